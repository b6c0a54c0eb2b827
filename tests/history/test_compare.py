# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Two runs on one page, and beside each other on the terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.history.histories import calm_run, killed_run
from tests.history.test_report import Reader
from titan_ft.cli.main import main
from titan_ft.history.outcomes.outcome import find_outcome
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.report.compare import (
    compare_charts,
    compare_figures,
    name_runs,
    write_comparison,
)
from titan_ft.history.report.interactive import make_figure
from titan_ft.history.report.layers import Bars, Curve
from titan_ft.run.events import Event
from titan_ft.run.log import encode


def write_run(folder: Path, events: list[Event]) -> Path:
    file = folder / "events" / "launcher-1.jsonl"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"".join(map(encode, events)))
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """A run without a failure, and one with a death."""
    return [
        write_run(tmp_path / "calm", calm_run(20)),
        write_run(tmp_path / "killed", killed_run()),
    ]


def test_figures_with_their_differences() -> None:
    """A figure of one run only has a dash; equal figures have no difference in per cent."""
    rows = {
        row.name: row for row in compare_figures([RunRecord(calm_run(20)), RunRecord(killed_run())])
    }
    assert rows["steps"].values == ("20", "10")
    assert rows["steps"].difference == "-50 %"
    assert rows["goodput"].difference.endswith(" points")
    assert rows["failures"].values == ("0", "\N{EN DASH}")
    assert rows["recoveries"].values == ("\N{EN DASH}", "1 of 1")
    assert rows["recoveries"].difference == "\N{EN DASH}"
    same = compare_figures(2 * [RunRecord(calm_run())])
    assert {row.difference for row in same} == {"equal"}


def test_curves_of_both_runs_are_drawn() -> None:
    """Each run has a named line and columns. Columns are shares, so that a long run does not hide a
    short one.
    """
    runs = [RunRecord(calm_run(20)), RunRecord(killed_run())]
    for record in runs:
        for event in record.commits:
            event.loss = 5.0 - event.step / 10
    charts = compare_charts(runs, ["a", "b"])
    lines = [layer for layer in charts["loss"].layers if isinstance(layer, Curve)]
    assert [(line.name, list(line.x)) for line in lines] == [
        ("a", [*range(1, 21)]),
        ("b", [*range(1, 11)]),
    ]
    assert lines[0].colour != lines[1].colour
    bars = [layer for layer in charts["step-times"].layers if isinstance(layer, Bars)]
    assert [sum(layer.counts) for layer in bars] == [pytest.approx(100), pytest.approx(100)]
    from plotly.graph_objects import Figure

    for chart in charts.values():
        drawn = make_figure(chart)
        assert (
            len(Figure(data=drawn["data"], layout=drawn["layout"]).data) == len(drawn["data"]) > 0
        )


def test_page_of_two_runs(folders: list[Path], tmp_path: Path) -> None:
    """Both outcomes come first, then the figures; all names are text."""
    runs = [RunRecord.read(folder / "events") for folder in folders]
    page = write_comparison(runs, ["<a>", "b"], tmp_path / "out").read_text(encoding="utf-8")
    read = Reader(page)
    head = read.text.partition("Difference")[0]
    outcomes = [find_outcome(record).headline for record in runs]
    assert outcomes[0] in head.partition(outcomes[1])[0]  # that of the first run comes first
    assert outcomes[1] in head
    assert "<a> and b" in head
    assert re.search(r"steps 20 .{0,9} s a step 10 .{0,9} s a step -50 %", read.text)
    assert set(read.figures) == {"step-times", "states"}  # these histories have no losses


def test_command_with_two_runs(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """A table on the terminal and a page; --against is the same, and both together are refused."""
    first, second = map(str, folders)
    assert main(["report", first, second]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split() == ["calm", "killed", "difference"]
    assert printed.splitlines()[-1] == f"page: {folders[0] / 'report' / 'compare.html'}"
    assert main(["report", first, "--against", second]) == 0
    assert capsys.readouterr().out == printed
    assert main(["report", first, second, "--against", second]) == 2
    assert "--against must not come with a second run" in capsys.readouterr().err
    assert main(["report", first, second, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["steps_committed"], figures["other"]["steps_committed"]) == (20, 10)
    assert main(["report", first, str(folders[0] / "no")]) == 2


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (("runs/a", "runs/b"), ("a", "b")),
        (("mon/run", "tue/run"), ("mon/run", "tue/run")),
        (("x/run", "x/run"), None),
    ],
)
def test_names_differ(folders: tuple[str, str], names: tuple[str, str] | None) -> None:
    """Runs are named by their folders, with as much of the path as distinguishes them."""
    found = name_runs([Path("/") / folder for folder in folders])
    assert found == names or (names is None and found[0] != found[1])
