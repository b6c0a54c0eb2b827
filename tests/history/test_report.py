# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The report page of a run: its figures, its text, and incomplete histories."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import random
import re
import shutil
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.event_builder import build, change, named
from titan_ft.faults.catalogue import FAULTS
from titan_ft.history.check import check
from titan_ft.history.outcomes.notes import find_notes
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.report import charts
from titan_ft.history.report.cards import find_cards
from titan_ft.history.report.charts import draw_charts
from titan_ft.history.report.facts import (
    Recovery,
    find_recoveries,
    list_goodput_terms,
    report_figures,
)
from titan_ft.history.report.failed import excerpt, find_failed
from titan_ft.history.report.interactive import make_figure
from titan_ft.history.report.layers import Band, Bars, Boxes, Chart, Curve, Marks, Rules
from titan_ft.history.report.page import write_report
from titan_ft.history.report.phases import StateSpan, find_state_spans
from titan_ft.history.report.style import DETAILS, GLYPHS, OTHER, STATES, mark_of
from titan_ft.history.report.thinning import MAX_BOXES, thin_rows
from titan_ft.history.summary import make_summary_table, summarize
from titan_ft.history.terminal import text_of
from titan_ft.history.timing import intervals
from titan_ft.history.timing.goodput import measure_goodput
from titan_ft.history.timing.incidents import Incident, find_failures
from titan_ft.run.events import Event, StepCommitted
from titan_ft.run.paths import RunPaths

DEADLY = (
    "kill_rank",
    "kill_group",
    "segfault",
    "exception",
    "out_of_memory",
    "abort_process_group",
    "kill_donor",
)
MILD = (
    "stop_group",
    "slow_rank",
    "network_dead",
    "nan_gradient",
    "flip_parameter",
    "kill_lighthouse",
    "disk_full",
)
SECTIONS = (
    "What failed",
    "The run",
    "Loss",
    "What each group did",
    "Failures and recoveries",
    "Goodput",
    "Promises",
    "Curves of training",
)
FIGURES = (
    "loss",
    "timeline",
    "participants",
    "stalls",
    "step-times",
    "goodput",
    "grad-norm",
    "lr",
    "memory",
)
BEGIN = 1_760_000_000.0


class Job:
    """Plays a job of many groups in virtual time, and writes its events."""

    def __init__(self, num_groups: int, seed: int = 1, digest_every: int = 10) -> None:
        self.events: list[Any] = []
        self.time = BEGIN
        self.step = 0
        self._random = random.Random(seed)
        self._digest_every = digest_every
        self._attempts = [0] * num_groups
        self._ready = [BEGIN + 3.0] * num_groups  # from then on the group is in the quorum
        self._behind = [False] * num_groups  # it sends zeros until its heal is over
        self._batches = [0] * num_groups
        self._lineage = "000000000000"
        self._log(
            BEGIN,
            "launch_started",
            replicas=num_groups,
            ranks_per_replica=1,
            spares=0,
            job_id="synthetic",
        )
        for replica in range(num_groups):
            self._start(replica, BEGIN + 0.1)
            self._log(BEGIN + 0.2, "loader_checked", replica, exact=True, transparent=True)
        self.time = BEGIN + 3.0

    def _log(
        self,
        time: float,
        name: str,
        replica: int | None = None,
        rank: int | None = 0,
        **fields: Any,
    ) -> None:
        if replica is not None:
            fields |= {"replica": replica, "attempt": self._attempts[replica]}
            fields |= {} if rank is None else {"rank": rank}
        self.events.append(build(named(name), time=time, mono=time - BEGIN, **fields))

    def _start(self, replica: int, time: float) -> None:
        config = {
            "group_size": len(self._attempts),
            "min_replica_size": 1,
            "digest_every": self._digest_every,
        }
        setup = {
            "model": "llama3 8B",
            "dataset": "c4",
            "seq_len": 8192,
            "local_batch_size": 2,
            "global_batch_size": 64,
        }
        setup |= {"parallelism": {"tensor_parallel_degree": 2}, "device": "H100", "num_cpus": 16}
        setup |= {"versions": {"titan_ft": "0.1.0", "torch": "2.13.0"}}
        told = {
            "config_digest": "c0ffee",
            "config": config,
            "setup": setup,
            "host": "here",
            "slurm": None,
        }
        self._log(time, "worker_started", replica, **told)

    def _members(self) -> list[int]:
        return [replica for replica, ready in enumerate(self._ready) if ready <= self.time]

    def commit(self, seconds: float, exchanges: int = 1, weightless: tuple[int, ...] = ()) -> None:
        """Make one step of all members."""
        members = [replica for replica in self._members() if not self._behind[replica]]
        slots = [replica for replica in members if replica not in weightless]
        self.step, parent, start = self.step + 1, self._lineage, self.time
        self._lineage = hashlib.sha1(f"{parent}{self.step}".encode()).hexdigest()[:12]
        self.time += seconds
        due = {"digest": self._lineage * 2} if self.step % self._digest_every == 0 else {}
        batches = {str(slot): [self._batches[slot], 1] for slot in slots}
        usual = {
            "step": self.step,
            "lineage": self._lineage,
            "parent": parent,
            "participants": slots,
            "tokens": 512 * len(slots),
            "loss": 5.7 * math.exp(-self.step / 900) + 2.4 + self._random.gauss(0, 0.05),
            "grad_norm": 0.7,
            "memory_bytes": 3 * 2**30 + self.step,
            "lr": 4e-4,
            "seconds": seconds,
            "exchanges": exchanges,
            "exchange_seconds": max(0.02, seconds - 0.25),
            "waits": [],
            "compute_seconds": 0.22,
            "apply_seconds": 0.01,
            "batches": batches,
        }
        for replica in members:
            data = {
                "slot": replica,
                "first_batch": self._batches[replica],
                "num_batches": 1,
                "checksum": "aa",
            }
            own = {
                "own_tokens": 512 if replica in slots else 0,
                "data": data,
                "extra_data": [],
                "forward_passes": 1,
            }
            self._log(self.time + 0.001 * replica, "step_committed", replica, **usual, **own, **due)
            if exchanges > 1:
                self._log(
                    start + 0.3,
                    "exchange_failed",
                    replica,
                    step=self.step,
                    error="peer is gone",
                    seconds=0.05,
                )
        for slot in slots:
            self._batches[slot] += 1

    def train(self, until: float) -> None:
        """Step until a moment; groups that are due heal on the way."""
        while self.time < until:
            self._heal()
            self.commit(0.28 * math.exp(self._random.gauss(0, 0.12)))

    def _heal(self) -> None:
        for replica in self._members():
            if self._behind[replica] and self._ready[replica] + 1.2 <= self.time:
                donor = next(r for r in self._members() if not self._behind[r])
                known = {"donor": donor, "from_step": self.step - 4, "step": self.step}
                self._log(self.time - 1.1, "heal_started", replica, **known)
                done = {"bytes": 93 * 2**20 + replica, "seconds": 0.9, "replayed": 4}
                self._log(self.time, "heal_finished", replica, **known, **done)
                opened = {"slot": replica, "first_batch": self._batches[replica], "exact": True}
                self._log(self.time, "data_opened", replica, **opened)
                self._behind[replica] = False

    def _down(self, replica: int, at: float, signal: str, imports: float) -> None:
        """End a group's attempt, and start the next."""
        self._log(
            at + 0.05,
            "worker_exited",
            replica,
            signal=signal,
            reason=f"rank 0 got {signal}",
            stopped=False,
        )
        self._attempts[replica] += 1
        self._log(at + 0.1, "replica_restarted", replica, None, reason=signal, standby=imports < 3)
        self._start(replica, at + 0.3)
        self._ready[replica] = at + 0.3 + imports
        quorum = {
            "quorum": self.step,
            "participants": [],
            "step": 0,
            "quorum_seconds": 0.05,
            "rebuild_seconds": 0.08,
        }
        self._log(self._ready[replica], "joined", replica, **quorum)
        self._behind[replica] = True

    def fault(self, kind: str, replica: int, shot: int) -> None:
        """Inject a fault now, and make the step that it hits."""
        target = (
            {"lighthouse": True} if kind == "kill_lighthouse" else {"replica": replica, "rank": 0}
        )
        known: dict[str, Any] = {"fault": kind, "target": target, "seed": 1, "shot": shot}
        if kind in DEADLY and (self._behind[replica] or len(self._members()) < 2):
            self._log(
                self.time,
                "fault_skipped",
                **known,
                reason=f"group {replica} is not up to date <yet>",
            )
            return
        at = self.time + 0.1
        self._log(at, "fault_injected", **known, params={})
        if kind in DEADLY:
            self._down(
                replica,
                at,
                "SIGSEGV" if kind == "segfault" else "SIGKILL",
                self._random.uniform(1.5, 6.0),
            )
            self.commit(self._random.uniform(0.7, 1.3), exchanges=2)
        elif kind == "nan_gradient":
            self._log(at, "gradient_excluded", replica, step=self.step + 1, slots=[replica])
            self.commit(0.3, weightless=(replica,))
        elif kind == "flip_parameter":
            self.commit(0.4, weightless=(replica,))
            self._log(
                self.time,
                "digest_mismatch",
                replica,
                step=self.step,
                minority=[replica],
                digests={},
            )
            self._behind[replica], self._ready[replica] = True, self.time
        elif kind == "kill_lighthouse":
            self._log(
                at + 0.4,
                "lighthouse_restarted",
                reason="it got SIGKILL",
                seconds=0.4,
                address="[::]:1",
            )
            self.commit(0.8)
        else:
            self.commit(
                2.5 if kind == "stop_group" else 0.9,
                exchanges=2 if kind.startswith("network") else 1,
            )
            self._log(self.time, "fault_undone", fault=kind, target=target, shot=shot)

    def finish(self) -> list[Event]:
        """End the job and return its history."""
        for replica in self._members():
            known = {
                "step": self.step,
                "tokens": 512 * sum(self._batches),
                "digest": "ff",
                "lineage": self._lineage,
            }
            self._log(self.time, "training_finished", replica, **known)
        self._log(self.time + 0.5, "launch_finished", code=0, reason="all groups finished")
        return sorted(self.events, key=lambda event: event.time)


def campaign(
    minutes: float = 20, num_groups: int = 4, every: float = 15, seed: int = 7
) -> list[Event]:
    """Return the history of a campaign: a fault of a random kind every so many seconds."""
    job, chance = Job(num_groups, seed), random.Random(seed)
    job._log(
        BEGIN + 1, "chaos_started", seed=seed, plan="campaign.toml", schedule=f"every {every:g} s"
    )
    end = BEGIN + 60 * minutes
    for shot in range(int(60 * minutes / every) - 1):
        job.train(BEGIN + every * (shot + 1))
        job.fault(chance.choice(DEADLY + MILD), chance.randrange(num_groups), shot)
    job.train(end)
    return job.finish()


class Reader(HTMLParser):
    """Reads a page strictly: every element is closed in its turn, every id is there once."""

    VOID = frozenset({"meta", "img"})

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.headings: list[str] = []
        self.texts: list[str] = []
        self.styles: list[str] = []
        self.scripts: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on")
            if name == "id":
                self.ids.append(str(value))
            elif name in ("src", "href", "srcset", "data", "action"):
                self.links.append(str(value))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in ("h2", "h3"):
            self.headings.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        {"script": self.scripts, "style": self.styles}.get(inside, self.texts).append(data)
        if inside in ("h2", "h3"):
            self.headings[-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    @property
    def figures(self) -> dict[str, Any]:
        """Return the data that the page's script draws."""
        found: dict[str, Any] = json.loads(self.scripts[0])
        return found


def read_page(events: list[Event], folder: Path) -> Reader:
    """Write the report of some events and read its page."""
    record = RunRecord(events)
    reader = Reader(write_report(record, folder).read_text(encoding="utf-8"))
    names = list(draw_charts(record)) if record.attempts else []
    assert [path.name for path in folder.iterdir()] == ["index.html"]
    assert list(reader.figures) == names
    assert sorted(each for each in reader.ids if "plot-" in each) == sorted(
        f"plot-{name}" for name in names
    )
    assert len(set(reader.ids)) == len(reader.ids)
    # Each section is in the contents, and nothing else.
    contents = [link[1:] for link in reader.links if link.startswith("#")]
    assert [each for each in reader.ids if each in contents] == contents
    # Every section that is there has something in it.
    for place, tag in enumerate(reader.tags[:-1]):
        assert tag != "h2" or reader.tags[place + 1] != "h2"
    return reader


@pytest.fixture(scope="module")
def short_campaign() -> list[Event]:
    return campaign(minutes=2)


@pytest.fixture(scope="module")
def campaign_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("campaign")


@pytest.fixture(scope="module")
def campaign_page(short_campaign: list[Event], campaign_folder: Path) -> Reader:
    return read_page(short_campaign, campaign_folder)


def test_page_of_a_campaign(short_campaign: list[Event], campaign_page: Reader) -> None:
    """Verdict, run and headline, then the sections in their order, and every recovery."""
    page, record = campaign_page, RunRecord(short_campaign)
    summary, judged = summarize(record), check(record)
    assert [each for each in page.headings if each in SECTIONS] == list(SECTIONS)
    assert sorted(page.figures) == sorted(FIGURES)
    head = page.text.partition("Mean over the tokens")[0]
    for text in (
        "Run synthetic",
        "Holds (7 promises checked)",
        "llama3 8B",
        "tensor parallel 2",
        "H100 (16 CPUs)",
    ):
        assert text in head
    for text in (
        "c4; sequences of 8,192 tokens, 64 a step",
        "torch 2.13.0",
        "min_replica_size 1",
        "seed 7",
    ):
        assert text in head
    for card in find_cards(record):
        assert f"{card.name} {card.text} {card.detail}" in head
    assert f"{summary.steps_committed:,}" in head
    for promise in range(1, 9):
        name = judged[promise].name
        assert name[:1].upper() + name[1:] in page.text
    for name, value, meaning in list_goodput_terms(record):
        assert f"{name} {value} {meaning}" in page.text
    faults = [event.fault for event in short_campaign if event.name == "fault_injected"]
    rows = page.text[page.text.index("Replayed") :]
    assert faults
    assert all(rows.count(f" {fault} ") >= faults.count(fault) for fault in faults)


def test_failures_are_those_of_the_fold(short_campaign: list[Event]) -> None:
    """A live view, which counts event by event, counts the failures that the report lists."""
    record = RunRecord(short_campaign)
    failures = find_failures(record)
    assert len(failures) == len(record.fold.failures) > 0
    deaths = {
        (attempt.slot, attempt.number)
        for group in record.attempts.values()
        for attempt in group
        if attempt.failed
    }
    assert {(each.slot, each.attempt) for each in record.fold.failures if each.died} == deaths
    assert {(each.replica, each.attempt) for each in failures} == {
        (f.slot, f.attempt) for f in record.fold.failures
    }


def test_page_needs_nothing_from_elsewhere(campaign_page: Reader, campaign_folder: Path) -> None:
    """The page has no external address, and its policy forbids the browser to load anything."""
    page = campaign_page
    assert not {"link", "iframe", "object", "base", "form"} & set(page.tags)
    assert page.links
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    texts = [*page.styles, *page.texts, page.scripts[0], page.scripts[2]]
    assert not [text for text in texts if "://" in text or "@import" in text or "url(" in text]
    policy = (
        (campaign_folder / "index.html")
        .read_text(encoding="utf-8")
        .partition('Content-Security-Policy" content="')[2]
    )
    nonce = policy.partition("'nonce-")[2].partition("'")[0]
    allowed = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src blob: data:"
    assert policy.partition('"')[0] == allowed
    assert len(nonce) >= 16


def test_charts_tell_the_records_numbers(short_campaign: list[Event]) -> None:
    """The charts show the record's losses, faults, times of each group, and counts of steps."""
    record = RunRecord(short_campaign)
    drawn = draw_charts(record)
    curve = layer_of(drawn["loss"], Curve)
    assert list(curve.x) == [point.step for point in record.curve]
    assert list(curve.y) == pytest.approx([point.loss for point in record.curve])
    faults = [each for each in find_recoveries(record) if each.step is not None]
    marks = [layer for layer in drawn["loss"].layers if isinstance(layer, Marks)]
    assert sorted(x for each in marks for x in each.x) == sorted(each.step for each in faults)
    assert set(layer_of(drawn["loss"], Rules).x) == {each.step for each in faults}
    spent = measure_goodput(record)
    for replica, place in zip(record.groups, range(1, 99), strict=False):
        shares = {
            layer.state: share
            for layer in drawn["goodput"].layers
            if isinstance(layer, Boxes)
            for row, share in zip(layer.rows, layer.widths, strict=True)
            if row == place
        }
        assert sum(shares.values()) == pytest.approx(100)
        computed = sum(
            spent.groups_us[replica].get(fine, 0) for fine in ("productive", "overhead", "wasted")
        )
        exchanged = spent.groups_us[replica].get("exchange_wait", 0)
        assert computed <= shares["training"] * spent.wall_us / 100 + 1 <= computed + exchanged + 2
    drawn_us = sum(
        width
        for layer in drawn["timeline"].layers
        if isinstance(layer, Boxes)
        for width in layer.widths
    )
    assert drawn_us * 1e6 == pytest.approx(spent.group_us)
    bars = layer_of(drawn["step-times"], Bars)
    assert sum(bars.counts) == len(record.commits)
    dots = next(layer for layer in drawn["stalls"].layers if isinstance(layer, Marks))
    stalls = [each.incident.stall_seconds for each in find_recoveries(record)]
    assert sorted(dots.x) == pytest.approx(
        sorted(max(0.01, stall) for stall in stalls if stall is not None)
    )


def layer_of(chart: Chart, kind: type[Any]) -> Any:
    """Return the layer of a chart that is of a kind."""
    (found,) = [layer for layer in chart.layers if isinstance(layer, kind)]
    return found


def test_plotly_accepts_every_figure(short_campaign: list[Event]) -> None:
    """Plotly's own classes accept every attribute of the page's figures."""
    from plotly.graph_objects import Figure

    for name, chart in draw_charts(RunRecord(short_campaign)).items():
        drawn = make_figure(chart)
        assert (
            len(Figure(data=drawn["data"], layout=drawn["layout"]).data) == len(drawn["data"]) > 0
        ), name
        if chart.x.kind == "clock":  # a number of two or four digits would be a year
            numbers = [x for trace in drawn["data"] for x in [*trace["x"], *trace.get("base", [])]]
            assert not [x for x in numbers if float(x).is_integer() and len(str(int(x))) in (2, 4)]


def test_promise_that_does_not_hold_is_named(short_campaign: list[Event], tmp_path: Path) -> None:
    """For a batch that is trained twice the page names the broken promise and the place."""
    broken = copy.deepcopy(short_campaign)
    commits = [event for event in broken if isinstance(event, StepCommitted) and event.step > 100]
    for event in commits:
        if 0 in event.batches:
            event.batches[0] = (event.batches[0][0] - 1, 1)
    page = read_page(broken, tmp_path)
    assert "6 Every batch once ✗ does not hold" in page.text
    assert "Every batch once no " in page.text
    assert "✗ promises Does not hold: every batch once." in page.text
    assert 'class="overall fails"' in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_a_reservation_stands_in_the_first_line(tmp_path: Path) -> None:
    """The promises' line is not plain green if the reader must know more, such as a failed save."""
    job = Job(2)
    job.train(BEGIN + 15)
    job._log(job.time, "checkpoint_failed", 0, step=40, error="disk full")
    page = read_page(job.finish(), tmp_path)
    line = page.text.partition("date ")[0]
    assert "! Finished at step 43 steps" in line
    assert (
        "✓ promises Holds (7 promises checked); the checkpoint of step 40 could not be saved"
        in line
    )
    assert 'class="overall open"' in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_figures_are_a_superset_of_the_summary(short_campaign: list[Event]) -> None:
    """--json has every figure of the short report, and adds goodput, stalls, verdicts, notes."""
    figures = report_figures(RunRecord(short_campaign))
    summary = summarize(RunRecord(short_campaign)).to_dict()
    assert {name: figures[name] for name in summary} == summary
    assert figures["goodput"]["num_groups"] == 4
    assert len(figures["stalls"]) == sum(figures["faults_by_kind"].values())
    assert figures["chaos"]["seed"] == 7
    assert (
        json.loads(json.dumps(figures, allow_nan=False))["check"]["verdict"]
        == figures["check"]["verdict"]
    )


def test_words_of_events_are_escaped(tmp_path: Path) -> None:
    """The text of events is text on the page, never markup."""
    evil = "<script>alert('&')</script>"
    job = Job(2)
    change(job.events[0], job_id=evil)
    job._log(BEGIN + 1, "chaos_started", seed=1, plan=evil, schedule=evil)
    job.train(BEGIN + 10)
    job._log(job.time, "fault_injected", fault=evil, target={"replica": 1}, seed=1, shot=0)
    job._log(job.time, "fault_skipped", fault=evil, target={"replica": 1}, shot=1, reason=evil)
    job._log(job.time, "checkpoint_failed", 0, error=evil, step=3)
    job._log(job.time, "worker_exited", 1, signal=evil, reason=evil, stopped=False)
    job.train(BEGIN + 15)
    job._log(job.time, "launch_finished", reason=evil, code=1)
    page = read_page(job.events, tmp_path)
    assert page.tags.count("script") == 3  # the figures, plotly.js and what calls it
    assert page.text.count("alert('&')") >= 6
    hovers = [
        text
        for each in page.figures.values()
        for trace in each["data"]
        for text in trace.get("hovertext", [])
    ]
    told = [text for text in hovers if "alert" in text]
    assert told
    assert all("&lt;script&gt;" in text and "<" not in text for text in told)


def test_fault_of_any_name_is_drawn(tmp_path: Path) -> None:
    """A long fault name leaves room for the plot, and no name is a formula."""
    job = Job(2)
    job.train(BEGIN + 10)
    job._log(
        job.time,
        "fault_injected",
        fault="$\\frac$ " + 30 * "long ",
        target={"replica": 1},
        seed=1,
        shot=0,
    )
    job.train(BEGIN + 15)
    page = read_page(job.finish(), tmp_path)
    labels = page.figures["stalls"]["layout"]["yaxis"]["ticktext"]
    assert [
        label for label in labels if len(label) <= 40 and label.startswith("$\\frac$ long ")
    ] == labels


def test_outcome_comes_first(tmp_path: Path) -> None:
    """The page begins with the outcome in its colour; a failed run is red."""
    job = Job(2)
    job.train(BEGIN + 15)
    finished = job.finish()
    killed: list[Any] = [
        event for event in finished if event.name not in ("training_finished", "launch_finished")
    ]
    for replica in (0, 1):
        job.events = killed
        error = {
            "code": 1,
            "error": "RuntimeError: boom",
            "where": "mybug.py:15",
            "log": "/elsewhere/rank-0.log",
        }
        job._log(job.time, "worker_exited", replica, reason="", stopped=False, **error)
        job._log(
            job.time, "replica_gave_up", replica, reason="again", log="", error="RuntimeError: boom"
        )
    job._log(job.time + 1, "launch_finished", reason="2 of 2 groups failed: 0, 1", code=1)
    for events, style, text in (
        (finished, "holds", f"Finished at step {job.step}"),
        (
            killed,
            "fails",
            f"Failed at step {job.step + 1}: RuntimeError: boom, rank 0 of group 0, mybug.py:15",
        ),
    ):
        page = read_page(events, tmp_path / style)
        source = (tmp_path / style / "index.html").read_text(encoding="utf-8")
        assert f'class="overall {style}">{"✓" if style == "holds" else "✗"} {text}' in source
        before = page.text.partition(text)[0]
        # Title and heading.
        assert before.split() == [*2 * ["Run", "synthetic"], "✓" if style == "holds" else "✗"]
        assert ("What failed" in page.headings) is (style == "fails")


def test_group_that_is_lost_is_named_once(tmp_path: Path) -> None:
    """A run that finished without a group says so first; the reason follows once, marked."""
    job = Job(2)
    job.train(BEGIN + 10)
    error = {"code": 1, "error": "ValueError: odd", "where": "odd.py:7"}
    job._log(job.time, "worker_exited", 1, reason="", stopped=False, **error)
    job._log(job.time, "replica_gave_up", 1, reason="again", log="", error="ValueError: odd")
    job._ready[1] = math.inf
    job.train(BEGIN + 20)
    record = RunRecord(job.finish())
    page = read_page(record.events, tmp_path)
    assert f" Finished at step {job.step} without group 1, lost since step" in page.text
    failed = page.text.partition("What failed")[2].partition("The run")[0]
    assert "Group 1 is lost since step" in failed
    assert failed.count("ValueError: odd") == 1
    assert 'class="failed decisive"' in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert find_state_spans(record)[1][-1].state == "lost"


def test_why_it_failed_is_on_the_page(tmp_path: Path) -> None:
    """The page has the exception, its place, the log's last lines as text, and links to the
    files.
    """
    run_dir = tmp_path / "a run"
    job = Job(2)
    job.train(BEGIN + 10)
    log = RunPaths(run_dir).logs(1, 0, 0)
    log.parent.mkdir(parents=True)
    log.write_text(
        "step 3\nTraceback (most recent call last):\n  File <b>\nValueError: <script>odd</script>\nlater\n"
    )
    RunPaths(run_dir).config.write_text("")
    known = {
        "code": 1,
        "error": "ValueError: <script>odd</script>",
        "where": "odd.py:7",
        "log": "/gone/rank-0.log",
    }
    job._log(job.time, "worker_exited", 1, reason="", stopped=False, **known)
    record = RunRecord(job.finish())
    page = write_report(record, RunPaths(run_dir).report, run_dir=run_dir)
    read = Reader(page.read_text(encoding="utf-8"))
    failed = read.text.partition("What failed")[2].partition("The run")[0]
    assert "ValueError: <script>odd</script> rank 0 of group 1, odd.py:7; at 0:" in failed
    assert "Traceback (most recent call last): File <b> ValueError: <script>odd</script>" in failed
    assert "later" not in failed
    links = [unquote(link) for link in read.links if not link.startswith("#")]
    assert {(page.parent / link).resolve() for link in links} == {
        log.resolve(),
        RunPaths(run_dir).config.resolve(),
        (run_dir / "logs").resolve(),
    }


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSEGV"])
def test_log_of_a_killed_process_explains_nothing(tmp_path: Path, signal: str) -> None:
    """SIGKILL leaves nothing in a log; any other signal may have left stacks there."""
    job = Job(2)
    job.train(BEGIN + 10)
    log = RunPaths(tmp_path).logs(1, 0, 0)
    log.parent.mkdir(parents=True)
    log.write_text("last words\n")
    job._log(job.time, "worker_exited", 1, reason="", stopped=False, signal=signal)
    (failed,) = find_failed(RunRecord(job.finish()))
    assert failed.reason.signal == signal
    assert excerpt(failed.reason, tmp_path) == ([] if signal == "SIGKILL" else ["last words"])


def test_empty_run_is_one_sentence(tmp_path: Path) -> None:
    """Without a step the page has only the outcome: no axis from 0 to 10 ms, no group of 0
    ranks.
    """
    page = read_page(
        [build(named("launch_finished"), time=BEGIN, code=1, reason="a port is in use")], tmp_path
    )
    assert page.figures == {}
    assert page.headings == []
    assert page.text.startswith(
        "Report of a run Report of a run ✗ Never began: a port is in use Made by"
    )


def test_ranks_that_differ_have_a_table(tmp_path: Path) -> None:
    """A slow rank, and one with more memory, are named with their hosts; equal ranks have no such
    table.
    """
    job = Job(3)
    job.train(BEGIN + 10)
    events: list[Any] = job.finish()
    assert "Ranks that differ" not in read_page(events, tmp_path / "equal").headings
    for event in events:
        if event.name == "step_committed" and event.replica == 1:
            event.compute_seconds = 0.44
        if event.name == "step_committed" and event.replica == 2:
            event.memory_bytes *= 2
    page = read_page(events, tmp_path / "odd")
    table = page.text.partition("Computing (s)")[2]
    assert (
        "group 1, rank 0 here 0.44 2.00 3.0 GiB 1.00 group 2, rank 0 here 0.22 1.00 6.0 GiB 2.00"
        in table
    )


def test_state_served_is_shown(tmp_path: Path) -> None:
    """Donors and joiners are on the page, in the JSON and on the terminal, with the ranks of a
    transfer together.
    """
    job = Job(3)
    job.train(BEGIN + 10)
    for rank in range(2):
        times = {"copy_seconds": 0.25 + rank, "serve_seconds": 3.5 + rank}
        job._log(job.time, "state_served", 1, rank, joiner=2, step=7, bytes=2**20, **times)
    job.train(BEGIN + 15)
    events = job.finish()
    page = read_page(events, tmp_path)
    assert "State served" in page.text
    assert "group 1 group 2 7 2.0 MiB 1.25 4.50" in page.text
    record = RunRecord(events)
    (transfer,) = report_figures(record)["transfers"]
    assert {**transfer, "time": 0} == {
        "time": 0,
        "donor": 1,
        "joiner": 2,
        "step": 7,
        "num_bytes": 2**21,
        "copy_seconds": 1.25,
        "serve_seconds": 4.5,
    }
    assert "1 time, 2.0 MiB; copied in 1.25 s" in text_of(make_summary_table(summarize(record)))


# The others are as quick, but there are many.
QUICK = ("nothing", "one group without failures", "the end")


@cache
def lacking() -> dict[str, list[Event]]:
    """Return incomplete histories, by what they lack."""
    whole = campaign(minutes=1, num_groups=2)
    quiet = Job(1)
    quiet.train(BEGIN + 20)
    late = [event for event in whole if event.time > BEGIN + 35]
    no_loss: list[Any] = copy.deepcopy(whole)
    for event in no_loss:
        if isinstance(event, StepCommitted) and event.step % 3 == 0:
            event.loss = None
    return {
        "nothing": [],
        "a launch": whole[:1],
        "no step": [event for event in whole if event.name != "step_committed"],
        "one group without failures": quiet.finish(),
        "the beginning": late,
        "the end": [event for event in whole if event.time < BEGIN + 35],
        "finite losses": no_loss,
    }


@pytest.mark.parametrize(
    "what", [w if w in QUICK else pytest.param(w, marks=pytest.mark.slow) for w in lacking()]
)
def test_history_that_lacks_something(what: str, tmp_path: Path) -> None:
    """Every incomplete history has a page, which claims no more than the history shows."""
    events = lacking()[what]
    page = read_page(events, tmp_path)
    assert json.dumps(report_figures(RunRecord(events)), allow_nan=False)
    if what in ("nothing", "a launch"):
        assert page.headings == []
        assert page.figures == {}
    if what == "no step":
        assert "Every batch once unknown" in page.text
        assert "Curves of training" not in page.headings
        assert "tokens per second" not in page.text
        assert "✓ holds" not in page.text.partition("What was verified")[2].partition("Clocks")[0]
    if what == "the end":  # as of a run that goes on
        assert "! End unknown, the launcher is gone: last at step" in page.text
        assert "? promises Unknown: the history is cut: the launch did not end" in page.text
        assert "one trajectory" not in page.text.partition("date ")[0]
    if what == "one group without failures":
        assert "failures 0 nothing failed" in page.text
        assert [each for each in page.headings if each in SECTIONS] == [
            each for each in SECTIONS if "ail" not in each
        ]
        assert not {"State served", "Notes", "Stall per failure", "Contributing groups"} & set(
            page.headings
        )
        assert "injected" not in page.text
        assert "red line" not in page.text


@pytest.mark.slow
def test_many_groups_and_long_runs_stay_small(tmp_path: Path) -> None:
    """A history of 32 groups, or of thousands of steps, makes a page that a browser still likes."""
    page = read_page(campaign(minutes=0.7, num_groups=32, every=5), tmp_path / "wide")
    assert all(f"group {replica}" in page.scripts[0] for replica in range(32))
    job = Job(2)
    job.train(BEGIN + 1800)
    read_page(job.finish(), tmp_path / "long")
    for folder in ("wide", "long"):
        size = (tmp_path / folder / "index.html").stat().st_size
        assert size - len(page.scripts[1]) < 2_000_000


def test_long_curve_keeps_what_stands_out() -> None:
    """100,000 steps become a bounded number of points, with each spike in the band, gaps, and marks
    of losses.
    """
    values: list[tuple[int, float | None]] = [(step, 2.0) for step in range(1, 100_001)]
    values[41_003] = (41_004, 99.0)
    values[70_020:70_480] = [(step, None) for step, _ in values[70_020:70_480]]
    layers, note = charts.make_curve(values, "loss")
    line = next(layer for layer in layers if isinstance(layer, Curve))
    band = next(layer for layer in layers if isinstance(layer, Band))
    lost = next(layer for layer in layers if isinstance(layer, Marks))
    assert len(line.x) <= charts.MAX_POINTS
    assert "mean of 50 steps" in note
    assert max(value for value in band.high if value is not None) == 99.0
    assert [text for text in line.texts if text.endswith("to 99")] == [
        "steps 41,001 to 41,050: loss 3.94, 2 to 99"
    ]
    assert any(value is None for value in line.y)
    # The bins at both ends have values as well.
    assert len(lost.x) == sum("none" in text for text in line.texts) + 2
    few, none = charts.make_curve(values[:50], "loss")
    assert none == ""
    assert [type(layer) for layer in few] == [Curve]


def test_long_rows_keep_every_trouble() -> None:
    """Training is joined where there is no room for each step; trouble stays, to the
    microsecond.
    """
    row, at = [], 0
    for step in range(5000):
        for fine, width in (("productive", 900), ("exchange_wait", 80), ("overhead", 20)):
            row.append(StateSpan(at, at := at + width, "training", fine))
        if step % 100 == 50:
            row.append(StateSpan(at, at := at + 7, "waiting", "detection", "peer is gone"))
            row.append(StateSpan(at, at := at + 90_000, "waiting", "exchange_wait"))
    thinned, note = thin_rows({0: row})
    assert len(thinned[0]) <= MAX_BOXES
    assert "without trouble" in note
    assert [each for each in thinned[0] if each.state != "training"] == [
        each for each in row if each.state == "waiting"
    ]
    assert (
        thinned[0][0].detail
        == "forward, backward, update 90 %, exchange of gradients 8 %, between steps 2 %"
    )
    assert sum(each.num_us for each in thinned[0]) == at
    untouched, none = thin_rows({0: row[:300]})
    assert (untouched[0], none) == (row[:300], "")


def test_row_that_is_trouble_all_over_is_thinned_by_columns() -> None:
    """A row too fine to draw covers all its time with each column's dominant state."""
    row = []
    for i in range(6000):
        row.append(StateSpan(100 * i, 100 * i + 70, "waiting", "detection"))
        row.append(StateSpan(100 * i + 70, 100 * i + 100, "recovering", "heal"))
    row[6000:6200] = [
        StateSpan(300_000 + 50 * i, 300_050 + 50 * i, "lost", "restart") for i in range(200)
    ]
    thinned, note = thin_rows({0: row, 1: row})
    assert sum(map(len, thinned.values())) <= MAX_BOXES
    assert "1,500 columns" in note
    for each in thinned.values():
        assert sum(part.num_us for part in each) == 600_000
        assert {part.state for part in each} == {"waiting", "lost"}
        assert sum(part.num_us for part in each if part.state == "lost") == pytest.approx(
            10_000, abs=500
        )


def test_marks_of_very_many_faults_are_joined() -> None:
    """Faults that would overlap are one mark with their number; none is lost."""
    hits = []
    for number in range(5000):
        incident = Incident(
            float(number), "kill_group", True, (number % 2,), 0, number, True, 0.1, 1.0, None
        )
        fault = Recovery(float(number), number, incident)
        hits.append(charts.Hit(fault, float(number), float(number % 2)))
    (marks,) = charts.make_fault_marks(hits)
    assert len(marks.x) <= 2 * (charts.MARK_COLUMNS + 1)
    told = sum(
        1 + int(text.partition(", and ")[2].removesuffix(" more") or 0) for text in marks.texts
    )
    assert told == 5000
    (each,) = charts.make_fault_marks(hits[:100])
    assert len(each.x) == 100


def test_a_happening_is_told_once() -> None:
    """A report of every group is one note in plain words with the groups; repetitions are
    counted.
    """
    job = Job(3)
    job.train(BEGIN + 10)
    for replica in range(3):
        for rank in range(2):
            job._log(job.time + replica, "gradient_excluded", replica, rank, step=9, slots=[1])
            job._log(
                job.time + replica,
                "digest_mismatch",
                replica,
                rank,
                step=9,
                minority=[2],
                digests={},
            )
    for seconds in (20, 40):
        job._log(job.time + seconds, "heal_failed", 1, donor=0, from_step=3, error="no route")
    job.train(BEGIN + 60)
    notes = [
        (note.event, note.where, note.text, note.count)
        for note in find_notes(RunRecord(job.finish()))
    ]
    assert notes == [
        (
            "gradient_excluded",
            "groups 0, 1, 2",
            "left out of step 9, as not finite: the gradient of group 1",
            1,
        ),
        (
            "digest_mismatch",
            "groups 0, 1, 2",
            "after step 9 the state of group 2 was not that of the others",
            1,
        ),
        (
            "heal_failed",
            "group 1",
            "could not fetch the state from group 0, another donor is asked: no route",
            2,
        ),
    ]


def test_every_state_and_fault_has_its_look() -> None:
    """Each state has a colour, each fine state has words, and each fault of the catalogue has a
    mark.
    """
    assert set(intervals.STATES) == DETAILS.keys()
    assert all(look.meaning.endswith(".") for look in STATES.values())
    marks = {name: mark_of(kind.category) for name, kind in FAULTS.items()}
    assert {symbol for _, symbol in marks.values()} <= GLYPHS.keys()
    assert OTHER not in marks.values()


def test_import_is_light() -> None:
    """torch and the drawing libraries are loaded only when a page is written; matplotlib
    never is.
    """
    code = (
        "import sys; from titan_ft.history.report import page\n"
        "print(sorted({'torch', 'matplotlib', 'torchft', 'plotly', 'jinja2'} & set(sys.modules)))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert process.stdout.strip() == "[]", process.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_page_in_a_browser(short_campaign: list[Event], tmp_path: Path) -> None:
    """Chromium runs the page's script and draws each chart; on paper each is as wide as the
    sheet.
    """
    page = write_report(RunRecord(short_campaign), tmp_path / "report")
    quiet = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
    )
    quiet += (
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path / 'profile'}",
    )

    def browse(*order: str) -> str:
        command = [
            "chromium",
            *quiet,
            "--window-size=1366,3000",
            "--virtual-time-budget=8000",
            *order,
        ]
        return subprocess.run(
            command, capture_output=True, timeout=120, check=True, text=True
        ).stdout

    browse(f"--print-to-pdf={tmp_path / 'page.pdf'}", page.as_uri())
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    dumped = browse("--dump-dom", page.as_uri())
    for name in FIGURES:
        drawn = dumped.partition(f'id="plot-{name}"')[2].partition("</figure>")[0]
        assert 'class="main-svg"' in drawn, name
        assert "xtick" in drawn, name
    # The same page, told that it is about to be printed: no plot is wider than a sheet of A4.
    text = page.read_text(encoding="utf-8")
    script = text.rpartition("</script>")
    page.write_text(
        f"{script[0]}dispatchEvent(new Event('beforeprint'));{script[1]}{script[2]}",
        encoding="utf-8",
    )
    printed = browse("--dump-dom", page.as_uri())
    widths = [
        float(width) for width in re.findall(r'class="main-svg"[^>]*? width="([\d.]+)"', printed)
    ]
    assert len(widths) >= len(FIGURES)
    assert max(widths) <= 694
