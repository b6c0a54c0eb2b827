# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The figures of a run's short report, and their table for the terminal.

`titan-ft report` calls `summarize` for the figures (`--json`), and `make_summary_table` for the
terminal. Most figures come from other modules of `titan_ft.history`; this module puts them side by
side.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from titan_ft.history.batches.audit import audit
from titan_ft.history.digests import DigestComparison, DigestVerdict, compare_digests
from titan_ft.history.fold.hosts import HostFigures
from titan_ft.history.fold.unit import STEP, Unit
from titan_ft.history.judgement import Verdict, count
from titan_ft.history.outcomes.crashes import Crash, find_crashes
from titan_ft.history.outcomes.hosts import find_hosts, name_range
from titan_ft.history.outcomes.outcome import Outcome, find_outcome
from titan_ft.history.record.run_record import RunRecord, once_per_record
from titan_ft.history.rounds import RecordedRounds, find_rounds
from titan_ft.history.terminal import make_grid, make_headline
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

MAX_ROWS_SHOWN = 5
"""The table shows at most so many failures, exceptions or hosts, one a row."""
MAX_CAUSE_CHARACTERS = 60
"""The table shows at most this much of the cause of a failure."""


@dataclass(frozen=True)
class Transfer:
    """One transfer of state to a joiner, by all ranks of the donor."""

    time: float
    """Unix seconds at which the last rank was done."""
    donor: int
    joiner: int
    step: int
    """The step after which the donor held this state."""
    num_bytes: int
    """Bytes of all ranks."""
    copy_seconds: float
    """The copy of the state by the slowest rank: the longest possible pause of training."""
    serve_seconds: float
    """The transfer by the slowest rank; training goes on meanwhile."""


@dataclass
class RunSummary:
    """The figures of one run. Figures that the history lacks are 0, None, empty or "unknown"."""

    outcome: Outcome
    start: float = 0.0
    """When the job began, in Unix seconds."""
    num_groups: int = 0
    ranks_per_group: int = 0
    seconds: float = 0.0
    """Time between the first and the last event."""
    tokens: int = 0
    """Tokens with a label that the steps up to the last one trained on."""
    unit: Unit = STEP
    """The unit of all figures of steps below: steps, or rounds."""
    rounds: RecordedRounds | None = None
    """The steps of each group in the rounds; None if the groups exchange at each step."""
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
    """The restarts by forks, which had imported everything already."""
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
    """The groups, starts and deaths on each host; the hosts with the most deaths come first."""
    heals: list[RecordedHeal] = field(default_factory=list)
    """All transfers of state that were received, those at the start of the run included."""
    transfers: list[Transfer] = field(default_factory=list)
    """All transfers of state that were served."""
    losses: list[tuple[int, float | None]] = field(default_factory=list)
    """(step, loss) of the first, the last and the quartile steps; None for a loss that was not
    finite.
    """
    final_digests: DigestVerdict = "unknown"
    """Whether all groups at the end held the same state, rank by rank."""
    finished_replicas: list[int] = field(default_factory=list)
    step_digests: DigestVerdict = "unknown"
    """Whether groups that made the same state had the same digest of it, rank by rank."""
    num_step_digests: int = 0
    """Pairs of a state and a rank that were compared."""
    differing_steps: list[int] = field(default_factory=list)
    every_batch_once: Verdict = "unknown"
    batches: str = ""
    """The audit's counts in words."""

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain dictionaries, lists and numbers, for JSON."""
        figures = asdict(self)
        figures["unit"] = self.unit.noun
        figures["rework"] = self.rework.to_dict()
        figures["outcome"] = self.outcome.to_dict()
        figures["losses"] = [{"step": step, "loss": loss} for step, loss in self.losses]
        return figures


@once_per_record
def summarize(record: RunRecord) -> RunSummary:
    """Return the figures of a run."""
    commits = record.commits
    restarts = record.of(ReplicaRestarted)
    attempted, committed = count_exchanges(record)
    wire_bytes, wire_bytes_per_step = count_wire_bytes(record)
    final_digests, finished_groups = _compare_final_digests(record)
    step_digests = _compare_step_digests(record)
    audited = audit(record)
    effective, effective_in_training = effective_training_time(record)
    return RunSummary(
        outcome=find_outcome(record),
        start=record.begin,
        num_groups=len(record.attempts),
        ranks_per_group=_count_ranks_per_group(record),
        seconds=_measure_seconds(record),
        tokens=_count_tokens(record),
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
        recomputed_forward_passes=sum(_count_recomputed(event) for event in commits),
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
        losses=_sample_losses(record),
        final_digests=final_digests,
        finished_replicas=finished_groups,
        step_digests=step_digests.verdict,
        num_step_digests=step_digests.num_compared,
        differing_steps=sorted({step for step, _, _ in step_digests.differing}),
        every_batch_once=audited.verdict,
        batches=audited.counts() if commits else "",
    )


def _count_ranks_per_group(record: RunRecord) -> int:
    ranks = [process.rank for process in record.processes]
    # Workers that died before their first event are known by their exits alone.
    ranks += [end.rank for end in record.of(WorkerExited)]
    return max(ranks, default=-1) + 1


def _measure_seconds(record: RunRecord) -> float:
    if not record.events:
        return 0.0
    return record.events[-1].time - record.events[0].time


def _count_tokens(record: RunRecord) -> int:
    tokens = [event.tokens for event in record.of(TrainingFinished)]
    if record.curve:
        tokens.append(record.curve[-1].tokens)
    return max(tokens, default=0)


def _compare_step_digests(record: RunRecord) -> DigestComparison[tuple[int, str, int]]:
    """Compare the digests that were taken on the way, by step, lineage and rank."""
    digests = []
    for event in record.of(StepCommitted):
        key = (event.step, event.lineage, event.rank)
        digests.append((key, event.replica, event.digest))
    return compare_digests(digests, record.num_usual_comparisons)


def _compare_final_digests(record: RunRecord) -> tuple[DigestVerdict, list[int]]:
    """Compare the digests at the end, by rank; return the verdict and the groups at the end."""
    ends: Sequence[TrainingFinished | Drained] = record.of(TrainingFinished)
    if not ends:
        ends = _find_last_to_leave(record)
    # A resumed run has an end of each launch: the last one counts.
    last_end: dict[tuple[int, int], TrainingFinished | Drained] = {}
    for event in ends:
        last_end[event.replica, event.rank] = event
    digests = [(event.rank, event.replica, event.digest) for event in last_end.values()]
    groups = {event.replica for event in last_end.values()}
    return compare_digests(digests).verdict, sorted(groups)


def find_transfers(record: RunRecord) -> list[Transfer]:
    """Return the transfers of state from donors, the ranks of a group together, in order of
    time.
    """
    served_by_ranks: dict[tuple[int, int, int], list[StateServed]] = defaultdict(list)
    for event in record.of(StateServed):
        served_by_ranks[event.replica, event.joiner, event.step].append(event)
    transfers = []
    for (donor, joiner, step), served in served_by_ranks.items():
        transfer = Transfer(
            time=max(event.time for event in served),
            donor=donor,
            joiner=joiner,
            step=step,
            num_bytes=sum(event.bytes for event in served),
            copy_seconds=max(event.copy_seconds for event in served),
            serve_seconds=max(event.serve_seconds for event in served),
        )
        transfers.append(transfer)
    return sorted(transfers, key=lambda transfer: transfer.time)


def _count_recomputed(commit: StepCommitted) -> int:
    """Return the repeated forward passes of a step by one group.

    A group without weight has none: it trains its batch in a later step.
    """
    if commit.data is None or not commit.contributed:
        return 0
    num_batches = sum(data.num_batches for data in commit.readings())
    return max(0, commit.forward_passes - num_batches)


def _sample_losses(record: RunRecord) -> list[tuple[int, float | None]]:
    """Return the loss of the first, the last and the quartile steps."""
    points = record.curve
    if not points:
        return []
    last = len(points) - 1
    # A short curve has the same point for several quarters.
    indices = {round(quarter * last / 4) for quarter in range(5)}
    return [(points[index].step, points[index].loss) for index in sorted(indices)]


def _find_last_to_leave(record: RunRecord) -> list[Drained]:
    """Return the events of the groups that left last, all after the same step.

    Such groups are at the end of a run that was stopped before its last step.
    """
    left = [event for event in record.of(Drained) if event.digest]
    if not left:
        return []
    last = max(left, key=lambda event: event.step)
    return [event for event in left if event.lineage == last.lineage]


def make_summary_table(summary: RunSummary) -> Group:
    """Return the figures for the terminal: what became of the run, why, and a short table."""
    from rich.console import Group

    rows = _describe_training(summary)
    rows += _describe_failures(summary)
    rows += _describe_hosts(summary.hosts)
    rows += _describe_recoveries(summary)
    rows += _describe_state(summary)
    return Group(*make_headline(summary.outcome, summary.outcome.colour), "", make_grid(rows))


_Row = tuple[str, str]
"""The name and the text of a figure in the table."""


def _describe_training(summary: RunSummary) -> list[_Row]:
    noun = summary.unit.noun
    committed = str(summary.steps_committed)
    if summary.rounds is not None:
        committed = summary.rounds.describe()
    rows = [
        ("groups", f"{summary.num_groups} x {count(summary.ranks_per_group, 'rank')}"),
        ("time", f"{summary.seconds:.1f} s, {_seconds(summary.step_seconds)} a {noun} (median)"),
        (f"{noun}s committed", committed),
    ]
    if summary.rework.describe():
        rows.append(("made again", summary.rework.describe()))
    rows.append(("goodput", _describe_goodput(summary)))
    exchanges = f"{summary.exchanges_attempted} attempted, {summary.exchanges_committed} committed"
    rows.append(("exchanges", exchanges))
    if summary.wire_bytes:
        rows.append(("gradients sent", describe_sent(summary)))
    recomputed = f"{summary.recomputed_forward_passes} (forward passes)"
    rows.append(("steps recomputed by survivors", recomputed))
    batches = "unknown"
    if summary.batches:
        batches = f"{summary.batches}: every batch once {summary.every_batch_once}"
    rows.append(("batches", batches))
    return rows


def _describe_failures(summary: RunSummary) -> list[_Row]:
    """Return the faults and failures, the first few one by one, and the exceptions."""
    rows = []
    if summary.num_faults:
        rows.append(("faults injected", str(summary.num_faults)))
    failures = f"{len(summary.failures)}, {count(summary.num_restarts, 'restart')}"
    if summary.num_standby_restarts:
        failures += f" ({summary.num_standby_restarts} without imports)"
    rows.append(("failures", failures))
    shown = summary.failures[:MAX_ROWS_SHOWN]
    rows += [(f"  {_name(failure)}", _describe_failure(failure)) for failure in shown]
    num_hidden = len(summary.failures) - MAX_ROWS_SHOWN
    if num_hidden > 0:
        rows.append(("  ...", f"{num_hidden} more"))
    rows += [
        ("exception", crash.describe(summary.start)) for crash in summary.crashes[:MAX_ROWS_SHOWN]
    ]
    num_hidden = len(summary.crashes) - MAX_ROWS_SHOWN
    if num_hidden > 0:
        rows.append(("  ...", f"{num_hidden} more (--json names them all)"))
    return rows


def _describe_hosts(hosts: Sequence[HostFigures]) -> list[_Row]:
    """Return the hosts with the most deaths; nothing for one host."""
    if len(hosts) <= 1:
        return []
    rows = [("hosts", str(len(hosts)))]
    shown = hosts[:MAX_ROWS_SHOWN]
    rows += [(f"  {figures.host}", _describe_host(figures)) for figures in shown]
    num_hidden = len(hosts) - MAX_ROWS_SHOWN
    if num_hidden > 0:
        rows.append(("  ...", f"{num_hidden} more, with no more deaths (--json has them all)"))
    return rows


def _describe_recoveries(summary: RunSummary) -> list[_Row]:
    """Return what failures and drains cost: stalls, times to rejoin, transfers of the state."""
    rows = []
    if summary.failures:
        stalls = [failure.stall_seconds for failure in summary.failures]
        rows.append(("survivors' stall", _spread(stalls)))
    away = [failure for failure in summary.failures if failure.away]
    if away:
        rejoins = [failure.rejoin_seconds for failure in away]
        rows.append(("time to rejoin", _spread(rejoins)))
    if summary.drains:
        rows.append(("drained", _describe_drains(summary.drains)))
    if summary.transfers:
        times = count(len(summary.transfers), "time")
        size = sum(each.num_bytes for each in summary.transfers) / 2**20
        served = f"{times}, {size:.1f} MiB; {_describe_transfers(summary.transfers)}"
        rows.append(("state served", served))
    return rows


def _describe_state(summary: RunSummary) -> list[_Row]:
    """Return the checkpoints, the restarts of the lighthouse, the losses and the digests."""
    rows = []
    if summary.num_checkpoints or summary.failed_checkpoints:
        checkpoints = f"{summary.num_checkpoints} saved"
        if summary.failed_checkpoints:
            last = summary.failed_checkpoints[-1]
            checkpoints += f", {len(summary.failed_checkpoints)} failed (last: {last})"
        rows.append(("checkpoints", checkpoints))
    if summary.num_lighthouse_restarts:
        rows.append(("lighthouse", count(summary.num_lighthouse_restarts, "restart")))
    losses = []
    for step, loss in summary.losses:
        value = "not finite"
        if loss is not None:
            value = f"{loss:.4f}"
        losses.append(f"{value} ({summary.unit.noun} {step})")
    if not losses:
        losses = ["unknown"]
    rows.append(("loss", ", ".join(losses)))
    groups = count(len(summary.finished_replicas), "group")
    rows.append(("final digests", f"{summary.final_digests} ({groups} at the end)"))
    step_digests: str = summary.step_digests
    if summary.differing_steps:
        steps = summary.unit.count(len(summary.differing_steps))
        step_digests += f" at {steps}, first {summary.differing_steps[0]}"
    rows.append(("digests on the way", f"{step_digests} ({summary.num_step_digests} compared)"))
    return rows


def _describe_goodput(summary: RunSummary) -> str:
    """Return the effective training time in words."""
    whole = summary.effective_training_time
    training = summary.effective_training_time_in_training
    if whole is None or training is None:
        return "unknown"
    noun = summary.unit.noun
    in_training = f"{100 * training:.1f} % from the first {noun} to the last"
    return f"{100 * whole:.1f} % effective training time, {in_training}"


def describe_sent(summary: RunSummary) -> str:
    """Return the bytes of gradients that were sent, in words."""
    text = f"{(summary.wire_bytes or 0) / 1e6:.1f} MB"
    per_step = summary.wire_bytes_per_step
    if per_step is not None:
        text += f", {per_step / 1e6:.2f} MB by a group for each of its steps"
    return text


def _name(end: RecordedFailure | RecordedDrain) -> str:
    if end.replica is None:
        return "all groups"
    return f"group {end.replica}, attempt {end.attempt}"


def _describe_failure(failure: RecordedFailure) -> str:
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
        size = f"{heal.num_bytes / 2**20:.1f} MiB in {_seconds(heal.seconds)}"
        parts.append(f"healed from group {heal.donor}: {size}")
        if heal.replayed:
            parts.append(f"{count(heal.replayed, 'update')} replayed")
    return ", ".join(parts)


def _describe_host(figures: HostFigures) -> str:
    deaths = f"{count(figures.deaths, 'death')} of {count(figures.starts, 'worker')} started"
    text = f"{deaths}, groups {name_range(figures.groups)}"
    if figures.left == 1:
        text += "; left once as suspected"
    elif figures.left:
        text += f"; left {figures.left} times as suspected"
    return text


def _describe_drains(drains: Sequence[RecordedDrain]) -> str:
    names = [_name(drain) for drain in drains[:MAX_ROWS_SHOWN]]
    if len(drains) > MAX_ROWS_SHOWN:
        names.append("...")
    text = f"{len(drains)} ({', '.join(names)})"
    stalls = [drain.stall_seconds for drain in drains]
    # If no stall is known, no group was left that could stall.
    if any(stall is not None for stall in stalls):
        text += f", survivors stalled {_spread(stalls)}"
    return text


def _describe_transfers(transfers: Sequence[Transfer]) -> str:
    copied = _spread([each.copy_seconds for each in transfers])
    sent = _spread([each.serve_seconds for each in transfers])
    return f"copied in {copied} (the longest pause of training), sent in {sent}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.2f} s"


def _spread(values: Sequence[float | None]) -> str:
    """Return median and maximum of the known values, and how many are unknown."""
    known = [value for value in values if value is not None]
    if not known:
        return "unknown"
    text = f"{median(known):.2f} s median, {max(known):.2f} s at most"
    if len(known) == 1:
        text = _seconds(known[0])
    num_unknown = len(values) - len(known)
    if num_unknown:
        text += f" ({num_unknown} unknown)"
    return text
