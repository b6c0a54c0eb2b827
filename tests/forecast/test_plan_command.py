# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""`titan-ft plan`: its table, its page, its JSON, its mistakes; and the sizes that `launch
--dry-run --json` prints.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
from pathlib import Path

import msgspec
import pytest

from tests.forecast.test_measured import events_of
from titan_ft.cli.main import main
from titan_ft.config import ConfigError
from titan_ft.forecast import published, sizes
from titan_ft.forecast.candidate import make_candidates
from titan_ft.forecast.choice import compare
from titan_ft.forecast.inputs import FIELDS_IN_SECONDS, describe_seconds
from titan_ft.forecast.page import draw_charts
from titan_ft.forecast.published import read_cases
from titan_ft.forecast.scenario import (
    UNITS,
    Checkpoint,
    Cluster,
    DurationTable,
    FailureKind,
    Groups,
    Job,
    Maintenance,
    Restart,
    Rounds,
    load_scenarios,
)
from titan_ft.history.report.interactive import make_figure
from titan_ft.history.report.layers import Curve
from titan_ft.run.log import encode

SCENARIO = """
clock = "wall"
days = 3
[cluster]
gpus = 98304
gpus_per_node = 8
price_per_gpu_hour = 2.0
spare_nodes = [0, 24]
[[failure]]
name = "node"
per_1000_node_days = 6.5
spacing = "memoryless"
breaks = 0.4
repair = "10 h"
[job]
step = "20 s"
groups = [6, 12]
[checkpoint]
save = "30 s"
[restart]
recover = { base = "50 s", per_gpu = "9 ms" }
[groups]
stall = "2 s"
away = { base = "110 s", per_gpu = "9 ms" }
[rounds]
steps = 30
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(SCENARIO)
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "events").mkdir(parents=True)
    (folder / "events" / "all.jsonl").write_bytes(
        b"".join(encode(event) for event in events_of(3, 600.0))
    )
    return folder


def test_a_scenario_is_a_table_a_sentence_and_a_page(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(scenario), "--seeds", "2"]) == 0
    shown = capsys.readouterr().out
    assert "Take 12 groups of 8,192 with 24 spare nodes: 9" in shown
    assert "Another number of groups starts the data anew today" in shown
    assert "under Slurm a node that the partition keeps free" in shown
    row = next(
        line
        for line in shown.splitlines()
        if line.startswith("│ 12 groups of 8,192 ") and "±" in line
    )
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    head = next(line for line in shown.splitlines() if "candidate" in line).strip("┃").split("┃")
    parts = [
        float(cell)
        for name, cell in zip(head, cells, strict=True)
        if name.strip() in SHARES and cell
    ]
    assert round(sum(parts), 1) == 100.0
    page = (scenario.parent / "cluster-plan" / "index.html").read_text()
    for part in (
        f"Forecast of {scenario}",
        "Size of a group",
        "Spare nodes",
        "Half of it",
        "no nodes",
    ):
        assert part in page
    assert not re.search(r"""(src|href)=["']?http""", page.partition("plotly.js v")[0])


SHARES = {
    "training",
    "stalled",
    "slower steps",
    "exchange",
    "checkpoints",
    "lost work",
    "too few groups",
    "away",
    "no nodes",
}


def test_the_charts_are_plotlys(scenario: Path) -> None:
    """Plotly's own classes accept them: the size of a group, the rate of failures, the spares and
    their knee.
    """
    from plotly.graph_objects import Figure

    scenario.write_text(SCENARIO.replace("[0, 24]", "24"))
    charts = draw_charts(compare(load_scenarios(scenario), num_runs=2)[0])
    assert charts.keys() == {"group-size", "mtbf", "spares"}
    for chart in charts.values():
        drawn = make_figure(chart)
        Figure(data=drawn["data"], layout=drawn["layout"])
    (knee,) = [layer for layer in charts["spares"].layers if isinstance(layer, Curve)]
    assert knee.y[0] is not None
    assert knee.y[-1] is not None
    assert knee.y[0] < knee.y[-1] - 30
    assert "22 nodes at most" in charts["spares"].caption


def test_the_page_lists_the_inputs_as_the_scenario_writes_them(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = scenario.read_text().replace('"10 h"', '{ median = "6 h", p99 = "2 d" }\nfirst_node = 8')
    job = '[[failure]]\nname = "job"\nscope = "job"\nmtbf = "10 d"\nspacing = "even"\n'
    scenario.write_text(f"{text}{job}")
    assert main(["plan", str(scenario), "--seeds", "2"]) == 0
    page = (scenario.parent / "cluster-plan" / "index.html").read_text()
    listed = page.partition("where they are from")[2]
    assert "{ median = 6 h, p99 = 2 d }" in listed
    assert "per_1000_node_days = 6.5" in listed
    assert "first_node = 8" in listed
    assert "mtbf = 10 d" in listed
    assert "gpus = 98,304" in listed
    assert "DurationTable(" not in page
    assert "(the record" not in listed


def test_inputs_are_shown_in_units_that_a_scenario_takes() -> None:
    for seconds in (0.0, 0.0004, 0.25, 1.0, 59.0, 60.0, 5400.0, 86400.0, 8.64e7):
        number, unit = describe_seconds(seconds).split()
        assert float(number) * UNITS[unit] == pytest.approx(seconds)


def test_every_length_of_a_scenario_is_shown_with_its_unit() -> None:
    """A field that is missing from the list would be shown as a bare number."""
    tables = (
        DurationTable,
        Cluster,
        FailureKind,
        Maintenance,
        Job,
        Checkpoint,
        Restart,
        Groups,
        Rounds,
    )
    for table in tables:
        for name, annotation in table.__annotations__.items():
            holds_seconds = re.search(r"Seconds|Duration|Interval", annotation) is not None
            assert holds_seconds == (name in FIELDS_IN_SECONDS), f"{table.__name__}.{name}"


def test_a_cost_that_nobody_gives_is_one_line_with_the_file(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line for line in scenario.read_text().splitlines() if not line.startswith("stall")]
    scenario.write_text("\n".join(lines))
    assert main(["plan", str(scenario), "--seeds", "2"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"titan-ft: {scenario}: groups.stall must be set, got nothing; give it")


def test_a_page_that_cannot_be_written_is_no_mistake_of_the_scenario(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("a file")
    assert main(["plan", str(scenario), "--seeds", "2", "--out", str(tmp_path / "taken")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("titan-ft: --out must be a folder that can be written, got ")


def test_a_log_is_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page says which distribution fits the gaps of a log, with the interval of its shape."""
    draw = random.Random(2)
    time, lines = 0.0, ["time,fault,target"]
    for _ in range(400):
        time += draw.weibullvariate(1000.0, 0.7)
        lines.append(f"{time:.1f},kill_group,")
    (tmp_path / "log.csv").write_text("\n".join(lines))
    path = tmp_path / "logged.toml"
    before, _, rest = SCENARIO.partition("per_1000_node_days")
    path.write_text(
        f'{before}trace = "log.csv"\nbreaks = 0.4\n{rest.partition("breaks = 0.4")[2].lstrip()}'
    )
    assert main(["plan", str(path), "--seeds", "2"]) == 0
    page = (tmp_path / "logged-plan" / "index.html").read_text()
    found = re.search(r"399 gaps, mean [\d.]+ min, shape (\S+) \((\S+) to (\S+)\)", page)
    assert found is not None
    shape, low, high = map(float, found.groups())
    assert low < 0.7 < high
    assert low < shape < high


def test_the_scenario_of_the_docs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run_dir: Path
) -> None:
    """It is read as it stands; with a run, what that scenario says goes before the record."""
    path = Path(__file__).parents[2] / "docs" / "planning.toml"
    for more in ((), ("--from", str(run_dir))):
        assert (
            main(["plan", str(path), "--seeds", "2", "--out", str(tmp_path / "page"), *more]) == 0
        )
        shown = capsys.readouterr().out
        assert "Take 24 groups of 4,096 with 24 spare nodes: 98." in shown
        assert ("input of the record" in shown) is bool(more)


def test_the_same_as_json(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(scenario), "--seeds", "2", "--json"]) == 0
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert case["advice"].startswith("Take 12 groups")
    assert [each["strategy"] for each in case["candidates"]].count("restart") == 2
    best = case["candidates"][0]
    assert sum(round(10 * value) for value in best["time_percent"].values()) == 1000
    assert best["range"][0] <= best["effective"] <= best["range"][1]
    assert not (scenario.parent / "cluster-plan").exists()


def test_a_run_without_a_scenario(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Five cases, from four times the failures to a quarter of them, each with half of the groups
    as well.
    """
    assert main(["plan", "--like", str(run_dir), "--seeds", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("failure[0].mtbf = ") == 5
    assert shown.count("│ 4 groups of 1 ") == shown.count("│ 2 groups of 2 ") == 5
    assert "BEYOND THE RECORD" in shown
    assert re.search(r"stall: a step with a death is late by +[\d.]+ s +\d+ observations", shown)
    assert (run_dir / "plan" / "index.html").exists()


def test_a_campaign_before_it_runs(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "--chaos",
        "blog_15s",
        "--from",
        str(run_dir),
        "--minutes",
        "5",
        "--seeds",
        "3",
    ]
    assert main(words) == 0
    assert re.search(r"^steps +\d+\.\d +\d+\.\d to \d+\.\d$", capsys.readouterr().out, re.MULTILINE)
    assert main([*words, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["counts"]["failures"]["mean"] + figures["counts"]["skipped"][
        "mean"
    ] == pytest.approx(17), (
        "each 15 s from 15 s on, until a launch of 5 minutes injects no more, 40 s before its end"
    )
    assert main([*words, "--minutes", "0.8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["failures"]["mean"] == 0, (
        "48 s: it is over before the first"
    )


def test_the_drawn_failures_as_a_trace(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["plan", str(scenario), "--trace-out", str(tmp_path / "drawn.csv"), "--seed", "3"])
        == 0
    )
    number = int(re.findall(r"(\d+) faults", capsys.readouterr().out)[0])
    lines = (tmp_path / "drawn.csv").read_text().splitlines()
    assert lines[:5] == [
        "# drawn by titan-ft plan: seed 3, 3 days, 6 groups",
        "# of the lists the first case: cluster.spare_nodes = 0",
        "# of the lists the first case: job.groups = 6",
        "# left out: repairs, for chaos breaks no node",
        "time,fault,target,params",
    ]
    assert len(lines) == number + 5


def test_the_validation_set_is_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 1 once a pinned figure does not come out."""
    cases = {case.id: case for case in read_cases()}
    monkeypatch.setattr(
        published, "read_cases", lambda: [cases["rsc-16384"], cases["own-5s"], cases["torchpass"]]
    )
    assert main(["plan", "--validate"]) == 0
    shown = capsys.readouterr().out
    assert "NO" not in shown.split()
    assert re.search(r"own-5s +│ steps +│ open ", shown)
    wrong = msgspec.structs.replace(cases["rsc-16384"], expect={"mtbf_hours": 1.9})
    monkeypatch.setattr(published, "read_cases", lambda: [wrong])
    assert main(["plan", "--validate"]) == 1
    assert "NO" in capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "",
            "SCENARIO must be given, or one of --like, --chaos, --validate, got nothing; give one of them",
        ),
        (
            "--validate --like x",
            "SCENARIO must be given, or one of --like, --chaos, --validate, got --like and --validate",
        ),
        ("--chaos blog_15s", "--chaos must come with --from RUN_DIR, got it alone"),
        ("gone.toml", "gone.toml"),
        (
            "--validate --minutes 3",
            "--minutes must come with --chaos, got --validate; leave it out",
        ),
        (
            "--validate --trace-out x",
            "--trace-out must come with SCENARIO, got --validate; leave it out",
        ),
        (
            "--validate --from x",
            "--from must come with SCENARIO or --chaos, got --validate; leave it out",
        ),
        (
            "--like x --from x",
            "--from must come with SCENARIO or --chaos, got --like; leave it out",
        ),
        (
            "--chaos blog_15s --from x --out x",
            "--out must come with SCENARIO or --like, got --chaos; leave it out",
        ),
        (
            "--chaos blog_15s --from x --minutes nan",
            "--minutes must be a number > 0, at most 1,000,000, got nan",
        ),
        (
            "--chaos blog_15s --from x --minutes 0",
            "--minutes must be a number > 0, at most 1,000,000, got 0.0",
        ),
        ("--validate --seeds 1000000", "--seeds must be from 2 to 10000, got 1000000"),
        ("--like gone", "--like must be the folder of a run, got gone"),
        ("--validate --seeds 1", "--seeds must be from 2 to 10000, got 1"),
    ],
)
def test_a_mistake_is_one_line(
    words: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *words.split()]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"titan-ft: {line}")


def test_sizes_of_a_dry_run_are_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures of the text, as numbers: 6,163,712 parameters x 4 bytes; a ring of 4 sends each
    byte 1.5 times.
    """
    monkeypatch.chdir(tmp_path)
    words = [
        "launch",
        "llama3_debug",
        "--replicas",
        "4",
        "--ranks-per-replica",
        "1",
        "--run-dir",
        "run",
    ]
    assert main([*words, "--dry-run", "--json", "--link-gbps", "10"]) == 0
    sizes = json.loads(capsys.readouterr().out)
    num_bytes = 4 * 6_163_712
    assert (sizes["parameters"], sizes["groups"]) == (6_163_712, 4)
    assert sizes["gpu_bytes"] == pytest.approx(4 * num_bytes, rel=1e-3)
    assert sizes["exchange"]["sent_bytes"] == pytest.approx(1.5 * num_bytes, rel=1e-3)
    assert sizes["exchange"]["seconds"] == pytest.approx(
        1.5 * num_bytes * 8 / 10e9 + 2 * num_bytes * 8 / 200e9, rel=1e-3
    )
    assert sizes["heal"]["bytes"] == pytest.approx(3 * num_bytes, rel=1e-3)
    assert list(tmp_path.iterdir()) == []
    assert main([*words, "--json"]) == 2
    assert "--json must come with --dry-run" in capsys.readouterr().err


def test_sizes_are_kept_if_another_try_would_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was cut is measured again; a dry run that crashed is not remembered, one that
    refused is.
    """
    text = SCENARIO.replace('step = "20 s"', 'step = "20 s"\nconfig = "llama3_debug"').partition(
        "[rounds]"
    )[0]
    (tmp_path / "s.toml").write_text(text)
    candidate = make_candidates(load_scenarios(tmp_path / "s.toml")[0])[-1]
    cache = tmp_path / "sizes.json"
    cache.write_text('{"0.1.0/')
    for code, kept in ((1, False), (2, True)):
        done = subprocess.CompletedProcess([], code, "", "titan-ft: it cannot be cut so\n")
        monkeypatch.setattr(sizes.subprocess, "run", lambda *_, done=done, **__: done)
        with pytest.raises(ConfigError, match=r"^it cannot be cut so$"):
            sizes.Sizes(cache).fit(candidate)
        assert ("refused" in cache.read_text()) is kept


@pytest.mark.slow
def test_a_config_bounds_the_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exchange that nothing hides is part of a step; a shape that cannot be cut is left out;
    sizes are kept.
    """
    path = tmp_path / "small.toml"
    text = (
        SCENARIO.replace("98304", "4")
        .replace("gpus_per_node = 8", "gpus_per_node = 1")
        .replace("[6, 12]", "[2, 4]")
    )
    text = text.replace(
        'step = "20 s"', 'step = "20 ms"\nconfig = "llama3_debug"\nlink_gbps = 1.0'
    ).replace("[0, 24]", "1")
    path.write_text(text.partition("[rounds]")[0])
    assert main(["plan", str(path), "--seeds", "2", "--json"]) == 0
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    found = {each["groups"]: each for each in case["candidates"] if each["strategy"] == "groups"}
    assert found[4]["exchange_seconds"] > found[2]["exchange_seconds"] > 0
    assert found[2]["time_percent"]["exchange"] > 50
    assert not any("not bounded" in note for note in case["notes"])
    sizes = tmp_path / "small-plan" / "sizes.json"
    assert len(json.loads(sizes.read_text())) == 2
    sizes.write_text(sizes.read_text().replace('"gpu_bytes": ', '"gpu_bytes": 9999999'))
    path.write_text(path.read_text().replace("[cluster]", "[cluster]\ngpu_memory_gb = 80"))
    assert main(["plan", str(path), "--seeds", "2", "--json"]) == 0
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert [each["strategy"] for each in case["candidates"]] == ["restart"]
    assert "cluster.gpu_memory_gb must hold 9" in case["notes"][0]
