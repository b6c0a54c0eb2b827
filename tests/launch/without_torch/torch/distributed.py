# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A store to which fake workers do not speak: its socket listens as long as the store is there."""

from __future__ import annotations

import socket


class TCPStore:
    def __init__(
        self,
        host: str,
        port: int,
        *,
        is_master: bool,
        wait_for_workers: bool,
        master_listen_fd: int,
    ) -> None:
        assert is_master
        self._listener = socket.socket(fileno=master_listen_fd)
