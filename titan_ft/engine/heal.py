# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The heal: a group that lacks the job's state gets it from holders, while the others train on.

There is one way in. The group asks the holders that it finds for an offer, and fetches the offered
state. Meanwhile it takes part in the exchanges without gradients, and queues their sums. Then it
loads the state, replays the queue, and is ready.

    asks (`OfferSearch`) -> fetches (`CatchUp`) -> loads and replays -> applies the last update
    together with the holders

The phases and their transitions are in `protocol/healing.py`. docs/heal.md follows one heal through
the files.
"""

from __future__ import annotations

import logging
import math
import threading
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
from titan_ft.protocol.decision import decide, is_update, releases_held_back
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

_MIN_ASKED = 8
"""Ask at least this many groups at once, even if `heal_donors` is smaller."""
_MAX_SLOW_ROUNDS = 3
"""After this many slow rounds in a row, ask the others to wait if more updates are queued."""
_MIN_REPLAYED = 2
"""Replay at least this many updates in each round. The others make one in the same time."""
_LOAD_TIMES_IN_RESERVE = 4
"""A load starts in the first half of the others' step, or later if this many load times remain in
the step."""
_POLL_SECONDS = 0.05  # between two looks at the other ranks of the group and at the other groups


class Heal:
    """Brings this rank's group to the job's state; see `run`.

    `ReplicaDimension` calls `await_offer` when a group joins, and `run` for each heal. Training
    thread only, except for `_fetch`. All ranks of a group call the same methods in the same order.
    They agree on facts that only one of them can know (`GroupCollectives.gather`). If `run` raises,
    the group lacks the state, and its process ends.

    Args:
        nominal_tokens: tokens of a step with all groups present.
        token: the run's shared secret.
        ranks_on_host: number of ranks that share this host's memory.
        apply: applies an update as a live step would.

    Attributes:
        ended_on_update: the last round of the heal was an update.
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
        # Groups may offer different states, and the state in most offers counts. So ask more groups
        # than serve the state; 0 = all.
        num_asked = max(_MIN_ASKED, config.heal_donors) if config.heal_donors else 0
        self._search = OfferSearch(rounds.find_holders, token, num_asked)
        self._lookout = Lookout(position, rounds, group)
        self._pace = _Pace()
        # A joiner asks the slots after its own at first. Then joiners that arrive together ask
        # different holders.
        self._healing = Healing(Phase.READY, last_donor=config.replica_id)
        self._attempt: CatchUp | None = None
        # Donors that serve this rank no more. The thread of the fetch writes it.
        self._lost: set[int] = set()
        self._offer: Offer | None = None  # found by `await_offer`, for the heal that follows
        self._least_step = 1  # states with fewer updates are outdated
        self.ended_on_update = False

    def await_offer(self, beyond: int) -> bool:
        """Wait for the requested quorum, or for the offer of a state with more than `beyond`
        updates.

        The holders of such a state come to a quorum only at the end of their step or round.

        Returns:
            True if a state is offered. The caller must then `run` the heal.
        """
        self._rounds.request_quorum()
        while not any(self._group.gather(self._rounds.quorum_ready)):
            offer = self._poll_search(beyond + 1)
            if offer is not None:
                self._offer = offer
                return True
            self._pause()
        return False

    def run(self) -> float:
        """Heal.

        Afterwards this group is READY, and the quorum of its next round is requested. It has the
        state of the holders or, after a roll-back, its own.

        Returns:
            The duration of the heal in seconds.

        Raises:
            JobLostError: no group that has the state is left.
            DivergedError: the groups' states differ without a majority.
            Leaving: the group got a leave request.
        """
        started = time.monotonic()
        # A newcomer fetches before its first quorum. The others may be in an exchange with this
        # group's former process. That exchange breaks, and they repeat it with the new process.
        is_new = self._rounds.last_round is None and not self._strategy.is_long
        self._start()
        while not self._is_in(Phase.READY):
            if is_new or self._strategy.is_long:
                self._prepare_until_quorum()
                if self._is_in(Phase.READY):
                    break
            self._rounds.launch_empty()
            others_repeat = is_new and self._meet_first_quorum()
            is_new = False
            self._prepare_during_step(others_repeat)
            self._take_in(self._rounds.make())
        self._exchange.copy_memory.drop()
        self._rounds.mark_busy()
        self._rounds.request_quorum()
        return time.monotonic() - started

    def _start(self) -> None:
        self._position.fall_behind()
        self._lookout.reset()
        self._pace = _Pace()
        self._search.pause(0.0)
        self._rounds.retract_offer()
        self._go(Healing(max_queued=self._agree_on_queue(), last_donor=self._config.replica_id))
        self._least_step = 1
        if self._rounds.last_round is not None:
            self._note_step(self._rounds.last_round)
        # If the heal ends before its first round: the round that this group missed may have been an
        # update, so assume that it was.
        self.ended_on_update = True
        if self._offer is not None:
            offer, self._offer = self._offer, None
            self._start_attempt(offer)

    def _agree_on_queue(self) -> int:
        """Return how many updates this group may queue: as many as its rank with least memory."""
        copies = self._exchange.copy_memory
        own = most_updates(
            self._config,
            free_bytes(),
            self._ranks_on_host,
            copies.num_bytes,
            copies.keep_on_device(),
        )
        return min(self._group.gather(own))

    def _go(self, healing: Healing) -> None:
        """Make a transition, and show it in the next row."""
        self._healing = healing
        self._position.show(healing)

    def _is_in(self, phase: Phase) -> bool:
        return self._healing.phase is phase

    # Before a quorum, and while the others compute

    def _prepare_until_quorum(self) -> None:
        """Ask, fetch, load and replay until the others come to their exchange.

        The quorum is requested first, so that the others do not wait for this group.

        Raises:
            Leaving: the group got a leave request. It has nothing to finish.
        """
        self._rounds.request_quorum()
        while not self._is_in(Phase.READY):
            self._leave_if_requested()
            if self._is_in(Phase.ASKING):
                # Before the check below: holders that wait for this group request the next quorum
                # at once, so it can be ready at every check.
                self._ask()
            if any(self._group.gather(self._rounds.quorum_ready)):
                return
            if self._is_in(Phase.REPLAYING) and self._has_work:
                # The smallest piece of work: a leave request must not wait for all of the queue.
                self._replay_until(-math.inf)
            else:
                self._pause()
            self._conclude()

    def _prepare_during_step(self, others_repeat: bool) -> None:
        """Ask, fetch, load and replay while the others compute a step, without delaying them.

        A state that arrives early in a step is loaded in it, and the group trains the next step.

        Args:
            others_repeat: the others do not compute. They repeat an exchange that broke with this
                group's former process.
        """
        self._pace.note_step()
        if others_repeat and not self._is_worth_a_wait():
            return
        while self._is_in(Phase.ASKING) and self._may_ask():
            self._ask()
            if self._is_in(Phase.FETCHING):
                self._rounds.mark_busy()
                self._await_state()
            elif all(self._group.gather(self._exchange.waits_for_members)):
                self._pause()
            else:
                return
        if self._is_in(Phase.FETCHING):
            self._await_state()
        if self._is_in(Phase.REPLAYING):
            self._make_room()
            self._replay_until(self._pace.find_latest(self._state.load_seconds))

    def _await_state(self) -> None:
        """Wait for the state while the others compute a step, as long as it can still be loaded."""
        self._make_room()
        # Not in a round of several steps, which takes too long: a leave request would go unnoticed.
        while self._is_in(Phase.FETCHING) and not self._strategy.is_long:
            latest = self._pace.find_latest(self._state.load_seconds)
            is_summing = self._exchange.waits_for_members
            if any(self._group.gather(time.monotonic() >= latest or not is_summing)):
                return
            if self._attempt is not None:
                with self._rounds.waiting():
                    self._attempt.wait(min(_POLL_SECONDS, latest - time.monotonic()))
            self._conclude()

    def _make_room(self) -> None:
        """Allocate memory for the next update now. Later, the allocation would delay the others."""
        if not self._healing.others_wait:
            self._exchange.copy_memory.prepare()

    def _is_worth_a_wait(self) -> bool:
        """Return True if the wait costs all others together less than one step of this group.

        The wait costs each of the others twice `load_seconds`: load and digest. Without the wait
        this group is back one step later. Returns False while a duration is unknown (0).
        """
        if not self._is_in(Phase.REPLAYING):
            return False
        num_others = len(self._rounds.get_quorum().members) - 1
        cost = 2 * self._state.load_seconds * num_others
        is_worth_it = cost > 0 and cost < self._pace.update_seconds
        return all(self._group.gather(is_worth_it))

    def _leave_if_requested(self) -> None:
        """Leave at once after a leave request: a group that heals has nothing to finish.

        Raises:
            Leaving: the group got a leave request.
        """
        if any(self._group.gather(self._rounds.leave_requested)):
            self._position.leave()
            raise Leaving

    def _pause(self) -> None:
        """Wait a moment for the next event of this heal.

        The leading rank waits for its search, if one is under way. Otherwise a rank waits for the
        quorum, or sleeps if the quorum is ready.
        """
        with self._rounds.waiting():
            if self._group.leads and self._search.wait(_POLL_SECONDS):
                return
            if self._rounds.quorum_ready:
                time.sleep(_POLL_SECONDS)
            else:
                self._rounds.pause(_POLL_SECONDS)

    # ASKING

    def _meet_first_quorum(self) -> bool:
        """Wait for the first quorum; return True if the fetched state is still the latest one.

        Then the others have made no update since the fetch began: they repeat the exchange that
        this group's former process broke. A later state in the quorum makes the fetched state
        outdated. An earlier state does not: the donor may be outside of this quorum.
        """
        quorum = self._rounds.get_quorum()
        self._least_step = max(self._group.gather(quorum.max_step))
        if self._is_in(Phase.ASKING):
            return False
        if self._least_step > self._healing.from_step:
            self._give_up(OutdatedError("the others have made an update since"))
            return False
        self._rounds.mark_busy()
        return True

    def _may_ask(self) -> bool:
        """Return True if the next round confirms the bytes that are fetched until then.

        The holders show their digests in it if this group is new to them, or if its last row asked
        for the state.
        """
        if self._strategy.is_long:
            # In a round of several steps, a group asks before the quorum (`_prepare_until_quorum`).
            return False
        last = self._rounds.last_round
        if last is None:
            quorum = self._rounds.get_quorum()
            has_others = quorum.error is None and len(quorum.members) > 1
            return all(self._group.gather(has_others))
        own = last.rows[last.quorum.rank]
        return own.asks_for_state and bool(last.verdict.holders)

    def _note_step(self, made: Round) -> None:
        """Note the step of the holders' state after a round."""
        if made.verdict.holders:
            self._least_step = made.verdict.step + int(is_update(made, self._config))

    def _ask(self) -> None:
        """Look for an offer, and start to fetch the offered state."""
        offer = self._poll_search(self._least_step)
        if offer is not None:
            self._start_attempt(offer)

    def _poll_search(self, least_step: int) -> Offer | None:
        """Return an offer that the group's leading rank has found; None = it has found none yet."""
        found = NO_OFFER
        if self._group.leads:
            found = self._search.poll(least_step, self._healing.last_donor)
        gather = self._group.gather
        # Only the leading rank, rank 0, knows the offer: each number is rank 0's.
        num_slots = gather(len(found.slots))[0]
        if num_slots == 0:
            return None
        step = gather(found.step)[0]
        lineage = gather(found.lineage)[0]
        digest = gather(found.digest)[0]
        milliseconds = gather(found.milliseconds)[0]
        elapsed_milliseconds = gather(found.elapsed_milliseconds)[0]
        own_slots = found.slots or (0,) * num_slots
        slots = tuple(gather(slot)[0] for slot in own_slots)
        # Remember the offered step. If its holders die before a round shows it, the job must not
        # silently start over.
        self._position.note_seen(step)
        return Offer(slots, step, lineage, digest, milliseconds, elapsed_milliseconds)

    def _start_attempt(self, offer: Offer) -> None:
        """Start to fetch an offered state."""
        max_donors = self._strategy.limit_donors(len(offer.slots))
        self._go(self._healing.take(offer, max_donors))
        self._pace.note_offer(offer)
        self._rounds.note_donors(offer.slots)
        self.ended_on_update = False
        self._lost = set()
        healing = self._healing
        self._events.emit(
            HealStarted(
                donor=healing.donor,
                donors=[*healing.donors],
                from_step=healing.from_step,
                step=healing.from_step,
            ),
        )
        if not self._strategy.is_long:
            self._make_room()
        self._attempt = CatchUp(partial(self._fetch, healing, self._lost), healing.max_queued)

    def _fetch(
        self,
        healing: Healing,
        lost: set[int],
        cancelled: threading.Event,
        note_share: Callable[[float], None],
    ) -> Snapshot:
        """Fetch this rank's part of the state; on the attempt's thread."""
        try:
            addresses = self._rounds.find_addresses(healing.donors)
        except OSError as error:
            reason = first_line(error)
            raise TransferError(
                f"groups {[*healing.donors]} offered their state: {reason}",
            ) from error

        def lose(place: int, error: str) -> None:
            donor = healing.donors[place]
            lost.add(donor)
            self._events.emit(DonorLost(donor=donor, from_step=healing.from_step, error=error))

        return fetch(
            addresses,
            self._token,
            healing.from_step,
            str(self._config.replica_id),
            CONNECTIONS,
            SLICE_SECONDS,
            cancelled,
            lose,
            note_share,
        )

    # FETCHING

    def _conclude(self) -> None:
        """Make the transition that the attempt's progress allows.

        - All ranks have their part of the state: go on to REPLAYING.
        - One rank's fetch failed: give the attempt up.
        - The state is loaded, confirmed and replayed: go on to READY.
        """
        if self._attempt is None:
            return
        if self._is_in(Phase.REPLAYING):
            self._finish()
            return
        fetched = Fetched(min(self._group.gather(self._attempt.fetched())))
        if fetched is Fetched.FAILED:
            error = self._attempt.error or "the fetch failed on another rank of this group"
            self._give_up(VoidError(error))
        elif fetched is Fetched.DONE:
            self._note_fetched(self._attempt.snapshot())
        else:
            if len(self._healing.donors) > 1:
                self._follow_donors()
            if self._healing.is_full and not self._healing.others_wait:
                self._end_queue(self._attempt)

    def _note_fetched(self, snapshot: Snapshot) -> None:
        offered = (self._healing.from_step, self._healing.lineage)
        is_offered_state = (snapshot.step, snapshot.lineage) == offered
        if all(self._group.gather(is_offered_state)):
            self._go(self._healing.note_fetched())
        else:
            reason = "the donor's state is not the one that the others went on from"
            self._give_up(VoidError(reason))

    def _follow_donors(self) -> None:
        """Name a donor that still serves all ranks, if the named one does not.

        Later joiners avoid the named donor. Each rank loses donors on its own. No rank may name a
        donor that another rank has lost.
        """
        lost = self._group.union(set(self._lost))
        donors = self._healing.donors
        serving = [slot for slot in donors if slot not in lost]
        if serving and serving[0] != donors[0]:
            self._go(self._healing.rename_donor(serving[0]))

    def _end_queue(self, attempt: CatchUp) -> None:
        """Act on a full queue: fetch a newer state, or let the others wait.

        The group fetches a newer state once in a heal, and only if all ranks would have it in time.
        """
        healing = self._healing
        num_queued = len(healing.queued)
        mebibytes = num_queued * self._exchange.copy_memory.num_bytes / 2**20
        reason = (
            f"{num_queued} updates ({mebibytes:,.1f} MiB on this rank) are queued, all that "
            f"{self._name_queue_bound()} allows, and the state is not there yet"
        )
        if healing.is_renewed or not all(self._group.gather(attempt.newer_would_be_in_time)):
            self._let_wait(reason)
            return
        logger.warning("fetching a newer state: %s", reason)
        self._events.emit(
            CatchUpRenewed(donor=healing.donor, from_step=healing.from_step, reason=reason),
        )
        self._drop_attempt()
        self._go(healing.renew())

    def _name_queue_bound(self) -> str:
        if self._config.catch_up_max_gb:
            return f"fault_tolerance.catch_up_max_gb ({self._config.catch_up_max_gb:g})"
        return "half of the host's free memory"

    def _let_wait(self, reason: str) -> None:
        """Let the others wait until this group has the state, or has replayed its queue."""
        self._go(self._healing.let_others_wait())
        logger.warning("the others wait for this group: %s", reason)
        healing = self._healing
        self._events.emit(
            CatchUpWaiting(donor=healing.donor, step=healing.target_step, reason=reason),
        )

    def _give_up(self, void: VoidError) -> None:
        """End the attempt. Ask again at once, or after a pause that doubles at each failure."""
        healing = self._healing
        self._drop_attempt()
        self._go(healing.lapse() if isinstance(void, OutdatedError) else healing.fail())
        self._search.pause(self._healing.pause_seconds)
        logger.warning("healing from group %d failed, asking again: %s", healing.donor, void)
        self._events.emit(
            HealFailed(donor=healing.donor, from_step=healing.from_step, error=str(void)),
        )

    def _drop_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.cancel()
        self._attempt = None

    # REPLAYING

    @property
    def _has_work(self) -> bool:
        """True if the state is not loaded, or an update is not replayed."""
        return not self._healing.is_loaded or self._healing.num_remaining > 0

    def _replay_until(self, deadline: float) -> None:
        """Load the state, then replay updates until `deadline`, so that the others do not wait.

        Replays at least `_MIN_REPLAYED` updates.
        """
        if not self._healing.is_loaded and not self._load():
            return
        for number in range(self._healing.num_remaining):
            if number >= _MIN_REPLAYED:
                lateness = max(self._group.gather(self._pace.note_lateness(deadline)))
                if lateness:
                    self._let_wait_if_too_slow(num_slow_rounds=lateness - 1)
                    break
            self._replay()
        if self._healing.others_wait and self._healing.num_remaining <= 1:
            # At most one update is left. Ask for the update that the others hold back: the next
            # round makes it.
            self._go(self._healing.let_others_go_on())

    def _let_wait_if_too_slow(self, num_slow_rounds: int) -> None:
        """Let the others wait if replays take longer than updates, and many updates are queued.

        `_MIN_REPLAYED` replays in each of their steps would cost the others more than one wait.
        """
        healing = self._healing
        is_too_slow = num_slow_rounds >= _MAX_SLOW_ROUNDS
        has_many = healing.num_remaining > _MAX_SLOW_ROUNDS
        if is_too_slow and has_many and not healing.others_wait:
            number = healing.num_remaining
            self._let_wait(f"to replay {number} queued updates takes longer than to make as many")

    def _load(self) -> bool:
        """Load the fetched state; return False if its bytes are not those of the offered digest."""
        assert self._attempt is not None, "a state is fetched before it is loaded"
        self._state.load(self._attempt.snapshot())
        self._exchange.drop_residuals()
        self._position.load(self._healing.from_step, self._healing.lineage)
        self._go(self._healing.load())
        self._rounds.take_digest()
        has_digest = self._healing.digest != 0  # without one, the next round confirms the bytes
        if not has_digest or self._healing.digest == self._position.digest:
            return True
        # A group with wrong bytes must not claim the job's state. The next round would reject the
        # bytes, and the group would heal without end.
        self._position.mark_corrupt()
        reason = "the state that came is not the one whose digest the holders agreed on"
        self._give_up(VoidError(reason))
        return False

    def _replay(self) -> None:
        assert self._attempt is not None, "updates are queued in an attempt"
        started = time.monotonic()
        update = self._attempt.take(self._healing.num_replayed)
        self._apply(update)
        self._position.advance(update)
        self._go(self._healing.replay())
        self._pace.replay_seconds = time.monotonic() - started

    def _finish(self) -> None:
        """End the heal if the state is loaded and confirmed, and at most one update is left.

        The others apply this last update at the same time.
        """
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
        """Act on the outcome of a round.

        Raises:
            Leaving, JobLostError, DivergedError: see `run`.
        """
        self.ended_on_update = isinstance(outcome, Round) and is_update(outcome, self._config)
        if isinstance(outcome, Round):
            self._lookout.note(outcome)
            self._note_step(outcome)
            self._search.hurry()
            self._compare_with_holders(outcome)
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
        # The next round is the update that the others hold back. Stay in REPLAYING, so that this
        # group queues the update. A READY group would compute a step from the state before it.
        if isinstance(outcome, Round) and releases_held_back(outcome, self._config):
            return
        self._conclude()

    def _compare_with_holders(self, made: Round) -> None:
        """Compare the fetched state with the one that the holders showed in a round."""
        verdict = made.verdict
        if not verdict.holders:
            # No holder to compare with. If all of them are dead, the fetched state is the latest
            # one.
            return
        digest = verdict.digest if verdict.verified else 0
        own_digest = self._position.digest
        try:
            self._go(self._healing.confirm(verdict.step, made.lineage, digest, own_digest))
        except VoidError as void:
            if self._healing.is_loaded and not self._healing.digest:
                self._position.mark_corrupt()
            self._give_up(void)

    def _note_round(self, made: Round) -> None:
        """Queue the round's update."""
        slowest_seconds = max(row.seconds for row in made.rows)
        self._pace.note_update(self._strategy.steps * slowest_seconds)
        if not self.ended_on_update:
            # No group trains now. Without a pause here, this group and the holders would make
            # empty rounds as fast as they can.
            time.sleep(PAUSE_SECONDS)
            return
        if self._attempt is None:
            return
        update = made.update(self._nominal_tokens).with_copied_sums()
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
            position.seen_step,
            position.step,
        )
        lost = position.seen_step - position.step
        self._events.emit(RolledBack(step=position.step, lost=lost))
        self._drop_attempt()
        position.roll_back()
        self._healing = self._healing.roll_back()
        # Without readers, each group reads only its own slot. The next round deals out the other
        # slots (`TakeOver`).
        self._ledger.readers = ()


class _Pace:
    """How fast the others make updates, and how fast this rank replays them. Training thread only.

    Attributes:
        update_seconds: time that the slowest group took for its last update; 0 = unknown.
        replay_seconds: time that this rank took for its last replay.
    """

    def __init__(self) -> None:
        self.update_seconds = 0.0
        self.replay_seconds = 0.0
        self._step_began = 0.0  # of the others, by this process's clock
        self._num_slow_rounds = 0  # rounds in a row in which a replay took longer than an update

    def note_update(self, seconds: float) -> None:
        """Note how long the slowest group took for an update; 0 = unknown."""
        self.update_seconds = seconds or self.update_seconds

    def note_step(self) -> None:
        """Note that the others begin a step, as far as this rank knows."""
        self._step_began = time.monotonic()

    def note_offer(self, offer: Offer) -> None:
        """Note how long a donor's last step took, and when the step under way began.

        A lone group admits a joiner in the middle of a step. If this rank counted from the joiner's
        quorum, the step would seem to begin later, and the joiner would load too late.
        """
        self.note_update(offer.milliseconds / 1000)
        self._step_began = time.monotonic() - offer.elapsed_milliseconds / 1000

    def find_latest(self, load_seconds: float) -> float:
        """Return the latest time to begin a load or a replay without delaying the others' step.

        This is half of the step, or the step minus four times the last load, whichever is later.
        Four times: load and digest, with margin.
        """
        half = self.update_seconds / 2
        if not load_seconds:
            return self._step_began + half
        reserve = _LOAD_TIMES_IN_RESERVE * load_seconds
        return self._step_began + max(half, self.update_seconds - reserve)

    def note_lateness(self, deadline: float) -> int:
        """Return 0 before the deadline; after it, 1 + the number of slow rounds in a row.

        In a slow round a replay takes longer than an update. One number, so that the ranks of a
        group agree on it at once.
        """
        if time.monotonic() < deadline:
            self._num_slow_rounds = 0
            return 0
        is_slow = self.update_seconds > 0 and self.replay_seconds > self.update_seconds
        self._num_slow_rounds = self._num_slow_rounds + 1 if is_slow else 0
        return 1 + self._num_slow_rounds
