# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Fault-tolerant data parallelism for torchtitan: replica groups that may die, hang, leave or join at any step."""

__version__ = "0.1.0"
