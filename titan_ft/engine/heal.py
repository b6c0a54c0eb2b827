# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The heal: a group that lacks the job's state gets it from holders, while the other groups train on.

There is one way in. The group asks the holders that it finds for an offer, fetches the offered state, takes part in the
exchanges without gradients and queues their sums, loads the state, replays the queue, and is ready. The phases and the
transitions are in `protocol/healing.py`; docs/heal.md follows one through the files.

    asks (`OfferSearch`) -> fetches (`CatchUp`) -> loads and replays -> applies the last update with the holders
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from titan_ft.config import FaultTolerance
from titan_ft.engine.catch_up import CatchUp, Fetched
from titan_ft.engine.lookout import Lookout
from titan_ft.engine.offer import OfferSearch
from titan_ft.engine.round import PAUSE_SECONDS, Rounds
from titan_ft.gradients.exchange import GradientExchange
from titan_ft.membership.group_collectives import GroupCollectives
from titan_ft.protocol import decision as decisions
from titan_ft.protocol.decision import decide, gives_next, is_update
from titan_ft.protocol.errors import Leaving, first_line
from titan_ft.protocol.healing import NO_OFFER, Healing, Offer, OutdatedError, Phase, VoidError
from titan_ft.protocol.ledger import Ledger
from titan_ft.protocol.position import Position
from titan_ft.protocol.round import Broken, Round, Update
from titan_ft.protocol.strategy import strategy_of
from titan_ft.run.events import (
    CatchUpRenewed,
    CatchUpWaiting,
    DonorLost,
    HealFailed,
    HealFinished,
    HealStarted,
    RolledBack,
)
from titan_ft.run.log import EventLog
from titan_ft.transfer.host_memory import free_bytes, most_updates
from titan_ft.transfer.snapshot import Snapshot, TrainState
from titan_ft.transfer.state_fetch import CONNECTIONS, SLICE_SECONDS, fetch
from titan_ft.transfer.wire import TransferError

logger = logging.getLogger(__name__)

_MIN_ASKED = 8  # ask at least this many groups at once, even if `heal_donors` is smaller
_MAX_SLOW_ROUNDS = 3  # at this many slow rounds in a row, with more updates still queued, the others are asked to wait
_LOAD_TIMES_IN_RESERVE = 4  # load now only if this many load times remain before the others' next update
_POLL_SECONDS = 0.05  # between two looks at the other ranks of the group and at the other groups


class Heal:
    """Brings this rank's group to the job's state; see `run`. Training thread only.

    All ranks of a group call the same methods alike, and agree on what only one of them can know
    (`GroupCollectives.gather`).

    Args:
        nominal_tokens: tokens of a step with all groups present.
        token: the run's shared secret.
        ranks_on_host: ranks that share this host's memory.
        apply: applies an update as a live step would.
    """

    def __init__(
        self,
        config: FaultTolerance,
        *,
        position: Position,
        rounds: Rounds,
        exchange: GradientExchange,
        state: TrainState,
        ledger: Ledger,
        group: GroupCollectives,
        events: EventLog,
        nominal_tokens: int,
        token: str,
        ranks_on_host: int,
        apply: Callable[[Update], object],
    ) -> None:
        self._config = config
        self._strategy = strategy_of(config)
        self._position = position
        self._rounds = rounds
        self._exchange = exchange
        self._state = state
        self._ledger = ledger
        self._group = group
        self._events = events
        self._nominal_tokens = nominal_tokens
        self._token = token
        self._ranks_on_host = ranks_on_host
        self._apply = apply
        # Groups may offer different states, and the most frequent one counts. So more groups are asked than give.
        # 0 = all.
        num_asked = max(_MIN_ASKED, config.heal_donors) if config.heal_donors else 0
        self._search = OfferSearch(rounds.find_holders, token, num_asked)
        self._lookout = Lookout(position, rounds, group)
        self._pace = _Pace()
        # Joiners ask from their own slots on, so that many that come together ask different holders.
        self._healing = Healing(Phase.READY, last_donor=config.replica_id)
        self._attempt: CatchUp | None = None
        self._lost: set[int] = set()  # donors that give nothing to this rank any more; written by the fetch's thread
        self._offer: Offer | None = None  # found by `await_offer`, for the heal that follows
        self._least_step = 1  # ask for at least this many updates: older states are outdated
        self.ended_on_update = False  # the last round was an update; `ReplicaDimension.opens` reads it after the heal

    def await_offer(self, beyond: int) -> bool:
        """Wait for the quorum asked for, or until a group offers a state of more than `beyond` updates.

        Returns:
            True if a state is offered: this group must `run`. Its holders come to a quorum only at the end of their
            step or round.
        """
        self._rounds.ask()
        while not any(self._group.gather(self._rounds.awaited)):
            if (offer := self._poll_search(beyond + 1)) is not None:
                self._offer = offer
                return True
            self._pause()
        return False

    def run(self) -> float:
        """Heal. This group is READY afterwards, with the holders' state or, after a roll-back, with its own; and the
        quorum of its next round is asked for.

        Returns:
            The seconds it took.

        Raises:
            JobLostError: no group that has the state is left.
            DivergedError: the groups' states differ without a majority.
            Leaving: the group was told to leave.
        """
        started = time.monotonic()
        # A newcomer asks before it has a quorum. The others' exchange may need its former process: then it breaks, and
        # the newcomer joins the repetition.
        is_new = self._rounds.last is None and not self._strategy.is_long
        self._begin()
        while not self._is_in(Phase.READY):
            if is_new or self._strategy.is_long:
                self._prepare_until_quorum()
                if self._is_in(Phase.READY):
                    break
            self._rounds.launch_empty()
            others_wait = is_new and self._meet()
            is_new = False
            self._prepare_during_step(others_wait)
            self._take_in(self._rounds.make())
        self._exchange.room.drop()
        self._rounds.begin()
        self._rounds.ask()
        return time.monotonic() - started

    def _begin(self) -> None:
        self._position.fall_behind()
        self._lookout.reset()
        self._pace = _Pace()
        self._search.pause(0.0)
        self._rounds.retract()
        self._go(Healing(max_queued=self._agree_on_queue(), last_donor=self._config.replica_id))
        self._least_step = 1
        if self._rounds.last is not None:
            self._note_step(self._rounds.last)
        self.ended_on_update = True  # the missed round may have been an update: assume so
        if self._offer is not None:
            offer, self._offer = self._offer, None
            self._take(offer)

    def _agree_on_queue(self) -> int:
        """Return how many updates this group may queue: as many as the rank with the least room, whatever each sees."""
        exchange = self._exchange
        on_device = exchange.room.keep_on_device()
        own = most_updates(self._config, free_bytes(), self._ranks_on_host, exchange.room.num_bytes, on_device)
        return min(self._group.gather(own))

    def _go(self, healing: Healing) -> None:
        """Make a transition, and show it in the next row."""
        self._healing = healing
        self._position.show(healing)

    def _is_in(self, phase: Phase) -> bool:
        return self._healing.phase is phase

    # Before a quorum, and while the others compute

    def _prepare_until_quorum(self) -> None:
        """Ask, fetch, load and replay until the others come to their exchange. The quorum is asked for first, so that
        they do not wait for this group.

        Raises:
            Leaving: the group was told to leave. It has nothing to finish.
        """
        began = time.monotonic()
        self._rounds.ask()
        while not self._is_in(Phase.READY):
            self._leave_if_told()
            if self._is_in(Phase.ASKING):
                # Before the check below: holders that wait for this group make rounds without pause, and the quorum
                # may always be ready.
                self._ask()
            if any(self._group.gather(self._rounds.awaited)):
                return
            if self._is_in(Phase.REPLAYING) and self._has_work:
                self._replay_until(began)  # that time has passed: replay two updates, then look for a leave request
            else:
                self._pause()
            self._conclude()

    def _prepare_during_step(self, others_wait: bool) -> None:
        """Ask, fetch, load and replay while the others compute a step, as far as that does not hold them up.

        A state that arrives early in a step is loaded in it, and the group trains the next step.

        Args:
            others_wait: they do not compute, but make an exchange again that broke with this group's former process.
        """
        self._pace.note_step()
        if others_wait and not self._is_worth_a_wait():
            return
        while self._is_in(Phase.ASKING) and self._may_ask():
            self._ask()
            if self._is_in(Phase.FETCHING):
                self._rounds.begin()
                self._await_state()
            elif all(self._group.gather(self._exchange.under_way)):
                self._pause()
            else:
                return
        if self._is_in(Phase.FETCHING):
            self._await_state()
        if self._is_in(Phase.REPLAYING):
            self._make_room()
            self._replay_until(self._pace.find_latest(self._state.load_seconds))

    def _await_state(self) -> None:
        """Wait for the state while the others compute a step, for as long as it can be loaded."""
        self._make_room()
        while self._is_in(Phase.FETCHING) and not self._strategy.is_long:
            # A round of several steps is too long to block in: a leave request would go unnoticed.
            until = self._pace.find_latest(self._state.load_seconds)
            if any(self._group.gather(time.monotonic() >= until or not self._exchange.under_way)):
                return
            if self._attempt is not None:
                with self._rounds.waiting():
                    self._attempt.wait(min(_POLL_SECONDS, until - time.monotonic()))
            self._conclude()

    def _make_room(self) -> None:
        """Allocate memory for the next update now. Later, the allocation would delay the others."""
        if not self._healing.others_wait:
            self._exchange.room.prepare()

    def _is_worth_a_wait(self) -> bool:
        """True if a load now costs the waiting groups, together, less than one group's step.

        The cost per group is twice `load_seconds`: load and digest. Otherwise this group is back one step later. Never
        true while a duration is unknown (0).
        """
        if not self._is_in(Phase.REPLAYING):
            return False
        others = len(self._rounds.meet().members) - 1
        costs = 2 * self._state.load_seconds * others
        return all(self._group.gather(0 < costs < self._pace.update_seconds))

    def _leave_if_told(self) -> None:
        """Leave at once: a group that heals has nothing to finish.

        Raises:
            Leaving: the group was told to leave.
        """
        if any(self._group.gather(self._rounds.told_to_leave)):
            self._position.leave()
            raise Leaving

    def _pause(self) -> None:
        """Wait a moment. The leading rank waits for its search, if one is under way.

        Otherwise a rank waits for the quorum, or sleeps if the quorum is there.
        """
        with self._rounds.waiting():
            if self._group.leads and self._search.wait(_POLL_SECONDS):
                return
            if self._rounds.awaited:
                time.sleep(_POLL_SECONDS)
            else:
                self._rounds.pause(_POLL_SECONDS)

    # ASKING

    def _meet(self) -> bool:
        """Wait for the first quorum; return True if the others repeat a broken exchange and wait.

        A later state in the quorum makes the fetched state outdated. An earlier one does not: the donor may be outside
        of this quorum.
        """
        quorum = self._rounds.meet()
        self._least_step = max(self._group.gather(quorum.max_step))
        if self._is_in(Phase.ASKING):
            return False
        if self._least_step > self._healing.from_step:
            self._give_up(OutdatedError("the others have made an update since"))
            return False
        self._rounds.begin()  # from here on a leave request takes effect after the round, so that it is not broken
        return True

    def _may_ask(self) -> bool:
        """True if the holders show their digests in the next round, so that it confirms the bytes fetched until then.

        The holders show digests if this group is new to them, or if its last row asked for the state.
        """
        if self._strategy.is_long:
            return False  # in such rounds a group asks before the quorum (`_prepare_until_quorum`)
        last = self._rounds.last
        if last is None:
            quorum = self._rounds.meet()
            return all(self._group.gather(quorum.error is None and len(quorum.members) > 1))
        own = last.rows[last.quorum.rank]
        return not own.has_state and own.donor < 0 and bool(last.verdict.holders)

    def _note_step(self, made: Round) -> None:
        """Take in which state the holders have after a round."""
        if made.verdict.holders:
            self._least_step = made.verdict.step + int(is_update(made, self._config))

    def _ask(self) -> None:
        """Look for an offer, and begin to fetch what is offered."""
        if (offer := self._poll_search(self._least_step)) is not None:
            self._take(offer)

    def _poll_search(self, least_step: int) -> Offer | None:
        """Return an offer that the group's leading rank has found; None if it has found none yet."""
        found = self._search.poll(least_step, self._healing.last_donor) if self._group.leads else None
        number = self._group.gather(0 if found is None else len(found.slots))[0]
        if number == 0:
            return None
        offer = found or NO_OFFER
        facts = (offer.step, offer.lineage, offer.digest, offer.milliseconds, offer.elapsed_milliseconds)
        step, lineage, digest, duration, elapsed = (self._group.gather(fact)[0] for fact in facts)
        own = (0,) * number if found is None else found.slots
        slots = tuple(self._group.gather(slot)[0] for slot in own)
        # Remember the offered step. If its holders die before a round shows it, the job must not silently start over.
        self._position.hear(step)
        return Offer(slots, step, lineage, digest, duration, elapsed)

    def _take(self, offer: Offer) -> None:
        """Begin to fetch an offered state."""
        most = self._strategy.limit_donors(len(offer.slots))
        self._go(self._healing.take(offer, most))
        self._pace.note_offer(offer)
        self._rounds.expect(offer.slots)
        self.ended_on_update = False
        healing, self._lost = self._healing, set()
        self._events.emit(
            HealStarted(
                donor=healing.donor, donors=[*healing.donors], from_step=healing.from_step, step=healing.from_step
            )
        )
        if not self._strategy.is_long:
            self._make_room()
        self._attempt = CatchUp(partial(self._fetch, healing, self._lost), healing.max_queued)

    def _fetch(
        self, healing: Healing, lost: set[int], cancelled: object, note_share: Callable[[float], None]
    ) -> Snapshot:
        """Fetch this rank's part of the state; on the attempt's thread."""
        try:
            addresses = self._rounds.find_addresses(healing.donors)
        except OSError as error:
            raise TransferError(f"groups {[*healing.donors]} offered their state: {first_line(error)}") from error

        def lose(place: int, error: str) -> None:
            lost.add(healing.donors[place])
            self._events.emit(DonorLost(donor=healing.donors[place], from_step=healing.from_step, error=error))

        return fetch(
            addresses,
            self._token,
            healing.from_step,
            str(self._config.replica_id),
            CONNECTIONS,
            SLICE_SECONDS,
            cancelled,  # type: ignore[arg-type]  # a threading.Event
            lose,
            note_share,
        )

    # FETCHING

    def _conclude(self) -> None:
        """Go on if all ranks of the group have their part of the state; give the attempt up if one failed."""
        if self._attempt is None:
            return
        if self._is_in(Phase.REPLAYING):
            self._finish()
            return
        fetched = Fetched(min(self._group.gather(self._attempt.fetched())))
        if fetched is Fetched.FAILED:
            self._give_up(VoidError(self._attempt.error or "the fetch failed on another rank of this group"))
        elif fetched is Fetched.DONE:
            self._note_fetched(self._attempt.snapshot())
        else:
            if len(self._healing.donors) > 1:
                self._follow_donors()
            if self._healing.is_full and not self._healing.others_wait:
                self._end_queue(self._attempt)

    def _note_fetched(self, snapshot: Snapshot) -> None:
        fits = (snapshot.step, snapshot.lineage) == (self._healing.from_step, self._healing.lineage)
        if all(self._group.gather(fits)):
            self._go(self._healing.note_fetched())
        else:
            self._give_up(VoidError("the donor's state is not the one that the others went on from"))

    def _follow_donors(self) -> None:
        """Name a donor that still serves all ranks, if the named one does not. Later joiners avoid the named donor."""
        # Each rank loses donors on its own. No rank may name a donor that another rank has lost.
        lost = self._group.union(set(self._lost))
        donors = self._healing.donors
        giving = [slot for slot in donors if slot not in lost]
        if giving and giving[0] != donors[0]:
            self._go(self._healing.follow(giving[0]))

    def _end_queue(self, attempt: CatchUp) -> None:
        """Fetch a newer state if all ranks would have it in time, once in a heal; else let the others wait."""
        healing = self._healing
        size = len(healing.queued) * self._exchange.room.num_bytes / 2**20
        reason = (
            f"{len(healing.queued)} updates ({size:,.1f} MiB on this rank) are queued, all that "
            f"{self._queue_bound()} allows, and the state is not there yet"
        )
        if healing.is_renewed or not all(self._group.gather(attempt.newer_would_be_in_time)):
            self._let_wait(reason)
            return
        logger.warning("fetching a newer state: %s", reason)
        self._events.emit(CatchUpRenewed(donor=healing.donor, from_step=healing.from_step, reason=reason))
        self._drop_attempt()
        self._go(healing.renew())

    def _queue_bound(self) -> str:
        """Name what bounds the queue."""
        if self._config.catch_up_max_gb:
            return f"fault_tolerance.catch_up_max_gb ({self._config.catch_up_max_gb:g})"
        return "half of the host's free memory"

    def _let_wait(self, reason: str) -> None:
        """Let the others wait until this group has the state, or has replayed its queue."""
        self._go(self._healing.let_others_wait())
        logger.warning("the others wait for this group: %s", reason)
        self._events.emit(CatchUpWaiting(donor=self._healing.donor, step=self._healing.target_step, reason=reason))

    def _give_up(self, void: VoidError) -> None:
        """End the attempt, and ask again: at once, or after a pause that doubles with each failure."""
        healing = self._healing
        self._drop_attempt()
        self._go(healing.lapse() if isinstance(void, OutdatedError) else healing.fail())
        self._search.pause(self._healing.pause_seconds)
        logger.warning("healing from group %d failed, asking again: %s", healing.donor, void)
        self._events.emit(HealFailed(donor=healing.donor, from_step=healing.from_step, error=str(void)))

    def _drop_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.cancel()
        self._attempt = None

    # REPLAYING

    @property
    def _has_work(self) -> bool:
        """True if the state is not loaded, or an update is not replayed."""
        return not self._healing.is_loaded or self._healing.num_remaining > 0

    def _replay_until(self, until: float) -> None:
        """Load the state, then replay until `until`, so that the others do not wait.

        Replay at least two updates: the others make one meanwhile.
        """
        if not (self._healing.is_loaded or self._load()):
            return
        for number in range(self._healing.num_remaining):
            slow_rounds = 0
            if number >= 2:
                slow_rounds = max(self._group.gather(self._pace.note_lateness(until)))
            if slow_rounds:
                healing = self._healing
                if slow_rounds > _MAX_SLOW_ROUNDS < healing.num_remaining and not healing.others_wait:
                    # Two replays in each of their steps would cost the others more than to wait for all at once.
                    self._let_wait(
                        f"to replay {healing.num_remaining} queued updates takes longer than to make as many"
                    )
                break
            self._replay()
        if self._healing.others_wait and self._healing.num_remaining <= 1:
            # At most one update is left: ask for the one that the others hold back. The next round makes it.
            self._go(self._healing.let_others_go_on())

    def _load(self) -> bool:
        """Make the fetched state this rank's; False if its bytes are not the ones that the holders agreed on."""
        assert self._attempt is not None, "a state is fetched before it is loaded"
        self._state.load(self._attempt.snapshot())
        self._exchange.drop_residuals()
        self._position.load(self._healing.from_step, self._healing.lineage)
        self._go(self._healing.load())
        self._rounds.take_digest()
        if self._healing.digest in (0, self._position.digest):
            return True
        # Wrong bytes must not claim the job's state: the next round would reject them, and the group would heal without
        # end.
        self._position.disown()
        self._give_up(VoidError("the state that came is not the one whose digest the holders agreed on"))
        return False

    def _replay(self) -> None:
        assert self._attempt is not None, "updates are queued in an attempt"
        began, update = time.monotonic(), self._attempt.take(self._healing.num_replayed)
        self._apply(update)
        self._position.advance(update)
        self._go(self._healing.replay())
        self._pace.replay_seconds = time.monotonic() - began

    def _finish(self) -> None:
        """Replay the last queued update while the others apply it, if the state before it is loaded and confirmed."""
        healing = self._healing
        if not healing.may_finish:
            return
        assert self._attempt is not None, "a state is fetched before it is the job's"
        if healing.num_remaining:
            self._replay()
        finished = HealFinished(
            donor=healing.donor,
            from_step=healing.from_step,
            step=healing.target_step,
            bytes=self._attempt.snapshot().payload.numel(),
            seconds=self._attempt.seconds,
            fetch_seconds=self._attempt.fetch_seconds,
            replayed=len(healing.queued),
        )
        self._attempt = None
        self._go(self._healing.finish())
        self._events.emit(finished)

    # After a round

    def _take_in(self, outcome: Round | Broken) -> None:
        """Do what follows from a round.

        Raises:
            Leaving, JobLostError, DivergedError: see `run`.
        """
        self.ended_on_update = isinstance(outcome, Round) and is_update(outcome, self._config)
        if isinstance(outcome, Round):
            self._lookout.note(outcome)
            self._note_step(outcome)
            self._search.hurry()
            self._hold_against(outcome)
        match decide(self._position, outcome, self._config):
            case decisions.RollBack():
                self._roll_back()
                return
            case decisions.Wait():
                time.sleep(PAUSE_SECONDS)
            case decisions.GiveUp(error):
                raise error
            case decisions.Leave():
                raise Leaving
            case _ if isinstance(outcome, Round):
                self._note_round(outcome)
        # The next round may be the held-back update, which this group must queue. A group that is READY now would train
        # a step before it.
        if not (isinstance(outcome, Round) and gives_next(outcome, self._config)):
            self._conclude()

    def _hold_against(self, made: Round) -> None:
        """Compare the fetched state with what the holders have shown in a round."""
        verdict = made.verdict
        if not verdict.holders:
            return  # No holder to compare with. If all are dead, the fetched state is the latest one left.
        digest = verdict.digest if verdict.verified else 0
        try:
            self._go(self._healing.hold_against(verdict.step, made.lineage, digest, self._position.digest))
        except VoidError as void:
            if self._healing.is_loaded and not self._healing.digest:
                self._position.disown()
            self._give_up(void)

    def _note_round(self, made: Round) -> None:
        """Queue the round's update."""
        self._pace.note_update(self._strategy.steps * max(row.seconds for row in made.rows))
        if not self.ended_on_update:
            time.sleep(PAUSE_SECONDS)  # no group trains just now: do not hurry the holders through empty rounds
            return
        if self._attempt is None:
            return
        update = made.update(self._nominal_tokens).kept()
        try:
            healing = self._healing.queue(update.step, made.lineage, update.lineage)
        except OutdatedError as void:
            self._give_up(void)
            return
        self._attempt.keep(update, len(healing.queued) - 1)
        self._go(healing)

    def _roll_back(self) -> None:
        """Go on from this group's own state."""
        position = self._position
        logger.warning(
            "the state after %s %d is lost with its groups; going on from %d",
            self._strategy.unit,
            position.seen,
            position.step,
        )
        self._events.emit(RolledBack(step=position.step, lost=position.seen - position.step))
        self._drop_attempt()
        position.roll_back()
        self._healing = self._healing.roll_back()
        # Without readers, each group reads only its own slot. The next round deals out the other slots (`TakeOver`).
        self._ledger.readers = ()


class _Pace:
    """How fast the others make updates, and how fast this rank replays them."""

    def __init__(self) -> None:
        self.update_seconds = 0.0  # of the slowest group, for its last update; 0 = unknown
        self._began = 0.0  # when the others began their step, by this process's clock
        self.replay_seconds = 0.0  # of the last replayed update
        self._slow_rounds = 0  # in a row in which a replay took longer than an update

    def note_update(self, seconds: float) -> None:
        """Take in how long the slowest group took for an update; 0 = unknown."""
        self.update_seconds = seconds or self.update_seconds

    def note_step(self) -> None:
        """The others begin a step, as far as this rank knows."""
        self._began = time.monotonic()

    def note_offer(self, offer: Offer) -> None:
        """Take in how long a donor's last step took, and when its step began.

        A lone group admits a joiner in the midst of a step. Timed from the joiner's quorum, that step would seem to
        begin later, and the joiner would load too late.
        """
        self.note_update(offer.milliseconds / 1000)
        self._began = time.monotonic() - offer.elapsed_milliseconds / 1000

    def find_latest(self, load_seconds: float) -> float:
        """Return the latest time to begin a load or a replay without delaying the others' step.

        Half of the step, or the step minus four times the last load (load and digest, with margin), whichever is later.
        """
        half = self.update_seconds / 2
        if not load_seconds:
            return self._began + half
        return self._began + max(half, self.update_seconds - _LOAD_TIMES_IN_RESERVE * load_seconds)

    def note_lateness(self, until: float) -> int:
        """Return 0 in time; 1 if late, plus 1 for each slow round in a row.

        In a slow round a replay takes longer than an update.
        """
        if time.monotonic() < until:
            self._slow_rounds = 0
            return 0
        is_slow = 0 < self.update_seconds < self.replay_seconds
        self._slow_rounds = self._slow_rounds + 1 if is_slow else 0
        return 1 + self._slow_rounds
