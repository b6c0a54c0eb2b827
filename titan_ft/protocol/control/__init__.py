# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The control tree of one replica group as a pure state machine: events in, actions out.

`titan_ft.membership` gives it sockets, a clock and a thread.
"""
