# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Harness of the integration tests: real worker processes, forked from one that has imported
everything.
"""
