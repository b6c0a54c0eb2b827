# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The events' proof of reopened data: everything is proved, or it is "unknown" with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.event_builder import change
from tests.history.conftest import SyntheticRun
from titan_ft.cli.main import main
from titan_ft.history.batches.audit import audit
from titan_ft.history.batches.reopenings import find_reopenings
from titan_ft.history.check import check
from titan_ft.history.outcomes.notes import find_notes
from titan_ft.history.record.run_record import RunRecord
from titan_ft.run.events import DataOpened, Event, LoaderChecked
from titan_ft.run.log import encode

RANKS = 2


def opened_again(events: Sequence[Event]) -> list[DataOpened]:
    return [event for event in events if isinstance(event, DataOpened) and event.first_batch > 0]


def judge(events: Sequence[Event]) -> tuple[str, int, int]:
    record = RunRecord(events)
    found = find_reopenings(record)
    return audit(record).verdict, found.number, found.num_unproved


def without(events: Sequence[Event], kind: type[Event]) -> list[Event]:
    return [event for event in events if not isinstance(event, kind)]


def test_reopenings_that_are_proved(good_run: SyntheticRun) -> None:
    """Each rank of the returning group reopened its slot and continued where it had ended."""
    assert len(opened_again(good_run.events)) == RANKS
    assert judge(good_run.events) == ("holds", RANKS, 0)


def test_a_loader_that_was_checked_proves_what_nobody_had_read_ahead(
    good_run: SyntheticRun,
) -> None:
    for event in opened_again(good_run.events):
        change(event, exact=None)
    assert judge(good_run.events) == ("holds", RANKS, 0)
    assert judge(without(good_run.events, LoaderChecked)) == ("unknown", RANKS, RANKS)


@pytest.mark.parametrize("transparent", [False, None])
def test_a_first_batch_proves_nothing_of_a_loader_that_nobody_can_look_into(
    good_run: SyntheticRun, transparent: bool | None
) -> None:
    """A loader that reshuffled each epoch without its generator gave 119 other batches, and "0
    lost" was printed.
    """
    for checked in good_run.events:
        if isinstance(checked, LoaderChecked):
            change(checked, transparent=transparent)
    assert judge(good_run.events) == ("unknown", RANKS, RANKS)
    told = audit(RunRecord(good_run.events)).unproved
    assert told.startswith(
        "2 reopenings of data not proved (Loader cannot be looked into; its first batch was right)"
    )
    assert judge(without(good_run.events, LoaderChecked)) == ("unknown", RANKS, RANKS)
    assert (
        judge([event for event in good_run.events if event not in opened_again(good_run.events)])[0]
        == "unknown"
    )


def wrong_batch(run: SyntheticRun) -> list[Event]:
    change(opened_again(run.events)[0], exact=False)
    return run.events


def inexact_loader(run: SyntheticRun) -> list[Event]:
    """Make one rank's loader inexact: then a right first batch proves nothing."""
    checked = next(event for event in run.events if isinstance(event, LoaderChecked))
    change(
        checked,
        exact=False,
        reason="opened again after batch 2, it gave another batch 4",
        loader="Mine",
    )
    return run.events


def untold(run: SyntheticRun) -> list[Event]:
    return without(run.events, DataOpened)


@pytest.mark.parametrize(
    ("damage", "number", "reason"),
    [
        (
            wrong_batch,
            1,
            "slot 2 at batch 6, by group 2: it was another batch than the one that follows there",
        ),
        (inexact_loader, RANKS, "Mine: opened again after batch 2, it gave another batch 4"),
        (untold, RANKS, "no event tells how it was opened"),
    ],
)
def test_what_is_not_proved_is_unknown(
    good_run: SyntheticRun, damage: Callable[[SyntheticRun], list[Event]], number: int, reason: str
) -> None:
    """The verdict has the reason and the remedy, and never "0 lost"."""
    record = RunRecord(damage(good_run))
    assert find_reopenings(record).num_unproved == number
    judged = check(record)["every batch once"]
    assert judged.verdict == "unknown"
    text = "\n".join([judged.statement, *judged.details(record.begin)])
    assert f"{number} reopening" in text
    assert reason in text
    assert "--reread" in text
    assert "0 lost" not in text
    assert "whether any were lost or repeated is not known" in judged.statement


def test_an_inexact_loader_that_nobody_opened_again_does_no_harm(
    synthetic_run: type[SyntheticRun],
) -> None:
    """It holds with a note that names the loader; so does an opaque loader."""
    run = synthetic_run()
    run.begin()
    run.steps(4)
    run.finish()
    for checked in run.events:
        if isinstance(checked, LoaderChecked):
            change(checked, transparent=False)
    assert audit(RunRecord(run.events)).verdict == "holds"
    record = RunRecord(inexact_loader(run))
    assert audit(record).verdict == "holds"
    assert any(
        "does not go on exactly" in note.text and "Mine" in note.text for note in find_notes(record)
    )


def test_the_command_says_so(
    good_run: SyntheticRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "all.jsonl").write_bytes(b"".join(map(encode, wrong_batch(good_run))))
    assert main(["check", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "1 reopening of data not proved" in " ".join(said.split())
    assert "0 lost" not in said
    assert main(["check", "--json", str(tmp_path)]) == 1
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["audit"]["verdict"] == "unknown"
    assert told["audit"]["unproved"].startswith("1 reopening of data not proved")
