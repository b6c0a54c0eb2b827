# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The heal: a group that lacks the job's state gets it from a donor, while the others train on.

It takes part in their rounds without gradients and queues the sums until a donor's state has arrived; then it replays
them.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from titan_ft.config import FaultTolerance
from titan_ft.engine.catch_up import CatchUp, Fetched
from titan_ft.engine.offer import NO_OFFER, Offer, OfferSearch, ask_all
from titan_ft.engine.round import PAUSE_SECONDS, Rounds
from titan_ft.gradients.exchange import GradientExchange
from titan_ft.membership.group import Group
from titan_ft.protocol import decision as decisions
from titan_ft.protocol.decision import Broken, Round, Update, decide, gives_next, is_update
from titan_ft.protocol.errors import Leaving, first_line
from titan_ft.protocol.ledger import Ledger
from titan_ft.protocol.position import Position
from titan_ft.protocol.row import Standing
from titan_ft.round_settings import steps_per_round, unit_of
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
from titan_ft.transfer.snapshot import TrainState
from titan_ft.transfer.state_fetch import CONNECTIONS, fetch
from titan_ft.transfer.wire import TransferError

logger = logging.getLogger(__name__)

_MAX_REST_ROUNDS = 64  # between two attempts of one heal
_FIRST_PAUSE_SECONDS = 1.0  # before the third attempt at an offer in one heal; the second one begins at once
_MAX_PAUSE_SECONDS = 64.0  # a round of several steps may last an hour, and offers last as long as it
_PATIENCE = 3  # rounds in a row with slow replays, with more than so many left, until the others are asked to wait
_LOADS = 4  # that a state must come before the others' next update to be loaded in time
_MOST_ASKED = 8  # groups that a newcomer asks at once what they offer
_SEARCH_REST_SECONDS = 1.0  # until a newcomer looks again for offers, behind one that has come to nothing
_POLL_SECONDS = 0.05  # between two looks whether the others are done, of a group of several ranks


class Heal:
    """Brings this rank's group to the job's state; see `run`.

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
        group: Group,
        events: EventLog,
        nominal_tokens: int,
        token: str,
        ranks_on_host: int,
        apply: Callable[[Update], object],
    ) -> None:
        self._config, self._position, self._rounds, self._exchange = config, position, rounds, exchange
        self._state, self._ledger, self._group, self._events = state, ledger, group, events
        self._nominal_tokens, self._token, self._apply = nominal_tokens, token, apply
        self._ranks_on_host = ranks_on_host
        self._most_donors = 1 if config.semi_sync_method else config.heal_donors or _MOST_ASKED  # of what they offer
        self._search = OfferSearch(
            rounds.find_holders, token, config.replica_id, self._most_donors, once=not config.semi_sync_method
        )
        self._offered: Offer | None = None  # that was found before the heal began
        self._attempt: CatchUp | None = None
        self._most = 1  # updates that may be queued while a state travels
        self._renewed = False  # a newer state was fetched because the queue was full
        self._donors: list[int] = []  # slots that it fetches from
        self._lost: set[int] = set()  # places in that list of those that give nothing to this rank any more
        self._rest_rounds = 0  # until the next donor is asked
        self.ended_on_update = False  # whether the last round of the heal was an update
        self._update_seconds = 0.0  # that the others' last one took the slowest of them to make, as their rows say
        self._replay_seconds = 0.0  # of the last replayed update
        self._slow_replays = 0  # rounds in a row in which a replay took longer than that
        self._alone_since: float | None = None  # by the group's clock: when who may be a holder was seen last
        self._outsiders: list[int] = []  # slots of groups that lived outside of the last round

    def run(self) -> float:
        """Heal; this group is READY afterwards and the quorum of its next round is asked for.

        Returns:
            The seconds it took.

        Raises:
            JobLostError: nobody is left who has the state.
            DivergedError: the groups' states differ without a majority.
            Leaving: the group was told to leave.
        """
        started = time.monotonic()
        self._position.fall_behind()
        self._position.be_alone(0.0)
        self._alone_since, self._outsiders, self._rest_rounds = None, [], 0
        self._most, self._renewed, self._slow_replays = self._agree_on_queue(), False, 0
        self._rounds.retract()
        self.ended_on_update = True  # whatever the round was that this group missed
        is_newcomer = not (self._config.semi_sync_method or self._rounds.met)  # the others see it by their quorum
        while self._position.standing is not Standing.READY:
            began = time.monotonic()
            meets_later = is_newcomer or bool(self._config.semi_sync_method)  # the others may be far from a round
            if self._attempt is None and meets_later:
                self._begin_aside()
            attempt = self._attempt
            if attempt is not None and meets_later and not self.ended_on_update:
                self._fetch_aside(attempt)
                if self._attempt is not attempt:
                    continue  # it has ended, one way or the other
            self._rounds.launch_empty()
            others_compute = True
            if is_newcomer:
                is_newcomer, others_compute = False, self._begin_early()
                began = time.monotonic()
                attempt = self._attempt
            if attempt is not None and (others_compute or self._is_worth_a_wait(attempt)):
                if not self._position.awaited:
                    self._exchange.room.prepare()
                until = began + self._spare_seconds()
                self._await_state(attempt, until)
                self._replay_some(attempt, until)
            outcome = self._rounds.make()
            self.ended_on_update = isinstance(outcome, Round) and is_update(outcome, self._config)
            if isinstance(outcome, Round):
                self._look_for_holders(outcome)
                self._check(outcome)
            self._act(outcome)
            if self._attempt is not None and not self._is_about_to_miss(outcome):
                self._conclude(self._attempt)
        attempt = None  # its memory can only be let go of with the rest if nothing refers to it
        self._exchange.room.drop()
        self._rounds.begin()
        self._rounds.ask()
        return time.monotonic() - started

    def _spare_seconds(self) -> float:
        """Return how far into the others' step this rank may begin to load, and to replay, without holding them up.

        Half of it, or all but what the last load took, some times over: it shows its digest, too.
        """
        load = self._state.load_seconds
        return max(self._update_seconds / 2, self._update_seconds - _LOADS * load if load else 0.0)

    def _is_worth_a_wait(self, attempt: CatchUp) -> bool:
        """Say whether to load now costs the others, all together, less than this group's part in a step is worth.

        It takes `load_seconds`, and as much for the digest; without that this group comes back a step later.
        """
        costs = 2 * self._state.load_seconds * (len(self._rounds.meet().members) - 1)
        return attempt.whole and all(self._group.gather(0 < costs < self._update_seconds))

    def _agree_on_queue(self) -> int:
        """Return how many updates this group may queue: as many as the rank with the least room, whatever each sees."""
        exchange = self._exchange
        on_device = exchange.room.keep_on_device()
        own = most_updates(self._config, free_bytes(), self._ranks_on_host, exchange.room.num_bytes, on_device)
        return min(self._group.gather(own))

    def await_offer(self, beyond: int) -> bool:
        """Wait for the quorum asked for, or until a group in the midst of its step offers a state behind more updates.

        Returns:
            Whether it does: the others are further than `beyond`, and come to a quorum at the end of that only.
        """
        self._offered = self._await_quorum_or_offer(beyond)
        return self._offered is not None

    def _begin_early(self) -> bool:
        """Begin to fetch while the others compute the step that this newcomer has come in, before they name a donor.

        They are about to show their digests in that round, for there is a newcomer in it: see `_confirm`. From now on a
        group that is told to leave does so behind the round, and does not break it.

        Returns:
            Whether they compute it. If this group has begun already, they make the exchange again that its former
            process has broken, and wait for it.
        """
        quorum = self._rounds.meet()
        if (attempt := self._attempt) is not None:
            # Those that this group has met may hold less than the one that it fetches from, which is to come.
            if max(self._group.gather(quorum.max_step)) <= attempt.from_step:
                self._rounds.begin()
                return False
            self._fail(attempt, "the others have made an update since")
        first = quorum.rank + 1  # several newcomers begin with different ones
        others = [*range(first, len(quorum.members)), *range(quorum.rank)][: self._most_donors]
        if not all(self._group.gather(quorum.error is None and quorum.max_step > 0 and bool(others))):
            return True
        addresses = {quorum.slots[rank]: self._rounds.peer_address(rank) for rank in others}
        offer = self._agree_on(self._ask_members(addresses, quorum.max_step) if self._group.leads else NO_OFFER)
        if offer.slots:
            self._rounds.begin()
            self._attempt = self._begin(offer, lambda: [addresses[slot] for slot in offer.slots])
        return True

    def _ask_members(self, addresses: dict[int, str], step: int) -> Offer:
        """Ask members of the quorum what they offer, for no longer than they need for the step."""
        thread = ThreadPoolExecutor(1, "titan_ft_offers")
        known = {slot: partial(str, address) for slot, address in addresses.items()}
        search = thread.submit(ask_all, known, self._token, step)
        thread.shutdown(wait=False)
        while self._exchange.under_way:
            with contextlib.suppress(TimeoutError):
                return search.result(_POLL_SECONDS)
        return NO_OFFER

    def _agree_on(self, found: Offer) -> Offer:
        """Return what rank 0 has found."""
        facts = (found.step, found.lineage, found.digest, found.milliseconds, len(found.slots))
        step, lineage, digest, milliseconds, number = (self._group.gather(fact)[0] for fact in facts)
        slots = tuple(self._group.gather(found.slots[n] if found.slots else 0)[0] for n in range(number))
        return Offer(slots, step, lineage, digest, milliseconds)

    def _check(self, made: Round) -> None:
        """Hold what is fetched against what the holders have shown in a round, and give it up if it is not theirs."""
        if self._attempt is None or not made.verdict.holders:
            return
        if self._attempt.digest is None:
            self._confirm(self._attempt, made)
        elif made.verdict.step > self._attempt.target_step:
            # Seen now, not in their next update: with several steps in a round that may be an hour away. If all of them
            # die, what has come is still the latest state that is left.
            self._fail(self._attempt, "the others have made an update since")

    def _confirm(self, attempt: CatchUp, made: Round) -> None:
        """Learn from the first round whether a state that no round has sent this group for is the holders'."""
        verdict = made.verdict
        agreed = verdict.verified and (verdict.step, made.lineage) == (attempt.from_step, attempt.lineage)
        if agreed and not (attempt.loaded and self._position.digest != verdict.digest):
            attempt.digest = verdict.digest
            return
        if attempt.loaded:
            self._position.disown()
        self._fail(attempt, "the state that was offered is not the one that the holders agree on")

    def _begin_aside(self) -> None:
        """Begin to fetch before there is a quorum, from groups that offer their state in the midst of a step or round.

        Raises:
            Leaving: the group was told to leave; it has nothing to finish.
        """
        offer, self._offered = self._offered or self._await_quorum_or_offer(0), None
        if offer is None:
            return
        self.ended_on_update = False
        self._attempt = self._begin(offer, lambda: self._find_addresses(offer.slots))
        if not self._config.semi_sync_method:
            self._exchange.room.prepare()  # now: behind the quorum they would wait for it

    def _find_addresses(self, slots: Sequence[int]) -> list[str]:
        try:
            return self._rounds.find_addresses(slots)
        except OSError as error:
            raise TransferError(f"groups {list(slots)} offered their state: {first_line(error)}") from error

    def _await_quorum_or_offer(self, beyond: int) -> Offer | None:
        """Wait until a group offers a state behind more than `beyond` updates; None if the quorum comes first."""
        self._rounds.ask()
        self._search.begin()
        while not any(self._group.gather(self._rounds.awaited)):
            found = (self._search.poll(beyond) if self._group.leads else None) or NO_OFFER
            if self._group.gather(len(found.slots))[0]:
                offer = self._agree_on(found)
                # Who offers it may be gone before it has shown it in a round: not to be begun anew silently.
                self._position.hear(offer.step)
                return offer
            if self._position.standing is not Standing.READY:
                self._leave_if_told()
            if not (self._group.leads and self._search.wait(_POLL_SECONDS)):
                self._rounds.pause(_POLL_SECONDS)
        return None

    def _leave_if_told(self) -> None:
        """Leave at once: a group that heals has nothing to finish.

        Raises:
            Leaving: it was told to.
        """
        if any(self._group.gather(self._rounds.told_to_leave)):
            self._position.leave()
            raise Leaving

    def _fetch_aside(self, attempt: CatchUp) -> None:
        """Wait for the state while the others train, until it is there or they are at the end of their step or round.

        The quorum is asked for, so that they do not wait for this group; without this the group would sit in the next
        round until they come, though its state may be there in a fraction of that time.

        Raises:
            Leaving: the group was told to leave; it has nothing to finish.
        """
        began = time.monotonic()
        self._rounds.ask()
        while self._attempt is attempt and not any(self._group.gather(self._rounds.awaited)):
            self._leave_if_told()
            if attempt.whole and (attempt.remaining or not attempt.loaded):
                self._replay_some(attempt, began)  # void if the bytes are not the agreed ones
            else:
                self._rounds.pause(_POLL_SECONDS)
            if self._attempt is attempt:
                self._conclude(attempt)

    def _await_state(self, attempt: CatchUp, until: float) -> None:
        """Wait for the state while the others compute a step, by this rank's clock no longer than `until`.

        A state that comes early enough in a step is loaded in it, and the group trains the next one. To load what comes
        later could hold the others up.
        """
        if self._config.semi_sync_method:  # a round of several steps is too long to be deaf in
            return
        while self._attempt is attempt and not attempt.whole:
            if any(self._group.gather(time.monotonic() >= until or not self._exchange.under_way)):
                return
            attempt.wait(min(_POLL_SECONDS, until - time.monotonic()))
            self._conclude(attempt)

    def _act(self, outcome: Round | Broken) -> None:
        """Do what follows from a round.

        Raises:
            Leaving: see `run`.
        """
        match decide(self._position, outcome, self._config):
            case decisions.Fetch(donors) if isinstance(outcome, Round):
                verdict, slots = outcome.verdict, outcome.slots(donors)
                addresses = [self._rounds.peer_address(donor) for donor in donors]
                offer = Offer(tuple(slots), verdict.step, outcome.lineage, verdict.digest)
                self._attempt = self._begin(offer, lambda: addresses)
            case decisions.RollBack():
                self._roll_back()
                return
            case decisions.Wait():
                time.sleep(PAUSE_SECONDS)
                return
            case decisions.GiveUp(error):
                raise error
            case decisions.Leave():
                raise Leaving
        if not isinstance(outcome, Round):
            return
        if self._attempt is None:
            self._rest_rounds -= 1
            if self._rest_rounds <= 0:
                self._position.end_fetch()
        self._update_seconds = steps_per_round(self._config) * max(row.seconds for row in outcome.rows)
        if not is_update(outcome, self._config):
            time.sleep(PAUSE_SECONDS)  # nobody trains just now: do not hurry the holders through empty rounds
        elif self._attempt is not None:
            self._queue(self._attempt, outcome)

    def _queue(self, attempt: CatchUp, made: Round) -> None:
        """Keep the round's update for the replay."""
        update = made.update(self._nominal_tokens).kept()
        if not attempt.queue(update, made.lineage):
            self._fail(attempt, f"missed an update before {unit_of(self._config)} {update.step}")
        elif attempt.whole:
            self._position.fetched(attempt.target_step)

    def _conclude(self, attempt: CatchUp) -> None:
        """Go on with the attempt if all ranks of the group have their part of the state; give it up if one failed."""
        if attempt.whole:
            self._catch_up(attempt)
            return
        fetched = Fetched(min(self._group.gather(attempt.fetched())))
        if fetched is Fetched.FAILED:
            self._fail(attempt, attempt.error or "the fetch failed on another rank of this group")
        elif fetched is Fetched.DONE and not all(self._group.gather(attempt.fits)):
            self._fail(attempt, "the donor's state is not the one that the others went on from")
        elif fetched is Fetched.DONE:
            attempt.whole = True
            self._position.fetched(attempt.target_step)  # the next round makes the update that the others hold back
        else:
            if len(self._donors) > 1:
                self._follow_donors()
            if attempt.full and not self._position.awaited:
                self._end_queue(attempt)

    def _follow_donors(self) -> None:
        """Name a donor that still gives, if the first one does not: nobody else is sent to the one that is named."""
        giving = [place for place in range(len(self._donors)) if place not in self._lost] or [0]
        self._position.follow(self._donors[max(self._group.gather(giving[0]))])

    def _begin(self, offer: Offer, addresses: Callable[[], list[str]]) -> CatchUp:
        """Begin to fetch what is offered."""
        slots, step, config = list(offer.slots), offer.step, self._config
        slot = slots[0]
        self._update_seconds = offer.milliseconds / 1000 or self._update_seconds
        self._position.hear(step)
        self._position.fetch(slot, step, awaited=config.catch_up == "wait")
        self._events.emit(HealStarted(donor=slot, donors=slots, from_step=step, step=step))
        self._donors, self._lost = slots, (lost := set())

        def lose(place: int, error: str) -> None:
            lost.add(place)
            self._events.emit(DonorLost(donor=slots[place], from_step=step, error=error))

        return CatchUp(
            slot,
            step,
            offer.lineage,
            offer.digest or None,
            lambda cancelled, note_share: fetch(
                addresses(),
                self._token,
                step,
                str(config.replica_id),
                CONNECTIONS,
                config.transfer_timeout_seconds,
                cancelled,
                lose,
                note_share,
            ),
            self._most,
        )

    def _end_queue(self, attempt: CatchUp) -> None:
        """Fetch a newer state if all ranks would have it in time, once in a heal; else let the others wait."""
        size = len(attempt.updates) * self._exchange.room.num_bytes / 2**20
        reason = (
            f"{len(attempt.updates)} updates ({size:,.1f} MiB on this rank) are queued, all that "
            f"{self._queue_bound()} allows, and the state is not there yet"
        )
        if self._renewed or not all(self._group.gather(attempt.newer_would_be_in_time)):
            self._let_wait(attempt, reason)
            return
        logger.warning("fetching a newer state: %s", reason)
        self._events.emit(CatchUpRenewed(donor=attempt.donor, from_step=attempt.from_step, reason=reason))
        attempt.cancel()
        self._attempt, self._renewed = None, True
        self._position.fetch_newer()

    def _queue_bound(self) -> str:
        """Name what bounds the queue."""
        if self._config.catch_up_max_gb:
            return f"fault_tolerance.catch_up_max_gb ({self._config.catch_up_max_gb:g})"
        return "half of the host's free memory"

    def _let_wait(self, attempt: CatchUp, reason: str) -> None:
        """Let the others wait until this group has the state, or has replayed what is queued."""
        self._position.keep_up()
        logger.warning("the others wait for this group: %s", reason)
        self._events.emit(CatchUpWaiting(donor=attempt.donor, step=attempt.target_step, reason=reason))

    def _fail(self, attempt: CatchUp, reason: str) -> None:
        """Give the attempt up. The next donor is asked after a rest that doubles: each one pays with a copy."""
        attempt.cancel()
        self._attempt = None
        if attempt.digest is None:  # no round has sent this group anywhere yet
            self._search.rest(_SEARCH_REST_SECONDS)
            self._rest_rounds = 0
            self._position.fetch_newer()
        else:
            self._rest_rounds = min(2 ** (self._position.heals - 1), _MAX_REST_ROUNDS) - 1
            self._position.end_fetch(rest=self._rest_rounds > 0)
        if self._config.semi_sync_method:
            self._search.rest(_find_pause_seconds(self._position.heals))
        logger.warning("healing from group %d failed, asking another donor: %s", attempt.donor, reason)
        self._events.emit(HealFailed(donor=attempt.donor, from_step=attempt.from_step, error=reason))

    def _replay_some(self, attempt: CatchUp, until: float) -> None:
        """Load the state if it is whole, then replay until the time `until`: the others must not wait for more.

        Two updates at least, for they make one meanwhile.
        """
        if self._attempt is not attempt or not attempt.whole or not (attempt.loaded or self._load(attempt)):
            return
        self._replay_until(attempt, until)
        if self._position.awaited and attempt.remaining <= 1:
            self._position.fetched(attempt.target_step)  # the next round makes the update that the others hold back

    def _replay_until(self, attempt: CatchUp, until: float) -> None:
        for number in range(attempt.remaining):
            if number >= 2 and (late := max(self._group.gather(self._note_lateness(until)))):
                if late > _PATIENCE < attempt.remaining and not self._position.awaited:
                    # Two replays in each of their steps would cost the others more than to wait for all at once.
                    reason = f"to replay {attempt.remaining} queued updates takes longer than to make as many"
                    self._let_wait(attempt, reason)
                return
            self._replay(attempt)

    def _note_lateness(self, until: float) -> int:
        """Count replays that are slow; returns 0 before `until`, then 1 and 1 for each of them in a row."""
        if time.monotonic() < until:
            self._slow_replays = 0
            return 0
        self._slow_replays = self._slow_replays + 1 if 0 < self._update_seconds < self._replay_seconds else 0
        return 1 + self._slow_replays

    def _load(self, attempt: CatchUp) -> bool:
        """Make the fetched state this rank's; False if its bytes are not the ones that the holders agreed on."""
        attempt.loaded = True
        self._state.load(attempt.snapshot())
        self._exchange.drop_residuals()
        self._position.load(attempt.from_step, attempt.lineage)
        self._rounds.take_digest()
        if attempt.digest is None or self._position.digest == attempt.digest:
            return True
        # Corrupted since the donor took its digest. As a claim to the job's state it would be found out at once, and
        # healed from the same donor again, without end.
        self._position.disown()
        self._fail(attempt, "the state that came is not the one whose digest the holders agreed on")
        return False

    def _replay(self, attempt: CatchUp) -> None:
        began, update = time.monotonic(), attempt.take()
        self._apply(update)
        self._position.advance(update)
        self._replay_seconds = time.monotonic() - began

    def _catch_up(self, attempt: CatchUp) -> None:
        """Replay the last queued update while the others apply it, if what is before it is loaded and confirmed."""
        if attempt.remaining > 1 or attempt.digest is None or not attempt.loaded:
            return
        if attempt.remaining:
            self._replay(attempt)
        self._position.heal()
        self._attempt = None
        self._events.emit(
            HealFinished(
                donor=attempt.donor,
                from_step=attempt.from_step,
                step=attempt.target_step,
                bytes=attempt.snapshot().payload.numel(),
                seconds=attempt.seconds,
                fetch_seconds=attempt.fetch_seconds,
                replayed=attempt.replayed,
            )
        )

    def _is_about_to_miss(self, outcome: Round | Broken) -> bool:
        """Say whether the next round is an update: this group must queue it; a READY one would train a step first."""
        return isinstance(outcome, Round) and gives_next(outcome, self._config)

    def _look_for_holders(self, made: Round) -> None:
        """Count the time without a holder of the job's state in sight, by the group's clock."""
        if made.verdict.holders:
            self._alone_since = None
            self._position.be_alone(0.0)
            return
        now = self._group.clock()
        # A holder that was silent for a moment, in the midst of a long step, is in no quorum until it has made that.
        if self._alone_since is None or any(self._group.gather(self._look_for_outsiders(made))):
            self._alone_since = now
        self._position.be_alone(now - self._alone_since)

    def _look_for_outsiders(self, made: Round) -> int:
        """Return how many groups live and are not in the quorum, as rank 0 sees it; tells people once."""
        slots = self._rounds.find_outsiders(made)
        if slots and slots != self._outsiders:
            logger.warning("nobody in the quorum holds the job's state; waiting for groups %s, which live", slots)
        self._outsiders = slots
        return len(slots)

    def _roll_back(self) -> None:
        """Go on from this group's own state."""
        position = self._position
        logger.warning(
            "the state after %s %d is lost with its groups; going on from %d",
            unit_of(self._config),
            position.seen,
            position.step,
        )
        self._events.emit(RolledBack(step=position.step, lost=position.seen - position.step))
        if self._attempt is not None:
            self._attempt.cancel()
        self._attempt = None
        position.roll_back()
        # Nobody reads for another group until all have met again: what is missing is dealt out in the round.
        self._ledger.readers = ()


def _find_pause_seconds(attempts: int) -> float:
    """Return how long no offer is looked for after so many attempts of one heal: each costs its donor a copy."""
    if attempts <= 1:
        return 0.0
    return min(_FIRST_PAUSE_SECONDS * 2.0 ** (attempts - 2), _MAX_PAUSE_SECONDS)
