# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Which groups take part in an exchange.

`membership.py` is the entry for the engine. Below it are the seat at the lighthouse, the quorums,
the control tree of a group's ranks, and the process groups. See docs/membership.md.
"""
