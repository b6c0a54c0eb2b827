# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The figures of a run's short report, and their table for the terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from titan_ft.history.batches.audit import audit
from titan_ft.history.digests import DigestVerdict, compare_digests
from titan_ft.history.fold.hosts import HostFigures
from titan_ft.history.fold.unit import STEP, Unit
from titan_ft.history.judgement import Verdict, count
from titan_ft.history.outcomes.crashes import Crash, find_crashes
from titan_ft.history.outcomes.hosts import find_hosts, name_range
from titan_ft.history.outcomes.outcome import Outcome, find_outcome
from titan_ft.history.record.run_record import RunRecord, view
from titan_ft.history.rounds import RecordedRounds, find_rounds
from titan_ft.history.terminal import grid, headline
from titan_ft.history.timing.goodput import (
    count_exchanges,
    count_wire_bytes,
    effective_training_time,
)
from titan_ft.history.timing.incidents import (
    RecordedDrain,
    RecordedFailure,
    RecordedHeal,
    count_faults,
    find_drains,
    find_failures,
    find_heals,
)
from titan_ft.history.timing.rework import Rework, find_rework
from titan_ft.run.events import (
    CheckpointFailed,
    CheckpointSaved,
    Drained,
    LighthouseRestarted,
    ReplicaRestarted,
    StateServed,
    StepCommitted,
    TrainingFinished,
    WorkerExited,
)

if TYPE_CHECKING:
    from rich.console import Group

MAX_FAILURES_SHOWN = 5
MAX_CAUSE_CHARACTERS = 60


@dataclass(frozen=True)
class Transfer:
    """What the ranks of a group served of one state to a joiner."""

    time: float
    """Unix seconds at which the last rank was done."""
    donor: int
    joiner: int
    step: int
    """Step after which the state is."""
    num_bytes: int
    """Bytes of all ranks."""
    copy_seconds: float
    """The copy of the state by the slowest rank: so long training stood still at most."""
    serve_seconds: float
    """The transfer by the slowest rank, beside training."""


@dataclass
class RunSummary:
    """The figures of one run. Zero, None, empty or "unknown" where it is not in the history."""

    outcome: Outcome
    """What became of it."""
    start: float = 0.0
    """When the job began, in Unix seconds."""
    num_groups: int = 0
    ranks_per_group: int = 0
    seconds: float = 0.0
    """Time between the first and the last event."""
    tokens: int = 0
    """Tokens with a label that the steps up to the last one trained on."""
    unit: Unit = STEP
    """What a commit stands for, and all figures of steps below count: steps, or rounds."""
    rounds: RecordedRounds | None = None
    """Who made how many steps of them; None where they are steps."""
    steps_committed: int = 0
    """The highest step that a group committed."""
    exchanges_committed: int = 0
    exchanges_attempted: int = 0
    """See `titan_ft.history.timing.goodput.count_exchanges`."""
    wire_bytes: int | None = None
    wire_bytes_per_step: float | None = None
    """See `titan_ft.history.timing.goodput.count_wire_bytes`."""
    step_seconds: float | None = None
    """The usual step, see `RunRecord.usual_step_us`."""
    effective_training_time: float | None = None
    effective_training_time_in_training: float | None = None
    """The goodput, see `titan_ft.history.timing.goodput.effective_training_time`."""
    rework: Rework = field(default_factory=Rework)
    """Committed steps that were thrown away and made again."""
    recomputed_forward_passes: int = 0
    """Forward passes beyond one per batch, by the groups that contributed to the step."""
    num_restarts: int = 0
    num_standby_restarts: int = 0
    """Those in which a process took over that had imported everything."""
    num_lighthouse_restarts: int = 0
    num_checkpoints: int = 0
    """Checkpoints that are complete, each step once."""
    failed_checkpoints: list[str] = field(default_factory=list)
    """The saves that failed, each with its reason, in order of time."""
    num_faults: int = 0
    """Injected faults, see `titan_ft.history.fold.faults.InjectedFaults`."""
    drains: list[RecordedDrain] = field(default_factory=list)
    failures: list[RecordedFailure] = field(default_factory=list)
    """See `titan_ft.history.fold.run`."""
    crashes: list[Crash] = field(default_factory=list)
    """The exceptions that ended groups, each once."""
    hosts: list[HostFigures] = field(default_factory=list)
    """What ran on each host, and how often it died there; those with the most deaths first."""
    heals: list[RecordedHeal] = field(default_factory=list)
    """All transfers of state that were received, those at the start of the run included."""
    transfers: list[Transfer] = field(default_factory=list)
    """All transfers of state that were served."""
    losses: list[tuple[int, float | None]] = field(default_factory=list)
    """(step, loss) of the first, the last and the quartile steps; None for a loss that was not
    finite.
    """
    final_digests: DigestVerdict = "unknown"
    """Whether ranks of the same index ended with the same state in all groups that finished, or
    left at the end.
    """
    finished_replicas: list[int] = field(default_factory=list)
    step_digests: DigestVerdict = "unknown"
    """Whether those that made the same state held the same bytes of it, wherever they took a
    digest.
    """
    num_step_digests: int = 0
    """Pairs of a state and a rank that were compared."""
    differing_steps: list[int] = field(default_factory=list)
    every_batch_once: Verdict = "unknown"
    batches: str = ""
    """The audit's counts in words."""

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain dictionaries, lists and numbers, for JSON."""
        figures = asdict(self)
        figures["unit"], figures["rework"] = self.unit.noun, self.rework.to_dict()
        figures["outcome"] = self.outcome.to_dict()
        figures["losses"] = [{"step": step, "loss": loss} for step, loss in self.losses]
        return figures


@view
def summarize(record: RunRecord) -> RunSummary:
    """Return the figures of a run."""
    events, commits = record.events, record.commits
    restarts, finished = record.of(ReplicaRestarted), record.of(TrainingFinished)
    attempted, committed = count_exchanges(record)
    wire_bytes, wire_bytes_per_step = count_wire_bytes(record)
    last = {(event.replica, event.rank): event for event in finished or _last_to_leave(record)}
    told = (((e.step, e.lineage, e.rank), e.replica, e.digest) for e in record.of(StepCommitted))
    compared = compare_digests(told, record.num_usual_comparisons)
    audited = audit(record)
    # Workers that died before their first event are known by their exits alone.
    ranks = [process.rank for process in record.processes] + [
        end.rank for end in record.of(WorkerExited)
    ]
    effective, effective_in_training = effective_training_time(record)
    return RunSummary(
        outcome=find_outcome(record),
        start=record.begin,
        num_groups=len(record.attempts),
        ranks_per_group=max(ranks, default=-1) + 1,
        seconds=events[-1].time - events[0].time if events else 0.0,
        tokens=max(
            [*(event.tokens for event in finished), *(point.tokens for point in record.curve[-1:])],
            default=0,
        ),
        unit=record.unit,
        rounds=find_rounds(record),
        steps_committed=max((event.step for event in commits), default=0),
        exchanges_committed=committed,
        exchanges_attempted=attempted,
        wire_bytes=wire_bytes,
        wire_bytes_per_step=wire_bytes_per_step,
        step_seconds=record.usual_step_seconds,
        effective_training_time=effective,
        effective_training_time_in_training=effective_in_training,
        rework=find_rework(record),
        recomputed_forward_passes=sum(_recomputed(event) for event in commits),
        num_restarts=len(restarts),
        num_standby_restarts=sum(event.standby for event in restarts),
        num_lighthouse_restarts=len(record.of(LighthouseRestarted)),
        num_checkpoints=len({event.step for event in record.of(CheckpointSaved)}),
        failed_checkpoints=[
            f"step {event.step}: {event.error}" for event in record.of(CheckpointFailed)
        ],
        num_faults=sum(count_faults(record).values()),
        drains=find_drains(record),
        failures=find_failures(record),
        crashes=find_crashes(record),
        hosts=find_hosts(record),
        heals=find_heals(record),
        transfers=find_transfers(record),
        losses=_losses(record),
        final_digests=compare_digests(
            (rank, replica, e.digest) for (replica, rank), e in last.items()
        ).verdict,
        finished_replicas=sorted({replica for replica, _ in last}),
        step_digests=compared.verdict,
        num_step_digests=compared.num_compared,
        differing_steps=sorted({step for step, _, _ in compared.differing}),
        every_batch_once=audited.verdict,
        batches=audited.counts() if commits else "",
    )


def find_transfers(record: RunRecord) -> list[Transfer]:
    """Return the transfers of state from donors, the ranks of a group together, in order of
    time.
    """
    ranks: dict[tuple[int, int, int], list[StateServed]] = defaultdict(list)
    for event in record.of(StateServed):
        ranks[event.replica, event.joiner, event.step].append(event)
    transfers = [
        Transfer(
            time=max(event.time for event in served),
            donor=donor,
            joiner=joiner,
            step=step,
            num_bytes=sum(event.bytes for event in served),
            copy_seconds=max(event.copy_seconds for event in served),
            serve_seconds=max(event.serve_seconds for event in served),
        )
        for (donor, joiner, step), served in ranks.items()
    ]
    return sorted(transfers, key=lambda transfer: transfer.time)


def _recomputed(commit: StepCommitted) -> int:
    """Return the repeated forward passes of a step; 0 for a group without weight, whose batch
    waits.
    """
    if commit.data is None or not commit.contributed:
        return 0
    return max(0, commit.forward_passes - sum(data.num_batches for data in commit.readings()))


def _losses(record: RunRecord) -> list[tuple[int, float | None]]:
    """Return the loss of the first, the last and the quartile steps."""
    points = record.curve
    places = (
        sorted({round(quarter * (len(points) - 1) / 4) for quarter in range(5)}) if points else []
    )
    return [(points[place].step, points[place].loss) for place in places]


def _last_to_leave(record: RunRecord) -> list[Drained]:
    """Return the groups that left together at the end of a run that was stopped before its last
    step.
    """
    left = [event for event in record.of(Drained) if event.digest]
    last = max(left, key=lambda event: event.step, default=None)
    return [event for event in left if last is not None and event.lineage == last.lineage]


def summary_table(summary: RunSummary) -> Group:
    """Return the figures for the terminal: what became of the run, why, and a short table."""
    from rich.console import Group

    s = summary
    standby = f" ({s.num_standby_restarts} without imports)" if s.num_standby_restarts else ""
    rows = [
        ("groups", f"{s.num_groups} x {count(s.ranks_per_group, 'rank')}"),
        ("time", f"{s.seconds:.1f} s, {_seconds(s.step_seconds)} a {s.unit.noun} (median)"),
        (f"{s.unit.noun}s committed", s.rounds.describe() if s.rounds else str(s.steps_committed)),
        *([("made again", s.rework.describe())] if s.rework.describe() else []),
        ("goodput", _goodput(s)),
        ("exchanges", f"{s.exchanges_attempted} attempted, {s.exchanges_committed} committed"),
        *([("gradients sent", describe_sent(s))] if s.wire_bytes else []),
        ("steps recomputed by survivors", f"{s.recomputed_forward_passes} (forward passes)"),
        (
            "batches",
            f"{s.batches}: every batch once {s.every_batch_once}" if s.batches else "unknown",
        ),
        *([("faults injected", str(s.num_faults))] if s.num_faults else []),
        ("failures", f"{len(s.failures)}, {count(s.num_restarts, 'restart')}{standby}"),
        *(
            (f"  {_name(failure)}", _describe(failure))
            for failure in s.failures[:MAX_FAILURES_SHOWN]
        ),
    ]
    if len(s.failures) > MAX_FAILURES_SHOWN:
        rows.append(("  ...", f"{len(s.failures) - MAX_FAILURES_SHOWN} more"))
    rows += [("exception", crash.describe(s.start)) for crash in s.crashes[:MAX_FAILURES_SHOWN]]
    if len(s.crashes) > MAX_FAILURES_SHOWN:
        rows.append(
            ("  ...", f"{len(s.crashes) - MAX_FAILURES_SHOWN} more (--json names them all)")
        )
    if len(s.hosts) > 1:
        rows.append(("hosts", str(len(s.hosts))))
        rows += [(f"  {each.host}", _describe_host(each)) for each in s.hosts[:MAX_FAILURES_SHOWN]]
        if len(s.hosts) > MAX_FAILURES_SHOWN:
            rows.append(
                (
                    "  ...",
                    f"{len(s.hosts) - MAX_FAILURES_SHOWN} more, with no more deaths (--json has them all)",
                )
            )
    if s.failures:
        rows.append(
            ("survivors' stall", _spread([failure.stall_seconds for failure in s.failures]))
        )
    if any(failure.away for failure in s.failures):
        rejoins = [failure.rejoin_seconds for failure in s.failures if failure.away]
        rows.append(("time to rejoin", _spread(rejoins)))
    if s.drains:
        who = ", ".join(_name(drain) for drain in s.drains[:MAX_FAILURES_SHOWN])
        more = ", ..." if len(s.drains) > MAX_FAILURES_SHOWN else ""
        # Else nobody was left to stall.
        known = any(drain.stall_seconds is not None for drain in s.drains)
        stall = (
            f", survivors stalled {_spread([drain.stall_seconds for drain in s.drains])}"
            if known
            else ""
        )
        rows.append(("drained", f"{len(s.drains)} ({who}{more}){stall}"))
    if s.transfers:
        size = sum(each.num_bytes for each in s.transfers) / 2**20
        rows.append(
            (
                "state served",
                f"{count(len(s.transfers), 'time')}, {size:.1f} MiB; {_served(s.transfers)}",
            )
        )
    if s.num_checkpoints or s.failed_checkpoints:
        failed = (
            f", {len(s.failed_checkpoints)} failed (last: {s.failed_checkpoints[-1]})"
            if s.failed_checkpoints
            else ""
        )
        rows.append(("checkpoints", f"{s.num_checkpoints} saved{failed}"))
    if s.num_lighthouse_restarts:
        rows.append(("lighthouse", count(s.num_lighthouse_restarts, "restart")))
    curve = ", ".join(
        f"{'not finite' if loss is None else f'{loss:.4f}'} ({s.unit.noun} {step})"
        for step, loss in s.losses
    )
    steps = (
        f" at {s.unit.count(len(s.differing_steps))}, first {s.differing_steps[0]}"
        if s.differing_steps
        else ""
    )
    rows += [
        ("loss", curve or "unknown"),
        (
            "final digests",
            f"{s.final_digests} ({count(len(s.finished_replicas), 'group')} at the end)",
        ),
        ("digests on the way", f"{s.step_digests}{steps} ({s.num_step_digests} compared)"),
    ]
    return Group(*headline(s.outcome, s.outcome.colour), "", grid(rows))


def _goodput(summary: RunSummary) -> str:
    """Return the effective training time in words."""
    whole, training = summary.effective_training_time, summary.effective_training_time_in_training
    if whole is None or training is None:
        return "unknown"
    noun = summary.unit.noun
    return f"{100 * whole:.1f} % effective training time, {100 * training:.1f} % from the first {noun} to the last"


def describe_sent(summary: RunSummary) -> str:
    """Return the bytes of gradients that were sent, in words."""
    total, per_step = summary.wire_bytes or 0, summary.wire_bytes_per_step
    each = "" if per_step is None else f", {per_step / 1e6:.2f} MB by a group for each of its steps"
    return f"{total / 1e6:.1f} MB{each}"


def _name(end: RecordedFailure | RecordedDrain) -> str:
    return "all groups" if end.replica is None else f"group {end.replica}, attempt {end.attempt}"


def _describe(failure: RecordedFailure) -> str:
    """Return one failure in words."""
    # The exceptions have lines of their own, whole.
    cause = shorten(failure.cause, MAX_CAUSE_CHARACTERS, placeholder=" ...")
    parts = [cause, f"survivors stalled {_seconds(failure.stall_seconds)}"]
    if not failure.away:
        parts.append("the exchange was repeated")
    elif failure.rejoin_seconds is None:
        parts.append("never contributed again")
    else:
        parts.append(f"contributing again after {_seconds(failure.rejoin_seconds)}")
    if failure.heal is not None:
        heal = failure.heal
        parts.append(
            f"healed from group {heal.donor}: {heal.num_bytes / 2**20:.1f} MiB in {_seconds(heal.seconds)}"
        )
        if heal.replayed:
            parts.append(f"{count(heal.replayed, 'update')} replayed")
    return ", ".join(parts)


def _describe_host(figures: HostFigures) -> str:
    groups = name_range(figures.groups)
    left = (
        f"; left {'once' if figures.left == 1 else f'{figures.left} times'} as suspected"
        if figures.left
        else ""
    )
    return f"{count(figures.deaths, 'death')} of {count(figures.starts, 'worker')} started, groups {groups}{left}"


def _served(transfers: Sequence[Transfer]) -> str:
    copies, sent = (
        [each.copy_seconds for each in transfers],
        [each.serve_seconds for each in transfers],
    )
    return f"copied in {_spread(copies)} (the longest pause of training), sent in {_spread(sent)}"


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f} s"


def _spread(values: Sequence[float | None]) -> str:
    """Return median and maximum of the known values, and how many are unknown."""
    known = [value for value in values if value is not None]
    if not known:
        return "unknown"
    text = (
        _seconds(known[0])
        if len(known) == 1
        else f"{median(known):.2f} s median, {max(known):.2f} s at most"
    )
    return text if len(known) == len(values) else f"{text} ({len(values) - len(known)} unknown)"
