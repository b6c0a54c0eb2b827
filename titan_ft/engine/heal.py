# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The heal: a group that lacks the job's state fetches it from other groups, which train on.

Terms:

- The *job's state* is the model, the optimizer and the data ledger after the latest update. Its
  *lineage* is a hash of the exchanges that made it, its *digest* a hash of its bytes.
- A *joiner* is a group that lacks this state. A *newcomer* is a joiner whose process has been in no
  round yet. A *holder* is a group that has the state, and a *donor* a holder that serves it.
- An *offer* is a holder's answer to a joiner: which state it serves until its next update.
- In a *round*, the groups sum their gradients and exchange one *row* of facts each. A round is an
  *update* if all holders apply the mean of its gradients. The *quorum* is the list of the groups in
  a round, and the *slot* is a group's number.
- `has_long_rounds`: with a semi-synchronous method, a group makes many local steps between two
  rounds. Otherwise each step has one round, or several if one breaks.

`Heal.run` goes through these phases (`protocol/healing.py`):

1. ASKING: ask holders for an offer (`OfferSearch`).
2. FETCHING: fetch the offered state on a thread (`CatchUp`). Meanwhile take part in the rounds
   without gradients, and queue their updates.
3. REPLAYING: load the state, and replay the queued updates, some of them in each round. The state
   is *confirmed* when all holders have the same digest and it is the digest of the loaded bytes.
4. READY: the last queued update was applied while the holders applied it. The group trains again.

Phases 1 to 3 are an *attempt*. If an attempt fails, the next one begins with phase 1. If no holder
is left, and no group has a later state than this one, this group becomes READY with its own state.
That is a *roll-back*.

docs/heal.md follows one heal through the files.
"""

from __future__ import annotations

import enum
import logging
import math
import threading
import time
from collections.abc import Callable
from functools import partial

from titan_ft.config import FaultTolerance
from titan_ft.engine.catch_up import CatchUp, FetchStatus
from titan_ft.engine.holder_watch import HolderWatch
from titan_ft.engine.offer import OfferSearch
from titan_ft.engine.round import PAUSE_SECONDS, Rounds
from titan_ft.gradients.exchange import GradientExchange
from titan_ft.membership.group_collectives import GroupCollectives
from titan_ft.protocol import decision as decisions
from titan_ft.protocol.decision import decide, ends_holding_back, is_update
from titan_ft.protocol.errors import Leaving, first_line
from titan_ft.protocol.healing import (
    NO_DIGEST,
    NO_OFFER,
    AttemptError,
    Healing,
    Offer,
    OutdatedError,
    Phase,
)
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
from titan_ft.transfer.state_fetch import NUM_CONNECTIONS, PROGRESS_TIMEOUT_SECONDS, fetch
from titan_ft.transfer.wire import TransferError

logger = logging.getLogger(__name__)

_MIN_ASKED = 8
"""A joiner asks at least this many groups at once, even if `heal_donors` is smaller. It fetches the
state that most of them offer, and one or two offers are no majority."""
_MIN_REPLAYED = 2
"""A joiner replays at least this many updates in each round, even if the others then wait for it.
The others make one update in a round, so the queue becomes shorter."""
_MAX_SLOW_ROUNDS = 3
"""After this many rounds in a row in which a replay took longer than an update, the joiner asks the
others to wait."""
_MAX_SHORT_QUEUE = 3
"""A joiner with at most this many queued updates does not ask the others to wait."""
_LOAD_TIMES_IN_RESERVE = 4
"""In the second half of the others' step, the joiner begins to load only if this many load times
are left. A load and the digest after it take about two load times. The others must not wait even if
both take twice as long as last time."""
_POLL_SECONDS = 0.05  # longest wait before the ranks compare their view of the other groups again
_ALREADY_OVER = -math.inf  # a deadline that has passed


class Heal:
    """Brings this rank's group to the job's state.

    `ReplicaDimension` (`engine/step.py`) calls `await_offer` when its group joins the job, and
    `run` for each heal.

    Threads: all methods but `_fetch` run on the training thread. All ranks of a group call the same
    methods in the same order. A decision may depend on a fact that differs between ranks, such as
    the time. Then the ranks gather the fact first (`GroupCollectives.gather`), and all of them
    decide alike.

    If `run` raises, the group does not hold the job's state, and its process ends.

    Args:
        position: this group's place in the job. The group's next row shows it.
        rounds: makes the rounds with the other groups.
        exchange: sums the gradients of a round, on a thread of its own.
        state: this rank's part of the state, which the heal replaces.
        ledger: the batches that the job has trained.
        group: collectives among the ranks of this group.
        nominal_tokens: tokens of a step with all groups present. `Round.update` scales the sums of
            gradients by it.
        token: the run's shared secret.
        ranks_on_host: number of ranks that share this host's memory.
        apply: applies a replayed update, by the same code as the update of a step.

    Attributes:
        ended_on_update: the last round of the heal was an update. The group's next round is then
            the first one after an update, as it is for the holders.
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
        self._strategy = strategy_of(config)  # an update of one step, or of many
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
        max_asked: int | None = None  # ask all holders at once
        if config.heal_donors:
            max_asked = max(_MIN_ASKED, config.heal_donors)
        self._search = OfferSearch(rounds.find_holders, token, max_asked)
        # Measures how long no holder has been seen. After that, a roll-back is possible.
        self._holder_watch = HolderWatch(position, rounds, group)
        self._pace = _Pace()
        # The phase and the facts of this heal. Each search for offers begins with the slot after
        # `last_donor`. `await_offer` searches before a heal, so its search begins with the slot
        # after this group's own.
        self._healing = Healing(Phase.READY, last_donor=config.replica_id)
        # The fetch and the queue; None in the phases ASKING and READY.
        self._attempt: CatchUp | None = None
        # Slots of donors that serve this rank no more. The fetch's thread adds to it.
        self._lost_donors: set[int] = set()
        self._offer: Offer | None = None  # found by `await_offer`, for the heal that follows
        # An offer with fewer committed updates is outdated. No state with 0 updates is offered.
        self._least_step = 1
        self.ended_on_update = False

    def await_offer(self, own_step: int) -> bool:
        """Wait for the requested quorum, or for the offer of a later state than this group's own.

        The quorum alone is not enough: groups that train come to it only at the end of their step
        or round. Until then, their offers are the only sign of a later state.

        Args:
            own_step: committed updates in this group's state.

        Returns:
            True if a later state is offered. The caller must then `run` the heal.
        """
        self._rounds.request_quorum()
        while not any(self._group.gather(self._rounds.quorum_ready)):
            offer = self._poll_search(least_step=own_step + 1)
            if offer is not None:
                self._offer = offer
                return True
            self._wait_briefly()
        return False

    def run(self) -> float:
        """Heal. Afterwards this group is READY, and the quorum of its next round is requested.

        The group then has the state of the holders or, after a roll-back, its own.

        Returns:
            The duration of the heal in seconds.

        Raises:
            JobLostError: no group that has the state is left.
            DivergedError: the groups' states differ without a majority.
            Leaving: the group got a leave request.
        """
        started = time.monotonic()
        has_long_rounds = self._strategy.has_long_rounds
        # True until this process's first quorum. With long rounds, the first quorum needs no
        # special care: the group prepares before each quorum anyway.
        is_newcomer = self._rounds.last_round is None and not has_long_rounds
        self._start_asking()
        while not self._is_in(Phase.READY):
            # The others come to a quorum only at the end of their step or round. Use this time.
            if is_newcomer or has_long_rounds:
                self._prepare_until_quorum()
                # If the offer had the digest on which the holders agree, the state is confirmed
                # already, and the group may be READY without a round.
                if self._is_in(Phase.READY):
                    break
            # The exchange waits for the others on a thread of its own. Meanwhile this group uses
            # the time in which the others compute their step.
            self._rounds.launch_without_gradients()
            others_repeat = False
            if is_newcomer:
                others_repeat = self._meet_first_quorum()
            is_newcomer = False
            self._prepare_during_step(others_repeat)
            self._handle_outcome(self._rounds.make())
        self._exchange.copy_memory.drop()  # free the memory of the queue
        # From now on, leave only after a round: the others count on this group in the next one.
        self._rounds.mark_busy()
        self._rounds.request_quorum()
        return time.monotonic() - started

    def _start_asking(self) -> None:
        """Begin a heal in phase ASKING."""
        self._position.start_heal()
        self._holder_watch.reset()
        self._pace = _Pace()
        self._search.restart()
        # This group's own state is not the job's.
        self._rounds.retract_offer()
        # Ask from the slot after this group's own on. Otherwise joiners that come together would
        # all ask the same holder first.
        healing = Healing(max_queued=self._agree_on_queue(), last_donor=self._config.replica_id)
        self._set_healing(healing)
        self._least_step = 1
        if self._rounds.last_round is not None:
            self._update_least_step(self._rounds.last_round)
        if self._offer is not None:
            offer = self._offer
            self._offer = None
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

    def _set_healing(self, healing: Healing) -> None:
        """Make a transition. This group's next row shows it to the others."""
        self._healing = healing
        self._position.show_heal(healing)

    def _is_in(self, phase: Phase) -> bool:
        return self._healing.phase is phase

    # Before a quorum, and while the others compute

    def _prepare_until_quorum(self) -> None:
        """Ask, fetch, load and replay until the others come to their exchange.

        Raises:
            Leaving: the group got a leave request.
        """
        # Request it first, so that the others need not wait for this group when they come.
        self._rounds.request_quorum()
        while not self._is_in(Phase.READY):
            self._leave_if_requested()
            if self._is_in(Phase.ASKING):
                # Ask before looking at the quorum. Holders that wait for this group request a
                # quorum at once. It would be ready in each pass, and this group would never ask.
                self._ask()
            if any(self._group.gather(self._rounds.quorum_ready)):
                return
            if self._is_in(Phase.REPLAYING) and self._has_replay_left:
                # Replay a few updates only: a leave request must not wait for the whole queue.
                self._replay_until(_ALREADY_OVER)
            else:
                self._wait_briefly()
            self._advance_phase()

    def _prepare_during_step(self, others_repeat: bool) -> None:
        """Ask, fetch, load and replay while the others compute a step, without delaying them.

        If the state arrives early in a step, the group loads it in this step, and trains the next
        one.

        Args:
            others_repeat: the others do not compute. They repeat an exchange that broke with this
                group's former process.
        """
        self._pace.start_step()
        if others_repeat and not self._is_worth_a_wait():
            return
        while self._is_in(Phase.ASKING) and self._next_round_confirms():
            self._ask()
            if self._is_in(Phase.FETCHING):
                # From now on, leave only after the round. It would break for the others otherwise.
                self._rounds.mark_busy()
                self._await_state()
                continue
            others_compute = self._exchange.waits_for_members
            if not all(self._group.gather(others_compute)):
                # The others have computed their step. Now they wait for this group to complete the
                # exchange.
                return
            self._wait_briefly()
        if self._is_in(Phase.FETCHING):
            self._await_state()
        if self._is_in(Phase.REPLAYING):
            self._prepare_memory()
            self._replay_until(self._pace.find_load_deadline(self._state.load_seconds))

    def _await_state(self) -> None:
        """Wait for the state while the others compute a step, until it is too late to load it."""
        self._prepare_memory()
        # Do not wait for the end of a long round: a leave request would go unnoticed.
        if self._strategy.has_long_rounds:
            return
        while self._is_in(Phase.FETCHING):
            deadline = self._pace.find_load_deadline(self._state.load_seconds)
            others_compute = self._exchange.waits_for_members
            # Stop if it is too late on one rank, or if the others have computed their step.
            if any(self._group.gather(time.monotonic() >= deadline or not others_compute)):
                return
            if self._attempt is not None:
                with self._rounds.waiting():
                    self._attempt.wait_for_fetch(min(_POLL_SECONDS, deadline - time.monotonic()))
            self._advance_phase()

    def _prepare_memory(self) -> None:
        """Allocate memory for the next queued update now. Later, that would delay the others.

        Groups that wait for this one make no update, and none is queued.
        """
        if not self._healing.others_wait:
            self._exchange.copy_memory.prepare()

    def _is_worth_a_wait(self) -> bool:
        """Return True if the others lose less time by waiting than this group gains.

        The others have nothing to compute. While this group loads the state and takes its digest,
        each of them waits for about twice `load_seconds`. Otherwise this group loads the state in
        their next step, and is back one step later.
        """
        if not self._is_in(Phase.REPLAYING):
            return False
        num_others = len(self._rounds.get_quorum().members) - 1
        cost_seconds = 2 * self._state.load_seconds * num_others
        gain_seconds = self._pace.update_seconds
        # 0: no load has been measured, or there are no others.
        is_known = cost_seconds > 0
        return all(self._group.gather(is_known and cost_seconds < gain_seconds))

    def _leave_if_requested(self) -> None:
        """Leave at once after a leave request: a group that heals has nothing to finish.

        Raises:
            Leaving: the group got a leave request.
        """
        if any(self._group.gather(self._rounds.leave_requested)):
            self._position.mark_leaving()
            raise Leaving

    def _wait_briefly(self) -> None:
        """Wait a moment for the next event of this heal.

        The leading rank waits for its search, if one is under way. Otherwise a rank waits for the
        quorum, or sleeps if the quorum is ready.
        """
        with self._rounds.waiting():
            if self._group.leads and self._search.wait_for_answers(_POLL_SECONDS):
                return
            if self._rounds.quorum_ready:
                time.sleep(_POLL_SECONDS)
            else:
                self._rounds.wait_for_quorum(_POLL_SECONDS)

    # ASKING

    def _meet_first_quorum(self) -> bool:
        """Wait for a newcomer's first quorum, and compare its state with the fetched one.

        The others may have been in an exchange with this group's former process. That exchange
        breaks when the process ends, and the others repeat it with this process.

        Returns:
            True if the others repeat an exchange in this way: this group has begun to fetch their
            state, and they have made no update since.
        """
        quorum = self._rounds.get_quorum()
        self._least_step = max(self._group.gather(quorum.max_step))
        if self._is_in(Phase.ASKING):
            return False
        # An earlier state in the quorum is no reason to give up: the donor may be outside of it.
        if self._least_step > self._healing.from_step:
            self._abandon_attempt(OutdatedError("the others have made an update since"))
            return False
        # From now on, leave only after the round. It would break for the others otherwise.
        self._rounds.mark_busy()
        return True

    def _next_round_confirms(self) -> bool:
        """Return True if the next round will confirm a state that is fetched before it.

        It does if the holders show their digests in it. They do so for a group that is new to them,
        and for a group whose last row asked for the state.
        """
        if self._strategy.has_long_rounds:
            # With long rounds, a group asks before the quorum (`_prepare_until_quorum`).
            return False
        last = self._rounds.last_round
        if last is None:
            quorum = self._rounds.get_quorum()
            has_others = quorum.error is None and len(quorum.members) > 1
            return all(self._group.gather(has_others))
        own = last.rows[last.quorum.rank]
        return own.asks_for_state and bool(last.verdict.holders)

    def _update_least_step(self, made: Round) -> None:
        """Note how many updates the holders' state has after a round."""
        if not made.verdict.holders:
            return
        self._least_step = made.verdict.step
        if is_update(made, self._config):
            self._least_step += 1

    def _ask(self) -> None:
        """Look for an offer, and start to fetch the offered state."""
        offer = self._poll_search(self._least_step)
        if offer is not None:
            self._start_attempt(offer)

    def _poll_search(self, least_step: int) -> Offer | None:
        """Return an offer that the group's leading rank has found; None = it has found none yet.

        Args:
            least_step: an offer with fewer committed updates does not count.
        """
        found = NO_OFFER
        if self._group.leads:
            found = self._search.poll(least_step, self._healing.last_donor)

        def read_leader(value: int) -> int:
            """Return the value of the group's leading rank, which is rank 0."""
            return self._group.gather(value)[0]

        # `gather` takes one integer, so the fields of the offer travel one after the other.
        num_slots = read_leader(len(found.slots))
        if num_slots == 0:
            return None
        step = read_leader(found.step)
        lineage = read_leader(found.lineage)
        digest = read_leader(found.digest)
        milliseconds = read_leader(found.step_milliseconds)
        elapsed_milliseconds = read_leader(found.elapsed_milliseconds)
        # Each rank must gather as many slots as the leading rank has.
        own_slots = found.slots or (0,) * num_slots
        slots = tuple(read_leader(slot) for slot in own_slots)
        # Remember the offered step. If its holders die before a round shows it, the job must not
        # silently start over.
        self._position.raise_seen_step(step)
        return Offer(slots, step, lineage, digest, milliseconds, elapsed_milliseconds)

    def _start_attempt(self, offer: Offer) -> None:
        """Start to fetch an offered state."""
        max_donors = self._strategy.limit_donors(len(offer.slots))
        self._set_healing(self._healing.start_fetch(offer, max_donors))
        self._pace.adopt_times(offer)
        # A newcomer's first quorum must include one of the groups that offered the state. Otherwise
        # this group would make updates alone while these groups are in their long round.
        self._rounds.remember_donors(offer.slots)
        # The offered state is later than the last round, so that round no longer counts.
        self.ended_on_update = False
        self._lost_donors = set()
        healing = self._healing
        self._events.emit(
            HealStarted(
                donor=healing.donor,
                donors=[*healing.donors],
                from_step=healing.from_step,
                step=healing.from_step,
            ),
        )
        # With long rounds, the next update to queue may be an hour away.
        if not self._strategy.has_long_rounds:
            self._prepare_memory()
        fetch_state = partial(self._fetch, healing, self._lost_donors)
        self._attempt = CatchUp(fetch_state, healing.max_queued)

    def _fetch(
        self,
        healing: Healing,
        lost_donors: set[int],
        cancelled: threading.Event,
        report_share: Callable[[float], None],
    ) -> Snapshot:
        """Fetch this rank's part of the state; on the attempt's thread.

        Args:
            lost_donors: gets the slots of donors that serve this rank no more.
            cancelled: ends the fetch when it is set.
            report_share: called now and then with the share of the part that has arrived.
        """
        try:
            addresses = self._rounds.find_addresses(healing.donors)
        except OSError as error:
            reason = first_line(error)
            raise TransferError(
                f"groups {[*healing.donors]} offered their state: {reason}",
            ) from error

        def report_lost(index: int, error: str) -> None:
            donor = healing.donors[index]
            lost_donors.add(donor)
            self._events.emit(DonorLost(donor=donor, from_step=healing.from_step, error=error))

        return fetch(
            addresses,
            self._token,
            healing.from_step,
            joiner=str(self._config.replica_id),
            num_connections=NUM_CONNECTIONS,
            progress_timeout=PROGRESS_TIMEOUT_SECONDS,
            cancelled=cancelled,
            report_lost=report_lost,
            report_share=report_share,
            lineage=healing.lineage,
        )

    # FETCHING

    def _advance_phase(self) -> None:
        """Go on to the next phase if the attempt has come so far.

        - FETCHING, and all ranks have their part of the state: go on to REPLAYING.
        - FETCHING, and the fetch of one rank failed: abandon the attempt.
        - REPLAYING, and the state is loaded, confirmed and replayed: go on to READY.
        """
        if self._attempt is None:
            return
        if self._is_in(Phase.REPLAYING):
            self._finish_if_possible()
            return
        # The rank with the least progress decides for the group.
        status = FetchStatus(min(self._group.gather(self._attempt.fetch_status)))
        match status:
            case FetchStatus.FAILED:
                error = self._attempt.error or "the fetch failed on another rank of this group"
                self._abandon_attempt(AttemptError(error))
            case FetchStatus.DONE:
                self._accept_fetched(self._attempt.get_snapshot())
            case FetchStatus.PENDING:
                if len(self._healing.donors) > 1:
                    self._name_serving_donor()
                if self._healing.is_queue_full and not self._healing.others_wait:
                    self._handle_full_queue(self._attempt)

    def _accept_fetched(self, snapshot: Snapshot) -> None:
        """Go on to REPLAYING, unless a rank got another state than the offered one."""
        offered = (self._healing.from_step, self._healing.lineage)
        is_offered_state = (snapshot.step, snapshot.lineage) == offered
        if all(self._group.gather(is_offered_state)):
            self._set_healing(self._healing.finish_fetch())
        else:
            reason = "the donor's state is not the one that the others went on from"
            self._abandon_attempt(AttemptError(reason))

    def _name_serving_donor(self) -> None:
        """Name another donor in the next row if the named one serves a rank no more.

        Later joiners choose another donor than the named one. Each rank loses donors for itself, so
        the ranks agree on a donor that still serves all of them.
        """
        lost = self._group.union(set(self._lost_donors))
        donors = self._healing.donors
        serving = [slot for slot in donors if slot not in lost]
        if serving and serving[0] != donors[0]:
            self._set_healing(self._healing.replace_first_donor(serving[0]))

    def _handle_full_queue(self, attempt: CatchUp) -> None:
        """Fetch a newer state, or let the others wait.

        The group fetches a newer state once in a heal, and only if all ranks would have it before
        the queue is full again.
        """
        healing = self._healing
        num_queued = len(healing.queued)
        mebibytes = num_queued * self._exchange.copy_memory.num_bytes / 2**20
        reason = (
            f"{num_queued} updates ({mebibytes:,.1f} MiB on this rank) are queued, all that "
            f"{self._name_queue_bound()} allows, and the state is not there yet"
        )
        if healing.has_dropped_for_newer or not all(
            self._group.gather(attempt.newer_would_be_in_time)
        ):
            self._let_others_wait(reason)
            return
        logger.warning("fetching a newer state: %s", reason)
        self._events.emit(
            CatchUpRenewed(donor=healing.donor, from_step=healing.from_step, reason=reason),
        )
        self._cancel_attempt()
        self._set_healing(healing.drop_for_newer())

    def _name_queue_bound(self) -> str:
        if self._config.catch_up_max_gb:
            return f"fault_tolerance.catch_up_max_gb ({self._config.catch_up_max_gb:g})"
        return "half of the host's free memory"

    def _let_others_wait(self, reason: str) -> None:
        """Let the others wait until this group has the state, or has replayed its queue."""
        self._set_healing(self._healing.let_others_wait())
        logger.warning("the others wait for this group: %s", reason)
        healing = self._healing
        self._events.emit(
            CatchUpWaiting(donor=healing.donor, step=healing.target_step, reason=reason),
        )

    def _abandon_attempt(self, error: AttemptError) -> None:
        """End the attempt. Ask again at once, or after a pause if several attempts have failed."""
        healing = self._healing
        self._cancel_attempt()
        if isinstance(error, OutdatedError):
            self._set_healing(healing.drop_outdated())
        else:
            self._set_healing(healing.drop_failed())
        self._search.restart(self._healing.pause_seconds)
        logger.warning("healing from group %d failed, asking again: %s", healing.donor, error)
        self._events.emit(
            HealFailed(donor=healing.donor, from_step=healing.from_step, error=str(error)),
        )

    def _cancel_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.cancel()
        self._attempt = None

    # REPLAYING

    @property
    def _has_replay_left(self) -> bool:
        """True if the state is not loaded, or an update is not replayed."""
        return not self._healing.is_loaded or self._healing.num_remaining > 0

    def _replay_until(self, deadline: float) -> None:
        """Load the state, and replay updates until `deadline`, so that the others do not wait.

        Replays at least `_MIN_REPLAYED` updates.
        """
        if not self._healing.is_loaded and not self._load():
            return
        for num_replayed in range(self._healing.num_remaining):
            if num_replayed >= _MIN_REPLAYED:
                # The slowest rank decides for the group.
                of_ranks = self._group.gather(self._pace.measure_lateness(deadline))
                lateness = _Lateness(max(of_ranks))
                if lateness is _Lateness.LATE_AND_TOO_SLOW:
                    self._let_others_wait_for_replay()
                if lateness is not _Lateness.IN_TIME:
                    break
            self._replay_next()
        if self._healing.others_wait and self._healing.num_remaining <= 1:
            # The queue is nearly empty. The next row lets the others make the update that they hold
            # back.
            self._set_healing(self._healing.let_others_go_on())

    def _let_others_wait_for_replay(self) -> None:
        """Let the others wait if many updates are queued.

        Replays take longer than updates, so the queue would hardly become shorter. In each of their
        steps the others would wait for `_MIN_REPLAYED` replays, which costs more than one wait for
        all of them.
        """
        num_remaining = self._healing.num_remaining
        if num_remaining > _MAX_SHORT_QUEUE and not self._healing.others_wait:
            self._let_others_wait(
                f"to replay {num_remaining} queued updates takes longer than to make as many",
            )

    def _load(self) -> bool:
        """Load the fetched state; return False if its bytes are not those of the offered digest."""
        assert self._attempt is not None, "a state is fetched before it is loaded"
        self._state.load(self._attempt.get_snapshot())
        # The rounding errors of this group's earlier gradients belong to the former state.
        self._exchange.drop_residuals()
        self._position.adopt_state(self._healing.from_step, self._healing.lineage)
        self._set_healing(self._healing.mark_loaded())
        self._rounds.compute_digest()
        if not self._healing.is_confirmed:
            # The next round compares the bytes with the holders' digest.
            return True
        if self._healing.digest == self._position.digest:
            return True
        # A group with wrong bytes must not claim the job's state. The next round would reject the
        # bytes, and the group would heal without end.
        self._position.mark_corrupt()
        reason = "the state that came is not the one whose digest the holders agreed on"
        self._abandon_attempt(AttemptError(reason))
        return False

    def _replay_next(self) -> None:
        """Apply the first queued update that is not replayed yet."""
        assert self._attempt is not None, "updates are queued in an attempt"
        started = time.monotonic()
        update = self._attempt.get_for_replay(self._healing.num_replayed)
        self._apply(update)
        self._position.advance(update)
        self._set_healing(self._healing.mark_replayed())
        self._pace.replay_seconds = time.monotonic() - started

    def _finish_if_possible(self) -> None:
        """End the heal if the state is loaded and confirmed, and at most one update is left.

        The others apply this last update at the same time.
        """
        healing = self._healing
        if not healing.may_finish:
            return
        assert self._attempt is not None, "a state is fetched before it is the job's"
        if healing.num_remaining:
            self._replay_next()
        finished = HealFinished(
            donor=healing.donor,
            from_step=healing.from_step,
            step=healing.target_step,
            bytes=self._attempt.get_snapshot().payload.numel(),
            seconds=self._attempt.elapsed_seconds,
            fetch_seconds=self._attempt.fetch_seconds,
            replayed=len(healing.queued),
        )
        self._attempt = None
        self._set_healing(self._healing.finish())
        self._events.emit(finished)

    # After a round

    def _handle_outcome(self, outcome: Round | Broken) -> None:
        """Act on the outcome of a round.

        Raises:
            Leaving, JobLostError, DivergedError: see `run`.
        """
        self.ended_on_update = isinstance(outcome, Round) and is_update(outcome, self._config)
        if isinstance(outcome, Round):
            self._holder_watch.look_for_holders(outcome)
            self._update_least_step(outcome)
            self._search.end_pause()
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
            case decisions.Repeat():
                if isinstance(outcome, Round):
                    self._queue_update(outcome)
        # The next round is the update that the others hold back. Stay in REPLAYING, so that this
        # group queues the update. A READY group would compute a step from the state before it.
        if isinstance(outcome, Round) and ends_holding_back(outcome, self._config):
            return
        self._advance_phase()

    def _compare_with_holders(self, made: Round) -> None:
        """Compare the fetched state with the state that the holders showed in a round."""
        verdict = made.verdict
        if not verdict.holders:
            # There is nothing to compare with. If all holders are dead, the fetched state is the
            # latest one.
            return
        digest = verdict.digest if verdict.verified else NO_DIGEST
        own_digest = self._position.digest
        try:
            confirmed = self._healing.confirm(verdict.step, made.lineage, digest, own_digest)
        except AttemptError as error:
            # The next row must not claim a state whose bytes nobody has confirmed.
            if self._healing.is_loaded and not self._healing.is_confirmed:
                self._position.mark_corrupt()
            self._abandon_attempt(error)
            return
        self._set_healing(confirmed)

    def _queue_update(self, made: Round) -> None:
        """Queue the update of a round. If the round is no update, pause instead."""
        slowest_seconds = max(row.seconds for row in made.rows)
        # A row has the seconds of one step. With long rounds, an update takes several.
        self._pace.set_update_seconds(self._strategy.steps * slowest_seconds)
        if not self.ended_on_update:
            # No group trains now. Without a pause here, this group and the holders would make
            # empty rounds as fast as they can.
            time.sleep(PAUSE_SECONDS)
            return
        if self._attempt is None:
            # A state that is offered from now on includes this update.
            return
        # The next exchange overwrites the sums, so keep a copy.
        update = made.update(self._nominal_tokens).with_copied_sums()
        try:
            healing = self._healing.queue_update(update.step, made.lineage, update.lineage)
        except OutdatedError as error:
            self._abandon_attempt(error)
            return
        last = len(healing.queued) - 1
        self._attempt.queue_update(update, last)
        self._set_healing(healing)

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
        self._cancel_attempt()
        position.roll_back()
        self._healing = self._healing.roll_back()
        # The ledger's readers are the groups that share the data of the next step. They held the
        # lost update, and may be dead. Without readers, each group reads the data of its own slot,
        # and the next round deals out the data of missing groups (`TakeOverSlots`).
        self._ledger.readers = ()


class _Lateness(enum.IntEnum):
    """Whether this rank is late with its replays. The largest value of the group's ranks counts."""

    IN_TIME = 0
    LATE = 1
    LATE_AND_TOO_SLOW = 2  # and replays took longer than updates, `_MAX_SLOW_ROUNDS` in a row


class _Pace:
    """How fast the others make updates, and how fast this rank replays them. Training thread only.

    Attributes:
        update_seconds: time that the slowest group took for its last update; 0 = unknown.
        replay_seconds: time that this rank took for its last replay.
    """

    def __init__(self) -> None:
        self.update_seconds = 0.0
        self.replay_seconds = 0.0
        # When the others began their step, by this process's clock.
        self._step_began = 0.0
        self._num_slow_rounds = 0  # in a row; in each, a replay took longer than an update

    def set_update_seconds(self, seconds: float) -> None:
        """Note how long the slowest group took for an update; 0 = unknown."""
        if seconds:
            self.update_seconds = seconds

    def start_step(self) -> None:
        """Note that the others begin a step, as far as this rank knows."""
        self._step_began = time.monotonic()

    def adopt_times(self, offer: Offer) -> None:
        """Note how long a donor's last step took, and when the step under way began.

        A lone group admits a joiner in the middle of a step. If this rank counted from its own
        quorum, the step would seem to begin later, and the joiner would load too late.
        """
        self.set_update_seconds(offer.step_milliseconds / 1000)
        self._step_began = time.monotonic() - offer.elapsed_milliseconds / 1000

    def find_load_deadline(self, load_seconds: float) -> float:
        """Return until when a load or a replay may begin without delaying the others' step.

        The deadline is the middle of the step, or `_LOAD_TIMES_IN_RESERVE` load times before its
        end if that is later. Until a load has been measured, it is the middle.

        Args:
            load_seconds: duration of the last load; 0 = unknown.
        """
        half = self.update_seconds / 2
        if not load_seconds:
            return self._step_began + half
        reserve = _LOAD_TIMES_IN_RESERVE * load_seconds
        return self._step_began + max(half, self.update_seconds - reserve)

    def measure_lateness(self, deadline: float) -> _Lateness:
        """Return whether the deadline of a round's replays is over, and count slow rounds.

        Call this once in a round after the deadline.
        """
        if time.monotonic() < deadline:
            self._num_slow_rounds = 0
            return _Lateness.IN_TIME
        is_slow = self.update_seconds > 0 and self.replay_seconds > self.update_seconds
        if is_slow:
            self._num_slow_rounds += 1
        else:
            self._num_slow_rounds = 0
        if self._num_slow_rounds >= _MAX_SLOW_ROUNDS:
            return _Lateness.LATE_AND_TOO_SLOW
        return _Lateness.LATE
