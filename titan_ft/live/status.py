# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The state of a run's groups as a person sees it, and the lines that events become; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan_ft.history.fold.group import GroupFold, GroupState
from titan_ft.history.fold.run import RunFold
from titan_ft.history.fold.unit import STEP, Unit
from titan_ft.run import events as ev

WAITING, STARTING, JOINED, HEALING, TRAINING = "waiting", "starting", "joined", "healing", "training"
DIED, DRAINING, DRAINED, FINISHED, FAILED = "died", "draining", "drained", "finished", "failed"
STOPPED = "stopped"
"""Ended by the launcher or its agent, before it could leave in order."""
LOST = "lost"
"""Not heard of for so long that its host may be gone; its own next event ends it."""
_SHOWN: dict[GroupState, str] = {"left": DRAINED, "finished": FINISHED, "given up": FAILED}
STATES = (WAITING, STARTING, JOINED, HEALING, TRAINING, LOST, DIED, DRAINING, DRAINED, FINISHED, FAILED, STOPPED)


@dataclass(frozen=True)
class GroupStatus:
    """What is known of one replica group; of its step, None until its attempt has made one."""

    replica: int
    state: str = WAITING
    step: int | None = None
    """Last step, or round, committed."""
    loss: float | None = None
    participants: tuple[int, ...] = ()
    """Groups that took part in that step, or in the quorum joined last."""
    attempt: int = 0
    restarts: int = 0
    own_loss: float | None = None
    """Mean loss of its own tokens in that step; None where it had none."""
    own_seconds: float | None = None
    """What that step took it without the exchange; of a round, each of its steps."""
    waited: ev.Waited | None = None
    """The other group that it waited for longest in that step, and why; from a `waiting` event on the group that the
    step under way waits for, with 0 s. None if it waited for nobody."""
    donor: int | None = None
    """Group that it fetched its state from last, or is fetching from."""
    host: str = ""
    fault: str = ""
    """Name of the fault injected into it last."""
    fault_time: float = 0.0
    """Unix seconds of that."""
    unit: Unit = STEP
    """What it commits: steps, or rounds."""


Groups = dict[int, GroupStatus]


def state_of(group: GroupFold, run: RunFold) -> str:
    """Return the state of a group as a person sees it."""
    if group.state in _SHOWN:
        return _SHOWN[group.state]
    if group.state == "died" and group.gets_no_restart:
        return FAILED
    if group.state == "died" and run.launch_end is not None:
        return DIED
    if run.launch_end is not None or group.was_stopped:
        return STOPPED
    if group.silence is not None:
        return LOST
    if group.state == "died":
        return DIED
    # A group that was asked to leave goes on with its step meanwhile.
    if run.stopping is not None:
        return DRAINING
    return WAITING if group.state == "not started" else group.state


def show_group(group: GroupFold, run: RunFold) -> GroupStatus:
    """Return what a person sees of a group."""
    state = state_of(group, run)
    commit = group.commit
    fault = group.last_fault
    return GroupStatus(
        group.slot,
        state,
        group.held_step,
        loss=None if commit is None else commit.loss,
        participants=group.participants,
        attempt=group.attempt,
        restarts=group.num_restarts,
        own_loss=None if commit is None else commit.own_loss,
        own_seconds=None if commit is None or group.silence is not None else _own_seconds(commit),
        waited=group.waited,
        donor=group.donor,
        host=group.host,
        fault="" if fault is None else fault.fault,
        fault_time=0.0 if fault is None else fault.time,
        unit=run.unit,
    )


def _own_seconds(commit: ev.StepCommitted) -> float | None:
    """Return what a step took a group by itself. Who joins in the midst of a round makes fewer, not faster ones."""
    steps = 1 if commit.inner_steps is None else commit.inner_steps
    return (commit.compute_seconds + commit.apply_seconds) / steps if steps else None


# The line that an event becomes. `group N` stands before those of a group itself, of which rank 0's count.
_LINES: dict[type[ev.Event], Callable[[Any, Unit], str]] = {
    ev.LighthouseRestarted: lambda e, u: f"{e.reason}; it is back at the same address after {e.seconds:.2f} s",
    ev.StrangerRefused: lambda e, u: f"the lighthouse refused {e.reason}, from {e.source}; said once",
    ev.ChaosStarted: lambda e, u: f"chaos begins: {e.plan}, seed {e.seed}: {e.schedule}",
    ev.ChaosFinished: lambda e, u: f"chaos ends: faults injected: {e.injected}, skipped: {e.skipped}",
    ev.FaultInjected: lambda e, u: f"fault: {_fault(e)}{_params(e)}",
    ev.FaultUndone: lambda e, u: f"fault undone: {_fault(e)}",
    ev.FaultSkipped: lambda e, u: f"fault skipped: {_fault(e)}{_because(e.reason)}",
    ev.EventsDropped: lambda e, u: f"{_writer(e)} lost events that it could not write: {e.error}",
    ev.GroupBack: lambda e, u: f"group {e.slot} is back: it was silent for {e.seconds:.0f} s",
    ev.PeerSilent: lambda e, u: (
        f"no heartbeat from {_groups(e.slots)} for {e.seconds:.1f} s: the exchange is repeated without"
    ),
    ev.WaitingToEnd: lambda e, u: (
        f"the last step is made; waiting for {_groups(e.slots)} for {e.seconds:.0f} s at most"
    ),
    ev.EndedWithout: lambda e, u: f"ended without {_groups(e.slots)}: not heard of for {e.seconds:.0f} s",
    ev.Straggler: lambda e, u: f"group {e.slot} is slow: {e.factor:.1f} times the others' step time",
    ev.StragglerRecovered: lambda e, u: f"group {e.slot} is as fast as the others again",
    ev.GradientExcluded: lambda e, u: (
        f"{u.name(e.step)} goes without group {_listed(e.slots)}: gradient not finite; the batch is trained again"
    ),
}
_LINES_OF_GROUP: dict[type[ev.Event], Callable[[Any, Unit], str]] = {
    ev.HealStarted: lambda e, u: f"healing from group {e.donor} at {u.name(e.from_step)}",
    ev.HealFinished: lambda e, u: f"healed in {e.seconds:.2f} s",
    ev.HealFailed: lambda e, u: f"got no state from group {e.donor}: {_first_line(e.error)}",
    ev.RolledBack: lambda e, u: f"goes on from {u.name(e.step)}: {u.noun}s lost with their groups: {e.lost}",
    ev.CheckpointFailed: lambda e, u: (
        f"could not save the checkpoint of step {e.step}: {_first_line(e.error)}{_latest_checkpoint(e.latest)}"
    ),
    ev.DigestMismatch: lambda e, u: (
        f"sees different digests at {u.name(e.step)} (minority: {_listed(e.minority) or 'none, a tie'})"
    ),
    ev.Waiting: lambda e, u: f"waits after {u.name(e.step)}: {e.reason or 'too few groups'}",
    ev.CatchUpRenewed: lambda e, u: f"gives up the state of {u.name(e.from_step)} for a newer one{_because(e.reason)}",
    ev.CatchUpWaiting: lambda e, u: f"lets the others wait until it has {u.name(e.step)}{_because(e.reason)}",
    ev.Drained: lambda e, u: f"left after {u.name(e.step)}{_because(e.reason)}",
    ev.ForeignMember: lambda e, u: f"leaves {e.member} aside{_because(e.reason)}",
    ev.StartedAnew: lambda e, u: "starts anew from step 0: no group holds the state of its earlier attempt",
    ev.CheckpointSkipped: lambda e, u: (
        f"goes on from the checkpoint of step {e.instead}, for that of step {e.step} is damaged{_because(e.reason)}"
    ),
    ev.CheckpointSetAside: lambda e, u: f"keeps a checkpoint of another job as {e.folder}, for it went back before it",
    ev.CheckpointLoaded: lambda e, u: f"goes on from the checkpoint of step {e.step}",
    ev.CheckpointSaved: lambda e, u: f"saved the checkpoint of step {e.step} in {e.seconds:.1f} s",
    ev.SavingBeforeLeaving: lambda e, u: (
        f"saves the checkpoint of step {e.step} before it leaves{_because(e.shortage)}"
    ),
    ev.LoaderChecked: lambda e, u: (
        f"has a data loader that does not go on exactly where its state was saved: {e.reason} ({e.loader})"
    ),
    ev.DataOpened: lambda e, u: (
        f"opened slot {e.slot} at batch {e.first_batch} and got another batch than follows there: data are lost or "
        "repeated"
    ),
    ev.DataReset: lambda e, u: f"starts its data anew{_because(e.reason)}",
    ev.TrainingFinished: lambda e, u: f"finished at {u.name(e.step)}",
    ev.CameTooLate: lambda e, u: f"came when the job had finished, at {u.name(e.step)}, and ends",
}
# Every group comes to the same finding: one line is enough.
_SEEN_BY_ALL = (
    ev.DigestMismatch,
    ev.EndedWithout,
    ev.GradientExcluded,
    ev.LoaderChecked,
    ev.PeerSilent,
    ev.RolledBack,
    ev.Straggler,
    ev.StragglerRecovered,
    ev.Waiting,
    ev.WaitingToEnd,
)


def describe(before: Mapping[int, str], run: RunFold, event: ev.Event) -> str | None:
    """Return the line that shows a change, or None when the event is not worth one.

    Args:
        before: the states of the groups before the event.
        run: the run after the event.
    """
    if isinstance(event, ev.GroupLost):
        return _describe_loss(before, run, event)
    line, line_of_group = _LINES.get(type(event)), _LINES_OF_GROUP.get(type(event))
    if isinstance(event, ev.FaultEvent) and event.rank and _hits_groups(event):
        return None  # the agents of all ranks report what hit their group
    if line is not None and not isinstance(event, ev.RankEvent):
        return line(event, STEP)
    replica = event.replica
    if replica is None or replica not in run.groups:
        return None
    name = f"group {replica}"
    group = run.groups[replica]
    state = state_of(group, run)
    match event:
        case ev.WorkerExited() if state == DIED and before.get(replica) != DIED and not event.stopped:
            if event.is_mistake:
                return None  # `ReplicaGaveUp` follows: the line of a mistake is one
            # The exception first: `top` cuts its lines at the terminal's width.
            parts = [event.error, event.reason or "a worker ended", event.log and f"see {event.log}"]
            return f"{name} died: {'; '.join(part for part in parts if part)}"
        case ev.AgentEnded():
            return f"{name} died: {event.reason}" + (f"; see {event.log}" if event.log else "")
        case ev.ReplicaRestarted():
            return f"{name} restarting (attempt {group.attempt})"
        case ev.ReplicaGaveUp() if event.mistake:
            return f"{name} has a mistake in its config: {event.mistake}"
        case ev.ReplicaGaveUp():
            if not event.error:
                return f"{name} failed: {event.reason}; see {event.log}"
            # The line of the death named the exception already.
            reason = group.last_reason if before.get(replica) in (DIED, FAILED) else None
            told = reason is not None and (reason.attempt, reason.text) == (event.attempt, event.error)
            return f"{name} failed: {event.reason}" + ("" if told else f"; {event.log}: {event.error}")
        case ev.SpareTookOver():
            return f"{name}: a spare takes its place (attempt {group.attempt})"
        case ev.Hung():
            return f"{name} hangs: rank {event.rank} made no progress and ends itself; its log has the stacks"
        case ev.LoaderChecked() if event.exact:
            return None
        case ev.DataOpened() if event.exact is not False:
            return None
        case ev.RankSilent():
            return f"{name}: ranks {_listed(event.ranks)} are silent, so that the group ends"
    if not isinstance(event, ev.RankEvent) or event.rank != 0 or event.attempt < group.attempt:
        return None
    if isinstance(event, ev.Joined):
        joins = state == JOINED and before.get(replica) != JOINED
        return f"{name} joined: {len(group.participants)} of {len(run.groups)} groups are there" if joins else None
    if isinstance(event, _SEEN_BY_ALL) and not _is_first_to_train(run, replica):
        return None
    if line is not None:
        return line(event, run.unit)
    return None if line_of_group is None else f"{name} {line_of_group(event, run.unit)}"


def is_shown_at_a_stop(event: ev.Event) -> bool:
    """Return whether the line of an event is shown while the whole run is being stopped.

    Workers do not "die" one by one then. But a worker that somebody else killed did.
    """
    told = ev.AgentEnded | ev.Drained | ev.CheckpointSaved | ev.CheckpointFailed | ev.SavingBeforeLeaving
    was_killed = isinstance(event, ev.WorkerExited) and event.signal is not None
    return was_killed or isinstance(event, told)


def _describe_loss(before: Mapping[int, str], run: RunFold, event: ev.GroupLost) -> str | None:
    group = run.groups.get(event.slot)
    if group is None or state_of(group, run) != LOST or before.get(event.slot) == LOST:
        return None
    last = group.held_step if event.last_step is None else event.last_step
    where = "" if last is None else f", last in {run.unit.name(last)}"
    return f"group {event.slot} is lost: silent for {event.seconds:.0f} s{where}"


def _is_first_to_train(run: RunFold, slot: int) -> bool:
    """Return whether a group is the first of those that train."""
    earlier = (group for group in run.groups.values() if group.slot < slot)
    return all(state_of(group, run) not in (JOINED, TRAINING) for group in earlier)


def _hits_groups(event: ev.FaultEvent) -> bool:
    """Tell whether a fault is one that hits whole groups."""
    from titan_ft.faults.catalogue import FAULTS  # a run that nobody breaks loads nothing of what breaks runs

    fault = FAULTS.get(event.fault)
    return fault is not None and fault.scope in ("group", "groups", "link")


def _fault(event: ev.FaultEvent) -> str:
    """Return a fault with its target: "kill_rank on group 2, rank 1"."""
    target = event.target
    if target is None:
        return event.fault
    if target.lighthouse:
        return f"{event.fault} on the lighthouse"
    rank = None if _hits_groups(event) else target.rank
    return f"{event.fault} on group {target.replica}" + (f", rank {rank}" if rank is not None else "")


def _writer(event: ev.LogEvent) -> str:
    """Return who wrote an event about its own file."""
    rank = "" if event.rank is None else f", rank {event.rank},"
    return "the launcher" if event.replica is None else f"group {event.replica}{rank}"


def _params(event: ev.FaultInjected) -> str:
    params = event.params or {}
    values = [f"{name} {value:g}" for name, value in params.items() if isinstance(value, int | float)]
    return f" ({', '.join(values)})" if values else ""


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0][:200]


def _latest_checkpoint(step: int | None) -> str:
    return "" if step is None else f"; the latest is that of step {step}" if step else "; there is none to go back to"


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def _groups(slots: Sequence[int]) -> str:
    return f"group {_listed(slots)}" if len(slots) == 1 else f"groups {_listed(slots)}"


def _listed(replicas: Iterable[int]) -> str:
    return ", ".join(str(replica) for replica in replicas)
