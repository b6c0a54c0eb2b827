# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Start torchft's lighthouse, behind a gate (`gate`) if the run has a token, or without a gate.

`lighthouse.serve` makes one of the two classes, and closes the object, on the main thread.
"""

from __future__ import annotations

import os
import socket
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from titan_ft.launch.gate import Gate
from titan_ft.system.namespace import enter_network_namespace
from titan_ft.system.refusal import Refusal
from titan_ft.system.seal import lighthouse_secret
from titan_ft.system.token import TOKEN_ENV

_INNER_HOST = "127.0.0.1"


class OpenLighthouse:
    """A lighthouse without a gate: every process that reaches its port can change the run.

    Attributes:
        port: the port of the lighthouse.
    """

    def __init__(self, server: Any) -> None:
        self._server = server
        self.port = _find_port(server)

    def describe_access(self) -> str:
        """Describe in one line which processes can reach the lighthouse."""
        return f"{TOKEN_ENV} is not set: every process of this host can change and end the run"

    def close(self) -> None:
        self._server.shutdown()


class GuardedLighthouse:
    """A lighthouse behind a gate, in a network namespace of its own if the system permits.

    The namespace belongs to one thread, which starts the lighthouse there and serves the gate. The
    gate's listening socket stays in the host's namespace, and so do all other threads. The process
    ends if the gate fails, and the launcher or the scheduler starts another lighthouse.

    Args:
        listener: socket that groups reach.
        token: the run's shared secret.
        start_server: starts torchft's lighthouse at a HOST:PORT.
        report: called with the first refusal of each kind, on the gate's thread.
        namespace_refusal: why a network namespace is impossible; empty if it is possible.

    Attributes:
        port: the port of the gate, which groups connect to.

    Raises:
        RuntimeError, OSError: the lighthouse does not start.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        start_server: Callable[[str], Any],
        report: Callable[[Refusal], None],
        namespace_refusal: str,
    ) -> None:
        self.port: int = listener.getsockname()[1]
        self._namespace_refusal = namespace_refusal
        started = Future[tuple[Gate, Any]]()

        def start() -> tuple[Gate, Any]:
            if not namespace_refusal:
                enter_network_namespace()
            server = start_server(f"{_INNER_HOST}:0")
            lighthouse_address = (_INNER_HOST, _find_port(server))
            gate = Gate(listener, lighthouse_address, lighthouse_secret(token), report)
            return gate, server

        def serve() -> None:
            try:
                gate, server = start()
            except Exception as error:  # noqa: BLE001
                # The constructor raises the error. Without it, the constructor would wait for ever.
                started.set_exception(error)
                return
            started.set_result((gate, server))
            try:
                gate.run()
            except Exception:  # noqa: BLE001
                # No group can reach the lighthouse any more, but the process would seem to live.
                traceback.print_exc()
                os._exit(1)

        self._thread = threading.Thread(target=serve, name="titan_ft_gate", daemon=True)
        self._thread.start()
        self._gate, self._server = started.result()
        self._inner_port = _find_port(self._server)

    def describe_access(self) -> str:
        """Describe in one line which processes can reach the lighthouse."""
        if not self._namespace_refusal:
            return f"only processes with this run's {TOKEN_ENV} reach it"
        return (
            f"only processes with this run's {TOKEN_ENV} reach it, and other users of this host "
            f"by port {self._inner_port}: the system allows no network namespace "
            f"({self._namespace_refusal})"
        )

    def close(self) -> None:
        """Close all connections, and end the lighthouse."""
        self._gate.close()
        self._thread.join()
        self._server.shutdown()


def _find_port(server: Any) -> int:
    # torchft's address() holds the host's name, which others would have to resolve.
    return int(server.address().rsplit(":", 1)[1])
