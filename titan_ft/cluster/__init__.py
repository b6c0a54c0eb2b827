# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs whose groups are started one by one: by hand on several hosts, by Slurm, by Kubernetes.

The package loads no torch. See docs/cluster.md.
"""
