# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Donors for tests of the transfer, and a record of the requests that they get."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the module `state_donor`

from state_donor import CHUNK, Donor

from titan_ft.transfer import state_fetch
from titan_ft.transfer.snapshot import Snapshot
from titan_ft.transfer.state_server import StateServer


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_fetch, "_SLICE_BYTES", CHUNK)


@pytest.fixture
def start_donor() -> Iterator[Callable[..., Donor]]:
    """Provide the builder of donors. They are closed with the test."""
    donors: list[Donor] = []

    def start(**kwargs: Any) -> Donor:
        donors.append(Donor(**kwargs))
        return donors[-1]

    yield start
    for donor in donors:  # the close waits for the server's poll, and must not delay the next test
        threading.Thread(target=donor.server.close).start()


@pytest.fixture
def donor(start_donor: Callable[..., Donor]) -> Donor:
    """Provide a donor without a snapshot."""
    return start_donor()


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    """Provide threads for joiners."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Provide a record of the requests to donors: offsets, and "header" for the header.

    `watch(interfere)` calls interfere(place, number of requests for it, send) before each answer.
    The function that it returns sends the answer.
    """

    def start(
        interfere: Callable[[Any, int, Any], Any] = lambda place, times, send: send,
    ) -> list[Any]:
        asked: list[Any] = []
        answer = StateServer._answer

        def watched(stream: Any, request: dict[str, Any], snapshot: Snapshot, send: Any) -> None:
            if "done" not in request:
                place = request.get("offset", "header")
                asked.append(place)
                send = interfere(place, asked.count(place), send)
            answer(stream, request, snapshot, send)

        monkeypatch.setattr(StateServer, "_answer", staticmethod(watched))
        return asked

    return start
