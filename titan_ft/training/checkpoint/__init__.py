# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of a run: saved by one group, loaded and compared by all, read back before anybody relies on them."""
