# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The record of a run: its event files, read once and kept, and the states that its commits
made.
"""
