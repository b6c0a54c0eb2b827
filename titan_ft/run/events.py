# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The events of a run: one class per event, which is the only place that knows its name and its fields.

A field without a default is in every line, as null where it has no value; one whose default is None is in a line only
when it has a value. Numbers that are not finite are null. The comment beside a field, or above it, says what it means;
`python -m titan_ft.run.events` prints docs/events.md from all of it.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

CONFIG_ERROR = "ConfigError"
"""Kind of an error that names a mistake of the user's."""
LIGHTHOUSE_ERROR = "LighthouseError"
"""Kind of an error that names the lighthouse, and says what to do."""
Severity = Literal["notice", "chaos", "failure"]
"""How a person should take an event: something went on, was injected, or failed."""


def _snake(name: str) -> str:
    """Return the name of an event, from that of its class."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Event(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="event", tag=_snake):
    """Something that happened. `EventLog.emit` fills in what stands here."""

    time: float = -1.0  # Unix seconds
    # seconds of the host's monotonic clock, which nobody sets: beside it, a wall clock that was set shows
    mono: float = -1.0
    pid: int = -1  # the process that announces it
    replica: int | None = None  # the replica group that it is about
    rank: int | None = None  # the rank in that group
    attempt: int | None = None  # how often that group was started before

    @property
    def name(self) -> str:
        """Return its name, which is the field `event` of its line."""
        return str(self.__struct_config__.tag)

    @property
    def time_us(self) -> int:
        """Its time in Unix microseconds."""
        return round(self.time * 1e6)

    @property
    def severity(self) -> Severity:
        """How a person should take it."""
        return "failure" if isinstance(self, FAILURES) else "notice"


class RankEvent(Event, kw_only=True):
    """Announced by a worker, of itself or, where all ranks of a group come to the same finding, of its group."""

    replica: int = -1
    rank: int = -1
    attempt: int = -1


class GroupEvent(Event, kw_only=True):
    """Announced of a group by its agent; `spare_took_over` and `agent_ended` by the launcher."""

    replica: int = -1
    attempt: int = -1


class LaunchEvent(Event, kw_only=True):
    """Announced by the launcher."""


class ChaosEvent(Event, kw_only=True):
    """Announced by what injects faults: the chaos runner (in the launcher, or `titan-ft chaos`), or a script."""

    @property
    def severity(self) -> Severity:
        return "chaos"


class LogEvent(Event, kw_only=True):
    """Announced by any process, about its own file of events."""


# Parts of events


class WorkerConfig(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a reader of the history needs of a worker's config: fields of `[fault_tolerance]` by their own names."""

    group_size: int  # replica groups of the job
    min_replica_size: int  # groups that a step needs
    digest_every: int  # steps from one digest to the next; 0 takes none
    batch_policy: str  # "shrink" or "constant"
    lr_policy: str  # what becomes of the LR where part of the batch is missing
    hang_timeout_seconds: float  # without progress for so long a worker ends itself; 0 never does
    chaos: bool  # whether the worker has a chaos agent
    steps: int  # `training.steps`
    checkpoint: bool  # `checkpoint.enable`
    # "local_sgd" or "diloco": what the job commits, and `step` counts in all events, is a round of several steps then
    semi_sync_method: str | None = None
    sync_steps: int | None = None  # steps between two exchanges of a parameter; with a semi-synchronous method only
    round_steps: int | None = None  # torchtitan's steps of a round: sync_steps / number of fragments; likewise


class Setup(msgspec.Struct, kw_only=True):
    """What a worker trains, on what, and with which software; for those who read the run's report later."""

    model: str  # torchtitan's name of the model and its flavor
    dataset: str  # `training.dataset`
    seq_len: int  # tokens of a sequence
    local_batch_size: int  # sequences of a microbatch of a data-parallel rank
    global_batch_size: int  # sequences of a step of all groups, as configured; -1 makes it local x ranks x groups
    parallelism: dict[str, int]  # torchtitan's degrees inside a group, by their fields' names; 1 is left out
    device: str  # name of its accelerator, else of its processor
    accelerator: bool = False  # whether that is an accelerator
    num_cpus: int  # processors that the worker may use
    versions: dict[str, str]  # of Python and of the packages that training rests on


class Batches(msgspec.Struct, kw_only=True):
    """Consecutive batches of a slot."""

    slot: int  # share of the data that they are of
    first_batch: int  # number of the first one in its slot, from 0
    num_batches: int  # how many
    checksum: str  # CRC-32 over the bytes of their inputs and labels, hex


class Waited(msgspec.Struct, frozen=True):
    """How long a rank waited in the exchanges of a step for another group.

    Time in which a group that trains and a joiner were both awaited counts for the group that trains.
    """

    slot: int  # the group that was awaited
    seconds: float  # how long, in all exchanges of the step
    # what the group did meanwhile: "computing", "loading" its batches, "between_steps" (saving, validating),
    # "connecting" to the other groups for longer than this rank, "catching_up" (it fetched, loaded or replayed the
    # state, or all groups connected to it), "asked" (the same, and it asked the others to wait); or why it did not
    # come: "lost", "left" in order, "too_few" (the step needs it for `min_replica_size`)
    why: str


class ChangedField(msgspec.Struct):
    """A field of the config that differs between two launches of a run; null where it is not set."""

    before: Any  # its value in the launch before
    now: Any  # its value in this one
    kind: str  # what the change may do: "harmless", or it changes the "arithmetic" or the "data"

    def describe(self, name: str) -> str:
        """Return the change of the field `name` in words."""
        before, now = ("not set" if value is None else json.dumps(value) for value in (self.before, self.now))
        kind = "" if self.kind == "harmless" else f", of the {self.kind}"
        return f"{name} = {now} (was {before}{kind})"


class Target(msgspec.Struct, omit_defaults=True, frozen=True):
    """Whom a fault hits: a rank, a group (no rank) or the lighthouse."""

    replica: int | None = None  # the group
    rank: int | None = None  # the rank of it
    lighthouse: bool = False  # true for the lighthouse, else left out


# Files of events


class EventsDelayed(LogEvent, kw_only=True):
    """The file could not be written for a while, and the events before this one came late. None of them is lost."""

    error: str  # why, in the system's words, such as "No space left on device"
    events: int  # how many waited in memory
    since: float  # Unix seconds of the first one


class EventsDropped(LogEvent, kw_only=True):
    """Events are missing from the file: more than the memory may hold had to wait until it could be written."""

    error: str  # why it could not be written, in the system's words
    events: int | None  # how many; null where an earlier process of the same pid was killed while its events waited
    kinds: dict[str, int]  # how many of each name
    since: float | None  # Unix seconds of the first one; null as above
    until: float | None  # Unix seconds of the last one; null as above


# A worker's life and its steps


class WorkerStarted(RankEvent, kw_only=True):
    """A worker begins: torch is imported and the config is read."""

    config_digest: str  # hash of what must be equal in the configs of all groups, hex
    host: str  # its host's name
    slurm: dict[str, str] | None  # Slurm's ids of the job and the step that it belongs to, its node; null outside Slurm
    # process of the agent that keeps its group; left out where that is not this project's
    agent_pid: int | None = None
    config: WorkerConfig | None = None  # fields of its config; left out by a trainer that is not this project's
    setup: Setup | None = None  # what it trains, on what; left out likewise
    arguments: list[str] | None = None  # its command line, without the program; left out likewise

    @property
    def node(self) -> str:
        """What people call its host, and agents do in their events: Slurm's name of the node, else the host's own."""
        return (self.slurm or {}).get("node") or self.host


class Joined(RankEvent, kw_only=True):
    """The worker has a process group with the counterparts of its rank in the other groups."""

    quorum: int  # the lighthouse's number of the quorum
    participants: list[int]  # groups in it
    step: int  # committed steps of this group
    quorum_seconds: float  # from the request to the lighthouse's answer
    rebuild_seconds: float  # from there until the process group stood


class StepCommitted(RankEvent, kw_only=True):
    """A step is committed and applied."""

    step: int  # its number, from 1; with a semi-synchronous method that of the round
    # torchtitan's step behind it: more than `step` where a round has several
    inner_step: int | None = None
    inner_steps: int | None = None  # steps of its own that this group made for it
    lineage: str  # names the state that it made, hex; the same in all groups that made it
    parent: str  # lineage of the state that it changed; twelve zeros for the initial one
    participants: list[int]  # groups whose gradients are in it
    tokens: int  # tokens with a label of all participants
    # mean loss over those; null where it is not finite
    loss: float | None
    own_tokens: int  # those of this group; 0 where it is no participant
    own_loss: float | None  # mean loss over those; null as above, and without any
    grad_norm: float | None  # before clipping; null where it is not finite
    lr: float | None  # learning rate of the update
    seconds: float  # all of the step, of this rank
    exchanges: int  # exchanges that it took, those that broke included
    exchange_seconds: float  # of that, from the end of backward to the commit
    # of that, waiting for other groups, the longest wait first; without waits shorter than 0.01 s. What is left went
    # into the sums
    waits: list[Waited] | None = None
    # bytes of gradients that this rank sent to the other groups since its last commit, as a ring of the members sends
    # them: those of exchanges that broke, and of a heal before it, included; rows are not
    wire_bytes: int | None = None
    # of that, forward and backward; on a GPU also what the update before still takes when they begin
    compute_seconds: float
    # of that, clipping and the optimizer; on a GPU what the host takes to queue them
    apply_seconds: float
    forward_passes: int  # microbatches that this rank computed
    data: Batches | None  # batches of its own slot that this rank read; null without any
    extra_data: list[Batches]  # batches that it read of the slots of absent groups
    batches: dict[int, tuple[int, int]]  # first batch and number of batches that the step trained, by slot
    digest: str | None = None  # hash of this rank's part of the state, hex; every `digest_every` steps
    # memory of this rank in bytes: what the accelerator's allocator held at most since torchtitan's last line of
    # metrics; on a CPU, what the process holds
    memory_bytes: int | None = None

    @property
    def titan_step(self) -> int:
        """torchtitan's step behind it."""
        return self.step if self.inner_step is None else self.inner_step

    @property
    def contributed(self) -> bool:
        """Whether this group's gradient is in the step."""
        return self.replica in self.participants

    def readings(self) -> Sequence[Batches]:
        """Return what this rank read for the step."""
        return self.extra_data if self.data is None else (self.data, *self.extra_data)


class LoaderChecked(RankEvent, kw_only=True):
    """At the job's start: whether a copy of the rank's data loader goes on exactly where its state was saved."""

    loader: str  # class of the loader, and of what it reads
    exact: bool  # whether it gave the batches that a loader gave which was not closed meanwhile
    batches: int  # that were compared
    reason: str  # what was found; empty where it is exact
    # whether only code decides where it goes on that this project knows: torchtitan's text data over classes of
    # `datasets`; of any other loader no comparison at the start proves what it does later
    transparent: bool | None = None


class DataOpened(RankEvent, kw_only=True):
    """The rank has opened a slot's data: at its beginning, or again after the last committed batch."""

    slot: int  # share of the data
    shard: int  # the rank's part of it, by its number in the whole job
    num_shards: int  # parts that the data of the whole job is cut into
    first_batch: int  # number of the batch that it has read first, from 0
    # whether that was the batch which follows there; null where nobody had read it before, as at the beginning
    exact: bool | None


class TrainingFinished(RankEvent, kw_only=True):
    """The last step is made, and all groups hold the final state."""

    step: int  # number of the last step
    tokens: int  # tokens that all groups have trained on
    digest: str | None  # hash of this rank's part of the final state, hex; null where digests are off
    lineage: str  # names the final state


class CameTooLate(RankEvent, kw_only=True):
    """The job had made its last step before this worker's group came, and the group ends."""

    step: int  # number of the last step


class Drained(RankEvent, kw_only=True):
    """The worker leaves because it was asked to."""

    step: int  # committed steps of this group
    reason: str  # who asked, or why it could not finish its step
    in_order: bool  # whether it finished its step first
    digest: str | None = None  # hash of this rank's part of the state, hex; only in order
    lineage: str | None = None  # names that state; only in order
    # batches of the round that it broke off, as this rank read them: they are void, and trained again
    void: list[Batches] | None = None


class Hung(RankEvent, kw_only=True):
    """The training thread made no progress for `hang_timeout_seconds`; the worker ends itself."""

    step: int  # committed steps of this group


class RankSilent(RankEvent, kw_only=True):
    """Ranks of the group have no heartbeat any more. Rank 0 ends itself, so that the group starts again."""

    ranks: list[int]  # the silent ones
    hosts: list[str]  # their hosts, in the same order
    seconds: float  # how long they were silent


# Exchanges that do not commit


class ExchangeFailed(RankEvent, kw_only=True):
    """An exchange broke on some rank of this group; it is repeated from the same gradients."""

    error: str  # what broke it
    seconds: float  # since its begin
    step: int  # committed steps of this group


class Waiting(RankEvent, kw_only=True):
    """The exchange worked and the step cannot be committed now; announced once until a step is."""

    step: int  # committed steps of this group
    participants: list[int]  # groups with gradients in that exchange
    reason: str  # too few groups, or a joiner that the others wait for
    slots: list[int] | None = None  # groups that the step waits for
    why: str | None = None  # why, as in `Waited`: "asked" or "too_few"


class WaitingToEnd(RankEvent, kw_only=True):
    """The group holds the final state and waits for groups that lack it, or were not heard of; once for each set."""

    step: int  # committed steps of this group
    slots: list[int]  # groups that it waits for
    seconds: float  # how long it waits at most


class EndedWithout(RankEvent, kw_only=True):
    """The group ends, though some groups never came for the final state: `FINISH_SECONDS` passed."""

    step: int  # committed steps of this group
    slots: list[int]  # groups without which the job ends
    seconds: float  # how long it waited for them


class GradientExcluded(RankEvent, kw_only=True):
    """Gradients that are not finite are left out of a step."""

    step: int  # the step
    slots: list[int]  # groups whose gradients they are


class DigestMismatch(RankEvent, kw_only=True):
    """The groups' states differ."""

    step: int  # committed steps
    digests: dict[int, str]  # each group's digest of its state, hex
    lineages: dict[int, str]  # each group's lineage
    # groups whose state is not the one that the job goes on with; none in a tie, which ends the run
    minority: list[int]


class Straggler(RankEvent, kw_only=True):
    """A group has become slower than `straggler.FACTOR` allows."""

    slot: int  # the group
    factor: float  # its own seconds of a step / the median of the others'
    step: int  # committed steps


class StragglerRecovered(RankEvent, kw_only=True):
    """A straggler is as fast as the others again."""

    slot: int  # the group
    factor: float  # its own seconds of a step / the median of the others'
    step: int  # committed steps


# Links and strangers


class PeerSilent(RankEvent, kw_only=True):
    """Members of an exchange do not heartbeat any more; it is broken off."""

    slots: list[int]  # the silent groups
    seconds: float  # of silence, at most


class GroupLost(RankEvent, kw_only=True):
    """Another group was not heard of for too long: its host is lost, it is frozen, or it is cut off.

    Announced by rank 0 of the lowest group that lives and has taken part in a step, and again when the silence has
    grown fourfold. A group that left in order, or never came, is not lost. Neither is a group that its agent restarts:
    the agent's events, which the survivor does not read, have the last word.
    """

    slot: int  # the group that is lost
    seconds: float  # since its last heartbeat
    step: int  # committed steps of the group that announces it
    last_step: int | None = None  # last step that the lost group took part in, where the survivor knows


class GroupBack(RankEvent, kw_only=True):
    """A group that was lost is heard of again; its own events say what it does."""

    slot: int  # the group
    seconds: float  # how long it was silent
    step: int  # committed steps of the group that announces it


class LeftOut(RankEvent, kw_only=True):
    """Groups have gone on without this one, which was silent for a while; its exchange is broken off, it comes back."""

    members: list[int]  # groups that have gone on


class LinkDead(RankEvent, kw_only=True):
    """Groups live and cannot be reached from this one."""

    slots: list[int]  # those groups


class Outside(RankEvent, kw_only=True):
    """The others go on without this group, because it and some of them cannot reach each other; it keeps its state."""

    members: list[int]  # groups that go on
    unreached: list[int]  # those of them that it cannot reach


class LinkBack(RankEvent, kw_only=True):
    """A group that was outside comes back."""

    slots: list[int]  # groups that can be reached again, or are gone


class LighthouseMoved(RankEvent, kw_only=True):
    """The group has followed the lighthouse to another place, or to another process at the same one."""

    address: str  # where it is now, http://host:port
    former: str  # where it was
    job: str  # Slurm's id of its job; empty outside Slurm


class ForeignMember(RankEvent, kw_only=True):
    """The lighthouse names a member that is none of this job's groups, and it is left aside."""

    member: str  # its name at the lighthouse
    reason: str  # what makes it a stranger


# Heals


class HealStarted(RankEvent, kw_only=True):
    """The group begins to fetch the job's state."""

    donor: int  # the group that it was sent to
    donors: list[int] = []  # the groups that it fetches from, each a part
    from_step: int  # step after which the state is that it fetches
    step: int  # the same


class HealFinished(RankEvent, kw_only=True):
    """The worker holds the job's state; the group contributes to the next step."""

    donor: int  # the group that it was sent to; others may have given parts of it
    from_step: int  # step after which the fetched state is
    step: int  # step after which the state is now
    bytes: int  # fetched by this rank
    seconds: float  # from the begin of the heal
    fetch_seconds: float  # of that, until the state was there
    replayed: int  # queued updates that were applied to it


class HealFailed(RankEvent, kw_only=True):
    """A heal is given up; another donor is asked."""

    donor: int  # the group that it should have come from
    from_step: int  # step after which the state is
    error: str  # why


class DonorLost(RankEvent, kw_only=True):
    """One of several donors gives nothing any more; the others give its part."""

    donor: int  # the group
    from_step: int  # step after which the state is
    error: str  # why


class CatchUpRenewed(RankEvent, kw_only=True):
    """The group has queued as many updates as it may, and fetches a newer state: that is likely to be in time."""

    donor: int  # the group that it has fetched from
    from_step: int  # step after which the state is that it gives up
    reason: str  # why its queue is full


class CatchUpWaiting(RankEvent, kw_only=True):
    """The group can queue no more updates, or replays them more slowly than the others make new ones; they wait now."""

    donor: int  # the group that it fetches from
    step: int  # step after which the state is that it will have
    reason: str = ""  # why


class StateServed(RankEvent, kw_only=True):
    """A donor's rank has served its state, or a part of it, to a joiner."""

    joiner: int  # the group
    step: int  # step after which the state is
    bytes: int  # that it gave
    copy_seconds: float  # the copy of the state: so long training stood still at most, for no update can pass it
    serve_seconds: float  # the transfer, beside training


class RolledBack(RankEvent, kw_only=True):
    """The latest state is lost with its groups; this group goes on from its own."""

    step: int  # committed steps of this group
    lost: int  # steps that are lost


class StartedAnew(RankEvent, kw_only=True):
    """A group that was restarted begins with step 1, because nobody holds a state."""

    step: int  # 0


# Checkpoints


class CheckpointSaved(RankEvent, kw_only=True):
    """Rank 0 of the writing group: a checkpoint is complete."""

    step: int  # torchtitan's step after which it is, as its folder is named; not the number of a round
    seconds: float  # from its begin
    model_only: bool = False  # training cannot go on from it (`checkpoint.last_save_model_only`)


class SavingBeforeLeaving(RankEvent, kw_only=True):
    """Rank 0 of a group that leaves, and with it the job's state: the group saves that state first."""

    step: int  # torchtitan's step after which it is, as its folder is named; not the number of a round
    seconds_left: float  # of `drain_timeout_seconds`; then the group ends, also in the midst of the save
    longest_seconds: float | None = None  # what the longest save of this process took, if it has made one

    @property
    def shortage(self) -> str:
        """Why the save may not be complete in time, and what to do; empty if it should be."""
        if self.longest_seconds is None or self.longest_seconds <= self.seconds_left:
            return ""
        return (
            f"{self.seconds_left:.1f} s are left, and a save took {self.longest_seconds:.1f} s; raise "
            "fault_tolerance.drain_timeout_seconds, and the platform's own limit if that is shorter"
        )


class CheckpointFailed(RankEvent, kw_only=True):
    """A checkpoint could not be written; the next due step tries again."""

    step: int  # torchtitan's step after which it would be
    error: str  # why
    latest: int | None = None  # step of the latest complete checkpoint, 0 without any


class CheckpointWithdrawn(RankEvent, kw_only=True):
    """Rank 0 of the writing group: a checkpoint of a state that turned out to be corrupt is removed."""

    step: int  # torchtitan's step after which it was


class CheckpointSkipped(RankEvent, kw_only=True):
    """Rank 0: a damaged checkpoint is passed over for an older one, or for the one of load_step."""

    step: int  # torchtitan's step after which the damaged one is
    reason: str  # what is wrong with it
    instead: int  # step of the checkpoint that is loaded


class CheckpointSetAside(RankEvent, kw_only=True):
    """Rank 0 of the writing group: a checkpoint of another job is renamed, for this job went back before it."""

    step: int  # torchtitan's step after which the checkpoint is that was saved just now
    folder: str  # new name of the other one, in the folder of checkpoints


class CheckpointLoaded(RankEvent, kw_only=True):
    """The worker goes on from a checkpoint."""

    step: int  # torchtitan's step after which it is, as its folder is named; not the number of a round
    lineage: str  # names its state


class DataReset(RankEvent, kw_only=True):
    """The data begins anew behind a checkpoint, so that batches may be trained again."""

    step: int  # torchtitan's step after which the checkpoint is
    reason: str  # why its place in the data does not fit, or is not wanted
    asked: bool = False  # the config asks for it (`checkpoint.exclude_from_loading`)


# Agents


class WorkerExited(GroupEvent, kw_only=True):
    """A worker ended."""

    rank: int = -1
    worker_pid: int  # its process
    reason: str  # in words
    stopped: bool  # whether it ended because of another rank, or because the run was stopped
    code: int | None = None  # its exit status, if it ended by itself
    signal: str | None = None  # name of the signal that ended it, if one did
    # the exception that ended it: its type and the first line of its message; with code 0: that it ended too early
    error: str | None = None
    error_kind: str | None = None  # the exception's type by itself, such as "ConfigError"
    # true where the reason may go by itself (a network, a lighthouse, other groups), or a fault was injected into the
    # attempt
    transient: bool | None = None
    # file and line that raised the exception: of the user's code, else of the library nearest to it; a path below the
    # working folder or the installed packages is given from there
    where: str | None = None
    log: str | None = None  # path of its log, where it failed of itself
    host: str | None = None  # name of its host, Slurm's where it has one

    @property
    def severity(self) -> Severity:
        return "notice" if self.stopped or self.cause is None else "failure"

    @property
    def is_mistake(self) -> bool:
        """Whether the worker found a mistake in its config."""
        return self.code == 2 and self.error_kind == CONFIG_ERROR

    @property
    def cause(self) -> str | None:
        """What ended the worker: a signal's name or an exit code; None where it ended well."""
        if self.signal is None and self.code == 0 and self.error is None:
            return None
        return self.signal or (None if self.code is None else f"exit code {self.code}")


class HostLeft(GroupEvent, kw_only=True):
    """So many workers have died on a host that the group leaves it, to be started elsewhere."""

    host: str  # its name
    deaths: int  # attempts of all groups that ended there by a worker's death, within the window
    reason: str  # in words


class AgentEnded(GroupEvent, kw_only=True):
    """The agent of a group died unexpectedly, or could not be started.

    The launcher writes this event once the agent's workers have ended as well. `attempt` is the attempt that ended with
    the agent. If the group is started again, the next agent writes `replica_restarted`, else `replica_gave_up` follows.
    """

    agent_pid: int | None  # its process; None if the agent could not be started
    reason: str  # in words, such as "its agent was killed by SIGKILL"
    restarts: bool  # whether the group is started again
    code: int | None = None  # exit status of the agent, if it ended by itself
    signal: str | None = None  # name of the signal that ended it, if one did
    log: str | None = None  # path of the agent's log

    @property
    def cause(self) -> str:
        """The cause in short: "agent: SIGKILL", "agent: exit code 1" or "agent: not started"."""
        if self.signal:
            return f"agent: {self.signal}"
        return "agent: not started" if self.code is None else f"agent: exit code {self.code}"


class ReplicaRestarted(GroupEvent, kw_only=True):
    """A group is started again; `attempt` is the new one."""

    reason: str  # why its last attempt ended
    standby: bool  # whether its workers had everything imported: forks


class ReplicaGaveUp(GroupEvent, kw_only=True):
    """A group is not started again. Announced by its agent, or by the launcher where that ended itself."""

    rank: int | None = None  # the rank that failed first; left out where the group's agent ended
    reason: str  # why its last attempt ended, and why there is no other
    log: str  # path of the log of that rank, else of the agent
    error: str  # the exception that ended it; without one the line of the log that says why
    error_kind: str | None = None  # the exception's type by itself; left out without one
    # why, as a code: "config", "final", "crash loop", "network", "restarts" (none is left), "host" (it is suspected),
    # "lost" (it was silent when all others had ended)
    cause: str | None = None

    @property
    def mistake(self) -> str:
        """The mistake in the config that ended the group, which only a worker could find; empty for other causes."""
        return self.error.removeprefix(f"{CONFIG_ERROR}: ") if self.cause == "config" else ""


class SpareTookOver(GroupEvent, kw_only=True):
    """A spare group takes the place of one that is lost; `attempt` is its first."""


# The launcher


class LaunchStarted(LaunchEvent, kw_only=True):
    """A run is launched."""

    replicas: int  # replica groups
    ranks_per_replica: int  # ranks of each
    spares: int  # spare groups
    job_id: str  # name of the job at the lighthouse
    config_file: str | None = None  # path of the job's TOML, as it was given
    # fields that differ from the launch that it goes on from, by their full names; only with --resume, where
    # --resume-with has named those that are not harmless
    changed: dict[str, ChangedField] | None = None

    @property
    def allowed(self) -> list[str]:
        """Return the changes of the arithmetic and of the data, in words."""
        changed = (self.changed or {}).items()
        return [change.describe(name) for name, change in changed if change.kind != "harmless"]


class LaunchStopping(LaunchEvent, kw_only=True):
    """All groups are asked to leave."""

    reason: str  # who asked: Ctrl-C, SIGTERM, or that its time is up
    drain_seconds: float  # how long they may take


NOT_BEGUN = "it had not begun to train"
"""Why a rank left at once: `Drained.reason`."""


class LaunchFinished(LaunchEvent, kw_only=True):
    """The launcher ends, as its last event."""

    code: int  # its exit status; 130 (Ctrl-C), 143 (SIGTERM), 129 (SIGHUP) where somebody stopped the run
    reason: str  # in words
    signal: str | None = None  # SIGINT (Ctrl-C), SIGTERM or SIGHUP, if that stopped the run: nothing has failed then
    # true where the launch itself failed, as when no lighthouse could be kept, and none of its groups
    own_failure: bool | None = None

    @property
    def severity(self) -> Severity:
        return "failure" if self.code != 0 and self.signal is None else "notice"


class LighthouseStarted(LaunchEvent, kw_only=True):
    """A lighthouse is started, the first or another one."""

    lighthouse_pid: int  # its process
    address: str  # http://host:port


class LighthouseRestarted(LaunchEvent, kw_only=True):
    """A lighthouse listens again in place of one that ended."""

    reason: str  # how the last one ended
    seconds: float  # without a lighthouse
    address: str  # http://host:port, the same as before


# Chaos


class ChaosStarted(ChaosEvent, kw_only=True):
    """The schedule of a plan begins."""

    seed: int  # what all that is random follows from
    plan: str  # its name
    schedule: str  # in words


class ChaosFinished(ChaosEvent, kw_only=True):
    """Nothing more will be injected."""

    injected: int  # faults that this plan has injected; a shot that kills a group to disturb its heal is two
    skipped: int  # shots that hit nobody


class FaultEvent(ChaosEvent, kw_only=True):
    """Announced by a chaos runner, by a script, or, with replica, rank and attempt, by the chaos agent in a worker."""

    fault: str  # its kind
    target: Target | None  # whom it hits


class FaultInjected(FaultEvent, kw_only=True):
    """A target is about to be hit."""

    fault: str  # its kind
    target: Target  # whom it hits
    seed: int | None  # of the shot; null where nothing about it is random
    shot: int | None = None  # number of the shot in the plan; one shot may hit several groups
    params: dict[str, int | float | str] | None = None  # parameters of the fault
    step: int | None = None  # committed steps of the group, where the agent knows
    tensor: str | None = None  # name of the tensor of which a bit is flipped
    element: list[int] | None = None  # its index in that tensor
    bit: int | None = None  # which bit of it
    bytes: int | None = None  # size of the message that is corrupted


class FaultUndone(FaultEvent, kw_only=True):
    """The fault in a target is undone, or its time is over."""

    fault: str  # its kind
    target: Target  # whom it hit
    shot: int  # number of the shot in the plan


class FaultSkipped(FaultEvent, kw_only=True):
    """A shot, or one target of it, is not injected."""

    fault: str  # its kind
    target: Target | None  # whom it should have hit; null where nobody was chosen
    shot: int  # number of the shot in the plan
    reason: str  # why
    seed: int | None = None  # of the shot; only by an agent


ABSTRACT: tuple[type[Event], ...] = (Event, RankEvent, GroupEvent, LaunchEvent, ChaosEvent, LogEvent, FaultEvent)
"""Nobody announces these; they are what the others are derived from."""


FAILURES: tuple[type[Event], ...] = (
    AgentEnded,
    DigestMismatch,
    GradientExcluded,
    GroupLost,
    Hung,
    ReplicaGaveUp,
)
"""Something failed that people should look at."""


def kinds(base: type[Event] = Event) -> Iterator[type[Event]]:
    """Yield the classes of all events below a class, in the order in which they were defined.

    A program with events of its own, such as a benchmark, derives their classes; they are read where they are imported.
    """
    for kind in base.__subclasses__():
        if kind not in ABSTRACT:
            yield kind
        yield from kinds(kind)


# docs/events.md

_HEAD = """\
# Events

<!-- Made by `python -m titan_ft.run.events > docs/events.md`; edit titan_ft/run/events.py instead. -->

Every process of a run appends what happens to a file of its own, `RUN_DIR/events/*.jsonl`: one JSON object a line. From
64 MiB on a file NAME.jsonl is followed by NAME.2.jsonl, and so on. A line is written in one piece and at once, so that
a process which is killed leaves whole lines, but for the last one at most.
On a disk without room the events wait in memory, and are written in their order when there is room again. A file that
is empty, or ends without a newline, is cut: its process had more to write, and may have been killed before it could.
Names and meanings are a contract: new events and new fields may come, what is here stays. A reader skips what it does
not know.

A field marked *optional* is in a line only when it has a value; `null` is written where that is said. A
number that is not finite is `null`.

Every line has:

"""


def markdown() -> str:
    """Return docs/events.md.

    Raises:
        ValueError: nothing says what a field means.
    """
    parts = [_HEAD, _table(("event", "str", "its name, as in the headings below"), *_rows(Event))]
    for section in ABSTRACT[1:]:
        own = [k for k in section.__subclasses__() if k.__module__ == Event.__module__ and k not in ABSTRACT]
        parts.append(f"## {section.__name__}\n\n{_summary(section)}\n")
        for kind in own:
            fields = [row for row in _rows(kind) if row[0] not in Event.__struct_fields__]
            parts.append(f"### `{_snake(kind.__name__)}`\n\n{_summary(kind)}\n")
            parts += [_table(*fields)] if fields else []
    for part in (Batches, ChangedField, Setup, Target, Waited, WorkerConfig):
        parts.append(f"## {part.__name__}\n\n{_summary(part)}\n\n{_table(*_rows(part))}")
    return "\n".join(parts)


_FIELD = re.compile(r"((?:^ +# .*\n)*)^ +(\w+): [^#\n]*?(?:  # (.*))?$", re.MULTILINE)


def _summary(kind: type) -> str:
    """Return a class's docstring in one line."""
    return " ".join(inspect.cleandoc(kind.__doc__ or "").split())


def _rows(kind: type[msgspec.Struct]) -> list[tuple[str, str, str]]:
    """Return name, type and meaning of a class's fields, in their order; the meaning is the comment beside or above."""
    meanings: dict[str, str] = {}
    for base in kind.__mro__[: kind.__mro__.index(msgspec.Struct)]:
        for above, name, beside in _FIELD.findall(inspect.getsource(base)):
            if meaning := beside or " ".join(above.replace("#", "").split()):
                meanings.setdefault(name, meaning)
    required = {field.name for field in msgspec.structs.fields(kind) if field.required}
    rows = []
    for name in kind.__struct_fields__:
        if name not in meanings:
            raise ValueError(f"{kind.__name__}.{name} needs a comment that says what it means")
        form = str(next(base.__annotations__[name] for base in kind.__mro__ if name in base.__annotations__))
        if name not in required and form.endswith(" | None"):
            form = f"{form.removesuffix(' | None')}, *optional*"
        rows.append((name, form.replace("None", "null").replace("|", "\\|"), f"{meanings[name]}."))
    return rows


def _table(*rows: tuple[str, str, str]) -> str:
    lines = ["| field | type | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {form} | {meaning} |" for name, form, meaning in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    # By its own name: as __main__ this module has classes of its own.
    from titan_ft.run import events

    print(events.markdown(), end="")
