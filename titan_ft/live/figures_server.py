# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""An HTTP server for figures that no client can overload.

prometheus_client's own server has a thread for each connection and no limit of time. A thousand
connections that said nothing took all descriptors of the launcher, which ended the run.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

MAX_CLIENTS = 16
"""Connections at once. For one more, the oldest is closed: an answer takes milliseconds."""
CLIENT_SECONDS = 5.0
"""A client may let a read or a write wait this long."""


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a request is no news, and neither is a stranger's."""


class FiguresServer(ThreadingMixIn, WSGIServer):
    """Serve an application from a thread of its own.

    Args:
        host: numeric address of this host to listen at.
        port: 0 chooses a free one.

    Raises:
        OSError: nothing can listen there.
    """

    daemon_threads = True
    # With the default of 5, a burst of connections makes other clients wait for seconds.
    request_queue_size = 128

    def __init__(self, host: str, port: int, app: Any) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._lock = threading.Lock()
        self._clients: dict[socket.socket, None] = {}  # the oldest first
        super().__init__((host, port), _Handler)
        self.set_app(app)
        self._thread = threading.Thread(
            target=self.serve_forever, name="titan_ft_figures", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def server_bind(self) -> None:
        """Listen, without resolving the name of this host, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        host, self.server_port = self.socket.getsockname()[:2]
        self.server_name = str(host)
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a client on a thread of its own."""
        oldest = None
        with self._lock:
            if len(self._clients) == MAX_CLIENTS:
                oldest = next(iter(self._clients))
                del self._clients[oldest]
            self._clients[request] = None
        if oldest is not None:
            # If the client has just gone, its thread closes the socket.
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a client's connection."""
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went, or that this server closed."""
