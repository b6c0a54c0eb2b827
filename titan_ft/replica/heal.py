# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The heal: a group that has not the job's state gets it from a donor, while the others train on.

It takes part in their rounds with zeros and queues the sums until a donor's state has arrived; then it replays them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from titan_ft.config import FaultTolerance
from titan_ft.history.events import EventLog
from titan_ft.replica.catch_up import CatchUp, Fetched, Update
from titan_ft.replica.errors import JobLostError
from titan_ft.replica.group import Group
from titan_ft.replica.round import PAUSE_SECONDS, Round, Rounds
from titan_ft.replica.row import Standing
from titan_ft.replica.snapshot import TrainState
from titan_ft.replica.transport import fetch

logger = logging.getLogger(__name__)


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
        group: Group,
        events: EventLog,
        token: str,
        apply: Callable[[Update], object],
    ) -> None:
        self._config, self._rounds, self._state, self._group, self._events = config, rounds, state, group, events
        self._token, self._apply = token, apply
        self._attempt: CatchUp | None = None

    def run(self) -> float:
        """Heal; this group is READY afterwards and the quorum of its next round is asked for.

        Returns:
            The seconds it took.

        Raises:
            JobLostError: nobody is left who has the state.
        """
        started = time.monotonic()
        self._rounds.position.standing = Standing.BEHIND
        self._rounds.position.heals = 0
        while self._rounds.position.standing is not Standing.READY:
            made = self._rounds.make()
            if made is not None and not made.verdict.holders:
                self._recall(made)
            elif made is not None:
                self._follow(made)
            if self._attempt is not None:
                self._conclude(self._attempt, idle=made is not None and not self._rounds.commits(made))
        return time.monotonic() - started

    def _follow(self, made: Round) -> None:
        """Begin to fetch from the donor that the round named, and queue the round's update."""
        if self._attempt is None:
            self._attempt = self._begin(made)
        if self._rounds.commits(made):
            update = self._rounds.update(made, keep=True)
            if not self._attempt.queue(update, made.lineage):
                self._fail(self._attempt, f"missed an update before step {update.step}")

    def _conclude(self, attempt: CatchUp, idle: bool) -> None:
        """End the attempt if all ranks of the group have their part of the state, or one of them failed."""
        fetched = Fetched(min(self._group.gather(attempt.fetched())))
        if fetched is Fetched.FAILED:
            self._fail(attempt, attempt.error or "the fetch failed on another rank of this group")
        elif fetched is Fetched.PENDING:
            if idle:  # nobody trains just now: do not hurry the holders through empty rounds
                time.sleep(PAUSE_SECONDS)
        elif not attempt.fits:
            self._fail(attempt, "the donor's state is not the one that the others went on from")
        else:
            self._finish(attempt)

    def _begin(self, made: Round) -> CatchUp:
        donor, step, config = made.verdict.donors[made.quorum.rank], made.verdict.step, self._config
        address, slot = self._rounds.membership.peer_address(donor), made.quorum.slots[donor]
        self._rounds.position.standing = Standing.CATCHING_UP
        self._rounds.position.heals += 1
        self._events.emit("heal_started", donor=slot, from_step=step, step=step)
        return CatchUp(
            slot,
            step,
            lambda: fetch(
                address,
                self._token,
                step,
                str(config.replica_id),
                config.transfer_connections,
                config.transfer_timeout_seconds,
            ),
        )

    def _fail(self, attempt: CatchUp, reason: str) -> None:
        """Give the attempt up; the next round asks another donor."""
        self._rounds.position.standing = Standing.BEHIND
        self._attempt = None
        logger.warning("healing from group %d failed, asking another donor: %s", attempt.donor, reason)
        self._events.emit("heal_failed", donor=attempt.donor, from_step=attempt.from_step, error=reason)

    def _finish(self, attempt: CatchUp) -> None:
        """Load the state and replay what was queued."""
        # The quorum is asked for with the step that the replay leads to, so that nobody has to wait for the replay.
        self._rounds.membership.begin(attempt.target_step)
        snapshot, position = attempt.snapshot(), self._rounds.position
        self._state.load(snapshot)
        position.step, position.lineage, position.sound = snapshot.step, snapshot.lineage, True
        for update in attempt.updates:
            self._apply(update)
            self._rounds.advance(update)
        position.standing = Standing.READY
        self._attempt = None
        self._events.emit(
            "heal_finished",
            donor=attempt.donor,
            from_step=attempt.from_step,
            step=attempt.target_step,
            bytes=snapshot.payload.numel(),
            seconds=attempt.seconds,
            replayed=len(attempt.updates),
        )

    def _recall(self, made: Round) -> None:
        """Nobody holds the latest state: go on from the latest that is left, if this group has it."""
        position = self._rounds.position
        if self._attempt is not None:
            self._fail(self._attempt, "no holder of the state is left")
        seen, best = max(row.seen for row in made.rows), max(row.step for row in made.rows)
        if best == 0 and seen > 0:
            raise JobLostError(
                f"every group that held the state after step {seen} is gone; restart the job from a checkpoint"
            )
        if position.sound and position.step == best:
            logger.warning("the state after step %d is lost with its groups; going on from step %d", seen, best)
            self._events.emit("rolled_back", step=best, lost=seen - best)
            position.standing, position.seen = Standing.READY, best
            self._rounds.membership.begin(best)
