# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Fold a run's events into what a person watching it wants to know; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from titan_ft.chaos.faults import FAULTS

Event = Mapping[str, Any]

WAITING = "waiting"
STARTING = "starting"
JOINED = "joined"
HEALING = "healing"
TRAINING = "training"
DIED = "died"
DRAINING = "draining"
DRAINED = "drained"
FINISHED = "finished"
FAILED = "failed"


@dataclass(frozen=True)
class GroupStatus:
    """What is known of one replica group."""

    replica: int
    state: str = WAITING
    step: int | None = None
    """Last step committed."""
    loss: float | None = None
    participants: tuple[int, ...] = ()
    """Groups that took part in that step, or in the quorum joined last."""
    attempt: int = 0
    restarts: int = 0
    own_loss: float | None = None
    """Mean loss of its own tokens in that step; None where it had none."""
    own_seconds: float | None = None
    """What that step took it without the exchange; None until it commits again after its end."""
    donor: int | None = None
    """Group that it fetched its state from last, or is fetching from."""
    host: str = ""
    fault: str = ""
    """Name of the fault injected into it last."""
    fault_time: float = 0.0
    """Unix seconds of that."""


Groups = dict[int, GroupStatus]


def initial(num_replicas: int) -> Groups:
    """Return the status before anything happened."""
    return {replica: GroupStatus(replica) for replica in range(num_replicas)}


def draining(groups: Groups) -> Groups:
    """Return the status once all groups have been asked to leave."""
    ended = (DIED, DRAINED, FINISHED, FAILED)
    return {
        replica: group if group.state in ended else replace(group, state=DRAINING) for replica, group in groups.items()
    }


def fold(groups: Groups, event: Event) -> Groups:
    """Return the status after an event. Of a group's ranks, rank 0 speaks; a rank that died does so for itself."""
    if event["event"] == "fault_injected":
        hit = {replica: groups[replica] for replica in fault_replicas(event.get("target")) if replica in groups}
        new = {"fault": str(event.get("fault")), "fault_time": event["time"]}
        return {**groups, **{replica: replace(group, **new) for replica, group in hit.items()}} if hit else groups
    group = groups.get(event.get("replica", -1))
    if group is None or event.get("attempt", group.attempt) < group.attempt:
        return groups
    changed = _apply(group, event)
    return groups if changed is group else {**groups, group.replica: changed}


def _apply(group: GroupStatus, event: Event) -> GroupStatus:
    match event["event"]:
        case "worker_exited" if group.state == FAILED or (group.state == DRAINED and event.get("stopped")):
            return group
        case "worker_exited" if event.get("code") != 0:
            return replace(group, state=DIED, own_seconds=None)
        case "worker_exited" if group.state != DRAINED and event.get("rank") == 0 and not event.get("stopped"):
            return replace(group, state=FINISHED)
        case "spare_took_over":  # its supervisor tells that it restarts the group
            return replace(group, state=STARTING, attempt=event["attempt"], own_seconds=None)
        case "replica_restarted":
            restarts = group.restarts + 1
            return replace(group, state=STARTING, attempt=event["attempt"], restarts=restarts, own_seconds=None)
        case "replica_gave_up":
            return replace(group, state=FAILED)
    if event.get("rank", 0) != 0 or group.state == FAILED:
        return group
    changed = _apply_word_of_rank_0(group, event)
    # A group that was asked to leave goes on with its step meanwhile.
    if group.state == DRAINING and changed.state not in (DRAINED, FINISHED):
        return replace(changed, state=DRAINING)
    return changed


def _apply_word_of_rank_0(group: GroupStatus, event: Event) -> GroupStatus:
    match event["event"]:
        case "worker_started":
            attempt, host = event.get("attempt", group.attempt), event.get("host", group.host)
            return replace(group, state=STARTING, attempt=attempt, host=host, own_seconds=None)
        case "joined":
            state = JOINED if group.state in (WAITING, STARTING) else group.state
            return replace(group, state=state, participants=tuple(event.get("participants", ())))
        case "heal_started":
            return replace(group, state=HEALING, donor=event.get("donor"))
        case "heal_finished":
            return replace(group, state=JOINED)
        case "step_committed":
            return replace(
                group,
                state=TRAINING,
                step=event.get("step"),
                loss=event.get("loss"),
                participants=tuple(event.get("participants", ())),
                own_loss=event.get("own_loss"),
                own_seconds=own_seconds(event),
            )
        case "drained":
            return replace(group, state=DRAINED, step=event.get("step", group.step))
        case "training_finished":
            return replace(group, state=FINISHED, step=event.get("step", group.step))
    return group


def own_seconds(event: Event) -> float | None:
    """Return what a committed step took the group without the exchange, or None where the event does not tell."""
    compute, apply = event.get("compute_seconds"), event.get("apply_seconds")
    if compute is not None and apply is not None:
        return float(compute + apply)
    whole, exchange = event.get("seconds"), event.get("exchange_seconds")
    return None if whole is None or exchange is None else max(0.0, whole - exchange)


def fault_replicas(target: Any) -> list[int]:
    """Return the groups that a fault's target names; older histories have a bare number there."""
    if isinstance(target, Mapping):
        target = target.get("replica")
    if isinstance(target, list | tuple):
        return [replica for part in target for replica in fault_replicas(part)]
    return [target] if isinstance(target, int) else []


def describe(before: Groups, after: Groups, event: Event) -> str | None:
    """Return the line that tells a change, or None when the event is not worth one."""
    if (tell_chaos := _WORDS_OF_CHAOS.get(event["event"])) is not None:
        # The agents of all ranks tell what befell their group.
        return tell_chaos(event) if event.get("rank", 0) == 0 or not _hits_groups(event) else None
    if event["event"] == "lighthouse_restarted":
        return f"{event.get('reason')}; it is back at the same address after {event.get('seconds', 0.0):.2f} s"
    replica = event.get("replica", -1)
    if replica not in after:
        return None
    name, new = f"replica {replica}", after[replica]
    match event["event"]:
        case "worker_exited" if new.state == DIED and not event.get("stopped", False):
            return f"{name} died: {event.get('reason') or 'a worker ended'}"
        case "replica_restarted":
            return f"{name} restarting (attempt {new.attempt})"
        case "replica_gave_up":
            return f"{name} failed: {event.get('reason')}; {event.get('log')}: {event.get('error')}"
        case "spare_took_over":
            return f"{name}: a spare takes its place (attempt {new.attempt})"
        case "hung":
            return f"{name} hangs: rank {event.get('rank')} made no progress and ends itself; its log has the stacks"
        case "rank_silent":
            return f"{name}: ranks {_listed(event.get('ranks', ()))} are silent, so that the group ends"
    if event.get("rank", 0) != 0 or event.get("attempt", new.attempt) < new.attempt:
        return None
    if event["event"] == "joined":
        joins = new.state == JOINED and before[replica].state != JOINED
        return f"{name} joined (groups {_listed(new.participants)})" if joins else None
    if event["event"] in _SEEN_BY_ALL and not _tells_for_all(after, replica):
        return None
    if event["event"].startswith("straggler"):
        return _describe_speed(event)
    if event["event"] == "gradient_excluded":
        whose = f"replica {_listed(event.get('slots', ()))}"
        return f"step {event.get('step')} goes without {whose}: gradient not finite; the batch is trained again"
    tell = _WORDS_OF_RANK_0.get(event["event"])
    return f"{name} {tell(event)}" if tell is not None else None


# Every group comes to the same finding: one line is enough.
_SEEN_BY_ALL = (
    "waiting",
    "straggler",
    "straggler_recovered",
    "digest_mismatch",
    "gradient_excluded",
    "rolled_back",
)


def _tells_for_all(groups: Groups, replica: int) -> bool:
    """Tell whether a group is the first of those that train."""
    return all(group.state not in (JOINED, TRAINING) for group in groups.values() if group.replica < replica)


def _describe_speed(event: Event) -> str:
    name = f"replica {event.get('slot', event['replica'])}"
    if event["event"] == "straggler_recovered":
        return f"{name} is as fast as the others again"
    factor = event.get("factor")
    return f"{name} is slow" + (f": {factor:.1f} times the others' step time" if factor is not None else "")


def _healed(event: Event) -> str:
    seconds = event.get("seconds")
    return "healed" + (f" in {seconds:.2f} s" if seconds is not None else "")


def _hits_groups(event: Event) -> bool:
    """Tell whether a fault is one that hits whole groups."""
    fault = FAULTS.get(str(event.get("fault")))
    return fault is not None and fault.scope in ("group", "groups", "link")


def _fault(event: Event) -> str:
    """Return a fault with its target: "kill_rank on replica 2, rank 1"."""
    name, target = event.get("fault"), event.get("target")
    if isinstance(target, Mapping) and target.get("lighthouse"):
        return f"{name} on the lighthouse"
    if not (replicas := fault_replicas(target)):
        return str(name)
    rank = target.get("rank") if isinstance(target, Mapping) and not _hits_groups(event) else None
    return f"{name} on replica {_listed(replicas)}" + (f", rank {rank}" if rank is not None else "")


def _params(event: Event) -> str:
    params = event.get("params") or {}
    values = [f"{name} {value:g}" for name, value in params.items() if isinstance(value, int | float)]
    return f" ({', '.join(values)})" if values else ""


def _first_line(text: Any) -> str:
    return (str(text).splitlines() or [""])[0][:200]


# What the chaos runner and its agents do, to whomever.
_WORDS_OF_CHAOS: dict[str, Callable[[Event], str]] = {
    "chaos_started": lambda e: f"chaos begins: {e.get('plan')}, seed {e.get('seed')}: {e.get('schedule')}",
    "chaos_finished": lambda e: f"chaos ends: faults injected: {e.get('injected')}, skipped: {e.get('skipped')}",
    "fault_injected": lambda e: f"fault: {_fault(e)}{_params(e)}",
    "fault_undone": lambda e: f"fault undone: {_fault(e)}",
    "fault_skipped": lambda e: f"fault skipped: {_fault(e)}{_because(e)}",
}


def _because(event: Event) -> str:
    return f" ({event['reason']})" if event.get("reason") else ""


# What each event of a group's rank 0 says after the group's name.
_WORDS_OF_RANK_0: dict[str, Callable[[Event], str]] = {
    "heal_started": lambda e: f"healing from replica {e.get('donor')} at step {e.get('from_step')}",
    "heal_finished": _healed,
    "heal_failed": lambda e: f"got no state from replica {e.get('donor')}: {_first_line(e.get('error'))}",
    "rolled_back": lambda e: f"goes on from step {e.get('step')}: steps lost with their groups: {e.get('lost')}",
    "checkpoint_failed": lambda e: (
        f"could not save the checkpoint of step {e.get('step')}: {_first_line(e.get('error'))}"
    ),
    "digest_mismatch": lambda e: (
        f"sees different digests at step {e.get('step')} (minority: {_listed(e.get('minority', ())) or 'none, a tie'})"
    ),
    "waiting": lambda e: f"waits after step {e.get('step')}: {e.get('reason') or 'too few groups'}",
    "catch_up_waiting": lambda e: f"cannot queue more updates: the others wait until it has step {e.get('step')}",
    "drained": lambda e: f"left after step {e.get('step')}{_because(e)}",
    "foreign_member": lambda e: f"leaves {e.get('member')} aside{_because(e)}",
    "refused": lambda e: f"refused {e.get('member')}{_because(e)}",
    "checkpoint_saved": lambda e: f"saved the checkpoint of step {e.get('step')}",
    "data_reset": lambda e: f"starts its data anew{_because(e)}",
    "training_finished": lambda e: f"finished at step {e.get('step')}",
}


def describe_progress(groups: Groups) -> str | None:
    """Return one line on how far the run is, or None before its first step."""
    running = [group for group in groups.values() if group.step is not None]
    if not running:
        return None
    ahead = max(running, key=lambda group: (group.step, -group.replica))
    loss = f"{ahead.loss:.5f}" if ahead.loss is not None else "-"
    restarts = sum(group.restarts for group in groups.values())
    return f"step {ahead.step}  loss {loss}  groups {len(ahead.participants)}/{len(groups)}  restarts {restarts}"


def _listed(replicas: Iterable[int]) -> str:
    return ", ".join(str(replica) for replica in replicas)
