# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The protocol between replica groups as pure values and policy: facts in, decisions out.

No module here opens a file or a socket, reads a clock, or starts a thread.
"""
