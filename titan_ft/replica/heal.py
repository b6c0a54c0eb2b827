# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The heal: a group that has not the job's state gets it from a donor, while the others train on.

It takes part in their rounds with zeros and queues the sums until a donor's state has arrived; then it replays them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from titan_ft.config import FaultTolerance
from titan_ft.history.events import EventLog
from titan_ft.replica.catch_up import CatchUp, Fetched, Update
from titan_ft.replica.errors import JobLostError
from titan_ft.replica.group import Group
from titan_ft.replica.ledger import Ledger
from titan_ft.replica.round import PAUSE_SECONDS, Round, Rounds
from titan_ft.replica.row import Standing
from titan_ft.replica.snapshot import TrainState
from titan_ft.replica.state_fetch import fetch

logger = logging.getLogger(__name__)

_MAX_REST = 64  # rounds between two attempts of one heal
_ALONE_SECONDS = 5.0  # without a holder before older states count


class Heal:
    """Brings this rank's group to the job's state; see `run`.

    Args:
        token: the run's shared secret.
        apply: applies an update as a live step would.
    """

    def __init__(
        self,
        config: FaultTolerance,
        rounds: Rounds,
        state: TrainState,
        ledger: Ledger,
        group: Group,
        events: EventLog,
        token: str,
        apply: Callable[[Update], object],
    ) -> None:
        self._config, self._rounds, self._state, self._group, self._events = config, rounds, state, group, events
        self._ledger, self._token, self._apply = ledger, token, apply
        self._attempt: CatchUp | None = None
        self._rest = 0  # rounds until the next donor is asked
        self._round_seconds = 0.0  # of the last round
        self._replay_seconds = math.inf  # of the last replayed update
        self._alone_since: float | None = None  # when the last holder was seen to have gone

    def run(self) -> float:
        """Heal; this group is READY afterwards and the quorum of its next round is asked for.

        Returns:
            The seconds it took.

        Raises:
            JobLostError: nobody is left who has the state.
        """
        started = time.monotonic()
        self._rounds.position.standing = Standing.BEHIND
        self._rounds.position.heals = self._rest = 0
        while self._rounds.position.standing is not Standing.READY:
            began = time.monotonic()
            self._rounds.offer_nothing()
            if self._attempt is not None and self._attempt.whole:
                self._replay_some(self._attempt)  # while the others compute
            made = self._rounds.make()
            if made is not None and made.verdict.holders:
                self._alone_since = None
                self._follow(made)
            if self._attempt is not None and self._conclude(self._attempt):
                break
            if made is not None and not made.verdict.holders:
                self._recall(made)
            elif made is not None and not self._rounds.commits(made):
                time.sleep(PAUSE_SECONDS)  # nobody trains just now: do not hurry the holders through empty rounds
            self._round_seconds = time.monotonic() - began
        return time.monotonic() - started

    def _follow(self, made: Round) -> None:
        """Begin to fetch from the donor that the round named, and queue the round's update."""
        if self._attempt is None and made.quorum.rank in made.verdict.donors:
            self._attempt = self._begin(made)
        elif self._attempt is None:
            self._rest -= 1
            if self._rest <= 0:
                self._rounds.position.standing = Standing.BEHIND
        if self._attempt is not None and self._rounds.commits(made) and not self._rounds.uncovered(made):
            update = self._rounds.update(made, keep=True)
            if not self._attempt.queue(update, made.lineage):
                self._fail(self._attempt, f"missed an update before step {update.step}")
            elif not self._attempt.whole and 0 < self._config.catch_up_max_steps <= len(self._attempt.updates):
                self._let_wait(self._attempt)

    def _conclude(self, attempt: CatchUp) -> bool:
        """Go on with the attempt if all ranks of the group have their part of the state; give it up if one failed.

        Returns:
            Whether this group now has the state.
        """
        if attempt.whole:
            return self._catch_up(attempt)
        fetched = Fetched(min(self._group.gather(attempt.fetched())))
        if fetched is Fetched.FAILED:
            self._fail(attempt, attempt.error or "the fetch failed on another rank of this group")
        elif fetched is Fetched.DONE and not attempt.fits:
            self._fail(attempt, "the donor's state is not the one that the others went on from")
        elif fetched is Fetched.DONE:
            attempt.whole = True
            self._rounds.position.awaited = False  # the next round makes the update that the others hold back
        return False

    def _begin(self, made: Round) -> CatchUp:
        donor, step, config = made.verdict.donors[made.quorum.rank], made.verdict.step, self._config
        address, slot = self._rounds.membership.peer_address(donor), made.quorum.slots[donor]
        position = self._rounds.position
        position.standing, position.donor, position.heals = Standing.CATCHING_UP, slot, position.heals + 1
        position.awaited = config.catch_up == "wait"
        self._events.emit("heal_started", donor=slot, from_step=step, step=step)
        return CatchUp(
            slot,
            step,
            lambda cancelled: fetch(
                address,
                self._token,
                step,
                str(config.replica_id),
                config.transfer_connections,
                config.transfer_timeout_seconds,
                cancelled,
            ),
        )

    def _let_wait(self, attempt: CatchUp) -> None:
        """Let the others wait for the transfer's end: the queue is as long as it may be."""
        if not self._rounds.position.awaited:
            self._rounds.position.awaited = True
            logger.warning(
                "the others wait for this group: fault_tolerance.catch_up_max_steps (%d) updates are queued and the "
                "state is not there yet",
                self._config.catch_up_max_steps,
            )
            self._events.emit("catch_up_waiting", donor=attempt.donor, step=attempt.target_step)

    def _fail(self, attempt: CatchUp, reason: str) -> None:
        """Give the attempt up. The next donor is asked after a rest that doubles: each one pays with a copy."""
        attempt.cancel()
        position = self._rounds.position
        self._attempt, position.donor, position.awaited = None, -1, False
        self._rest = min(2 ** (position.heals - 1), _MAX_REST) - 1
        position.standing = Standing.CATCHING_UP if self._rest else Standing.BEHIND
        logger.warning("healing from group %d failed, asking another donor: %s", attempt.donor, reason)
        self._events.emit("heal_failed", donor=attempt.donor, from_step=attempt.from_step, error=reason)

    def _replay_some(self, attempt: CatchUp) -> None:
        """Load the state, then replay what fits into half of a step: the others must not wait for more.

        Two updates at least, for they make one meanwhile.
        """
        position = self._rounds.position
        if not attempt.loaded:
            attempt.loaded = True
            snapshot = attempt.snapshot()
            self._state.load(snapshot)
            position.step, position.lineage, position.sound = snapshot.step, snapshot.lineage, True
        affordable = max(2, int(self._round_seconds / 2 / self._replay_seconds))
        for _ in range(min(*self._group.gather(affordable), attempt.remaining)):
            self._replay(attempt)

    def _replay(self, attempt: CatchUp) -> None:
        began, update = time.monotonic(), attempt.take()
        self._apply(update)
        self._rounds.advance(update)
        self._replay_seconds = time.monotonic() - began

    def _catch_up(self, attempt: CatchUp) -> bool:
        """Replay the last queued update while the others apply it; False if more than that is queued."""
        if attempt.remaining > 1:
            return False
        if attempt.remaining:
            self._replay(attempt)
        position = self._rounds.position
        position.standing, position.donor = Standing.READY, -1
        self._attempt = None
        self._rounds.ask()
        self._events.emit(
            "heal_finished",
            donor=attempt.donor,
            from_step=attempt.from_step,
            step=attempt.target_step,
            bytes=attempt.snapshot().payload.numel(),
            seconds=attempt.seconds,
            fetch_seconds=attempt.fetch_seconds,
            replayed=attempt.replayed,
        )
        return True

    def _recall(self, made: Round) -> None:
        """No holder of the state is in the quorum: wait a little, then go on from the latest state that is left.

        Holders may only be late, and a transfer may still end.
        """
        now, position = time.monotonic(), self._rounds.position
        self._alone_since = self._alone_since or now
        if not any(self._group.gather(int(now >= self._alone_since + _ALONE_SECONDS))):
            time.sleep(PAUSE_SECONDS)
            return
        seen, best = max(row.seen for row in made.rows), max(row.step for row in made.rows)
        if best == 0 and seen > 0:
            raise JobLostError(
                f"every group that held the state after step {seen} is gone; restart the job from a checkpoint"
            )
        if position.sound and position.step == best:
            logger.warning("the state after step %d is lost with its groups; going on from step %d", seen, best)
            self._events.emit("rolled_back", step=best, lost=seen - best)
            if self._attempt is not None:
                self._attempt.cancel()
            self._attempt, position.standing, position.donor, position.seen = None, Standing.READY, -1, best
            position.awaited = False
            # Nobody reads for another group until all have met again: what is missing is dealt out in the round.
            self._ledger.readers = tuple(range(self._config.group_size))
