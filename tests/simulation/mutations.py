# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Defects that the engine had, or could have. The exploration must find each of them.

Each mutation replaces functions, methods, properties or constants of the engine by name. So a line
may be moved or formatted freely, and a missing name is an error. A mutation runs in a forked
process.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch

from tests.simulation import standins
from tests.simulation.schedule import draw
from titan_ft.device import local_shard
from titan_ft.engine import (
    catch_up,
    drain,
    feed,
    heal,
    outer,
    round_strategy,
    step,
    waits,
    watchdog,
)
from titan_ft.engine import round as rounds
from titan_ft.gradients import exchange, quantize
from titan_ft.gradients.bucket import Bucket
from titan_ft.gradients.flight import Flight
from titan_ft.gradients.operations import Operations
from titan_ft.gradients.sums import Sums
from titan_ft.membership import group_collectives, membership, partition, pulse
from titan_ft.membership.control_tree import ControlTree
from titan_ft.protocol import decision, healing, member, verdict
from titan_ft.protocol.control import link as control_links
from titan_ft.protocol.control.node import Node
from titan_ft.protocol.errors import GaveUpError
from titan_ft.protocol.position import Position
from titan_ft.protocol.report import RoundReport
from titan_ft.protocol.round import Broken, Round, Update
from titan_ft.run.events import DataOpened
from titan_ft.training.checkpoint import choice as checkpoint_choice

SCHEDULES = 2000
"""Within so many schedules the exploration must find a mutation."""

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutation:
    """A defect.

    Attributes:
        name: of the function that puts the defect into the engine.
        text: description of the defect.
        apply: puts the defect into the engine.
        kinds: kinds of faults that find it soon.
        promises: it breaks one of these.
        first: first seed.
        mode: mode of the schedules, as in `schedule.draw`.
    """

    name: str
    text: str
    apply: Callable[[Patch], None]
    kinds: tuple[str, ...]
    promises: tuple[str, ...]
    first: int = 0
    mode: str = "sync"


@dataclass(frozen=True)
class Found:
    """The first schedule in which a mutation breaks a promise."""

    seed: int
    schedules: int
    promise: str
    text: str


MUTATIONS: list[Mutation] = []


def mutation(
    kinds: tuple[str, ...], promises: tuple[str, ...], first: int = 0, mode: str = "sync"
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Enter a function that applies a defect into `MUTATIONS`."""

    def enter(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        text = (apply.__doc__ or "").strip().removesuffix(".")
        MUTATIONS.append(Mutation(apply.__name__, text, apply, kinds, promises, first, mode))
        return apply

    return enter


# Tools


FAILURES: list[Exception] = []
"""Errors of the mutations themselves: a name that is gone, or another signature. They would pass
for the defect.
"""


def around(patch: Patch, owner: ModuleType | type, name: str, act: Callable[..., Any]) -> None:
    """Replace a function, method or property by `act`.

    `act` gets the former one as its first argument. A module's function is replaced under each name
    by which another module has imported it.
    """
    former = vars(owner)[name]
    call = former.fget if isinstance(former, property) else former

    @wraps(call)
    def instead(*args: Any, **kwargs: Any) -> Any:
        try:
            return act(call, *args, **kwargs)
        except Exception as error:
            if traceback.extract_tb(error.__traceback__)[-1].filename == __file__:
                FAILURES.append(error)
            raise

    if isinstance(owner, type):
        patch.setattr(owner, name, property(instead) if isinstance(former, property) else instead)
        return
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(("titan_ft.", "tests.simulation.")):
            for attribute, value in list(vars(module).items()):
                if value is former:
                    patch.setattr(module, attribute, instead)


def substitute(patch: Patch, owner: ModuleType | type, name: str, act: Callable[..., Any]) -> None:
    """Replace a function, method or property by `act`, which does not get the former one."""
    around(patch, owner, name, lambda former, *args, **kwargs: act(*args, **kwargs))


@contextlib.contextmanager
def lent(owner: object, **values: Any) -> Iterator[None]:
    """Give an object other attributes inside the context.

    Only this object changes. Other ranks run in between, and keep theirs.
    """
    former = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name in values:
        assert hasattr(owner, name), f"{type(owner).__name__} has no {name}"
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(owner)[name]
        vars(owner).update(former)


def with_verdict(made: Round, **values: Any) -> Round:
    """Return a round with another verdict."""
    return replace(made, verdict=replace(made.verdict, **values))


# The engine


@mutation(kinds=("freeze",), promises=("liveness",))
def thawed_group_waits_for_successors(patch: Patch) -> None:
    """A thawed group does not notice that the others have left its exchange."""
    substitute(patch, pulse, "find_successors", lambda own, others, quorum: [])


@mutation(kinds=("absent",), promises=("ranks never part",), first=160)
def start_by_own_clock(patch: Patch) -> None:
    """Each rank measures the wait for the first step by its own clock."""

    def start(former: Callable[..., bool], self: Any, begin_at: int) -> bool:
        own = copy.copy(self._group)
        own.clock = lambda: group_collectives.time.monotonic()
        with lent(self, _group=own):
            return former(self, begin_at)

    around(patch, step.ReplicaDimension, "start", start)


@mutation(kinds=("long",), promises=("no state given up",))
def start_beside_living_group(patch: Patch) -> None:
    """A job starts anew although a group in a long step is alive. The joiners do not see that
    group's early offer either.
    """

    def start(former: Callable[..., bool], self: Any, begin_at: int) -> bool:
        with lent(self._outsiders, has_any=lambda made: False):
            return former(self, begin_at)

    around(patch, step.ReplicaDimension, "start", start)
    substitute(patch, membership.Membership, "find_holders", lambda self: {})


@mutation(kinds=("flip", "groups_die"), promises=("counters",), first=740)
def any_state_is_final(patch: Patch) -> None:
    """A group that heals after the last step accepts any state as the final one."""

    def finish(former: Callable[..., str | None], self: Any) -> str | None:
        while (digest := former(self)) is None:
            self.heal()
        return digest

    around(patch, step.ReplicaDimension, "finish", finish)


@mutation(kinds=("cut",), promises=("no state given up", "liveness"))
def dead_links_not_reported(patch: Patch) -> None:
    """No group reports that it cannot reach another one."""
    substitute(patch, partition.Partition, "must_report", lambda self, failures: False)


@mutation(kinds=("flip", "kill"), promises=("one trajectory", "no state given up"))
def donor_shows_no_digest(patch: Patch) -> None:
    """A donor does not show the digest of its bytes, and the joiner does not require it."""

    def hold(
        former: Callable[..., healing.Healing],
        self: Any,
        step: int,
        lineage: int,
        digest: int,
        own: int,
    ) -> Any:
        shown = digest or own or 1
        return former(self, step, lineage, shown, own if digest else shown)

    def load(former: Callable[..., bool], self: Any) -> bool:
        with lent(
            self._rounds, compute_digest=lambda: self._position.set_digest(self._healing.digest)
        ):
            return former(self)

    substitute(patch, rounds.Rounds, "_digest_for_joiners", lambda self, quorum: None)
    around(patch, healing.Healing, "confirm", hold)
    around(patch, heal.Heal, "_load", load)


@mutation(kinds=("last",), promises=("no state given up",))
def queue_not_claimed(patch: Patch) -> None:
    """A joiner rolls back before it has replayed the updates in its queue."""
    substitute(patch, Position, "claimed_step", lambda self: 0 if self.corrupt else self.step)


@mutation(kinds=("tail",), promises=("no work lost",))
def one_ahead_makes_all_heal(patch: Patch) -> None:
    """One group that is ahead makes all others heal."""

    def find_step(rows: Sequence[Any], claims: Sequence[int]) -> int:
        return max(rows[rank].step for rank in claims or range(len(rows)))

    substitute(patch, verdict, "_find_step", find_step)
    substitute(patch, Position, "newest_step", lambda self: self.step)


@mutation(kinds=("lost",), promises=("liveness",))
def reader_of_nothing_not_present(patch: Patch) -> None:
    """A group that has read nothing does not count as a holder of the state."""

    def find_wait(former: Callable[..., Any], made: Round, config: Any) -> Any:
        givers = sorted({*made.verdict.contributors, *made.verdict.excluded})
        return former(with_verdict(made, ready=tuple(givers)), config)

    around(patch, decision, "_find_wait", find_wait)


@mutation(
    kinds=("kill", "drain", "freeze"), promises=("no state given up", "one trajectory", "liveness")
)
def update_keeps_digest(patch: Patch) -> None:
    """A group keeps the digest of the state before an update."""

    def advance(former: Callable[..., None], self: Position, update: Update) -> None:
        digest = self.digest
        former(self, update)
        self.digest = digest

    around(patch, Position, "advance", advance)


@mutation(kinds=("lost",), promises=("no state given up",))
def load_keeps_digest(patch: Patch) -> None:
    """A heal without a replayed update keeps the digest of the joiner's former state."""

    def load(former: Callable[..., bool], self: Any) -> bool:
        digest = self._position.digest
        with lent(
            self._rounds, compute_digest=lambda: self._position.set_digest(self._healing.digest)
        ):
            is_loaded = former(self)
        self._position.digest = digest
        return is_loaded

    around(patch, heal.Heal, "_load", load)


@mutation(kinds=("freeze", "cut_lighthouse"), promises=("exact average",))
def stale_gradient_is_added(patch: Patch) -> None:
    """A group that is behind adds its stale gradient."""

    def launch(
        former: Callable[..., Any], self: Any, newest_step: int | None, **options: Any
    ) -> Any:
        return former(self, None if newest_step is None else 2**62, **options)

    def complete(
        former: Callable[..., Any], self: RoundReport, quorum: Any, gave: bool, came: float
    ) -> Any:
        return former(self, quorum, gave and quorum.max_step <= self.newest_step, came)

    around(patch, exchange.GradientExchange, "_launch", launch)
    around(patch, RoundReport, "complete", complete)


@mutation(
    kinds=("flip", "freeze", "tail"), promises=("exact average", "one trajectory", "no work lost")
)
def strays_gradient_enters(patch: Patch) -> None:
    """The gradients of a stray enter the update."""

    def train(former: Callable[..., Any], own: Position, made: Round, config: Any) -> Any:
        return former(own, with_verdict(made, strays=()), config)

    def is_update(former: Callable[..., bool], made: Round, config: Any) -> bool:
        return former(with_verdict(made, strays=()), config)

    around(patch, decision, "_decide_training", train)
    around(patch, decision, "is_update", is_update)


@mutation(kinds=("nan",), promises=("exact average", "one trajectory"))
def nan_in_last_bucket_only(patch: Patch) -> None:
    """The exchange looks for a NaN in the last bucket only."""

    def make(former: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        former(self, *args, **kwargs)
        for bucket in self._buckets[:-1]:
            bucket.compute_total = bucket.total.zero_

    around(patch, exchange.GradientExchange, "__init__", make)


@mutation(kinds=("kill",), promises=("exact average", "one trajectory", "no state given up"))
def nccl_not_asked(patch: Patch) -> None:
    """The exchange ignores an error that NCCL reports only on request."""
    substitute(patch, Operations, "_raise_nccl_error", lambda self: None)


@mutation(kinds=("none",), promises=("exact average",))
def sums_are_no_mean(patch: Patch) -> None:
    """The sums are not divided into a mean."""

    def update(former: Callable[..., Update], self: Round, *args: Any) -> Update:
        return replace(former(self, *args), scale=1.0)

    around(patch, Round, "update", update)


@mutation(
    kinds=("many", "groups_die", "lighthouse", "cut_lighthouse"),
    promises=("every batch once", "no state given up"),
)
def doubled_data_is_taken(patch: Patch) -> None:
    """Two groups that have read the same data both enter the update."""
    substitute(patch, verdict, "_find_duplicates", lambda holders, read: ())


@mutation(kinds=("drain",), promises=("ranks never part", "no state given up", "liveness"))
def rank_leaves_on_its_own(patch: Patch) -> None:
    """A rank leaves after its leave request, although the other ranks of its group got none."""

    def after_vote(former: Callable[..., bool], self: Any) -> bool:
        if self._num_ranks == 1:
            return bool(former(self))
        self._agreed = self._agreed or self._requested
        return bool(self._agreed)

    around(patch, drain.Drain, "after_vote", after_vote)


@mutation(
    kinds=("drain",), promises=("ranks never part", "no state given up", "liveness"), first=4050
)
def note_may_come_after_the_vote(patch: Patch) -> None:
    """A note may reach a rank after the result of its sender's next vote."""

    def send_note(former: Callable[..., None], self: Any, topic: str, text: str = "") -> None:
        standins.THREADING.Thread(target=partial(former, self, topic, text)).start()

    around(patch, ControlTree, "send_note", send_note)


@mutation(
    kinds=("kill", "donor"), promises=("ranks never part", "one trajectory", "no state given up")
)
def joiner_begins_rank_by_rank(patch: Patch) -> None:
    """A rank of a joiner starts with the fetched state before all ranks of its group have it."""

    def gather(
        former: Callable[..., list[int]], self: group_collectives.GroupCollectives, value: int
    ) -> list[int]:
        return [value] if isinstance(value, catch_up.FetchStatus) else former(self, value)

    around(patch, group_collectives.GroupCollectives, "gather", gather)


@mutation(kinds=("checkpoint",), promises=("ranks never part", "no state given up", "liveness"))
def each_rank_chooses_checkpoint(patch: Patch) -> None:
    """Each rank lists the folder of checkpoints by itself."""

    def agree(
        former: Callable[..., Any], request: Any, rank: int, gather: Callable[[int], list[int]]
    ) -> Any:
        def own_first(value: int) -> list[int]:
            values = gather(value)
            return values[rank:] + values[:rank]

        return former(request, 0, own_first)

    around(patch, checkpoint_choice, "agree_on_step", agree)


@mutation(kinds=("cut", "drain"), promises=("no work lost",))
def outsider_does_not_leave(patch: Patch) -> None:
    """A group outside the largest clique leaves neither on request nor in time."""

    def look(former: Callable[..., list[str]], self: Any, lost: Any) -> list[str]:
        with lent(self, _leave_requested=lambda: False):
            return former(self, lost)

    around(patch, partition.Partition, "_probe_outside", look)
    substitute(patch, drain.Drain, "agree_to_stop_waiting", lambda self, is_answered: False)


@mutation(kinds=("nan",), promises=("ranks never part",))
def each_rank_leaves_gradients_out(patch: Patch) -> None:
    """Each rank decides by itself whether its gradients are left out."""

    def break_(
        former: Callable[..., Broken], self: Any, error: str, is_spoiled: bool, *args: Any
    ) -> Broken:
        return replace(former(self, error, is_spoiled, *args), gave_nonfinite=is_spoiled)

    around(patch, rounds.Rounds, "_record_broken", break_)


@mutation(
    kinds=("kill", "lossy"),
    promises=(
        "ranks never part",
        "one trajectory",
        "exact average",
        "liveness",
        "no state given up",
    ),
)
def rank0_asks_nobody(patch: Patch) -> None:
    """Rank 0 decides by its own findings alone."""

    def decides(former: Callable[..., str], self: Any, found: Any, decide: Any, *args: Any) -> str:
        return former(self, found, lambda said: decide(set(found)), *args)

    around(patch, ControlTree, "rank0_decides", decides)


@mutation(kinds=("kill", "lossy"), promises=("ranks never part",))
def own_vote_counts(patch: Patch) -> None:
    """Each rank obeys its own vote."""

    def agree(former: Callable[..., bool], self: Any, at: int, ok: bool) -> bool:
        former(self, at, ok)
        return ok

    around(patch, membership.Membership, "_agree_on_outcome", agree)


@mutation(kinds=("reset_own",), promises=("no state given up",))
def connection_not_made_again(patch: Patch) -> None:
    """A rank is lost when its connection within the group breaks."""
    patch.setattr(control_links, "GRACE_SECONDS", 0.0)


@mutation(kinds=("flip",), promises=("no state given up",))
def corrupt_minority_ends_all(patch: Patch) -> None:
    """A corrupt minority ends all groups."""

    def decide(former: Callable[..., Any], own: Position, outcome: Any, config: Any) -> Any:
        if isinstance(outcome, Round) and outcome.verdict.corrupt:
            outcome = with_verdict(outcome, tie=True)
        return former(own, outcome, config)

    around(patch, decision, "_decide", decide)


@mutation(kinds=("shape",), promises=("no state given up",))
def newest_group_is_right(patch: Patch) -> None:
    """The newest group decides which shape is right."""

    def admit(former: Callable[..., Any], own: member.Member, replica_ids: Any) -> Any:
        groups = member.known_members(replica_ids, own.token)
        newest = max(groups, key=lambda one: one.age)
        alike = [one for one in groups if member._kind(one) == member._kind(newest)]
        member._check_kind(own, newest, alike)
        return former(own, [one.replica_id for one in alike])

    around(patch, member, "admit", admit)


@mutation(kinds=("late",), promises=("no state given up",))
def job_needs_all_groups(patch: Patch) -> None:
    """A job starts with all of its groups only."""

    def start(former: Callable[..., Any], *args: Any) -> Any:
        found = former(*args)
        is_incomplete = isinstance(found, decision.StartTraining) and found.num_missing
        return decision.GiveUp(GaveUpError("groups are missing")) if is_incomplete else found

    around(patch, decision, "_decide_start", start)


@mutation(kinds=("kill", "freeze", "cut"), promises=("no idle traffic",))
def broken_count_is_believed(patch: Patch) -> None:
    """The exchange believes a count of givers that has broken."""

    def agree(former: Callable[..., Any], self: Any) -> Any:
        with lent(self._operations, _raise_nccl_error=lambda: None):
            return former(self)

    around(patch, Flight, "_agree_on_fragments", agree)


@mutation(kinds=("none",), promises=("no idle traffic",))
def empty_rounds_send_gradients(patch: Patch) -> None:
    """Rounds without gradients send the buckets nevertheless."""

    def agree(former: Callable[..., Any], self: Any) -> Any:
        former(self)
        return frozenset(range(self._num_fragments))

    around(patch, Flight, "_agree_on_fragments", agree)


@mutation(kinds=("shape",), promises=("one trajectory",))
def other_shape_is_admitted(patch: Patch) -> None:
    """A group of another shape is admitted."""
    substitute(patch, member, "_kind", lambda one: (one.job, one.config, ""))
    substitute(patch, member, "_shape_differences", lambda own, other: [])


@mutation(kinds=("freeze", "cut_ranks"), promises=("liveness",))
def other_hosts_not_watched(patch: Patch) -> None:
    """Only the first of a group's hosts is watched."""
    substitute(patch, Node, "report_silence", lambda self, peer, seconds, now: [])


@mutation(kinds=("hang",), promises=("nothing silent",))
def hang_ends_silently(patch: Patch) -> None:
    """A process that hangs ends without an event."""

    def make(former: Callable[..., None], self: Any, seconds: float, on_hang: Any) -> None:
        former(self, seconds, lambda: None)

    around(patch, watchdog.Watchdog, "__init__", make)


@mutation(kinds=("rejoin",), promises=("no stall for a joiner",))
def transfer_is_awaited(patch: Patch) -> None:
    """The others wait for a joiner's transfer."""

    def take(
        former: Callable[..., healing.Healing], self: healing.Healing, *args: Any
    ) -> healing.Healing:
        return former(self, *args).let_others_wait()

    around(patch, healing.Healing, "start_fetch", take)


@mutation(kinds=("last",), promises=("no stall for a joiner",))
def queue_is_replayed_at_once(patch: Patch) -> None:
    """A joiner replays its whole queue at once."""
    substitute(patch, heal._Pace, "measure_lateness", lambda self, deadline: heal._Lateness.IN_TIME)


@mutation(kinds=("fork",), promises=("liveness",))
def report_forgets_older_accusers(patch: Patch) -> None:
    """A report names only the groups that have accused this group since the previous report."""

    def report(former: Callable[..., str], self: Any, *args: Any) -> str:
        with lent(self, _members=self._accusers):
            return former(self, *args)

    around(patch, partition.Partition, "_open_seat_with_report", report)


@mutation(kinds=("fork",), promises=("one trajectory",))
def base_of_queue_not_compared(patch: Patch) -> None:
    """A joiner does not compare the base of the first update in its queue."""

    def queue(
        former: Callable[..., healing.Healing],
        self: healing.Healing,
        step: int,
        base: int,
        lineage: int,
    ) -> healing.Healing:
        is_first = step == self.from_step + 1
        return former(self, step, self.lineage if is_first else base, lineage)

    around(patch, healing.Healing, "queue_update", queue)


@mutation(kinds=("save",), promises=("no work lost",))
def withdrawn_checkpoint_counts(patch: Patch) -> None:
    """A checkpoint that was withdrawn counts as saved."""

    def observe(former: Callable[..., None], self: Position, made: Round) -> None:
        saved = max(self.saved_step, *(row.saved_step for row in made.rows))
        former(self, made)
        if made.verdict.corrupt:
            self.saved_step = saved
            self._drop_saves_ahead(made)

    def withdraw(former: Callable[..., None], self: Position) -> None:
        saved = self.saved_step
        former(self)
        self.saved_step = saved

    around(patch, Position, "observe", observe)
    around(patch, Position, "withdraw_saved", withdraw)


@mutation(kinds=("flip", "kill"), promises=("one trajectory",))
def fetched_bytes_not_compared(patch: Patch) -> None:
    """A joiner does not compare the fetched bytes with the digest that the holders agreed on."""

    def load(former: Callable[..., bool], self: Any) -> bool:
        with lent(
            self._rounds, compute_digest=lambda: self._position.set_digest(self._healing.digest)
        ):
            return former(self)

    def hold(
        former: Callable[..., healing.Healing],
        self: Any,
        step: int,
        lineage: int,
        digest: int,
        _: int,
    ) -> Any:
        return former(self, step, lineage, digest, digest)

    around(patch, healing.Healing, "confirm", hold)
    around(patch, heal.Heal, "_load", load)


@mutation(kinds=("preempt",), promises=("no work lost",))
def loaded_checkpoint_keeps_state(patch: Patch) -> None:
    """A group that has loaded a checkpoint counts as a keeper of the state."""

    def observe(former: Callable[..., None], self: Position, made: Round) -> None:
        former(self, made)
        self.keepers = tuple(made.slots(made.verdict.holders))

    around(patch, Position, "observe", observe)


@mutation(kinds=("none",), promises=("exact average", "one trajectory"))
def others_halves_ignored(patch: Patch) -> None:
    """A group ignores the bfloat16 values of the others."""

    def add_up(former: Callable[..., None], self: Any, bucket: Bucket) -> None:
        own = bucket.values.clone()
        former(self, bucket)
        if bucket.is_bfloat16:
            bucket.values.copy_(own.mul_(self._operations.num_members))

    around(patch, Flight, "_sum", add_up)


@mutation(kinds=("kill", "many"), promises=("every batch once",))
def entry_has_earlier_state(patch: Patch) -> None:
    """An entry has the loader's state before its batches."""

    def read_on(former: Callable[..., None], self: Any, num_batches: int) -> None:
        state = feed.save_loader(self.loader)
        former(self, num_batches)
        self._readings[-1].entry = replace(self._readings[-1].entry, state=state)

    around(patch, feed._Reader, "_read_on", read_on)


@mutation(kinds=("kill", "many"), promises=("nothing silent",))
def data_claims_to_go_on(patch: Patch) -> None:
    """A group that opens its data at a wrong batch reports that the data continues exactly."""

    def make(former: Callable[..., None], self: Any, *args: Any) -> None:
        former(self, *args)
        emit = self._emit

        def emit_exact(event: DataOpened) -> None:
            emit(event if event.exact is None else msgspec.structs.replace(event, exact=True))

        self._emit = emit_exact

    around(patch, feed.Feed, "__init__", make)


@mutation(kinds=("kill", "cut"), promises=("waits",))
def connecting_is_charged_to_nobody(patch: Patch) -> None:
    """The time of connecting after a change of members is in no recorded wait."""

    def find_waits(
        former: Callable[..., Any], rows: Any, own: int, began: float, connected: float, gone: Any
    ) -> Any:
        return former(rows, own, began, -1.0, gone)

    around(patch, waits, "find_waits", find_waits)


# Semi-synchronous methods


@mutation(
    kinds=("joiner",), promises=("no stall for a joiner", "no work lost", "liveness"), mode="semi"
)
def no_opening_after_update(patch: Patch) -> None:
    """The groups do not meet right after a round's update."""
    patch.setattr(step, "_MAX_OPENING_ROUNDS", 0)


@mutation(kinds=("alone",), promises=("no stall for a joiner", "liveness"), mode="semi")
def joiner_ignores_waiting_groups(patch: Patch) -> None:
    """A joiner makes the others wait until it has trained a whole round."""
    around(
        patch, rounds.Rounds, "signs", lambda former, self: former(self) & ~rounds.Sign.OTHERS_WAIT
    )


@mutation(kinds=("joiner",), promises=("no stall for a joiner",), mode="semi")
def joiner_sits_in_next_round(patch: Patch) -> None:
    """A joiner sits in the next round although its state is there long before."""

    def prepare(former: Callable[..., None], self: Any) -> None:
        if self._attempt is None:
            former(self)

    around(patch, heal.Heal, "_prepare_until_quorum", prepare)


@mutation(kinds=("lighthouse", "leave", "alone"), promises=("no work lost",), mode="semi")
def groups_in_round_not_awaited(patch: Patch) -> None:
    """A quorum without groups in the middle of a round is accepted, for example after a restart of
    the lighthouse.
    """
    nothing = membership._MissingGroups(membership._MissingKind.NOTHING, [])
    substitute(
        patch, membership.Membership, "_find_missing_groups", lambda self, present, absent: nothing
    )


@mutation(kinds=("flip",), promises=("one trajectory",), mode="semi")
def anchors_not_compared(patch: Patch) -> None:
    """The groups do not compare the bytes from which a round's changes are measured."""
    substitute(patch, rounds.Rounds, "_compares_before_sum", lambda self, contribution: False)


@mutation(kinds=("none",), promises=("one trajectory", "no state given up"), mode="semi")
def inner_moments_in_digest(patch: Patch) -> None:
    """A group's digest includes the moments of its own optimizer."""
    substitute(patch, outer.OuterState, "_agreed_optimizers", lambda self: self._optimizers)


@mutation(kinds=("none",), promises=("exact average",), mode="semi")
def change_without_tokens(patch: Patch) -> None:
    """A group's change is not weighted by its tokens."""

    def take(
        former: Callable[..., None], self: outer.OuterModel, weights: dict[int, float]
    ) -> None:
        former(self, dict.fromkeys(weights, 1 / 3))

    around(patch, outer.OuterModel, "compute_changes", take)


@mutation(kinds=("none",), promises=("exact average",), mode="semi")
def mean_by_number_of_groups(patch: Patch) -> None:
    """A fragment's mean is by the number of groups."""

    def fill(former: Callable[..., None], self: Bucket, indices: Any, weight: float) -> None:
        former(self, indices, 1.0)

    around(patch, Bucket, "fill", fill)


@mutation(kinds=("none",), promises=("exact average",), mode="semi")
def resting_fragments_are_updated(patch: Patch) -> None:
    """Fragments that are not exchanged are updated from the former content of their buckets."""

    def write(former: Callable[..., None], self: Sums, scale: float | None = None) -> None:
        former(self, scale)
        for bucket, flat in zip(self._buckets, self.flats, strict=True):
            if flat is None:
                bucket.write(bucket.flat, [1.0] * len(bucket.parts), scale)

    around(patch, Sums, "write", write)


@mutation(kinds=("none",), promises=("one trajectory",), mode="semi")
def model_takes_all_anchors(patch: Patch) -> None:
    """A group continues with the anchors of all fragments."""

    def make_step(
        former: Callable[..., float], self: outer.OuterModel, alpha: float = 0.0
    ) -> float:
        squares = former(self, alpha)
        with torch.no_grad():
            for anchor, (_, parameter) in zip(self.anchors, self._named, strict=True):
                if anchor.grad is None:
                    local_shard(parameter).copy_(torch.lerp(anchor, local_shard(parameter), alpha))
        return squares

    around(patch, outer.OuterModel, "step", make_step)


@mutation(kinds=("nan",), promises=("no state given up",), mode="semi")
def excluded_group_keeps_moments(patch: Patch) -> None:
    """A group whose change was not finite keeps its moments."""

    def meet(self: round_strategy.RoundStrategy) -> bool:
        return not self._job_is_over and self._meet_in_opening_rounds()

    substitute(patch, round_strategy.RoundStrategy, "meet_after_update", meet)


@mutation(kinds=("none",), promises=("one trajectory",), mode="semi")
def own_order_of_8_bit_sums(patch: Patch) -> None:
    """Each group adds up the changes in 8 bits in an order of its own."""

    def add_up(former: Callable[..., None], self: Any, bucket: Bucket) -> None:
        if bucket.residual is None:
            former(self, bucket)
            return
        operations, gather = self._operations, self._operations.all_gather
        with lent(operations, all_gather=lambda own: gather(own).roll(-operations.quorum.rank, 0)):
            former(self, bucket)

    around(patch, Flight, "_sum", add_up)


@mutation(kinds=("none",), promises=("exact average",), mode="semi")
def residual_is_given_again(patch: Patch) -> None:
    """A group adds the rounding residual of a change several times."""

    def add_to(former: Callable[..., None], self: quantize.Residual, values: torch.Tensor) -> None:
        if self._error is not None:
            self._error.mul_(4)
        former(self, values)

    around(patch, quantize.Residual, "add_to", add_to)


# The exploration


def find(mutation: Mutation, schedules: int = SCHEDULES) -> Found | str:
    """Explore with a mutation; return the finding, or the reason why there is none."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_find, args=(mutation, schedules, send))
    process.start()
    send.close()
    try:
        found: Found | str = receive.recv()
    except EOFError:
        found = "the process ended without an answer"
    process.join()
    return found


def _find(mutation: Mutation, schedules: int, send: Connection) -> None:
    try:
        mutation.apply(Patch())
        with standins.installed():
            for number in range(schedules):
                seed = mutation.first + number
                problems = draw(seed, mutation.kinds, mutation.mode).run().problems
                if FAILURES:
                    send.send(f"the mutation itself failed: {FAILURES[0]!r}")
                    return
                for problem in problems[:1]:
                    if problem.promise in mutation.promises:
                        send.send(Found(seed, number + 1, problem.promise, problem.text))
                        return
        send.send(f"nothing in {schedules} schedules")
    except Exception as error:  # noqa: BLE001  # a process's edge
        send.send(f"{type(error).__name__}: {error}")


def main(arguments: Sequence[str]) -> int:
    """Print the schedule that finds each mutation; return 1 if one is not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutations")
    parser.add_argument("--schedules", type=int, default=SCHEDULES)
    parser.add_argument("--only", default="", help="part of the name")
    options = parser.parse_args(arguments)
    missed = 0
    for mutation in MUTATIONS:
        if options.only in mutation.name:
            found = find(mutation, options.schedules)
            missed += isinstance(found, str)
            said = (
                found
                if isinstance(found, str)
                else f"seed {found.seed}, {found.promise}: {found.text[:110]}"
            )
            print(f"{mutation.name}: {said}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
