# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The state of a run's groups, and one line of text for each event; pure functions.

`titan-ft top` and the launcher's terminal show both. `RunStatus` (`live/run_status.py`) calls this
module for them: it reads each new event, adds it to the `RunFold`, and then calls `build_status`
for each group and `describe_event` for the event.

A *fold* (`history/fold/`) is the sum of all events so far: `RunFold` of the run, `GroupFold` of one
group. A *unit* is the meaning of one commit: a step, or with LocalSGD and DiLoCo a round of several
local steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from titan_ft.history.fold.group import GroupFold, GroupState
from titan_ft.history.fold.run import RunFold
from titan_ft.history.fold.unit import STEP, Unit
from titan_ft.run import events as ev

# The states of a group, in the usual order. `titan-ft top` and the metrics show these names.
WAITING = "waiting"
"""The group has not started."""
STARTING = "starting"
"""The group's processes have started."""
JOINED = "joined"
"""The group meets the other groups, but has trained nothing yet."""
HEALING = "healing"
"""The group fetches the job's state from another group."""
TRAINING = "training"
DIED = "died"
"""A process of the group has ended by itself. The group may be started again."""
DRAINING = "draining"
"""The group was asked to leave, and finishes its step."""
DRAINED = "drained"
"""The group has left in order."""
FINISHED = "finished"
"""The group has made the job's last step."""
FAILED = "failed"
"""The group has died, and is not started again."""
STOPPED = "stopped"
"""The launcher or the agent ended the group before it could leave in order."""
LOST = "lost"
"""The group was silent for so long that its host may be gone. Its next event ends this state."""
_STATES_AT_THE_END: dict[GroupState, str] = {
    "left": DRAINED,
    "finished": FINISHED,
    "given up": FAILED,
}
"""The state of a group whose fold has a final state: no later event changes it."""
STATES = (
    WAITING,
    STARTING,
    JOINED,
    HEALING,
    TRAINING,
    LOST,
    DIED,
    DRAINING,
    DRAINED,
    FINISHED,
    FAILED,
    STOPPED,
)


@dataclass(frozen=True)
class GroupStatus:
    """The figures of one replica group, as `titan-ft top` shows them.

    The *last step* is the group's last committed step, or round. Its figures are None before the
    first commit.
    """

    slot: int
    state: str = WAITING
    step: int | None = None
    """Number of the last step."""
    loss: float | None = None
    """Mean loss of all groups in the last step."""
    participants: tuple[int, ...] = ()
    """Slots of the groups in the last step, or in a newer quorum."""
    attempt: int = 0
    restarts: int = 0
    own_loss: float | None = None
    """Mean loss of this group's own tokens in the last step; None without tokens."""
    own_seconds: float | None = None
    """Seconds of the last step without the exchange; for a round, of one local step."""
    waited: ev.Waited | None = None
    """The group for which this group waited longest in the last step, and the seconds. If the
    current step waits already: the group for which it waits, with 0 seconds. None without a
    wait."""
    donor: int | None = None
    """Donor of this group's current or last heal."""
    host: str = ""
    fault: str = ""
    """Name of the last fault that chaos injected into the group."""
    fault_time: float = 0.0
    """Unix seconds of that fault."""
    unit: Unit = STEP
    """Whether the group counts steps or rounds."""


Groups = dict[int, GroupStatus]


def state_of(group: GroupFold, run: RunFold) -> str:
    """Return the state of a group to be shown: one of `STATES`.

    The group's own events give `GroupFold.state`. Later facts about the run override it.
    """
    if group.state in _STATES_AT_THE_END:
        return _STATES_AT_THE_END[group.state]
    has_died = group.state == "died"
    launcher_has_ended = run.launch_end is not None
    if has_died and group.gets_no_restart:
        return FAILED
    if has_died and launcher_has_ended:
        return DIED
    if launcher_has_ended or group.was_stopped:
        return STOPPED
    # Before the next case: if the agent of a dead group is silent as well, its host may be gone.
    if group.silence is not None:
        return LOST
    if has_died:
        return DIED
    if run.stopping is not None:
        return DRAINING
    if group.state == "not started":
        return WAITING
    return group.state


def build_status(group: GroupFold, run: RunFold) -> GroupStatus:

    loss: float | None = None
    own_loss: float | None = None
    own_seconds: float | None = None
    if group.commit is not None:
        loss = group.commit.loss
        own_loss = group.commit.own_loss
        # A silent group may have slowed down since its last step, so that step's time is not shown.
        if group.silence is None:
            own_seconds = _own_seconds(group.commit)
    fault = ""
    fault_time = 0.0
    if group.last_fault is not None:
        fault = group.last_fault.fault
        fault_time = group.last_fault.time
    return GroupStatus(
        group.slot,
        state_of(group, run),
        group.held_step,
        loss=loss,
        participants=group.participants,
        attempt=group.attempt,
        restarts=group.num_restarts,
        own_loss=own_loss,
        own_seconds=own_seconds,
        waited=group.waited,
        donor=group.donor,
        host=group.host,
        fault=fault,
        fault_time=fault_time,
        unit=run.unit,
    )


def _own_seconds(commit: ev.StepCommitted) -> float | None:
    """Return the seconds of a local step without the exchange; None without a local step.

    For a round this is the mean of the local steps that this group made. A group that joins during
    a round makes fewer than the other groups.
    """
    num_steps = 1 if commit.inner_steps is None else commit.inner_steps
    if num_steps == 0:
        return None
    return (commit.compute_seconds + commit.apply_seconds) / num_steps


def _describe_by_class(event: ev.Event, name: str, unit: Unit) -> str | None:
    """Return the line of an event by its class alone; None for a class without a line.

    Args:
        name: the group that wrote the event, such as "group 2". Lines about the run do not use it.
    """
    match event:
        # About the run:
        case ev.LighthouseRestarted():
            return f"{event.reason}; it is back at the same address after {event.seconds:.2f} s"
        case ev.LighthouseRenewed():
            return f"the lighthouse starts anew, and forgets {event.num_ended:,} ended processes"
        case ev.StrangerRefused():
            port = "the lighthouse"
            if event.port is not None:
                port = f"the {event.port} of {_name_writer(event)}"
            return f"{port} refused {event.reason}, from {event.source}; said once"
        case ev.ChaosStarted():
            return f"chaos begins: {event.plan}, seed {event.seed}: {event.schedule}"
        case ev.ChaosFinished():
            return f"chaos ends: faults injected: {event.injected}, skipped: {event.skipped}"
        case ev.FaultInjected():
            return f"fault: {_name_fault(event)}{_describe_params(event)}"
        case ev.FaultUndone():
            return f"fault undone: {_name_fault(event)}"
        case ev.FaultSkipped():
            return f"fault skipped: {_name_fault(event)}{_in_brackets(event.reason)}"
        case ev.EventsDropped():
            return f"{_name_writer(event)} lost events that it could not write: {event.error}"
        case ev.GroupBack():
            return f"group {event.slot} is back: it was silent for {event.seconds:.0f} s"
        case ev.PeerSilent():
            silence = f"no heartbeat from {_name_groups(event.slots)} for {event.seconds:.1f} s"
            return f"{silence}: the exchange is repeated without"
        case ev.WaitingToEnd():
            limit = f"for {event.seconds:.0f} s at most"
            return f"the last step is made; waiting for {_name_groups(event.slots)} {limit}"
        case ev.EndedWithout():
            return (
                f"ended without {_name_groups(event.slots)}: not heard of for {event.seconds:.0f} s"
            )
        case ev.Straggler():
            return f"group {event.slot} is slow: {event.factor:.1f} times the others' step time"
        case ev.StragglerRecovered():
            return f"group {event.slot} is as fast as the others again"
        case ev.GradientExcluded():
            without = f"{unit.name(event.step)} goes without group {_list(event.slots)}"
            return f"{without}: gradient not finite; the batch is trained again"
        # About the group, by its rank 0:
        case ev.HealStarted():
            return f"{name} healing from group {event.donor} at {unit.name(event.from_step)}"
        case ev.HealFinished():
            return f"{name} healed in {event.seconds:.2f} s"
        case ev.HealFailed():
            return (
                f"{name} got no state from group {event.donor}: {_cut_to_first_line(event.error)}"
            )
        case ev.RolledBack():
            lost = f"{unit.noun}s lost with their groups: {event.lost}"
            return f"{name} goes on from {unit.name(event.step)}: {lost}"
        case ev.CheckpointFailed():
            error = f"{_cut_to_first_line(event.error)}{_describe_latest_checkpoint(event.latest)}"
            return f"{name} could not save the checkpoint of step {event.step}: {error}"
        case ev.DigestMismatch():
            minority = _list(event.minority) or "none, a tie"
            where = f"at {unit.name(event.step)} (minority: {minority})"
            return f"{name} sees different digests {where}"
        case ev.Waiting():
            return f"{name} waits after {unit.name(event.step)}: {event.reason or 'too few groups'}"
        case ev.CatchUpRenewed():
            state = f"the state of {unit.name(event.from_step)}"
            return f"{name} gives up {state} for a newer one{_in_brackets(event.reason)}"
        case ev.CatchUpWaiting():
            until = f"until it has {unit.name(event.step)}"
            return f"{name} lets the others wait {until}{_in_brackets(event.reason)}"
        case ev.Drained():
            return f"{name} left after {unit.name(event.step)}{_in_brackets(event.reason)}"
        case ev.ForeignMember():
            return f"{name} leaves {event.member} aside{_in_brackets(event.reason)}"
        case ev.StartedAnew():
            reason = "no group holds the state of its earlier attempt"
            return f"{name} starts anew from step 0: {reason}"
        case ev.CheckpointSkipped():
            damage = f"that of step {event.step} is damaged{_in_brackets(event.reason)}"
            return f"{name} goes on from the checkpoint of step {event.instead}, because {damage}"
        case ev.CheckpointSetAside():
            reason = "the job went back before it"
            return f"{name} renames an outdated checkpoint to {event.folder}: {reason}"
        case ev.CheckpointLoaded():
            return f"{name} goes on from the checkpoint of step {event.step}"
        case ev.CheckpointSaved():
            return f"{name} saved the checkpoint of step {event.step} in {event.seconds:.1f} s"
        case ev.SavingBeforeLeaving():
            warning = _in_brackets(event.shortage)
            return f"{name} saves the checkpoint of step {event.step} before it leaves{warning}"
        case ev.LoaderChecked() if not event.exact:
            fault = "does not go on exactly where its state was saved"
            return f"{name} has a data loader that {fault}: {event.reason} ({event.loader})"
        case ev.DataOpened() if event.exact is False:
            place = f"slot {event.slot} at batch {event.first_batch}"
            fault = "got another batch than follows there: data are lost or repeated"
            return f"{name} opened {place} and {fault}"
        case ev.DataReset():
            return f"{name} starts its data anew{_in_brackets(event.reason)}"
        case ev.TrainingFinished():
            return f"{name} finished at {unit.name(event.step)}"
        case ev.CameTooLate():
            return f"{name} came when the job had finished, at {unit.name(event.step)}, and ends"
    return None


_WRITTEN_BY_ALL_GROUPS = (
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
"""All training groups write these events about one occurrence. One group's line is enough."""


def describe_event(states_before: Mapping[int, str], run: RunFold, event: ev.Event) -> str | None:
    """Return the line that shows an event; None if no line is shown.

    Several processes may report the same occurrence. Only one of them gets a line.

    Args:
        states_before: the states of the groups before the event, by slot.
        run: the fold of all events, with this one.
    """
    if isinstance(event, ev.GroupLost):
        return _describe_lost_group(states_before, run, event)
    if isinstance(event, ev.FaultEvent) and _hits_whole_groups(event) and event.rank:
        # A rank other than 0. All ranks report a fault of their group; rank 0's line is enough.
        return None
    if not isinstance(event, ev.RankEvent):
        # Events of the launcher and of chaos: their lines need no group.
        line = _describe_by_class(event, name="", unit=STEP)
        if line is not None:
            return line
    slot = event.replica
    if slot is None or slot not in run.groups:
        return None
    group = run.groups[slot]
    name = f"group {slot}"
    state_before = states_before.get(slot)
    # Events of the group's agent, or of any of its ranks:
    match event:
        case ev.WorkerExited():
            # Of several workers that end, the first one makes the group die.
            has_died_now = state_of(group, run) == DIED and state_before != DIED
            if event.stopped or not has_died_now:
                return None
            if event.is_mistake:
                # `ReplicaGaveUp` follows at once, and its line names the mistake.
                return None
            return _describe_death(name, event)
        case ev.AgentEnded():
            log = f"; see {event.log}" if event.log else ""
            return f"{name} died: {event.reason}{log}"
        case ev.ReplicaRestarted():
            return f"{name} restarting (attempt {group.attempt})"
        case ev.ReplicaGaveUp():
            return _describe_last_failure(name, event, group, state_before)
        case ev.SpareTookOver():
            return f"{name}: a spare takes its place (attempt {group.attempt})"
        case ev.Hung():
            cause = f"rank {event.rank} made no progress and ends itself"
            return f"{name} hangs: {cause}; its log has the stacks"
        case ev.RankSilent():
            return f"{name}: ranks {_list(event.ranks)} are silent, so that the group ends"
    if not isinstance(event, ev.RankEvent):
        return None
    # Rank 0 speaks for its group. An event of an earlier attempt may be read late.
    if event.rank != 0 or event.attempt < group.attempt:
        return None
    if isinstance(event, ev.Joined):
        # Written at each change of the quorum. Only a group that was not there before gets a line.
        has_joined_now = state_of(group, run) == JOINED and state_before != JOINED
        if not has_joined_now:
            return None
        return f"{name} joined: {len(group.participants)} of {len(run.groups)} groups are there"
    if isinstance(event, _WRITTEN_BY_ALL_GROUPS) and not _is_lowest_in_training(run, slot):
        return None
    return _describe_by_class(event, name, run.unit)


def _describe_death(name: str, event: ev.WorkerExited) -> str:
    parts = []
    # The exception comes first, because `top` cuts long lines off.
    if event.error:
        parts.append(event.error)
    parts.append(event.reason or "a worker ended")
    if event.log:
        parts.append(f"see {event.log}")
    return f"{name} died: {'; '.join(parts)}"


def _describe_last_failure(
    name: str, event: ev.ReplicaGaveUp, group: GroupFold, state_before: str | None
) -> str:
    """Return the line of a group that is not started again."""
    if event.mistake:
        return f"{name} has a mistake in its config: {event.mistake}"
    line = f"{name} failed: {event.reason}"
    if not event.error:
        return f"{line}; see {event.log}"
    reason = group.last_reason if state_before in (DIED, FAILED) else None
    if reason is not None:
        is_same_exception = reason.attempt == event.attempt and reason.text == event.error
        if is_same_exception:
            # The line of the group's death has named the exception already.
            return line
    return f"{line}; {event.log}: {event.error}"


def is_shown_while_stopping(event: ev.Event) -> bool:
    """Return True if the line of an event is shown while the whole run is being stopped.

    Workers are expected to end then. Only a worker that dies by a signal is news.
    """
    if isinstance(event, ev.WorkerExited):
        return event.signal is not None
    shown = (
        ev.AgentEnded,
        ev.Drained,
        ev.CheckpointSaved,
        ev.CheckpointFailed,
        ev.SavingBeforeLeaving,
    )
    return isinstance(event, shown)


def _describe_lost_group(
    states_before: Mapping[int, str], run: RunFold, event: ev.GroupLost
) -> str | None:
    group = run.groups.get(event.slot)
    if group is None or state_of(group, run) != LOST:
        return None
    if states_before.get(event.slot) == LOST:
        return None  # another group has reported it
    line = f"group {event.slot} is lost: silent for {event.seconds:.0f} s"
    last_update = event.last_step
    if last_update is None:
        last_update = group.held_step
    if last_update is not None:
        line += f", last in {run.unit.name(last_update)}"
    return line


def _is_lowest_in_training(run: RunFold, slot: int) -> bool:
    """Return True if no group with a lower slot trains."""
    for group in run.groups.values():
        if group.slot < slot and state_of(group, run) in (JOINED, TRAINING):
            return False
    return True


def _hits_whole_groups(event: ev.FaultEvent) -> bool:
    """Return True if a fault hits whole groups, and not one rank."""
    # Imported here, so that a run without faults does not load the code of faults.
    from titan_ft.faults.catalogue import FAULTS

    fault = FAULTS.get(event.fault)
    return fault is not None and fault.scope in ("group", "groups", "link")


def _name_fault(event: ev.FaultEvent) -> str:
    """Name a fault with its target, such as "kill_rank on group 2, rank 1"."""
    target = event.target
    if target is None:
        return event.fault
    if target.lighthouse:
        return f"{event.fault} on the lighthouse"
    text = f"{event.fault} on group {target.replica}"
    if target.rank is None or _hits_whole_groups(event):
        return text
    return f"{text}, rank {target.rank}"


def _name_writer(event: ev.Event) -> str:
    """Name the process that wrote an event about itself."""
    if event.replica is None:
        return "the launcher"
    rank = "" if event.rank is None else f", rank {event.rank},"
    return f"group {event.replica}{rank}"


def _describe_params(event: ev.FaultInjected) -> str:
    params = event.params or {}
    values = []
    for name, value in params.items():
        if isinstance(value, int | float):
            values.append(f"{name} {value:g}")
    return _in_brackets(", ".join(values))


def _cut_to_first_line(text: str) -> str:
    return (text.splitlines() or [""])[0][:200]


def _describe_latest_checkpoint(step: int | None) -> str:
    if step is None:
        return ""
    if step == 0:
        return "; there is none to go back to"
    return f"; the latest is that of step {step}"


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _name_groups(slots: Sequence[int]) -> str:
    noun = "group" if len(slots) == 1 else "groups"
    return f"{noun} {_list(slots)}"


def _list(values: Iterable[int]) -> str:
    return ", ".join(str(value) for value in values)
