# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The thread that reports lost groups survives a failed check, and reports consistent steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from titan_ft.config import FaultTolerance
from titan_ft.membership import roll_call
from titan_ft.membership.roll_call import RollCall
from titan_ft.protocol import roll
from titan_ft.run.events import Event, GroupLost

DEADLINE_SECONDS = 20.0

Ages = tuple[Mapping[int, float], Mapping[int, float]]


class Events:
    """An event log that passes each event on."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self.emit = on_event


@contextmanager
def checking(
    find_ages: Callable[[], Ages | None],
    on_event: Callable[[Event], None] = lambda event: None,
) -> Iterator[RollCall]:
    config = FaultTolerance(replica_id=0, group_size=3, heartbeat_timeout_ms=10)
    events: Any = Events(on_event)
    watch = RollCall(config, events, find_ages, lambda: ())
    try:
        yield watch
    finally:
        watch.close()


def test_a_check_that_fails_is_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the thread would end, and no lost group would be reported any more."""
    monkeypatch.setattr(roll_call, "_MIN_PAUSE_SECONDS", 0.01)
    num_calls = 0
    checked_again = threading.Event()

    def find_ages() -> Ages:
        nonlocal num_calls
        num_calls += 1
        if num_calls <= 2:
            raise RuntimeError("the page is odd")
        checked_again.set()
        return {}, {}

    with caplog.at_level(logging.ERROR), checking(find_ages):
        assert checked_again.wait(DEADLINE_SECONDS)
    assert len(caplog.records) == 1, "two failures in a row are one line"
    assert "the page is odd" in caplog.text


def test_a_report_has_the_step_at_which_the_loss_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits go on while two lost groups are reported. Both reports belong to one check."""
    monkeypatch.setattr(roll_call, "_MIN_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(roll, "MIN_SILENCE_SECONDS", 0.05)
    lost: list[GroupLost] = []
    reported_all = threading.Event()

    def on_event(event: Event) -> None:
        assert isinstance(event, GroupLost)
        lost.append(event)
        watch.commit(6, [0])
        if len(lost) == 2:
            reported_all.set()

    with checking(lambda: ({}, {}), on_event=on_event) as watch:
        watch.commit(5, [0, 1, 2])
        assert reported_all.wait(DEADLINE_SECONDS)
    assert [(event.slot, event.step) for event in lost[:2]] == [(1, 5), (2, 5)]
