# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The event of a connection that a port has refused."""

from __future__ import annotations

from titan_ft.run.events import StrangerRefused
from titan_ft.run.log import EventLog
from titan_ft.system.refusal import Refusal


def emit_refusal(events: EventLog, port: str | None, refusal: Refusal) -> None:
    """Write the event of a refusal.

    Args:
        port: see `StrangerRefused`.
    """
    events.emit(
        StrangerRefused(kind=refusal.kind, source=refusal.source, reason=refusal.text, port=port)
    )
