# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Measure titan_ft beside stock torchtitan and torchtitan's own integration of torchft;
scripts/bench.py starts it.
"""
