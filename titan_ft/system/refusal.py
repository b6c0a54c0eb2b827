# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Refused connections of strangers, at any port of a run. See docs/security.md, "Ports"."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

T = TypeVar("T")
RefusalKind: TypeAlias = Literal["no_secret", "silent", "crowd", "no_descriptors"]
_TEXTS: dict[RefusalKind, str] = {
    "no_secret": "a connection that does not show the run's secret (another TITAN_FT_TOKEN, or another version?)",
    "silent": "a connection that has not shown the run's secret within {patience:g} s",
    "crowd": "too many connections at once that do not show the run's secret",
    "no_descriptors": "connections that do not show the run's secret, because they take all descriptors",
}


def find_crowded(connections: Sequence[T], source: Callable[[T], str]) -> T:
    """Return the oldest connection of the host that has most of them: the one to refuse.

    The oldest connection of all hosts may be a peer's whose handshake takes some trips.

    Args:
        connections: without a proof, the oldest first.
        source: returns the numeric address of a connection's other end.
    """
    num_by_source = Counter(map(source, connections))
    # `max` takes the first of equals: the oldest.
    return max(connections, key=lambda connection: num_by_source[source(connection)])


class StrangerError(ConnectionError):
    """The other end does not know the run's token, or speaks another protocol."""


@dataclass(frozen=True)
class Refusal:
    """The first refused connection of a kind at one port.

    Attributes:
        source: numeric address of the other end.
        text: describes the refused connection.
    """

    kind: RefusalKind
    source: str
    text: str


class Refusals:
    """Reports the first refused connection of each kind at one port; any thread.

    A stranger may come a thousand times a second. With a report for each connection he would fill
    the run's folder.

    Args:
        patience_seconds: time that a connection has to show the run's secret.
        report: takes the first refusal of each kind, on the thread that refuses. None = nobody
            wants to know.
    """

    def __init__(
        self, patience_seconds: float, report: Callable[[Refusal], None] | None = None
    ) -> None:
        self._patience_seconds = patience_seconds
        self._report = report
        self._lock = threading.Lock()
        self._reported: set[RefusalKind] = set()

    def add(self, kind: RefusalKind, source: str) -> None:
        """Count a refused connection.

        Args:
            source: numeric address of the other end.
        """
        with self._lock:
            if kind in self._reported:
                return
            self._reported.add(kind)
        if self._report is not None:
            text = _TEXTS[kind].format(patience=self._patience_seconds)
            self._report(Refusal(kind, source, text))
