# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The state on its way between replica groups.

`snapshot.py` copies and loads a state, `state_server.py` serves it, `state_fetch.py` fetches it,
and `wire.py` is the protocol between them. See docs/heal.md.
"""
