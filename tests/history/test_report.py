# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The page that a run leaves: its figures, its text, and what it does with histories that lack something."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import random
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.event_builder import build, change, named
from titan_ft.chaos.faults import FAULTS
from titan_ft.history import intervals
from titan_ft.history.check import check
from titan_ft.history.record import RunRecord
from titan_ft.history.report.facts import duration, report_figures
from titan_ft.history.report.page import write_report
from titan_ft.history.report.plots import MAX_POINTS, Span, thin
from titan_ft.history.report.style import OTHER, STATES, category
from titan_ft.history.summary import summarize, summary_table
from titan_ft.history.terminal import text_of
from titan_ft.run.events import Event, StepCommitted

DEADLY = ("kill_rank", "kill_group", "segfault", "exception", "out_of_memory", "abort_process_group", "kill_donor")
MILD = ("stop_group", "slow_rank", "network_dead", "nan_gradient", "flip_parameter", "kill_lighthouse", "disk_full")
FIGURES = ("loss", "participants", "timeline", "step-times", "stalls", "goodput")
BEGIN = 1_760_000_000.0


class Job:
    """Play a job of many groups in virtual time, and write the events that it would write."""

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
        self._log(BEGIN, "launch_started", replicas=num_groups, ranks_per_replica=1, spares=0, job_id="synthetic")
        for replica in range(num_groups):
            self._start(replica, BEGIN + 0.1)
        self.time = BEGIN + 3.0

    def _log(self, time: float, name: str, replica: int | None = None, rank: int | None = 0, **fields: Any) -> None:
        if replica is not None:
            fields |= {"replica": replica, "attempt": self._attempts[replica]}
            fields |= {} if rank is None else {"rank": rank}
        self.events.append(build(named(name), time=time, mono=time - BEGIN, **fields))

    def _start(self, replica: int, time: float) -> None:
        config = {"group_size": len(self._attempts), "min_replica_size": 1, "digest_every": self._digest_every}
        self._log(time, "worker_started", replica, config_digest="c0ffee", config=config, host="here", slurm=None)

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
            "lr": 4e-4,
            "seconds": seconds,
            "exchanges": exchanges,
            "exchange_seconds": max(0.02, seconds - 0.25),
            "compute_seconds": 0.22,
            "apply_seconds": 0.01,
            "batches": batches,
        }
        for replica in members:
            data = {"slot": replica, "first_batch": self._batches[replica], "num_batches": 1, "checksum": "aa"}
            own = {"own_tokens": 512 if replica in slots else 0, "data": data, "extra_data": [], "forward_passes": 1}
            self._log(self.time + 0.001 * replica, "step_committed", replica, **usual, **own, **due)
            if exchanges > 1:
                self._log(start + 0.3, "exchange_failed", replica, step=self.step, error="peer is gone", seconds=0.05)
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
                self._behind[replica] = False

    def _down(self, replica: int, at: float, signal: str, imports: float) -> None:
        """End a group's attempt, and start the next."""
        self._log(at + 0.05, "worker_exited", replica, signal=signal, reason=f"rank 0 got {signal}", stopped=False)
        self._attempts[replica] += 1
        self._log(at + 0.1, "replica_restarted", replica, None, reason=signal, standby=imports < 3)
        self._start(replica, at + 0.3)
        self._ready[replica] = at + 0.3 + imports
        quorum = {"quorum": self.step, "participants": [], "step": 0, "quorum_seconds": 0.05, "rebuild_seconds": 0.08}
        self._log(self._ready[replica], "joined", replica, **quorum)
        self._behind[replica] = True

    def fault(self, kind: str, replica: int, shot: int) -> None:
        """Inject a fault now, and make the step that it hits."""
        target = {"lighthouse": True} if kind == "kill_lighthouse" else {"replica": replica, "rank": 0}
        known: dict[str, Any] = {"fault": kind, "target": target, "seed": 1, "shot": shot}
        if kind in DEADLY and (self._behind[replica] or len(self._members()) < 2):
            self._log(self.time, "fault_skipped", **known, reason=f"replica {replica} is not up to date <yet>")
            return
        at = self.time + 0.1
        self._log(at, "fault_injected", **known, params={})
        if kind in DEADLY:
            self._down(replica, at, "SIGSEGV" if kind == "segfault" else "SIGKILL", self._random.uniform(1.5, 6.0))
            self.commit(self._random.uniform(0.7, 1.3), exchanges=2)
        elif kind == "nan_gradient":
            self._log(at, "gradient_excluded", replica, step=self.step + 1, slots=[replica])
            self.commit(0.3, weightless=(replica,))
        elif kind == "flip_parameter":
            self.commit(0.4, weightless=(replica,))
            self._log(self.time, "digest_mismatch", replica, step=self.step, minority=[replica], digests={})
            self._behind[replica], self._ready[replica] = True, self.time
        elif kind == "kill_lighthouse":
            self._log(at + 0.4, "lighthouse_restarted", reason="it got SIGKILL", seconds=0.4, address="[::]:1")
            self.commit(0.8)
        else:
            self.commit(2.5 if kind == "stop_group" else 0.9, exchanges=2 if kind.startswith("network") else 1)
            self._log(self.time, "fault_undone", fault=kind, target=target, shot=shot)

    def finish(self) -> list[Event]:
        """End the job and return its history."""
        for replica in self._members():
            known = {"step": self.step, "tokens": 512 * sum(self._batches), "digest": "ff", "lineage": self._lineage}
            self._log(self.time, "training_finished", replica, **known)
        self._log(self.time + 0.5, "launch_finished", code=0, reason="all groups finished")
        return sorted(self.events, key=lambda event: event.time)


def campaign(minutes: float = 20, num_groups: int = 4, every: float = 15, seed: int = 7) -> list[Event]:
    """Return the history of a campaign: a fault of a random kind every so many seconds."""
    job, chance = Job(num_groups, seed), random.Random(seed)
    job._log(BEGIN + 1, "chaos_started", seed=seed, plan="campaign.toml", schedule=f"every {every:g} s")
    end = BEGIN + 60 * minutes
    for shot in range(int(60 * minutes / every) - 1):
        job.train(BEGIN + every * (shot + 1))
        job.fault(chance.choice(DEADLY + MILD), chance.randrange(num_groups), shot)
    job.train(end)
    return job.finish()


class Reader(HTMLParser):
    """Reads a page strictly: every element is closed in its turn, every id is there once."""

    VOID = frozenset({"meta"})

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            elif name in ("src", "href", "xlink:href", "clip-path") and tag != "a":
                self.references.append(str(value).removeprefix("url(").removesuffix(")"))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def read_page(events: list[Event], folder: Path) -> Reader:
    """Write the report of some events and read its page."""
    page = write_report(RunRecord(events), folder)
    reader = Reader(page.read_text(encoding="utf-8"))
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["index.html", *(f"{name}.png" for name in FIGURES)]
    )
    assert reader.tags.count("svg") == len(FIGURES)
    assert len(reader.ids) == len(set(reader.ids))
    assert {reference.removeprefix("#") for reference in reader.references} <= set(reader.ids)
    return reader


@pytest.fixture(scope="module")
def short_campaign() -> list[Event]:
    return campaign(minutes=2)


def test_page_of_a_campaign(short_campaign: list[Event], tmp_path: Path) -> None:
    """The page holds facts, verdicts, figures and every recovery, and needs no script and nothing from elsewhere."""
    page = read_page(short_campaign, tmp_path / "report")
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert "@import" not in page.text
    summary = summarize(RunRecord(short_campaign))
    for text in ("Run synthetic", f"{summary.steps_committed:,}", "82.3 %", "30.2 %", "44 → 80 %", "10 → 3 min"):
        assert text in page.text
    judged = check(RunRecord(short_campaign))
    for promise in range(1, 9):
        name = judged[promise].name
        assert name[:1].upper() + name[1:] in page.text
    faults = [event.fault for event in short_campaign if event.name == "fault_injected"]
    rows = page.text[page.text.index("Updates replayed") :]
    assert faults
    assert all(rows.count(f" {fault} ") >= faults.count(fault) for fault in faults)
    for name in FIGURES:
        assert (tmp_path / "report" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_promise_that_does_not_hold_is_named(short_campaign: list[Event], tmp_path: Path) -> None:
    """A batch that is trained twice makes the page say which promise is broken, and where."""
    broken = copy.deepcopy(short_campaign)
    commits = [event for event in broken if isinstance(event, StepCommitted) and event.step > 100]
    for event in commits:
        if 0 in event.batches:
            event.batches[0] = (event.batches[0][0] - 1, 1)
    page = read_page(broken, tmp_path)
    row = page.text[page.text.index("Every batch once") :]
    assert row.startswith("Every batch once ✗ does not hold")
    assert "Every batch trained once no" in page.text


def test_figures_are_a_superset_of_the_summary(short_campaign: list[Event]) -> None:
    """--json keeps every figure of the short report as it is, and adds goodput, stalls, verdicts, notes."""
    figures = report_figures(RunRecord(short_campaign))
    summary = summarize(RunRecord(short_campaign)).to_dict()
    assert {name: figures[name] for name in summary} == summary
    assert figures["goodput"]["num_groups"] == 4
    assert len(figures["stalls"]) == sum(figures["faults_by_kind"].values())
    assert figures["chaos"]["seed"] == 7
    assert json.loads(json.dumps(figures, allow_nan=False))["check"]["verdict"] == figures["check"]["verdict"]


def test_words_of_events_are_escaped(tmp_path: Path) -> None:
    """Whatever an event says is text on the page, never markup."""
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
    assert "script" not in page.tags
    assert page.text.count("alert('&')") >= 6


def test_state_served_is_shown(tmp_path: Path) -> None:
    """Who served whom: the ranks of one transfer together, on the page, in the JSON and on the terminal."""
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
    assert "1 time, 2.0 MiB; copied in 1.25 s" in text_of(summary_table(summarize(record)))


QUICK = ("nothing", "one group without failures", "the end")  # the others are as quick, but there are many


def lacking() -> dict[str, list[Event]]:
    """Return histories that lack something, by what it is."""
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


@pytest.mark.parametrize("what", [w if w in QUICK else pytest.param(w, marks=pytest.mark.slow) for w in lacking()])
def test_history_that_lacks_something(what: str, tmp_path: Path) -> None:
    """There is a page whatever the history lacks, and it never says more than the history tells."""
    events = lacking()[what]
    page = read_page(events, tmp_path)
    assert json.dumps(report_figures(RunRecord(events)), allow_nan=False)
    if what in ("nothing", "a launch", "no step"):
        assert "Every batch trained once unknown" in page.text
        assert "✓ holds" not in page.text.partition("Headline figures")[0].partition("Clocks")[0]
    if what == "one group without failures":
        assert "No faults were injected." in page.text
        assert "Nothing failed." in page.text
    if what == "the end":
        assert "does not tell how it ended" in page.text


@pytest.mark.slow
def test_many_groups_and_long_runs_stay_small(tmp_path: Path) -> None:
    """A history of 32 groups, or of thousands of steps, makes a page that a browser still likes."""
    page = read_page(campaign(minutes=0.7, num_groups=32, every=5), tmp_path / "wide")
    assert all(f"group {replica}" in page.text for replica in range(32))
    job = Job(2)
    job.train(BEGIN + 1800)
    read_page(job.finish(), tmp_path / "long")
    for folder in ("wide", "long"):
        assert (tmp_path / folder / "index.html").stat().st_size < 2_000_000


def test_thinned_row_keeps_its_time() -> None:
    """A row too fine to draw still covers all of its time, with the state that took most of each column."""
    spans = [Span(i / 10, i / 10 + width, state) for i in range(6000) for width, state in ((0.07, "productive"),)]
    spans += [Span(i / 10 + 0.07, i / 10 + 0.1, "exchange_wait") for i in range(6000)]
    spans[3000:3100] = [Span(300 + i / 10, 300 + (i + 1) / 10, "restart") for i in range(100)]
    thinned = thin(sorted(spans, key=lambda span: span.start), 600, MAX_POINTS)
    assert len(thinned) <= MAX_POINTS
    assert sum(span.end - span.start for span in thinned) == pytest.approx(600)
    assert {span.state for span in thinned} == {"productive", "restart"}
    assert sum(span.end - span.start for span in thinned if span.state == "restart") == pytest.approx(10, abs=1)


def test_every_state_and_fault_has_its_look() -> None:
    """One colour per state, and a mark for each fault of the catalogue."""
    assert set(intervals.STATES) == STATES.keys()
    assert len({colour for _, colour in STATES.values()}) == len(STATES)
    assert {kind for kind in FAULTS if category(kind) == OTHER} == set()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "unknown"),
        (0.0, "0.00 s"),
        (0.0213, "21 ms"),
        (0.0996, "0.10 s"),
        (9.996, "10.0 s"),
        (59.94, "59.9 s"),
        (119.6, "2 min"),
        (1200.8, "20 min 1 s"),
        (3600 * 5 + 61, "5 h 1 min"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    """A duration has its unit and the digits that mean something."""
    assert duration(seconds) == text


def test_import_is_light() -> None:
    """Neither torch nor matplotlib comes in before a figure is drawn, and pyplot never does."""
    code = (
        "import sys; from titan_ft.history.record import RunRecord\n"
        "from titan_ft.history.report import page, plots\n"
        "heavy = {'torch', 'matplotlib', 'torchft'} & set(sys.modules)\n"
        "plots.draw(RunRecord([]))\n"
        "print(sorted(heavy), 'matplotlib.pyplot' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert process.stdout.strip() == "[] False", process.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_page_in_a_browser(short_campaign: list[Event], tmp_path: Path) -> None:
    """Chromium draws the page and prints it."""
    page = write_report(RunRecord(short_campaign), tmp_path / "report")
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
    quiet += ("--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}")
    for order in (f"--screenshot={tmp_path / 'page.png'}", f"--print-to-pdf={tmp_path / 'page.pdf'}"):
        command = ["chromium", *quiet, "--window-size=1366,3000", order, page.as_uri()]
        subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert (tmp_path / "page.png").stat().st_size > 100_000
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
