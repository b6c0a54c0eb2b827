# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One rank's training in the simulation: the part of `titan_ft.trainer.ReplicaTrainer`, around the
unchanged engine.

Only this module knows the engine's constructors and methods.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tests.simulation import folder, training
from tests.simulation.control import FAN_OUT
from tests.simulation.data import DataJudge, Loader
from tests.simulation.faults import CutInside, CutLighthouse, LighthouseDies, ResetOwn
from tests.simulation.kernel import Process
from tests.simulation.own_steps import OwnSteps, SteadyStrategy
from tests.simulation.saving import Saves
from tests.simulation.transfer import SnapshotServer
from tests.simulation.waiting import Arrival
from titan_ft.config import FaultTolerance
from titan_ft.engine.donor import Donor
from titan_ft.engine.drain import Drain
from titan_ft.engine.feed import Feed, Reading
from titan_ft.engine.heal import Heal
from titan_ft.engine.round import Rounds
from titan_ft.engine.step import ReplicaDimension
from titan_ft.engine.strategy import StepStrategy
from titan_ft.engine.watchdog import Watchdog, end_process
from titan_ft.gradients.exchange import ExchangeResult, GradientExchange
from titan_ft.membership.control_tree import ControlTree, ReceivedDecision
from titan_ft.membership.group_collectives import GroupCollectives
from titan_ft.membership.membership import Membership
from titan_ft.membership.pulse import SILENT_BEATS
from titan_ft.protocol.control.node import LostRank
from titan_ft.protocol.errors import Leaving
from titan_ft.protocol.healing import Phase
from titan_ft.protocol.ledger import Ledger
from titan_ft.protocol.member import Quorum
from titan_ft.protocol.position import Position
from titan_ft.protocol.report import RoundReport
from titan_ft.protocol.round import Broken, Round, Update
from titan_ft.round_settings import quantizes
from titan_ft.run.events import DataOpened, Drained, Event, Hung, RankSilent
from titan_ft.training.checkpoint.choice import (
    NO_STEP,
    LoadRequest,
    agree_on_step,
    check_same_state,
    check_still_there,
    read_on_all_ranks,
)
from titan_ft.transfer.reach import Probe

if TYPE_CHECKING:
    from tests.simulation.world import GroupRun, World

LATE_ANSWERS = CutInside, CutLighthouse, LighthouseDies, ResetOwn
"""Faults that let a quorum's answer reach its members at different times."""
_BUCKET_BYTES = 4  # each parameter gets a bucket of its own


class Events:
    """Stands in for titan_ft.run.log.EventLog: events go into the trace and to the world's
    checks.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def emit(self, event: Event) -> None:
        """Pass an event to the world."""
        rank = self._rank
        if isinstance(event, DataOpened):
            rank.data.opened(event)
        fields = {
            n: getattr(event, n)
            for n in event.__struct_fields__
            if n not in Event.__struct_fields__
        }
        rank.world.saw(rank, event.name, fields)

    def close(self) -> None:
        """There is nothing to close."""


class _WatchedDonor(Donor):
    """The donor of a rank.

    The engine calls it after every successful round, so here the world sees all of them.
    """

    def __init__(self, rank: Rank, state: Any, server: Any) -> None:
        super().__init__(state, server)
        self._rank = rank

    def copy_after_round(self, made: Round, position: Position, *, is_update: bool) -> None:
        """Let the world judge the round, before the state is written."""
        self._rank.world.made_round(self._rank, made)
        self._rank.judge_waits(made)
        super().copy_after_round(made, position, is_update=is_update)


@dataclass(frozen=True)
class _NotedFacts:
    """Facts of a rank.

    `note` is called when the facts are sent, so only if the sums have been made.
    """

    facts: RoundReport
    note: Callable[[Quorum], None]

    def complete(self, quorum: Quorum, gave: bool, came: float) -> tuple[Sequence[float], bytes]:
        """Call `note`, and return row and message."""
        self.note(quorum)
        return self.facts.complete(quorum, gave, came)


@dataclass(frozen=True)
class Ended:
    """How a rank's part ended in order: "finished" or "drained"."""

    how: str
    step: int
    lineage: int
    digest: str


class Rank:
    """One rank of one attempt of a group; `train` is its main thread."""

    def __init__(self, world: World, group: GroupRun, number: int, process: Process) -> None:
        self.world, self.group, self.number, self.process = world, group, number, process
        self.slot = group.slot
        self.node = (group.slot, number)
        options = world.options
        self.config = FaultTolerance(**{**options.fault_tolerance, "replica_id": group.slot})
        self.nominal_tokens = 10 * options.groups
        self.ledger = Ledger(options.groups, number, options.ranks)
        self.shapes = training.OTHER_SHAPES if group.slot in options.odd else training.SHAPES
        self.position = Position()
        self.own = self._make_own()
        self.strategy = self._make_strategy()
        self.state: Any = self.strategy.state
        self.state.buffers = world.options.buffers
        self.state.is_scarce = self._is_scarce
        self._copies = 0
        self.ended: Ended | None = None
        self.ready = False  # the rank holds a committed state, as far as the world knows
        self.spoiled = 0  # number of coming backwards whose gradients are not finite
        self.hangs = False
        self.slowness = 0.0  # seconds that each backward takes longer
        # In its last round, this rank was one update ahead of the majority.
        self.ahead = False
        self.met: list[int] = []  # slots of the groups in the last round that worked
        # In its last round, nobody could tell which bytes are right, and the world agrees.
        self.tied = False
        self.voted = self.voted_when_told = False
        self.returned = False  # the process ends in order
        self.told_why = False  # an event has said why the process ends itself
        self.abandoned = False  # the process ends without having left in order, and has said so
        # Number of newer states that it has fetched in this heal, because its queue was full.
        self.renewals = 0
        self.sent = 0  # number of gradient values that it has summed with others in the last round
        self.found: int | None = None  # step of the checkpoint that it has chosen, or NO_STEP
        self.dimension: ReplicaDimension
        self.saves = Saves(self)
        self._sent_before = 0
        self._read: set[tuple[int, int]] = set()
        self.data = DataJudge(process.name, world.report, forgets=options.forgets)
        self.drain: Drain | None = None

    def _is_scarce(self) -> bool:
        """True if this rank's host is short of memory. The answer changes from call to call."""
        self._copies += 1
        rng = random.Random(f"scarce {self.world.seed} {self.process.name} {self._copies}")
        return rng.random() < self.world.options.scarce

    def _make_own(self) -> OwnSteps:
        return OwnSteps(self)

    def _make_strategy(self) -> StepStrategy:
        return SteadyStrategy(self, self.own)

    @property
    def held(self) -> tuple[int, int]:
        """Step and lineage of the rank's state."""
        return self.state.held

    def joins(self, quorum: Quorum) -> bool:
        """Return True if this rank joins.

        It lacks the job's state, has not begun, or is about to notice that the others are ahead.
        """
        trains = self.position.standing.has_state and self.position.training
        return not trains or quorum.max_step > self.position.step + 1

    @property
    def is_built(self) -> bool:
        """True if this rank has everything that it needs to train."""
        return "dimension" in vars(self)

    @property
    def computed(self) -> bool:
        """True if this rank has computed gradients for the step under way."""
        return bool(self._read)

    @property
    def in_exchange(self) -> bool:
        """True if the rank's requested quorum has arrived, and no vote has used it yet."""
        pending: Any = self._membership._requested_quorum
        return pending is not None and pending._done

    def gather(self, value: int) -> list[int]:
        """Gather an integer of every rank of the group.

        Before the group is built, there is nothing to agree on.
        """
        return self._group.gather(value) if "_group" in vars(self) else [value]

    def gather_losses(self, values: Sequence[float]) -> torch.Tensor:
        return self._group.gather_losses(values)

    @property
    def is_connected(self) -> bool:
        """True if the process group is ready for an exchange."""
        return self._process_group.is_connected

    def reset_connection(self) -> None:
        """Reset one of the rank's connections to other groups."""
        self._process_group.reset_connection()

    def votes(self) -> None:
        """Count the bytes sent in the round that ends now."""
        reduced = self._process_group.reduced
        self.sent, self._sent_before = reduced - self._sent_before, reduced

    def main(self) -> None:
        """Train, then end the process."""
        self.train()
        self.returned = True
        self.process.end()

    def train(self) -> None:
        """Train from the first step to the last one, as the trainer does."""
        world = self.world
        world.kernel.sleep(self.group.delays[self.number])
        self._build()
        watchdog, drain = self.watchdog, self._drain
        try:
            try:
                self._train()
            except Leaving:
                self._leave()
            drain.leave()
        finally:
            watchdog.close()
            self._membership.close()
            self._server.close()
        self.saves.close()

    def _hear_loss(self, events: Any, loss: LostRank) -> None:
        """End rank 0 if another rank is silent, as `Links` does."""
        if loss.silent_seconds:
            silent = RankSilent(ranks=[loss.rank], hosts=[loss.host], seconds=loss.silent_seconds)
            end_process(
                1,
                lambda: events.emit(silent),
                lambda: "_membership" in vars(self) and self._membership.stop_heartbeats(),
            )

    def _leave(self) -> None:
        """Leave the other groups, as the trainer does."""
        last = self.dimension.find_last_to_leave()
        if last is not None and not self.saves.lacks_state():
            last = None
        if last is None or not last.agreed:
            self._membership.close()
        self.saves.withdraw()
        if last is not None:
            if self.dimension.await_turn_to_save(
                last, self.saves.holds_state, self.saves.watch_others()
            ):
                self.strategy.go_back_to_update()
                self.saves.save_on_leave()
            self._membership.close()
        self._end("drained")

    def _build(self) -> None:
        world, config, process = self.world, self.config, self.process
        host, port = world.store_address(self.slot)
        events: Any = Events(self)
        self.feed = Feed(self.ledger, self._open_loader, iter, events.emit)
        control_store: Any = (
            world.connect_store(host, port, 300.0) if world.options.ranks > 1 else None
        )
        control = ControlTree(
            self.number,
            world.options.ranks,
            host=host,
            token="token",
            store=control_store,
            key=f"titan_ft/control/{self.slot}/{self.group.attempt}",
            host_name=world.host(self.node),
            patience=SILENT_BEATS * config.heartbeat_timeout_ms / 1000,
            fan_out=FAN_OUT,
        )
        self.drain = self._drain = Drain(
            control,
            num_ranks=world.options.ranks,
            timeout_seconds=config.drain_timeout_seconds,
            on_abandon=lambda reason: events.emit(Drained(step=0, reason=reason, in_order=False)),
        )
        if world.told_to_drain(self):
            self.drain.request()
        self.watchdog = Watchdog(config.hang_timeout_seconds, lambda: events.emit(Hung(step=0)))
        world_group: Any = "world"
        self._group = GroupCollectives(torch.device("cpu"), world_group)
        # Choose first, as the trainer does. After a group has joined, the others wait for it.
        if world.folder is None:
            self.found = NO_STEP
        else:
            request = LoadRequest(folder.PATH, find_defect=lambda _: "")
            self.found = agree_on_step(request, self.number, self._group.gather).step
            world.chose(self, self.found)
        address = f"{world.host(self.node)}:{9000 + self.group.attempt}"
        server = SnapshotServer(
            world.kernel, process, self.node, config.process_group_timeout_ms / 1000
        )
        world.transfers.servers[address] = self._server = server
        self._process_group = world.process_group(self)
        if self.number == 0:
            control.listen_for_losses(partial(self._hear_loss, events))
        self._membership = Membership(
            config,
            process_group=self._process_group,
            lighthouse="http://10.9.0.1:1",
            host=host,
            group_rank=self.number,
            group_world_size=world.options.ranks,
            store=(host, port),
            control=control,
            config_digest="c0ffee",
            address=address,
            token="token",
            events=events,
            shape=f"{world.options.ranks}r;layout={sum(10 * size for size in self.shapes[1:]):012x}",
            probe=Probe("token", address, self.number),
            leave_requested=lambda: self._drain.requested,
        )
        self._watch_agreements(self._membership)
        self._exchange = GradientExchange(
            self.state.parameters,
            self._membership,
            bucket_bytes=_BUCKET_BYTES,
            where=torch.device("cpu"),
            overlap=world.options.overlap,
            fragments=self.state.fragments,
            quantize=quantizes(config),
            dtype=getattr(torch, config.exchange_dtype),
        )
        state: Any = self.state
        shared: dict[str, Any] = {"position": self.position, "group": self._group, "events": events}
        snapshot_server: Any = server
        self._rounds = rounds = Rounds(
            config,
            self._membership,
            self._exchange,
            state=state,
            donor=_WatchedDonor(self, state, snapshot_server),
            drain=self._drain,
            watchdog=self.watchdog,
            **shared,
        )
        self._watch_arrivals(self._exchange, rounds)
        self._heals = heal = Heal(
            config,
            rounds=rounds,
            exchange=self._exchange,
            state=state,
            ledger=self.ledger,
            nominal_tokens=self.nominal_tokens,
            token="token",
            ranks_on_host=world.options.ranks,
            apply=self._apply,
            **shared,
        )
        self.dimension = ReplicaDimension(
            config,
            rounds=rounds,
            heal=heal,
            ledger=self.ledger,
            nominal_tokens=self.nominal_tokens,
            pauses_after=self.strategy.pauses_after,
            **shared,
        )
        self.strategy.attach(self.dimension, self._exchange)

    def _open_loader(self, slot: int) -> Loader:
        return Loader(slot, forgets=self.world.options.forgets)

    def read_batch(self, slot: int, behind: int = 0) -> Reading:
        """Read the next batch of a slot, as the trainer does."""
        reading = self.feed.read(slot, 1, behind)
        number = reading.entry.first_batch
        self.data.read(slot, number, reading.batches[0][1])
        if (slot, number) in self._read:
            self.world.report(
                "no work lost", f"{self.process.name} computes batch {number} of slot {slot} twice"
            )
        self._read.add((slot, number))
        return reading

    def _watch_agreements(self, membership: Membership) -> None:
        world, seat, control = self.world, membership._seat, membership._control
        decide, announce = control.rank0_decides, control.rank0_announces
        request, vote = seat.request, membership.vote

        def watched_decide(
            found: Collection[str], judge: Callable[[set[str]], str], timeout: float | None = None
        ) -> str:
            answer = decide(found, judge, timeout)
            world.agreed(self, answer)
            return answer

        def watched_announce(judge: Callable[[], str]) -> ReceivedDecision:
            announced = announce(judge)
            world.agreed(self, announced.text)
            return announced

        def watched_request(
            step: int, failures: int, is_outdated: Callable[[Sequence[str]], bool]
        ) -> Any:
            world.asks(self, step)
            return request(step, failures, is_outdated)

        def watched_vote(step: int, ok: bool) -> bool:
            world.votes(self)
            world.moment("vote", self.node)
            return vote(step, ok)

        vars(control)["rank0_decides"] = watched_decide
        vars(control)["rank0_announces"] = watched_announce
        vars(seat)["request"] = watched_request
        vars(membership)["vote"] = watched_vote

    def _watch_arrivals(self, exchange: GradientExchange, rounds: Rounds) -> None:
        """Record when this rank reaches each exchange.

        Not with rounds of several steps, which launch exchanges early.
        """
        if self.config.semi_sync_method:
            return
        finish, make, kernel, world = exchange.finish, rounds.make, self.world.kernel, self.world

        def watched_make(*args: Any, **kwargs: Any) -> Round | Broken:
            self._began = kernel.now
            return make(*args, **kwargs)

        def watched_finish(facts: RoundReport) -> ExchangeResult:
            came, began = kernel.now, self._began

            def note(quorum: Quorum) -> None:
                times = (quorum.requested_at, quorum.answered_at, quorum.connected_at)
                asked, answered, ready = (
                    (at - self.process.clock) / self.process.rate for at in times
                )
                connecting = max(ready - max(began, answered), 0.0)
                arrival = Arrival(began, asked, max(came, ready), connecting, self.joins(quorum))
                world.waits.comes(self, quorum.key, arrival)

            return finish(_NotedFacts(facts, note))

        vars(exchange)["finish"], vars(rounds)["make"] = watched_finish, watched_make

    def judge_waits(self, made: Round) -> None:
        """Let the world judge this rank's reported waits.

        Not if a rank stood still, or if its connection to the lighthouse or to its group's store
        broke. Then its request may arrive late, or it reads the answer late and takes that time for
        the time of the answer.
        """
        late = self.world.thawed or any(
            isinstance(fault, LATE_ANSWERS) for fault in self.world.faults
        )
        if not (self.config.semi_sync_method or late):
            self.world.waits.judge(self, made, self._rounds.waits._last_waits)

    def _train(self) -> None:
        dimension, world = self.dimension, self.world
        assert self.found is not None
        step = max(self.found, 0)
        if dimension.join(step):
            self._heal(computed=False)
        else:
            self._load(step)
            if dimension.start(step):
                world.started(self, step)
            else:
                self._heal(computed=False)
        digest = None
        while digest is None:
            while self.position.step < world.options.steps:
                self._step()
            digest = dimension.finish()
            if digest is None:
                self._heal(computed=False)
        self.saves.withdraw()
        self.saves.finish(self.position.step)
        self._end("finished", digest)

    def _load(self, step: int) -> None:
        """Load this rank's part of the checkpoint after `step`, if there is one.

        As `ReplicaCheckpoints` does.
        """
        kept, world, gather = self.world.folder, self.world, self._group.gather
        if step and kept is not None:
            check_still_there(folder.PATH, step, gather)
            world.moment("loading", self.node)
            snapshot = read_on_all_ranks(
                lambda: kept.load(step, self.number, self.node), folder.PATH, gather
            )
            world.kernel.sleep(0.1 * world.kernel.rng.random())
            self.state.load(snapshot)
            self.position.set_lineage(snapshot.lineage)
            check_same_state(folder.PATH, step, snapshot.lineage, gather)
            self.position.set_saved_step(step)
            world.loaded(self)

    def _step(self) -> None:
        dimension, world = self.dimension, self.world
        self.state.zero_grad()
        self._read.clear()
        slots, train = dimension.slots_to_read(), self.strategy.train
        self.own.step = (
            self.strategy.last_step_of(self.position.step) + 1
        )  # as torchtitan's loop does
        self.strategy.start_update()
        committed = dimension.commit(train(slots, dimension.arm), train, self._discard)
        if committed is None:
            self._heal(computed=bool(slots))
            return
        self.world.waits.committed += [(self.slot, wait) for wait in committed.waits]
        update = committed.update
        self._know(update, committed.parent, committed.participants)
        self._apply(update)
        world.committed(self, update.step, committed.participants)
        dimension.digest_if_due()
        dimension.offer_state()
        if self.position.leaving:
            raise Leaving
        self.saves.participants = committed.participants
        self._go_on()
        self.saves.save(self.position.step, last=self.position.step >= world.options.steps)

    def _go_on(self) -> None:
        if self.strategy.meet_after_update():
            self._heal(computed=False)

    @property
    def unreplayed(self) -> int:
        """Number of queued updates that are not replayed yet; 0 before the state is fetched."""
        healing = self._heals._healing
        return healing.num_remaining if healing.phase is Phase.REPLAYING else 0

    @property
    def update_bytes(self) -> int:
        """Return the bytes of a queued update."""
        return self._exchange.copy_memory.num_bytes

    @property
    def queued(self) -> int:
        """Number of updates that are queued in the heal under way."""
        return len(self._heals._healing.queued)

    def _heal(self, computed: bool) -> None:
        is_behind = True
        while is_behind:
            self._heal_once(computed)
            is_behind, computed = self.strategy.resume_after_heal(), False

    def _heal_once(self, computed: bool) -> None:
        self.renewals = 0
        self.world.heals(self, computed)
        self._read.clear()
        self.saves.participants = []
        self.state.zero_grad()
        self.saves.withdraw()
        self.dimension.heal()
        self.own.step = self.strategy.last_step_of(self.position.step)
        self.ready = True
        self._hold(self.position.step, self.position.lineage)
        self.world.healed(self)

    def _discard(self) -> None:
        self.strategy.discard()
        self._read.clear()

    def _apply(self, update: Update) -> None:
        """Apply a committed update, live or replayed."""
        world = self.world
        self._know(update, self.held[1], None)
        world.kernel.sleep(world.options.apply_seconds)
        if update.step != self.state.progress.steps + 1:
            world.report(
                "counters",
                f"{self.process.name} applies update {update.step} to a state of {self.held[0]}",
            )
        self.strategy.apply(update)
        self._hold(update.step, update.lineage)
        world.oracle.applied(self.slot, self.number, update.lineage, self.state)

    def _know(self, update: Update, parent: int, participants: list[int] | None) -> None:
        self.world.oracle.committed(
            self.slot,
            update.lineage,
            parent,
            update.step,
            update.tokens,
            participants,
            update.entries,
            update.readers,
        )

    def _hold(self, step: int, lineage: int) -> None:
        self.state.held = (step, lineage)
        self.ready = True

    def _end(self, how: str, digest: str = "") -> None:
        step, lineage = self.held
        self.ended = Ended(how, step, lineage, digest or self.state.digest())
        self.world.rank_ended(self)
