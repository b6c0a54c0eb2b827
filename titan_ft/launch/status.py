# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Fold a run's events into what a person watching it wants to know; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

Event = Mapping[str, Any]

WAITING = "waiting"
STARTING = "starting"
JOINED = "joined"
HEALING = "healing"
TRAINING = "training"
DIED = "died"
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


Groups = dict[int, GroupStatus]


def initial(num_replicas: int) -> Groups:
    """Return the status before anything happened."""
    return {replica: GroupStatus(replica) for replica in range(num_replicas)}


def fold(groups: Groups, event: Event) -> Groups:
    """Return the status after an event. Of a group's ranks, rank 0 speaks; a rank that died does so for itself."""
    group = groups.get(event.get("replica", -1))
    if group is None or event.get("attempt", group.attempt) < group.attempt:
        return groups
    changed = _apply(group, event)
    return groups if changed is group else {**groups, group.replica: changed}


def _apply(group: GroupStatus, event: Event) -> GroupStatus:
    match event["event"]:
        case "worker_exited" if event.get("code") != 0 and group.state != FAILED:
            return replace(group, state=DIED)
        case "worker_exited" if group.state != FAILED and event.get("rank") == 0 and not event.get("stopped"):
            return replace(group, state=FINISHED)
        case "replica_restarted":
            return replace(group, state=STARTING, attempt=event["attempt"], restarts=group.restarts + 1)
        case "replica_gave_up":
            return replace(group, state=FAILED)
    if event.get("rank", 0) != 0 or group.state == FAILED:
        return group
    match event["event"]:
        case "worker_started":
            return replace(group, state=STARTING)
        case "joined":
            state = JOINED if group.state in (WAITING, STARTING) else group.state
            return replace(group, state=state, participants=tuple(event.get("participants", ())))
        case "heal_started":
            return replace(group, state=HEALING)
        case "heal_finished":
            return replace(group, state=JOINED)
        case "step_committed":
            return replace(
                group,
                state=TRAINING,
                step=event.get("step"),
                loss=event.get("loss"),
                participants=tuple(event.get("participants", ())),
            )
        case "training_finished":
            return replace(group, state=FINISHED, step=event.get("step", group.step))
    return group


def describe(before: Groups, after: Groups, event: Event) -> str | None:
    """Return the line that tells a change, or None when the event is not worth one."""
    replica = event.get("replica", -1)
    if replica not in after:
        return None
    old, new = before[replica], after[replica]
    name = f"replica {replica}"
    match event["event"]:
        case "worker_exited" if new.state == DIED and not event.get("stopped", False):
            return f"{name} died: {event.get('reason') or 'a worker ended'}"
        case "replica_restarted":
            return f"{name} restarting (attempt {new.attempt})"
        case "replica_gave_up":
            return f"{name} failed: {event.get('reason')}; {event.get('log')}: {event.get('error')}"
    if event.get("rank", 0) != 0 or event.get("attempt", new.attempt) < new.attempt:
        return None
    match event["event"]:
        case "joined" if new.state == JOINED and old.state != JOINED:
            return f"{name} joined (groups {_listed(new.participants)})"
        case "heal_started":
            return f"{name} healing from replica {event.get('donor')} at step {event.get('from_step')}"
        case "heal_finished":
            seconds = event.get("seconds")
            return f"{name} healed" + (f" in {seconds:.2f} s" if seconds is not None else "")
        case "digest_mismatch":
            minority = _listed(event.get("minority", ()))
            return f"{name} sees different digests at step {event.get('step')} (minority: {minority or 'none, a tie'})"
        case "training_finished":
            return f"{name} finished at step {new.step}"
    return None


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
