# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The events of a run. Each event is one class here, the only place with its name and its fields.

A field without a default is in every line. It is null if it has no value. A field with the default
None is in a line only if it has a value. Numbers that are not finite are written as null.

The comment beside or above a field is its description. `python -m titan_ft.run.events` prints
docs/events.md from the docstrings and these comments.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

CONFIG_ERROR = "ConfigError"
"""Type name of an error that names a mistake in the user's config."""
LIGHTHOUSE_ERROR = "LighthouseError"
"""Type name of an error that names the lighthouse and a remedy."""
TOKEN_REFUSED_ERROR = "TokenRefusedError"
"""Type name of the error of a group that has waited in vain for a lighthouse with its token."""
Severity = Literal["notice", "chaos", "failure"]
"""An event is a notice, an injected fault, or a failure."""


def _snake(name: str) -> str:
    """Return the name of an event for the name of its class."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Event(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="event", tag=_snake):
    """An event. `EventLog.emit` fills in the fields of this class."""

    time: float = -1.0  # Unix seconds
    # seconds of the host's monotonic clock; unlike `time`, nobody sets it
    mono: float = -1.0
    pid: int = -1  # process that writes the event
    replica: int | None = None  # slot of the replica group
    rank: int | None = None  # rank in the group
    attempt: int | None = None  # number of earlier starts of the group

    @property
    def name(self) -> str:
        """Value of the field `event` in the line."""
        return str(self.__struct_config__.tag)

    @property
    def time_us(self) -> int:
        """Time in Unix microseconds."""
        return round(self.time * 1e6)

    @property
    def severity(self) -> Severity:
        return "failure" if isinstance(self, FAILURES) else "notice"


class RankEvent(Event, kw_only=True):
    """Written by a worker, about its rank, or by rank 0 about its group."""

    replica: int = -1
    rank: int = -1
    attempt: int = -1


class GroupEvent(Event, kw_only=True):
    """Written by a group's agent; `spare_took_over` and `agent_ended` by the launcher."""

    replica: int = -1
    attempt: int = -1


class LaunchEvent(Event, kw_only=True):
    """Written by the launcher; `lighthouse_renewed` by the lighthouse, `stranger_refused` by the
    process that listens at the port.
    """


class ChaosEvent(Event, kw_only=True):
    """Written by the chaos runner (launcher or `titan-ft chaos`), an agent, or a script."""

    @property
    def severity(self) -> Severity:
        return "chaos"


class LogEvent(Event, kw_only=True):
    """Written by any process, about its own file of events."""


# Parts of events


class WorkerConfig(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The part of a worker's config that readers of a run need."""

    group_size: int  # replica groups of the job
    min_replica_size: int  # smallest number of groups that may commit a step
    digest_every: int  # steps between two digests; 0 = no digests
    batch_policy: str  # "shrink" or "constant"
    lr_policy: str  # learning rate if part of the batch is missing
    hang_timeout_seconds: float  # time without progress until a worker ends itself; 0 = never
    chaos: bool  # true if the worker has a chaos agent
    steps: int  # `training.steps`
    checkpoint: bool  # `checkpoint.enable`
    # "local_sgd" or "diloco"; then `step` counts rounds of several local steps in all events
    semi_sync_method: str | None = None
    # local steps between two exchanges of a parameter; only with a semi-synchronous method
    sync_steps: int | None = None
    # local steps of a round: sync_steps / number of fragments; only with such a method
    round_steps: int | None = None


class Setup(msgspec.Struct, kw_only=True):
    """Model, data, device and software of a worker, for the report of the run."""

    model: str  # torchtitan's name of the model, and its flavor
    dataset: str  # `training.dataset`
    seq_len: int  # tokens of a sequence
    local_batch_size: int  # sequences of a microbatch of a data-parallel rank
    # sequences of a step of all groups, as configured; -1 = local x ranks x groups
    global_batch_size: int
    # torchtitan's degrees inside a group, by field name; degrees of 1 are left out
    parallelism: dict[str, int]
    device: str  # name of the accelerator, else of the processor
    accelerator: bool = False  # true if `device` is an accelerator
    num_cpus: int  # processors that the worker may use
    versions: dict[str, str]  # versions of Python, torch and other packages, by name


class Batches(msgspec.Struct, kw_only=True):
    """Consecutive batches of a slot."""

    slot: int  # slot, which is a share of the data
    first_batch: int  # number of the first batch in the slot, from 0
    num_batches: int  # number of batches
    checksum: str  # CRC-32 of the bytes of inputs and labels, hex


class Waited(msgspec.Struct, frozen=True):
    """The time that a rank waited for another group in the exchanges of a step.

    If the rank waited for a training group and a joiner at once, the training group is charged.
    """

    slot: int  # group that the rank waited for
    seconds: float  # time in all exchanges of the step
    # what the group did: "computing", "loading" batches, "between_steps" (saving, validating),
    # "connecting" for longer than this rank, "catching_up" (fetching, loading or replaying the
    # state) or "asked" (catching up, and the others agreed to wait); or why it was absent: "lost",
    # "left" in order, "too_few" (the step needs it for `min_replica_size`)
    why: str


class ChangedField(msgspec.Struct):
    """A config field that differs between two launches of a run; null where it is not set."""

    before: Any  # value in the launch before
    now: Any  # value in this launch
    kind: str  # effect of the change: "harmless", or on the "arithmetic" or the "data"

    def describe(self, name: str) -> str:
        """Describe the change of the field `name` in words."""
        before = "not set" if self.before is None else json.dumps(self.before)
        now = "not set" if self.now is None else json.dumps(self.now)
        kind = "" if self.kind == "harmless" else f", of the {self.kind}"
        return f"{name} = {now} (was {before}{kind})"


class Target(msgspec.Struct, omit_defaults=True, frozen=True):
    """The target of a fault: a rank, a group (without `rank`), or the lighthouse."""

    replica: int | None = None  # slot of the group
    rank: int | None = None  # rank in the group
    lighthouse: bool = False  # true for the lighthouse, else left out


# Files of events


class EventsDelayed(LogEvent, kw_only=True):
    """The file could not be written for a while. The earlier events came late; none is lost."""

    error: str  # the system's error, such as "No space left on device"
    events: int  # number of events that waited in memory
    since: float  # Unix seconds of the first such event


class EventsDropped(LogEvent, kw_only=True):
    """Events are missing, because more had to wait than memory may hold."""

    error: str  # the system's error
    # number of missing events; null if an earlier process of this pid was killed while they waited
    events: int | None
    kinds: dict[str, int]  # number of missing events, by name
    since: float | None  # Unix seconds of the first missing event; null as above
    until: float | None  # Unix seconds of the last missing event; null as above


# A worker's life and its steps


class WorkerStarted(RankEvent, kw_only=True):
    """A worker has imported torch and read its config."""

    config_digest: str  # hash of the settings that must be equal in all groups, hex
    host: str  # host name
    # Slurm's ids of job and step, and the name of the node; null outside Slurm
    slurm: dict[str, str] | None
    # process of the group's agent; left out if the agent is not titan_ft's
    agent_pid: int | None = None
    config: WorkerConfig | None = None  # config; left out by other trainers
    setup: Setup | None = None  # model and software; left out by other trainers
    arguments: list[str] | None = None  # command line; left out by other trainers

    @property
    def node(self) -> str:
        """Slurm's name of the node, else the host name. Agents use the same name."""
        return (self.slurm or {}).get("node") or self.host


class Joined(RankEvent, kw_only=True):
    """The worker has a process group with its counterparts in the other groups."""

    quorum: int  # the lighthouse's number of the quorum
    participants: list[int]  # groups in the quorum
    step: int  # committed steps of this group
    quorum_seconds: float  # from the request to the lighthouse's answer
    rebuild_seconds: float  # from the answer to the process group


class StepCommitted(RankEvent, kw_only=True):
    """A step is committed and applied."""

    step: int  # number of the step, from 1; of the round with a semi-synchronous method
    # torchtitan's step after the commit; differs from `step` if rounds have several local steps
    inner_step: int | None = None
    inner_steps: int | None = None  # local steps that this group made for the round
    lineage: str  # name of the new state, hex; equal in all groups that made it
    parent: str  # lineage of the state before; twelve zeros for the initial state
    participants: list[int]  # groups whose gradients are in the step
    tokens: int  # tokens with a label of all participants
    loss: float | None  # mean loss over `tokens`; null if not finite
    own_tokens: int  # tokens of this group; 0 if it is no participant
    own_loss: float | None  # mean loss over `own_tokens`; null if not finite or without tokens
    grad_norm: float | None  # norm before clipping; null if not finite
    lr: float | None  # learning rate of the update
    seconds: float  # duration of the step on this rank
    exchanges: int  # exchanges of the step, broken ones included
    exchange_seconds: float  # part of `seconds` from the end of backward to the commit
    # part of `exchange_seconds` that was spent waiting for other groups, the longest wait first;
    # waits below 0.01 s are left out
    waits: list[Waited] | None = None
    # bytes of gradients that this rank has sent to other groups since its last commit, counted as
    # for a ring; includes broken exchanges and a heal
    wire_bytes: int | None = None
    # part of `seconds` for forward and backward; on a GPU with the rest of the update before
    compute_seconds: float
    # part of `seconds` for clipping and optimizer; on a GPU the host's time to queue them
    apply_seconds: float
    forward_passes: int  # microbatches that this rank computed
    data: Batches | None  # batches of its own slot that this rank read; null if none
    extra_data: list[Batches]  # batches that this rank read for absent groups
    # first batch and number of batches that the step trained, by slot
    batches: dict[int, tuple[int, int]]
    digest: str | None = None  # hash of this rank's state, hex; every `digest_every` steps
    # memory of this rank in bytes: the peak of the accelerator's allocator since torchtitan's last
    # line of metrics; on a CPU the resident size
    memory_bytes: int | None = None

    @property
    def titan_step(self) -> int:
        """torchtitan's step after the commit."""
        return self.step if self.inner_step is None else self.inner_step

    @property
    def contributed(self) -> bool:
        """True if this group's gradient is in the step."""
        return self.replica in self.participants

    def readings(self) -> Sequence[Batches]:
        """Return all batches that this rank read for the step."""
        if self.data is None:
            return self.extra_data
        return (self.data, *self.extra_data)


class LoaderChecked(RankEvent, kw_only=True):
    """At the job's start: a copy of the rank's loader was restored from its state and compared."""

    loader: str  # class of the loader, and of the dataset
    exact: bool  # true if the copy gave the same batches as the loader itself
    batches: int  # number of compared batches
    reason: str  # the difference; empty if `exact`
    # true for torchtitan's text data over known classes of `datasets`; for any other loader the
    # comparison at the start does not prove later restores
    transparent: bool | None = None


class DataOpened(RankEvent, kw_only=True):
    """The rank has opened a slot's data: at the start, or again after the last committed batch."""

    slot: int  # slot of the data
    shard: int  # number of the rank's shard in the whole job
    num_shards: int  # shards of the whole job
    first_batch: int  # number of the first batch read, from 0
    # true if the batch has the expected checksum; null if no rank had read that batch before
    exact: bool | None


class TrainingFinished(RankEvent, kw_only=True):
    """The last step is committed, and all groups hold the final state."""

    step: int  # number of the last step
    tokens: int  # tokens of all groups in the whole training
    digest: str | None  # hash of this rank's final state, hex; null without digests
    lineage: str  # name of the final state


class CameTooLate(RankEvent, kw_only=True):
    """The job had committed its last step before this group joined; the group ends."""

    step: int  # number of the last step


class Drained(RankEvent, kw_only=True):
    """The worker leaves on request."""

    step: int  # committed steps of this group
    reason: str  # origin of the request, or why the group could not finish its step
    in_order: bool  # true if the group finished its step first
    digest: str | None = None  # hash of this rank's state, hex; only in order
    lineage: str | None = None  # name of the state; only in order
    # batches that this rank read for a round it broke off; they are trained again
    void: list[Batches] | None = None


class Hung(RankEvent, kw_only=True):
    """The training thread made no progress for `hang_timeout_seconds`; the worker ends itself."""

    step: int  # committed steps of this group


class RankSilent(RankEvent, kw_only=True):
    """Ranks of the group send no heartbeats. Rank 0 ends itself, and the group starts again."""

    ranks: list[int]  # the silent ranks
    hosts: list[str]  # hosts of the silent ranks, in the same order
    seconds: float  # time since their last heartbeat


# Exchanges that do not commit


class ExchangeFailed(RankEvent, kw_only=True):
    """An exchange broke on some rank of this group; it is repeated with the same gradients."""

    error: str  # the error
    seconds: float  # time since the exchange began
    step: int  # committed steps of this group


class Waiting(RankEvent, kw_only=True):
    """The exchange worked, but its step cannot be committed yet; written once until a commit."""

    step: int  # committed steps of this group
    participants: list[int]  # groups with gradients in the exchange
    reason: str  # too few groups, or a joiner that asked the others to wait
    slots: list[int] | None = None  # groups that the step waits for
    why: str | None = None  # reason as in `Waited`: "asked" or "too_few"


class WaitingToEnd(RankEvent, kw_only=True):
    """The group holds the final state and waits for other groups; once for each set of groups."""

    step: int  # committed steps of this group
    slots: list[int]  # groups that lack the final state, or were not heard of
    seconds: float  # longest time to wait


class EndedWithout(RankEvent, kw_only=True):
    """The group ends although some groups did not fetch the final state within `FINISH_SECONDS`."""

    step: int  # committed steps of this group
    slots: list[int]  # the missing groups
    seconds: float  # time that the group waited


class GradientExcluded(RankEvent, kw_only=True):
    """Gradients that are not finite are left out of a step."""

    step: int  # number of the step
    slots: list[int]  # groups whose gradients are left out


class DigestMismatch(RankEvent, kw_only=True):
    """The states of the groups differ."""

    step: int  # committed steps
    digests: dict[int, str]  # hash of each group's state, hex, by slot
    lineages: dict[int, str]  # lineage of each group's state, by slot
    # groups that must heal; empty in a tie, which ends the run
    minority: list[int]


class Straggler(RankEvent, kw_only=True):
    """A group has become slower than `straggler.FACTOR` allows."""

    slot: int  # the slow group
    factor: float  # its own seconds of a step / median of the other groups
    step: int  # committed steps


class StragglerRecovered(RankEvent, kw_only=True):
    """A straggler is as fast as the others again."""

    slot: int  # the group
    factor: float  # its own seconds of a step / median of the other groups
    step: int  # committed steps


# Links and strangers


class PeerSilent(RankEvent, kw_only=True):
    """Members of an exchange send no heartbeats; the exchange is broken off."""

    slots: list[int]  # the silent groups
    seconds: float  # longest time since a heartbeat


class GroupLost(RankEvent, kw_only=True):
    """Another group was not heard of for too long: its host is lost, frozen or cut off.

    Written by rank 0 of the lowest live group that has taken part in a step, and again when the
    silence has grown fourfold. A group that left in order, or never came, is not lost. A group that
    its agent restarts is not lost either; the events of that agent have the last word.
    """

    slot: int  # the lost group
    seconds: float  # time since its last heartbeat
    step: int  # committed steps of the group that writes the event
    last_step: int | None = None  # last step with the lost group, if known


class GroupBack(RankEvent, kw_only=True):
    """A lost group is heard of again."""

    slot: int  # the group
    seconds: float  # duration of the silence
    step: int  # committed steps of the group that writes the event


class LeftOut(RankEvent, kw_only=True):
    """This group was silent, and the others went on without it; it breaks off and comes back."""

    members: list[int]  # groups that went on


class LinkDead(RankEvent, kw_only=True):
    """Groups are alive but cannot be reached from this one."""

    slots: list[int]  # the unreachable groups


class Outside(RankEvent, kw_only=True):
    """The others go on without this group, because a link is dead; this group keeps its state."""

    members: list[int]  # groups that go on
    unreached: list[int]  # members that this group cannot reach


class LinkBack(RankEvent, kw_only=True):
    """A group that was outside comes back."""

    slots: list[int]  # groups that are reachable again, or have gone


class LighthouseMoved(RankEvent, kw_only=True):
    """The group uses another lighthouse: a new address, or a new process at the same address."""

    address: str  # new address, http://host:port
    former: str  # address before
    job: str  # Slurm's id of the lighthouse's job; empty outside Slurm


class ForeignMember(RankEvent, kw_only=True):
    """The lighthouse names a member that is no group of this job; it is ignored."""

    member: str  # its name at the lighthouse
    reason: str  # why it is no group of this job


# Heals


class HealStarted(RankEvent, kw_only=True):
    """The group begins to fetch the job's state."""

    donor: int  # first donor
    donors: list[int] = []  # all donors; each sends a part
    from_step: int  # step of the offered state
    step: int  # equal to `from_step`


class HealFinished(RankEvent, kw_only=True):
    """The worker holds the job's state; its group contributes to the next step."""

    donor: int  # first donor; other groups may have sent parts
    from_step: int  # step of the fetched state
    step: int  # step of the state after the replay
    bytes: int  # bytes that this rank fetched
    seconds: float  # duration of the heal
    fetch_seconds: float  # part of `seconds` until the state had arrived
    replayed: int  # queued updates that were applied to the fetched state


class HealFailed(RankEvent, kw_only=True):
    """An attempt to heal is given up; the group asks another donor."""

    donor: int  # first donor
    from_step: int  # step of the offered state
    error: str  # the error


class DonorLost(RankEvent, kw_only=True):
    """One of several donors sends nothing any more; the others send its part."""

    donor: int  # the lost donor
    from_step: int  # step of the offered state
    error: str  # the error


class CatchUpRenewed(RankEvent, kw_only=True):
    """The queue of updates is full; the group gives up this fetch and fetches a newer state."""

    donor: int  # donor of the state that is given up
    from_step: int  # step of that state
    reason: str  # why the queue is full


class CatchUpWaiting(RankEvent, kw_only=True):
    """The others wait: the joiner's queue is full, or it replays updates too slowly."""

    donor: int  # donor
    step: int  # step that the joiner's state will have
    reason: str = ""  # why the others must wait


class StateServed(RankEvent, kw_only=True):
    """A donor's rank has sent its state, or a part of it, to a joiner."""

    joiner: int  # group of the joiner
    step: int  # step of the state
    bytes: int  # bytes that the rank sent
    copy_seconds: float  # copy of the state to host memory, the longest possible pause of training
    serve_seconds: float  # transfer, during which training goes on


class RolledBack(RankEvent, kw_only=True):
    """The latest state is lost with its groups; this group goes on from its own state."""

    step: int  # committed steps of this group
    lost: int  # number of lost steps


class StartedAnew(RankEvent, kw_only=True):
    """A restarted group begins with step 1, because no group holds a state."""

    step: int  # 0


# Checkpoints


class CheckpointSaved(RankEvent, kw_only=True):
    """Rank 0 of the writing group: a checkpoint is complete."""

    step: int  # torchtitan's step, as in the folder's name; not the number of a round
    seconds: float  # duration of the save
    # true if training cannot go on from it (`checkpoint.last_save_model_only`)
    model_only: bool = False


class SavingBeforeLeaving(RankEvent, kw_only=True):
    """Rank 0 of the last group that holds the job's state: the group saves before it leaves."""

    step: int  # torchtitan's step, as in the folder's name; not the number of a round
    # rest of `drain_timeout_seconds`; after this time the group ends, even during the save
    seconds_left: float
    longest_seconds: float | None = None  # longest save of this process; left out without one

    @property
    def shortage(self) -> str:
        """Why the save may not be complete in time, with a remedy; empty if time is sufficient."""
        if self.longest_seconds is None or self.longest_seconds <= self.seconds_left:
            return ""
        return (
            f"{self.seconds_left:.1f} s are left, and a save took {self.longest_seconds:.1f} s; "
            "raise fault_tolerance.drain_timeout_seconds, and the platform's own limit if that is "
            "shorter"
        )


class CheckpointFailed(RankEvent, kw_only=True):
    """A checkpoint could not be written; the next due step tries again."""

    step: int  # torchtitan's step of the checkpoint
    error: str  # the error
    latest: int | None = None  # step of the latest complete checkpoint; 0 = there is none


class CheckpointWithdrawn(RankEvent, kw_only=True):
    """Rank 0 of the writing group: a checkpoint is removed, because its state was corrupt."""

    step: int  # torchtitan's step of the checkpoint


class CheckpointSkipped(RankEvent, kw_only=True):
    """Rank 0: a damaged checkpoint is skipped; an older one, or that of load_step, is loaded."""

    step: int  # torchtitan's step of the damaged checkpoint
    reason: str  # the damage
    instead: int  # step of the checkpoint that is loaded


class CheckpointSetAside(RankEvent, kw_only=True):
    """Rank 0 of the writing group: the job went back before a checkpoint, which is now renamed."""

    step: int  # torchtitan's step of the checkpoint that was just saved
    folder: str  # new name of the outdated checkpoint, in the folder of checkpoints


class CheckpointLoaded(RankEvent, kw_only=True):
    """The worker goes on from a checkpoint."""

    step: int  # torchtitan's step, as in the folder's name; not the number of a round
    lineage: str  # name of the loaded state


class DataReset(RankEvent, kw_only=True):
    """The data begins anew after a checkpoint, so batches may be trained again."""

    step: int  # torchtitan's step of the checkpoint
    reason: str  # why its place in the data does not fit, or is not wanted
    asked: bool = False  # true if `checkpoint.exclude_from_loading` asks for it


# Agents


class WorkerExited(GroupEvent, kw_only=True):
    """A worker has ended."""

    rank: int = -1
    worker_pid: int  # its process
    reason: str  # cause in words
    stopped: bool  # true if another rank's end, or a stop of the run, ended the worker
    code: int | None = None  # exit status, if the worker exited
    signal: str | None = None  # name of the signal, if one ended the worker
    # type and first line of the exception; with code 0, that the worker ended too early
    error: str | None = None
    error_kind: str | None = None  # type of the exception, such as "ConfigError"
    # true if another attempt may succeed unchanged (network, lighthouse, other groups), or if a
    # fault was injected into the attempt
    transient: bool | None = None
    # file and line that raised the exception, the user's code first; relative to the working
    # folder or to the installed packages
    where: str | None = None
    log: str | None = None  # path of the worker's log, if the worker failed by itself
    host: str | None = None  # host name, Slurm's if there is one

    @property
    def severity(self) -> Severity:
        return "notice" if self.stopped or self.cause is None else "failure"

    @property
    def is_mistake(self) -> bool:
        """True if the worker found a mistake in its config."""
        return self.code == 2 and self.error_kind == CONFIG_ERROR

    @property
    def cause(self) -> str | None:
        """Name of the signal, or the exit code; None if the worker ended well."""
        if self.signal is None and self.code == 0 and self.error is None:
            return None
        if self.signal:
            return self.signal
        return None if self.code is None else f"exit code {self.code}"


class HostLeft(GroupEvent, kw_only=True):
    """Many workers have died on a host; the group leaves it and is started elsewhere."""

    host: str  # host name
    deaths: int  # attempts of all groups that a worker's death ended there within the window
    reason: str  # cause in words


class AgentEnded(GroupEvent, kw_only=True):
    """The agent of a group died unexpectedly, or could not be started.

    The launcher writes this event after the agent's workers have ended. `attempt` is the attempt
    that ended with the agent. If the group is started again, its next agent writes
    `replica_restarted`. Otherwise `replica_gave_up` follows.
    """

    agent_pid: int | None  # process of the agent; None if the agent could not be started
    reason: str  # cause in words, such as "its agent was killed by SIGKILL"
    restarts: bool  # true if the group is started again
    code: int | None = None  # exit status, if the agent exited
    signal: str | None = None  # name of the signal, if one ended the agent
    log: str | None = None  # path of the agent's log

    @property
    def cause(self) -> str:
        """Short cause: "agent: SIGKILL", "agent: exit code 1" or "agent: not started"."""
        if self.signal:
            return f"agent: {self.signal}"
        return "agent: not started" if self.code is None else f"agent: exit code {self.code}"


class ReplicaRestarted(GroupEvent, kw_only=True):
    """A group is started again; `attempt` is the new attempt."""

    reason: str  # why the attempt before ended
    standby: bool  # true if the workers are forks of a process that had imported everything


class ReplicaGaveUp(GroupEvent, kw_only=True):
    """A group is not started again. Written by its agent, or by the launcher if the agent ended."""

    rank: int | None = None  # rank that failed first; left out if the agent ended
    reason: str  # why the last attempt ended, and why no other follows
    log: str  # path of the log of that rank, else of the agent
    error: str  # the exception; without an exception the line of the log with the cause
    error_kind: str | None = None  # type of the exception; left out without an exception
    # cause as a code: "config", "final", "crash loop", "network", "restarts" (none is left), "host"
    # (the host is suspected), "lost" (the group was silent when all others had ended)
    cause: str | None = None

    @property
    def mistake(self) -> str:
        """The mistake in the config that ended the group; empty for other causes."""
        if self.cause != "config":
            return ""
        return self.error.removeprefix(f"{CONFIG_ERROR}: ")


class SpareTookOver(GroupEvent, kw_only=True):
    """A spare group replaces a lost group; `attempt` is its first attempt."""


# The launcher


class LaunchStarted(LaunchEvent, kw_only=True):
    """A run is launched."""

    replicas: int  # replica groups
    ranks_per_replica: int  # ranks of each group
    spares: int  # spare groups
    job_id: str  # name of the job at the lighthouse
    config_file: str | None = None  # path of the job's TOML, as given
    # with --resume: fields that differ from the launch before, by full name; --resume-with has
    # allowed those that are not harmless
    changed: dict[str, ChangedField] | None = None

    @property
    def allowed(self) -> list[str]:
        """The changes of the arithmetic and of the data, in words."""
        changes = []
        for name, change in (self.changed or {}).items():
            if change.kind != "harmless":
                changes.append(change.describe(name))
        return changes


class LaunchStopping(LaunchEvent, kw_only=True):
    """All groups are asked to leave."""

    reason: str  # cause: Ctrl-C, SIGTERM, or a limit of time
    drain_seconds: float  # time that the groups may take


NOT_BEGUN = "it had not begun to train"
"""`Drained.reason` of a rank that left before it had begun to train."""


class LaunchFinished(LaunchEvent, kw_only=True):
    """The launcher ends. This is its last event."""

    code: int  # exit status; after a stop 130 (Ctrl-C), 143 (SIGTERM) or 129 (SIGHUP)
    reason: str  # cause in words
    # SIGINT (Ctrl-C), SIGTERM or SIGHUP if that signal stopped the run, which is no failure
    signal: str | None = None
    # true if the launch itself failed and no group did, for example without a lighthouse
    own_failure: bool | None = None

    @property
    def severity(self) -> Severity:
        return "failure" if self.code != 0 and self.signal is None else "notice"


class LighthouseStarted(LaunchEvent, kw_only=True):
    """A lighthouse is started: the first one, or a successor."""

    lighthouse_pid: int  # its process
    address: str  # http://host:port


class LighthouseRestarted(LaunchEvent, kw_only=True):
    """A new lighthouse listens in place of one that ended."""

    reason: str  # how the lighthouse before ended
    seconds: float  # time without a lighthouse
    address: str  # http://host:port, unchanged


class LighthouseRenewed(LaunchEvent, kw_only=True):
    """The lighthouse starts anew at its address by itself, to forget processes that have ended."""

    num_ended: int  # processes of groups that it forgets
    address: str  # http://host:port, unchanged


class StrangerRefused(LaunchEvent, kw_only=True):
    """A port of the run has closed a connection without the run's secret; once for each kind and
    port."""

    # "no_secret": it shows another secret or none; "silent": it shows nothing in time; "crowd": too
    # many such connections at once; "no_descriptors": they take all descriptors of the process
    kind: str
    source: str  # numeric address of its other end
    reason: str  # in words
    # "state server" or "control tree" of a rank, or "agent" of a group on several hosts; the
    # lighthouse's gate if left out
    port: str | None = None


# Chaos


class ChaosStarted(ChaosEvent, kw_only=True):
    """The schedule of a plan begins."""

    seed: int  # seed of all random choices
    plan: str  # name of the plan
    schedule: str  # schedule in words


class ChaosFinished(ChaosEvent, kw_only=True):
    """No more faults will be injected."""

    # faults that this plan injected; a shot that kills a group to provoke a heal counts twice
    injected: int
    skipped: int  # shots that hit no target


class FaultEvent(ChaosEvent, kw_only=True):
    """Written by a chaos runner, a script, or a worker's chaos agent (with rank and attempt)."""

    fault: str  # name of the fault
    target: Target | None  # target


class FaultInjected(FaultEvent, kw_only=True):
    """A fault is about to hit a target."""

    fault: str  # name of the fault
    target: Target  # target
    seed: int | None  # seed of the shot; null if nothing is random
    shot: int | None = None  # number of the shot in the plan; one shot may hit several groups
    params: dict[str, int | float | str] | None = None  # parameters of the fault
    step: int | None = None  # committed steps of the group, if known
    tensor: str | None = None  # name of the tensor with the flipped bit
    element: list[int] | None = None  # index of the element in the tensor
    bit: int | None = None  # number of the bit in the element
    bytes: int | None = None  # size of the corrupted message


class FaultUndone(FaultEvent, kw_only=True):
    """A fault in a target has ended, or was undone."""

    fault: str  # name of the fault
    target: Target  # target
    shot: int  # number of the shot in the plan


class FaultSkipped(FaultEvent, kw_only=True):
    """A shot, or one target of a shot, is not injected."""

    fault: str  # name of the fault
    target: Target | None  # intended target; null if none was chosen
    shot: int  # number of the shot in the plan
    reason: str  # why
    seed: int | None = None  # seed of the shot; written by agents only


ABSTRACT: tuple[type[Event], ...] = (
    Event,
    RankEvent,
    GroupEvent,
    LaunchEvent,
    ChaosEvent,
    LogEvent,
    FaultEvent,
)
"""Base classes. No line has one of these names."""


FAILURES: tuple[type[Event], ...] = (
    AgentEnded,
    DigestMismatch,
    GradientExcluded,
    GroupLost,
    Hung,
    ReplicaGaveUp,
)
"""Events that always report a failure. Other classes decide by their fields: see `severity`."""


def kinds(base: type[Event] = Event) -> Iterator[type[Event]]:
    """Yield all event classes below `base`, in the order of their definition.

    A benchmark with events of its own derives classes. They count where they are imported.
    """
    for kind in base.__subclasses__():
        if kind not in ABSTRACT:
            yield kind
        yield from kinds(kind)


# docs/events.md

_HEAD = """\
# Events

<!-- Made by `python -m titan_ft.run.events > docs/events.md`; edit titan_ft/run/events.py instead. -->

Every process of a run appends its events to a file of its own, `RUN_DIR/events/*.jsonl`, one JSON object a line. After
64 MiB the file NAME.jsonl continues as NAME.2.jsonl, and so on. Each line is written at once and in one piece. After a
kill, at most the last line is incomplete.

On a full disk the events wait in memory. They are written in order when the disk has room again. A file that is empty,
or has no newline at its end, is cut: its process had more events, and may have been killed before it could write them.

Names and meanings are a contract. New events and fields may be added; existing ones stay. Readers skip unknown names.

A field marked *optional* is in a line only if it has a value. Other fields are `null` without a value, where the text
says so. A number that is not finite is `null`.

Every line has:

"""


def markdown() -> str:
    """Return docs/events.md.

    Raises:
        ValueError: a field has no comment.
    """
    event_row = ("event", "str", "name of the event, as in the headings below")
    parts = [_HEAD, _table(event_row, *_rows(Event))]
    for base in ABSTRACT[1:]:
        parts.append(f"## {base.__name__}\n\n{_summary(base)}\n")
        for kind in base.__subclasses__():
            # Programs and tests derive events of their own, which the document must not list.
            if kind in ABSTRACT or kind.__module__ != Event.__module__:
                continue
            parts.append(f"### `{_snake(kind.__name__)}`\n\n{_summary(kind)}\n")
            fields = [row for row in _rows(kind) if row[0] not in Event.__struct_fields__]
            if fields:
                parts.append(_table(*fields))
    parts += [
        f"## {part.__name__}\n\n{_summary(part)}\n\n{_table(*_rows(part))}"
        for part in (Batches, ChangedField, Setup, Target, Waited, WorkerConfig)
    ]
    return "\n".join(parts)


_FIELD = re.compile(r"((?:^ +# .*\n)*)^ +(\w+): [^#\n]*?(?:  # (.*))?$", re.MULTILINE)
"""A field in the source of a class: comment above, name, comment beside."""


def _summary(kind: type) -> str:
    """Return a class's docstring in one line."""
    return " ".join(inspect.cleandoc(kind.__doc__ or "").split())


def _meanings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the comments of a class's fields, inherited ones included, by name."""
    meanings: dict[str, str] = {}
    for base in kind.__mro__[: kind.__mro__.index(msgspec.Struct)]:
        for above, name, beside in _FIELD.findall(inspect.getsource(base)):
            meaning = beside or " ".join(above.replace("#", "").split())
            if meaning:
                meanings.setdefault(name, meaning)
    return meanings


def _type_name(kind: type[msgspec.Struct], field: str, required: bool) -> str:
    """Return the annotated type of a field as the document shows it."""
    annotated = next(
        base.__annotations__[field] for base in kind.__mro__ if field in base.__annotations__
    )
    name = str(annotated)
    if not required and name.endswith(" | None"):
        name = f"{name.removesuffix(' | None')}, *optional*"
    return name.replace("None", "null").replace("|", "\\|")


def _rows(kind: type[msgspec.Struct]) -> list[tuple[str, str, str]]:
    """Return name, type and meaning of each field."""
    meanings = _meanings(kind)
    rows = []
    for field in msgspec.structs.fields(kind):
        if field.name not in meanings:
            raise ValueError(
                f"{kind.__name__}.{field.name} needs a comment that says what it means"
            )
        type_name = _type_name(kind, field.name, field.required)
        rows.append((field.name, type_name, f"{meanings[field.name]}."))
    return rows


def _table(*rows: tuple[str, str, str]) -> str:
    lines = ["| field | type | meaning |", "| --- | --- | --- |"]
    for name, type_name, meaning in rows:
        lines.append(f"| `{name}` | {type_name} | {meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    # Import the module by name: the classes of __main__ are others than those of this module.
    from titan_ft.run import events

    print(events.markdown(), end="")
