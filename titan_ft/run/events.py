# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The events of a run: one class per event, which is the only place that knows its name and its fields.

A field without a default is in every line, as null where there is nothing to tell; one whose default is None is in a
line only when it is told. Numbers that are not finite are null. `python -m titan_ft.run.events` prints docs/events.md.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import msgspec


def _snake(name: str) -> str:
    """Return the name of an event, from that of its class."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Event(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="event", tag=_snake):
    """Something that happened. `EventLog.emit` fills in what stands here.

    Attributes:
        time: Unix seconds.
        mono: seconds of the host's monotonic clock, which nobody sets: beside it, a wall clock that was set shows.
        pid: the process that tells it.
        replica: the replica group that it is about.
        rank: the rank in that group.
        attempt: how often that group was started before.
    """

    time: float = -1.0  # -1 until it is filled in
    mono: float = -1.0
    pid: int = -1
    replica: int | None = None
    rank: int | None = None
    attempt: int | None = None

    @property
    def name(self) -> str:
        """Return its name, which is the field `event` of its line."""
        return str(self.__struct_config__.tag)


class RankEvent(Event, kw_only=True):
    """Told by a worker, of itself or, where all ranks of a group come to the same finding, of its group."""

    replica: int = -1
    rank: int = -1
    attempt: int = -1


class GroupEvent(Event, kw_only=True):
    """Told of a group by its supervisor; `spare_took_over` by the launcher."""

    replica: int = -1
    attempt: int = -1


class LaunchEvent(Event, kw_only=True):
    """Told by the launcher."""


class ChaosEvent(Event, kw_only=True):
    """Told by whoever injects faults: the chaos runner (in the launcher, or `titan-ft chaos`), or a script."""


# Parts of events


class WorkerConfig(msgspec.Struct, kw_only=True):
    """What a reader of the history needs of a worker's config: fields of `[fault_tolerance]` by their own names.

    Attributes:
        group_size: replica groups of the job.
        min_replica_size: groups that a step needs.
        digest_every: steps from one digest to the next; 0 takes none.
        batch_policy: "shrink" or "constant".
        lr_policy: what becomes of the LR where part of the batch is missing.
        catch_up: "replay", or "wait": the others wait for a joiner.
        hang_timeout_seconds: without progress for so long a worker ends itself; 0 never does.
        chaos: whether the worker has a chaos agent.
        steps: `training.steps`.
        checkpoint: `checkpoint.enable`.
    """

    group_size: int
    min_replica_size: int
    digest_every: int
    batch_policy: str
    lr_policy: str
    catch_up: str
    hang_timeout_seconds: float
    chaos: bool
    steps: int
    checkpoint: bool


class Batches(msgspec.Struct, kw_only=True):
    """Consecutive batches of a slot.

    Attributes:
        slot: share of the data that they are of.
        first_batch: number of the first one in its slot, from 0.
        num_batches: how many.
        checksum: CRC-32 over the bytes of their inputs and labels, hex.
    """

    slot: int
    first_batch: int
    num_batches: int
    checksum: str


class Target(msgspec.Struct, omit_defaults=True, frozen=True):
    """Whom a fault hits: a rank, a group (no rank) or the lighthouse.

    Attributes:
        replica: the group.
        rank: the rank of it.
        lighthouse: true for the lighthouse, else left out.
    """

    replica: int | None = None
    rank: int | None = None
    lighthouse: bool = False


# A worker's life and its steps


class WorkerStarted(RankEvent, kw_only=True):
    """A worker begins: torch is imported and the config is read.

    Attributes:
        config_digest: hash of what must be equal in the configs of all groups, hex.
        host: its host's name.
        slurm: Slurm's ids of the job and the step that it belongs to; null outside Slurm.
        config: fields of its config; left out by a trainer that is not this project's.
    """

    config_digest: str
    host: str
    slurm: dict[str, str] | None
    config: WorkerConfig | None = None


class Joined(RankEvent, kw_only=True):
    """The worker has a process group with the counterparts of its rank in the other groups.

    Attributes:
        quorum: the lighthouse's number of the quorum.
        participants: groups in it.
        step: committed steps of this group.
        quorum_seconds: from the request to the lighthouse's answer.
        rebuild_seconds: from there until the process group stood.
    """

    quorum: int
    participants: list[int]
    step: int
    quorum_seconds: float
    rebuild_seconds: float


class StepCommitted(RankEvent, kw_only=True):
    """A step is committed and applied.

    Attributes:
        step: its number, from 1.
        lineage: names the state that it made, hex; the same in all groups that made it.
        parent: lineage of the state that it changed; twelve zeros for the initial one.
        participants: groups whose gradients are in it.
        tokens: tokens with a label of all participants.
        loss: mean loss over those; null on a rank that does not compute it (pipeline), or where it is not finite.
        own_tokens: those of this group; 0 where it is no participant.
        own_loss: mean loss over those; null as above, and without any.
        grad_norm: before clipping; null where it is not finite.
        lr: learning rate of the update.
        seconds: all of the step, of this rank.
        exchanges: exchanges that it took, those that broke included.
        exchange_seconds: of that, from the end of backward to the commit.
        compute_seconds: of that, forward and backward.
        apply_seconds: of that, clipping and the optimizer.
        forward_passes: microbatches that this rank computed.
        data: batches of its own slot that this rank read; null without any.
        extra_data: batches that it read of the slots of absent groups.
        batches: first batch and number of batches that the step trained, by slot.
        digest: hash of this rank's part of the state, hex; every `digest_every` steps.
    """

    step: int
    lineage: str
    parent: str
    participants: list[int]
    tokens: int
    loss: float | None
    own_tokens: int
    own_loss: float | None
    grad_norm: float | None
    lr: float | None
    seconds: float
    exchanges: int
    exchange_seconds: float
    compute_seconds: float
    apply_seconds: float
    forward_passes: int
    data: Batches | None
    extra_data: list[Batches]
    batches: dict[int, tuple[int, int]]
    digest: str | None = None

    @property
    def contributed(self) -> bool:
        """Whether this group's gradient is in the step."""
        return self.replica in self.participants

    def readings(self) -> Iterator[Batches]:
        """Yield what this rank read for the step."""
        if self.data is not None:
            yield self.data
        yield from self.extra_data


class TrainingFinished(RankEvent, kw_only=True):
    """The last step is made, and all groups hold the final state.

    Attributes:
        step: number of the last step.
        tokens: tokens that all groups have trained on.
        digest: hash of this rank's part of the final state, hex; null where digests are off.
        lineage: names the final state.
    """

    step: int
    tokens: int
    digest: str | None
    lineage: str


class Drained(RankEvent, kw_only=True):
    """The worker leaves because it was asked to.

    Attributes:
        step: committed steps of this group.
        reason: who asked, or why it could not finish its step.
        in_order: whether it finished its step first.
        digest: hash of this rank's part of the state, hex; only in order.
        lineage: names that state; only in order.
    """

    step: int
    reason: str
    in_order: bool
    digest: str | None = None
    lineage: str | None = None


class Hung(RankEvent, kw_only=True):
    """The training thread made no progress for `hang_timeout_seconds`; the worker ends itself.

    Attributes:
        step: committed steps of this group.
    """

    step: int


class RankSilent(RankEvent, kw_only=True):
    """Rank 0 has not heard of other ranks of its group for too long, and ends itself.

    Attributes:
        ranks: the silent ones.
        hosts: their hosts, in the same order.
        seconds: how long they were silent.
    """

    ranks: list[int]
    hosts: list[str]
    seconds: float


# Exchanges that do not commit


class ExchangeFailed(RankEvent, kw_only=True):
    """An exchange broke on some rank of this group; it is repeated from the same gradients.

    Attributes:
        error: what broke it.
        seconds: since its begin.
        step: committed steps of this group.
    """

    error: str
    seconds: float
    step: int


class Waiting(RankEvent, kw_only=True):
    """The exchange worked and the step cannot be committed now; told once until a step is.

    Attributes:
        step: committed steps of this group.
        participants: groups with gradients in that exchange.
        reason: too few groups, or a joiner that the others wait for.
    """

    step: int
    participants: list[int]
    reason: str


class GradientExcluded(RankEvent, kw_only=True):
    """Gradients that are not finite are left out of a step.

    Attributes:
        step: the step.
        slots: groups whose gradients they are.
    """

    step: int
    slots: list[int]


class DigestMismatch(RankEvent, kw_only=True):
    """The groups' states differ.

    Attributes:
        step: committed steps.
        digests: each group's digest of its state, hex.
        lineages: each group's lineage.
        minority: groups whose state is not the one that the job goes on with; none in a tie, which ends the run.
    """

    step: int
    digests: dict[int, str]
    lineages: dict[int, str]
    minority: list[int]


class Straggler(RankEvent, kw_only=True):
    """A group has become slower than `straggler_factor` allows.

    Attributes:
        slot: the group.
        factor: its own seconds of a step / the median of the others'.
        step: committed steps.
    """

    slot: int
    factor: float
    step: int


class StragglerRecovered(RankEvent, kw_only=True):
    """A straggler is as fast as the others again.

    Attributes:
        slot: the group.
        factor: its own seconds of a step / the median of the others'.
        step: committed steps.
    """

    slot: int
    factor: float
    step: int


# Links and strangers


class PeerSilent(RankEvent, kw_only=True):
    """Members of an exchange do not heartbeat any more; it is broken off.

    Attributes:
        slots: the silent groups.
        seconds: of silence, at most.
    """

    slots: list[int]
    seconds: float


class LinkDead(RankEvent, kw_only=True):
    """Groups live and cannot be reached from this one.

    Attributes:
        slots: those groups.
    """

    slots: list[int]


class Outside(RankEvent, kw_only=True):
    """The others go on without this group, because it and some of them cannot reach each other; it keeps its state.

    Attributes:
        members: groups that go on.
        unreached: those of them that it cannot reach.
    """

    members: list[int]
    unreached: list[int]


class LinkBack(RankEvent, kw_only=True):
    """A group that was outside comes back.

    Attributes:
        slots: groups that can be reached again, or are gone.
    """

    slots: list[int]


class ForeignMember(RankEvent, kw_only=True):
    """The lighthouse names a member that is none of this job's groups, and it is left aside.

    Attributes:
        member: its name at the lighthouse.
        reason: what makes it a stranger.
    """

    member: str
    reason: str


# Heals


class HealStarted(RankEvent, kw_only=True):
    """The group begins to fetch the job's state from a donor.

    Attributes:
        donor: the group that it fetches from.
        from_step: step after which the state is that it fetches.
        step: the same.
    """

    donor: int
    from_step: int
    step: int


class HealFinished(RankEvent, kw_only=True):
    """The worker holds the job's state; the group contributes to the next step.

    Attributes:
        donor: the group that it was fetched from.
        from_step: step after which the fetched state is.
        step: step after which the state is now.
        bytes: fetched by this rank.
        seconds: from the begin of the heal.
        fetch_seconds: of that, until the state was there.
        replayed: queued updates that were applied to it.
    """

    donor: int
    from_step: int
    step: int
    bytes: int
    seconds: float
    fetch_seconds: float
    replayed: int


class HealFailed(RankEvent, kw_only=True):
    """A heal is given up; another donor is asked.

    Attributes:
        donor: the group that it should have come from.
        from_step: step after which the state is.
        error: why.
    """

    donor: int
    from_step: int
    error: str


class CatchUpWaiting(RankEvent, kw_only=True):
    """The group has queued as many updates as it may; from now on the others wait for its transfer.

    Attributes:
        donor: the group that it fetches from.
        step: step after which the state is that it will have.
    """

    donor: int
    step: int


class StateServed(RankEvent, kw_only=True):
    """A donor's rank has served its state to a joiner.

    Attributes:
        joiner: the group.
        step: step after which the state is.
        bytes: size of this rank's part.
        copy_seconds: the copy of the state, while training stood still.
        serve_seconds: the transfer, beside training.
    """

    joiner: int
    step: int
    bytes: int
    copy_seconds: float
    serve_seconds: float


class RolledBack(RankEvent, kw_only=True):
    """The latest state is lost with its groups; this group goes on from its own.

    Attributes:
        step: committed steps of this group.
        lost: steps that are lost.
    """

    step: int
    lost: int


class StartedAnew(RankEvent, kw_only=True):
    """A group that was restarted begins with step 1, because nobody holds a state.

    Attributes:
        step: 0.
    """

    step: int


# Checkpoints


class CheckpointSaved(RankEvent, kw_only=True):
    """Rank 0 of the writing group: a checkpoint is complete.

    Attributes:
        step: step after which it is.
        seconds: from its begin.
    """

    step: int
    seconds: float


class CheckpointFailed(RankEvent, kw_only=True):
    """A checkpoint could not be written; another group saves at its next commit.

    Attributes:
        step: step after which it would be.
        error: why.
    """

    step: int
    error: str


class CheckpointWithdrawn(RankEvent, kw_only=True):
    """Rank 0 of the writing group: a checkpoint of a state that turned out to be corrupt is removed.

    Attributes:
        step: step after which it was.
    """

    step: int


class CheckpointLoaded(RankEvent, kw_only=True):
    """The worker goes on from a checkpoint.

    Attributes:
        step: step after which it is.
        lineage: names its state.
    """

    step: int
    lineage: str


class DataReset(RankEvent, kw_only=True):
    """The data begins anew behind a checkpoint, so that batches may be trained again.

    Attributes:
        step: step after which the checkpoint is.
        reason: why its place in the data does not fit.
    """

    step: int
    reason: str


# Supervisors


class WorkerExited(GroupEvent, kw_only=True):
    """A worker ended.

    Attributes:
        worker_pid: its process.
        reason: in words.
        stopped: whether the supervisor ended it, because of another rank or because the run was stopped.
        code: its exit status, if it ended by itself.
        signal: name of the signal that ended it, if one did.
    """

    rank: int = -1
    worker_pid: int
    reason: str
    stopped: bool
    code: int | None = None
    signal: str | None = None

    @property
    def cause(self) -> str | None:
        """What ended the worker: a signal's name or an exit code; None where it ended well."""
        return self.signal or (f"exit code {self.code}" if self.code else None)


class ReplicaRestarted(GroupEvent, kw_only=True):
    """A group is started again; `attempt` is the new one.

    Attributes:
        reason: why its last attempt ended.
        standby: whether processes take over that have imported everything.
    """

    reason: str
    standby: bool


class ReplicaGaveUp(GroupEvent, kw_only=True):
    """A group is not started again.

    Attributes:
        reason: why its last attempt ended, and why there is no other.
        log: path of the log of the rank that failed first, which `rank` names.
        error: the line of it that says why.
    """

    rank: int = -1
    reason: str
    log: str
    error: str


class SpareTookOver(GroupEvent, kw_only=True):
    """A spare group takes the place of one that is lost; `attempt` is its first."""


# The launcher


class LaunchStarted(LaunchEvent, kw_only=True):
    """A run is launched.

    Attributes:
        replicas: replica groups.
        ranks_per_replica: ranks of each.
        spares: spare groups.
        job_id: name of the job at the lighthouse.
    """

    replicas: int
    ranks_per_replica: int
    spares: int
    job_id: str


class LaunchStopping(LaunchEvent, kw_only=True):
    """All groups are asked to leave.

    Attributes:
        reason: who asked.
        drain_seconds: how long they may take.
    """

    reason: str
    drain_seconds: float


class LaunchFinished(LaunchEvent, kw_only=True):
    """The launcher ends, as its last event.

    Attributes:
        code: its exit status.
        reason: in words.
    """

    code: int
    reason: str


class LighthouseStarted(LaunchEvent, kw_only=True):
    """A lighthouse is started, the first or another one.

    Attributes:
        lighthouse_pid: its process.
        address: http://host:port.
    """

    lighthouse_pid: int
    address: str


class LighthouseRestarted(LaunchEvent, kw_only=True):
    """A lighthouse listens again in place of one that ended.

    Attributes:
        reason: how the last one ended.
        seconds: without a lighthouse.
        address: http://host:port, the same as before.
    """

    reason: str
    seconds: float
    address: str


# Chaos


class ChaosStarted(ChaosEvent, kw_only=True):
    """The schedule of a plan begins.

    Attributes:
        seed: what all that is random follows from.
        plan: its name.
        schedule: in words.
    """

    seed: int
    plan: str
    schedule: str


class ChaosFinished(ChaosEvent, kw_only=True):
    """Nothing more will be injected.

    Attributes:
        injected: shots that hit somebody.
        skipped: shots that did not.
    """

    injected: int
    skipped: int


class FaultEvent(ChaosEvent, kw_only=True):
    """Told by a chaos runner, by a script, or, with replica, rank and attempt, by the chaos agent in a worker.

    Attributes:
        fault: its kind.
        target: whom it hits.
    """

    fault: str
    target: Target | None


class FaultInjected(FaultEvent, kw_only=True):
    """A target is about to be hit.

    Attributes:
        fault: its kind.
        target: whom it hits.
        seed: of the shot; null where nothing about it is random.
        shot: number of the shot in the plan; one shot may hit several groups.
        params: parameters of the fault.
        step: committed steps of the group, where the agent knows.
        tensor: name of the tensor of which a bit is flipped.
        element: its index in that tensor.
        bit: which bit of it.
        bytes: size of the message that is corrupted.
    """

    fault: str
    target: Target
    seed: int | None
    shot: int | None = None
    params: dict[str, int | float | str] | None = None
    step: int | None = None
    tensor: str | None = None
    element: list[int] | None = None
    bit: int | None = None
    bytes: int | None = None


class FaultUndone(FaultEvent, kw_only=True):
    """A target is left alone again.

    Attributes:
        fault: its kind.
        target: whom it hit.
        shot: number of the shot in the plan.
    """

    fault: str
    target: Target
    shot: int


class FaultSkipped(FaultEvent, kw_only=True):
    """A shot, or one target of it, is not injected.

    Attributes:
        fault: its kind.
        target: whom it should have hit; null where nobody was chosen.
        shot: number of the shot in the plan.
        reason: why.
        seed: of the shot; only by an agent.
    """

    fault: str
    target: Target | None
    shot: int
    reason: str
    seed: int | None = None


ABSTRACT: tuple[type[Event], ...] = (Event, RankEvent, GroupEvent, LaunchEvent, ChaosEvent, FaultEvent)
"""Nobody tells these; they are what the others are derived from."""


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

Every process of a run appends what happens to a file of its own, `RUN_DIR/events/*.jsonl`: one JSON object a line. It
is written in one piece and at once, so that a process which is killed leaves whole lines, but for the last one at most.
Names and meanings are a contract: new events and new fields may come, what is here stays. A reader skips what it does
not know.

A field marked *optional* is in a line only when there is something to tell; `null` is written where that is said. A
number that is not finite is `null`.

Every line has:

"""


def markdown() -> str:
    """Return docs/events.md.

    Raises:
        ValueError: a field is not described, or what is described is no field.
    """
    parts = [_HEAD, _table(("event", "str", "its name, as in the headings below"), *_rows(Event))]
    for section in ABSTRACT[1:]:
        own = [k for k in section.__subclasses__() if k.__module__ == Event.__module__ and k not in ABSTRACT]
        parts.append(f"## {section.__name__}\n\n{_summary(section)}\n")
        for kind in own:
            fields = [row for row in _rows(kind) if row[0] not in Event.__struct_fields__]
            parts.append(f"### `{_snake(kind.__name__)}`\n\n{_summary(kind)}\n")
            parts += [_table(*fields)] if fields else []
    for part in (Batches, Target, WorkerConfig):
        parts.append(f"## {part.__name__}\n\n{_summary(part)}\n\n{_table(*_rows(part))}")
    return "\n".join(parts)


def _summary(kind: type) -> str:
    """Return what a docstring says before its list of attributes."""
    return inspect.getdoc(kind).partition("\n\nAttributes:")[0].replace("\n", " ")  # type: ignore[union-attr]


def _rows(kind: type[msgspec.Struct]) -> list[tuple[str, str, str]]:
    """Return name, type and meaning of a class's fields, in their order."""
    told: dict[str, str] = {}
    for base in kind.__mro__:
        attributes = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        told = dict(re.findall(r"^ +(\w+): (.+(?:\n {8,}.+)*)", attributes, re.MULTILINE)) | told
    required = {field.name for field in msgspec.structs.fields(kind) if field.required}
    if told.keys() != set(kind.__struct_fields__):
        differing = ", ".join(sorted(told.keys() ^ set(kind.__struct_fields__)))
        raise ValueError(f"the fields of {kind.__name__} must be those that its docstring describes: {differing}")
    rows = []
    for name in kind.__struct_fields__:
        form = str(next(base.__annotations__[name] for base in kind.__mro__ if name in base.__annotations__))
        if name not in required and form.endswith(" | None"):
            form = f"{form.removesuffix(' | None')}, *optional*"
        rows.append((name, form.replace("None", "null").replace("|", "\\|"), " ".join(told[name].split())))
    return rows


def _table(*rows: tuple[str, str, str]) -> str:
    lines = ["| field | type | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {form} | {meaning} |" for name, form, meaning in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    # By its own name: as __main__ this module has classes of its own.
    from titan_ft.run import events

    print(events.markdown(), end="")
