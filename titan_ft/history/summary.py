# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Fold the events of a run into the figures that its short report shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from titan_ft.history import audit
from titan_ft.history.failures import (
    Drain,
    Failure,
    Heal,
    attempt_of,
    contributed,
    find_drains,
    find_failures,
    find_heals,
    group_commits,
    median_seconds,
)
from titan_ft.history.trajectory import readings
from titan_ft.run.events import Drained, Event, LighthouseRestarted, ReplicaRestarted, StepCommitted, TrainingFinished

Verdict = Literal["equal", "differ", "unknown"]
MAX_FAILURES_SHOWN = 5


@dataclass
class RunSummary:
    """The figures of one run. Zero, None, empty or "unknown" where the history does not tell."""

    num_groups: int = 0
    ranks_per_group: int = 0
    seconds: float = 0.0
    """Time between the first and the last event."""
    tokens: int = 0
    """Tokens that all groups have trained on at the end; 0 unless a group finished."""
    steps_committed: int = 0
    """The highest step that a group committed."""
    exchanges_committed: int = 0
    """Different steps that some group committed."""
    exchanges_attempted: int = 0
    """Exchanges that those steps took, retries included; of the group with most of them."""
    step_seconds: float | None = None
    """Median duration of a step."""
    recomputed_forward_passes: int = 0
    """Forward passes beyond one per batch, by the groups that contributed to the step."""
    num_restarts: int = 0
    num_standby_restarts: int = 0
    """Those in which a process took over that had imported everything."""
    num_lighthouse_restarts: int = 0
    drains: list[Drain] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    heals: list[Heal] = field(default_factory=list)
    """All transfers of state, those at the start of the run included."""
    losses: list[tuple[int, float | None]] = field(default_factory=list)
    """(step, loss) of the first, the last and the quartile steps; None for a loss that was not finite."""
    final_digests: Verdict = "unknown"
    """Whether ranks of the same index ended with the same state in all groups that finished, or left at the end."""
    finished_replicas: list[int] = field(default_factory=list)
    step_digests: Verdict = "unknown"
    """Whether they had the same state at each step where they took a digest."""
    num_step_digests: int = 0
    """(step, rank) pairs that were compared."""
    differing_steps: list[int] = field(default_factory=list)
    every_batch_once: audit.Verdict = "unknown"
    batches: str = ""
    """The audit's counts in words."""

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain dictionaries, lists and numbers, for JSON."""
        figures = asdict(self)
        figures["losses"] = [{"step": step, "loss": loss} for step, loss in self.losses]
        return figures


def summarize(events: Iterable[Event]) -> RunSummary:
    """Fold events, in any order, into the figures of the run."""
    history = sorted(events, key=lambda event: event.time)
    commits = group_commits(history)
    heals = find_heals(history)
    ranks = defaultdict(set)
    restarts = [event for event in history if isinstance(event, ReplicaRestarted)]
    for event in history:
        attempt = attempt_of(event)
        if attempt is not None:
            ranks[attempt[0]].add(event.rank or 0)
    finished = [event for event in history if isinstance(event, TrainingFinished)]
    left = [event for event in history if isinstance(event, Drained) and event.digest]
    exchanges: dict[int, int] = {}
    for event in commits:
        exchanges[event.step] = max(exchanges.get(event.step, 1), event.exchanges)
    summary = RunSummary(
        num_groups=len(ranks),
        ranks_per_group=max((max(indices) + 1 for indices in ranks.values()), default=0),
        seconds=history[-1].time - history[0].time if history else 0.0,
        tokens=max((event.tokens for event in finished), default=0),
        steps_committed=max(exchanges, default=0),
        exchanges_committed=len(exchanges),
        exchanges_attempted=sum(exchanges.values()),
        step_seconds=median_seconds(commits),
        recomputed_forward_passes=sum(_recomputed(event) for event in commits),
        num_restarts=len(restarts),
        num_standby_restarts=sum(event.standby for event in restarts),
        num_lighthouse_restarts=sum(isinstance(event, LighthouseRestarted) for event in history),
        drains=find_drains(history),
        failures=find_failures(history, heals),
        heals=heals,
        losses=_losses(commits),
    )
    _compare_final(summary, finished or _last_to_leave(left))
    _compare_steps(summary, history)
    if commits:
        audited = audit.audit(history)
        summary.every_batch_once, summary.batches = audited.verdict, audited.counts()
    return summary


def _recomputed(commit: StepCommitted) -> int:
    """Return the forward passes of a step beyond one per batch; 0 for a group without weight, whose batch waits."""
    if commit.data is None or not contributed(commit):
        return 0
    return max(0, commit.forward_passes - sum(data.num_batches for data in readings(commit)))


def _losses(commits: Iterable[StepCommitted]) -> list[tuple[int, float | None]]:
    """Return the loss of the first, the last and the quartile steps, each from the lowest replica that has it."""
    best: dict[int, tuple[int, float | None]] = {}
    for event in commits:
        if event.replica <= best.get(event.step, (event.replica, None))[0]:
            best[event.step] = (event.replica, event.loss)
    steps = sorted(best)
    if not steps:
        return []
    indices = sorted({round(quarter * (len(steps) - 1) / 4) for quarter in range(5)})
    return [(steps[index], best[steps[index]][1]) for index in indices]


def _by_key(
    events: Iterable[Drained | StepCommitted | TrainingFinished], keys: Sequence[str]
) -> dict[tuple[int, ...], dict[int, set[str]]]:
    """Return the digests of events per key, and there per replica."""
    table: dict[tuple[int, ...], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for event in events:
        if event.digest:
            table[tuple(getattr(event, key) for key in keys)][event.replica].add(event.digest)
    return table


def _last_to_leave(left: Iterable[Drained]) -> list[Drained]:
    """Return the groups that left together at the end of a run that was ended before its training."""
    left = list(left)
    last = max(left, key=lambda event: event.step, default=None)
    return [event for event in left if last is not None and event.lineage == last.lineage]


def _compare_final(summary: RunSummary, finished: Iterable[Drained | TrainingFinished]) -> None:
    """Compare the digests with which the ranks ended, and note who ended."""
    last = {(event.replica, event.rank): event for event in finished}
    summary.finished_replicas = sorted({replica for replica, _ in last})
    table = _by_key(last.values(), ["rank"])
    compared = [digests for digests in table.values() if len(digests) > 1]
    if compared:
        summary.final_digests = "differ" if any(len(set().union(*d.values())) > 1 for d in compared) else "equal"


def _compare_steps(summary: RunSummary, history: Iterable[Event]) -> None:
    """Compare the digests that ranks of the same index took at the same step."""
    table = _by_key((event for event in history if isinstance(event, StepCommitted)), ["step", "rank"])
    compared = {key: digests for key, digests in table.items() if len(digests) > 1}
    summary.num_step_digests = len(compared)
    summary.differing_steps = sorted({key[0] for key, d in compared.items() if len(set().union(*d.values())) > 1})
    if compared:
        summary.step_digests = "differ" if summary.differing_steps else "equal"


def format_summary(summary: RunSummary) -> str:
    """Return the figures as a few aligned lines of text."""
    s = summary
    standby = f" ({s.num_standby_restarts} by a standby)" if s.num_standby_restarts else ""
    rows = [
        ("groups", f"{s.num_groups} x {_count(s.ranks_per_group, 'rank')}"),
        ("time", f"{s.seconds:.1f} s, {_seconds(s.step_seconds)} a step (median)"),
        ("steps committed", str(s.steps_committed)),
        ("exchanges", f"{s.exchanges_attempted} attempted, {s.exchanges_committed} committed"),
        ("steps recomputed by survivors", f"{s.recomputed_forward_passes} (forward passes)"),
        ("batches", f"{s.batches}: every batch once {s.every_batch_once}" if s.batches else "unknown"),
        ("failures", f"{len(s.failures)}, {_count(s.num_restarts, 'restart')}{standby}"),
        *((f"  {_name(failure)}", _describe(failure)) for failure in s.failures[:MAX_FAILURES_SHOWN]),
    ]
    if len(s.failures) > MAX_FAILURES_SHOWN:
        rows.append(("  ...", f"{len(s.failures) - MAX_FAILURES_SHOWN} more"))
    if s.failures:
        rows.append(("survivors' stall", _spread([failure.stall_seconds for failure in s.failures])))
        rows.append(("time to rejoin", _spread([failure.rejoin_seconds for failure in s.failures])))
    if s.drains:
        who = ", ".join(_name(drain) for drain in s.drains[:MAX_FAILURES_SHOWN])
        more = ", ..." if len(s.drains) > MAX_FAILURES_SHOWN else ""
        stall = _spread([drain.stall_seconds for drain in s.drains])
        rows.append(("drained", f"{len(s.drains)} ({who}{more}), survivors stalled {stall}"))
    if s.num_lighthouse_restarts:
        rows.append(("lighthouse", _count(s.num_lighthouse_restarts, "restart")))
    curve = ", ".join(f"{'not finite' if loss is None else f'{loss:.4f}'} (step {step})" for step, loss in s.losses)
    steps = f" at {_count(len(s.differing_steps), 'step')}, first {s.differing_steps[0]}" if s.differing_steps else ""
    rows += [
        ("loss", curve or "unknown"),
        ("final digests", f"{s.final_digests} ({_count(len(s.finished_replicas), 'group')} at the end)"),
        ("digests on the way", f"{s.step_digests}{steps} ({s.num_step_digests} compared)"),
    ]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)


def _name(end: Failure | Drain) -> str:
    return f"replica {end.replica}, attempt {end.attempt}"


def _describe(failure: Failure) -> str:
    """Return one failure in words."""
    parts = [failure.cause, f"survivors stalled {_seconds(failure.stall_seconds)}"]
    if failure.rejoin_seconds is None:
        parts.append("never contributed again")
    else:
        parts.append(f"contributing again after {_seconds(failure.rejoin_seconds)}")
    if failure.heal is not None:
        heal = failure.heal
        parts.append(f"healed from replica {heal.donor}: {heal.num_bytes / 2**20:.1f} MiB in {_seconds(heal.seconds)}")
        if heal.replayed:
            parts.append(f"{_count(heal.replayed, 'update')} replayed")
    return ", ".join(parts)


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f} s"


def _count(value: int, noun: str) -> str:
    return f"{value} {noun}" if value == 1 else f"{value} {noun}s"


def _spread(values: Sequence[float | None]) -> str:
    """Return median and maximum of the known values, and how many are unknown."""
    known = [value for value in values if value is not None]
    if not known:
        return "unknown"
    text = _seconds(known[0]) if len(known) == 1 else f"{median(known):.2f} s median, {max(known):.2f} s at most"
    return text if len(known) == len(values) else f"{text} ({len(values) - len(known)} unknown)"
