# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Who takes part: the seat at the lighthouse, quorums, agreement among a group's ranks, process
groups."""
