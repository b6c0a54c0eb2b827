# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Harness of the integration tests. Its workers are real processes, forks of a zygote."""
