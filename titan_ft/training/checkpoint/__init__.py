# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of a run: one group saves them, all load and compare them; each is read back after
its save.
"""
