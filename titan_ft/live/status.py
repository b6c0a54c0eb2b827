# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Fold a run's events into what a person watching it wants to know; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from titan_ft.history.fold import is_silent
from titan_ft.history.unit import STEP, Unit
from titan_ft.run import events as ev

WAITING, STARTING, JOINED, HEALING, TRAINING = "waiting", "starting", "joined", "healing", "training"
DIED, DRAINING, DRAINED, FINISHED, FAILED = "died", "draining", "drained", "finished", "failed"
STOPPED = "stopped"
"""Ended by the launcher, before it could leave in order."""
LOST = "lost"
"""Not heard of for so long that its host may be gone; its own next event ends it."""
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
    error: str = ""
    """Exception that ended its workers last; empty where it was a signal, or they told of none."""
    fault: str = ""
    """Name of the fault injected into it last."""
    fault_time: float = 0.0
    """Unix seconds of that."""
    unit: Unit = STEP
    """What it commits: steps, or rounds."""


Groups = dict[int, GroupStatus]


def initial(num_replicas: int) -> Groups:
    """Return the status before anything happened."""
    return {replica: GroupStatus(replica) for replica in range(num_replicas)}


def draining(groups: Groups) -> Groups:
    """Return the status once all groups have been asked to leave."""
    ended = (LOST, DIED, DRAINED, FINISHED, FAILED)
    return {
        replica: group if group.state in ended else replace(group, state=DRAINING) for replica, group in groups.items()
    }


def stopped(groups: Groups) -> Groups:
    """Return the status once the launcher has ended every group that had not ended by itself."""
    ended = (DIED, DRAINED, FINISHED, FAILED)
    return {
        replica: group if group.state in ended else replace(group, state=STOPPED) for replica, group in groups.items()
    }


def is_lost(state: str, quiet_seconds: float, silent_seconds: float) -> bool:
    """Tell whether a group in a state is lost; see `is_silent`."""
    ended, starts = state in (DRAINED, FINISHED, FAILED, STOPPED), state in (WAITING, STARTING, DIED)
    return is_silent(quiet_seconds, silent_seconds, ended=ended, starts=starts)


def fold(groups: Groups, event: ev.Event, heard: Mapping[int, float] | None = None) -> Groups:
    """Return the status after an event. Of a group's ranks, rank 0's events count, and the end of any rank.

    Args:
        heard: Unix seconds of each group's last event, to judge whether it is lost.
    """
    if isinstance(event, ev.GroupLost | ev.GroupBack | ev.EndedWithout):
        groups = _fold_silence(groups, event, heard or {})
    if isinstance(event, ev.FaultInjected):
        hit = groups.get(-1 if event.target.replica is None else event.target.replica)
        if hit is None:
            return groups
        return {**groups, hit.replica: replace(hit, fault=event.fault, fault_time=event.time)}
    group = groups.get(-1 if event.replica is None else event.replica)
    if group is None or (event.attempt is not None and event.attempt < group.attempt):
        return groups
    changed = _apply(group, event)
    return groups if changed is group else {**groups, group.replica: changed}


def _fold_silence(
    groups: Groups, event: ev.GroupLost | ev.GroupBack | ev.EndedWithout, heard: Mapping[int, float]
) -> Groups:
    """Return the status after what one group says of others."""
    for slot in event.slots if isinstance(event, ev.EndedWithout) else [event.slot]:
        group = groups.get(slot)
        if group is None:
            continue
        if isinstance(event, ev.GroupBack):
            state = JOINED if group.state == LOST else group.state
        else:
            lost = is_lost(group.state, event.time - heard.get(slot, 0.0), event.seconds)
            state = LOST if lost else group.state
        if state != group.state:
            step = group.step
            if state == LOST and isinstance(event, ev.GroupLost) and event.last_step is not None:
                step = max(step or 0, event.last_step)  # its own last commit may not be written
            groups = {**groups, slot: replace(group, state=state, step=step, own_seconds=None)}
    return groups


def _apply(group: GroupStatus, event: ev.Event) -> GroupStatus:
    match event:
        case ev.WorkerExited() if group.state == FAILED or (group.state == DRAINED and event.stopped):
            return group
        case ev.WorkerExited() if event.stopped and group.state == DRAINING:
            return replace(group, state=STOPPED, loss=None, own_loss=None, own_seconds=None)
        case ev.WorkerExited() if group.state == STOPPED and event.stopped:
            return group
        case ev.WorkerExited() if event.code != 0 or event.error is not None:
            error = group.error if event.stopped or group.state == DIED else event.error or ""
            return replace(group, state=DIED, loss=None, own_loss=None, own_seconds=None, error=error)
        case ev.WorkerExited() if group.state != DRAINED and event.rank == 0 and not event.stopped:
            return replace(group, state=FINISHED)
        case ev.AgentEnded():
            state = DIED if event.restarts else FAILED
            return replace(group, state=state, loss=None, own_loss=None, own_seconds=None, error=event.reason)
        case ev.SpareTookOver():  # its agent's event of the restart follows
            return _starting(group, event.attempt)
        case ev.ReplicaRestarted():
            return replace(_starting(group, event.attempt), restarts=group.restarts + 1)
        case ev.ReplicaGaveUp():
            return replace(group, state=FAILED)
    if event.rank != 0 or group.state == FAILED:
        return group
    changed = _apply_event_of_rank_0(group, event)
    # A group that was asked to leave goes on with its step meanwhile.
    if group.state == DRAINING and changed.state not in (DRAINED, FINISHED):
        return replace(changed, state=DRAINING)
    return changed


def _starting(group: GroupStatus, attempt: int) -> GroupStatus:
    """Return a group of which a new attempt begins: it has made nothing yet, whatever the one before it had."""
    kept = {name: getattr(group, name) for name in ("restarts", "host", "fault", "fault_time", "unit")}
    return GroupStatus(group.replica, STARTING, attempt=attempt, **kept)


def _apply_event_of_rank_0(group: GroupStatus, event: ev.Event) -> GroupStatus:
    match event:
        case ev.WorkerStarted():
            unit = group.unit if event.config is None else Unit.of(event.config)
            return replace(_starting(group, event.attempt), host=event.node, unit=unit)
        case ev.Joined():
            state = JOINED if group.state in (WAITING, STARTING, LOST) else group.state
            return replace(group, state=state, participants=tuple(event.participants))
        case ev.LeftOut():  # it was frozen, and notices that the others went on
            return replace(group, state=JOINED)
        case ev.HealStarted():
            return replace(group, state=HEALING, donor=event.donor)
        case ev.HealFinished():
            return replace(group, state=JOINED, step=event.step)
        case ev.CheckpointLoaded():
            return replace(group, step=group.unit.commits_after(event.step))
        case ev.StepCommitted():
            return replace(
                group,
                state=TRAINING,
                step=event.step,
                loss=event.loss,
                participants=tuple(event.participants),
                own_loss=event.own_loss,
                own_seconds=_own_seconds(event),
                waited=next(iter(event.waits or ()), None),
            )
        case ev.Waiting() if event.slots:
            return replace(group, waited=ev.Waited(slot=event.slots[0], seconds=0.0, why=event.why or ""))
        case ev.Drained():
            return replace(group, state=DRAINED, step=event.step)
        case ev.TrainingFinished() | ev.CameTooLate():
            return replace(group, state=FINISHED, step=event.step)
    return group


def _own_seconds(commit: ev.StepCommitted) -> float | None:
    """Return what a step took a group by itself. Who joins in the midst of a round makes fewer, not faster ones."""
    steps = 1 if commit.inner_steps is None else commit.inner_steps
    return (commit.compute_seconds + commit.apply_seconds) / steps if steps else None


# The line that an event becomes. `group N` stands before those of a group itself, of which rank 0's count.
_LINES: dict[type[ev.Event], Callable[[Any, Unit], str]] = {
    ev.LighthouseRestarted: lambda e, u: f"{e.reason}; it is back at the same address after {e.seconds:.2f} s",
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
    ev.Drained: lambda e, u: (
        "left before it had begun to train"
        if e.reason == ev.NOT_BEGUN
        else f"left after {u.name(e.step)}{_because(e.reason)}"
    ),
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


def describe(before: Groups, after: Groups, event: ev.Event) -> str | None:
    """Return the line that shows a change, or None when the event is not worth one."""
    if isinstance(event, ev.GroupLost):
        return _describe_loss(before, after, event)
    line, line_of_group = _LINES.get(type(event)), _LINES_OF_GROUP.get(type(event))
    if isinstance(event, ev.FaultEvent) and event.rank and _hits_groups(event):
        return None  # the agents of all ranks report what hit their group
    if line is not None and not isinstance(event, ev.RankEvent):
        return line(event, STEP)
    replica = event.replica
    if replica is None or replica not in after:
        return None
    name, new = f"group {replica}", after[replica]
    match event:
        case ev.WorkerExited() if new.state == DIED and before[replica].state != DIED and not event.stopped:
            if event.is_mistake:
                return None  # `ReplicaGaveUp` follows: the line of a mistake is one
            # The exception first: `top` cuts its lines at the terminal's width.
            parts = [event.error, event.reason or "a worker ended", event.log and f"see {event.log}"]
            return f"{name} died: {'; '.join(part for part in parts if part)}"
        case ev.AgentEnded():
            return f"{name} died: {event.reason}" + (f"; see {event.log}" if event.log else "")
        case ev.ReplicaRestarted():
            return f"{name} restarting (attempt {new.attempt})"
        case ev.ReplicaGaveUp() if event.mistake:
            return f"{name} has a mistake in its config: {event.mistake}"
        case ev.ReplicaGaveUp():
            if not event.error:
                return f"{name} failed: {event.reason}; see {event.log}"
            told = before[replica].error == event.error  # when it died
            return f"{name} failed: {event.reason}" + ("" if told else f"; {event.log}: {event.error}")
        case ev.SpareTookOver():
            return f"{name}: a spare takes its place (attempt {new.attempt})"
        case ev.Hung():
            return f"{name} hangs: rank {event.rank} made no progress and ends itself; its log has the stacks"
        case ev.LoaderChecked() if event.exact:
            return None
        case ev.DataOpened() if event.exact is not False:
            return None
        case ev.RankSilent():
            return f"{name}: ranks {_listed(event.ranks)} are silent, so that the group ends"
    if not isinstance(event, ev.RankEvent) or event.rank != 0 or event.attempt < new.attempt:
        return None
    if isinstance(event, ev.Joined):
        joins = new.state == JOINED and before[replica].state != JOINED
        return f"{name} joined: {len(new.participants)} of {len(after)} groups are there" if joins else None
    if isinstance(event, _SEEN_BY_ALL) and not _is_first_to_train(after, replica):
        return None
    if line is not None:
        return line(event, new.unit)
    return None if line_of_group is None else f"{name} {line_of_group(event, new.unit)}"


def _describe_loss(before: Groups, after: Groups, event: ev.GroupLost) -> str | None:
    group = after.get(event.slot)
    if group is None or group.state != LOST or before[event.slot].state == LOST:
        return None
    last = group.step if event.last_step is None else event.last_step
    where = "" if last is None else f", last in {group.unit.name(last)}"
    return f"group {event.slot} is lost: silent for {event.seconds:.0f} s{where}"


def _is_first_to_train(groups: Groups, replica: int) -> bool:
    """Tell whether a group is the first of those that train."""
    return all(group.state not in (JOINED, TRAINING) for group in groups.values() if group.replica < replica)


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
