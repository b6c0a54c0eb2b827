# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The replica dimension: what the trainer sees of the other groups.

quorum (asked for at the last commit) -> forward and backward -> exchange -> vote -> commit
                                                                 ^            |no
                                                                 +-- new quorum, same gradients
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from titan_ft.config import FaultTolerance
from titan_ft.history.events import EventLog
from titan_ft.replica.catch_up import Update
from titan_ft.replica.errors import GaveUpError, NonFiniteError
from titan_ft.replica.group import Group
from titan_ft.replica.heal import Heal
from titan_ft.replica.ledger import Ledger, share_out
from titan_ft.replica.round import PAUSE_SECONDS, Contribution, Position, Round, Rounds
from titan_ft.replica.row import Standing, fold48
from titan_ft.replica.snapshot import TrainState
from titan_ft.replica.straggler import Stragglers

logger = logging.getLogger(__name__)

MAX_EXCLUSIONS = 3
"""Steps in a row whose gradients only this group could not give, until it is started again."""


@dataclass(frozen=True)
class Committed:
    """A committed step: its update, and what is logged of it.

    Attributes:
        participants: slots of the groups that contributed weight.
        valid_tokens: tokens that the mean is taken over.
        loss, max_loss: mean per valid token over all participants, and the largest mean of one rank.
        own_tokens, own_loss: this group's part of them; None = it has none.
        exchanges: rounds that the step took; 1 = no retry.
        parent: lineage of the state before the step.
        slowest: seconds of the slowest group's own part of the step / median of the others' (0 = alone).
    """

    update: Update
    parent: int
    participants: list[int]
    valid_tokens: int
    loss: float
    max_loss: float
    own_tokens: int
    own_loss: float | None
    exchanges: int
    slowest: float


class ReplicaDimension:
    """One rank's side of the protocol. Training thread only; all ranks of a group call the same methods alike.

    Args:
        nominal_tokens: tokens of a step with all groups present; local losses are scaled by its inverse.
        pauses_after: says of a step whether training goes on after it only when something else is done.
    """

    def __init__(
        self,
        config: FaultTolerance,
        *,
        rounds: Rounds,
        heal: Heal,
        state: TrainState,
        ledger: Ledger,
        group: Group,
        events: EventLog,
        nominal_tokens: int,
        pauses_after: Callable[[int], bool],
    ) -> None:
        self._config, self._rounds, self._heal, self._state, self._group = config, rounds, heal, state, group
        self._ledger = ledger
        self._stragglers = Stragglers(config.straggler_factor, config.straggler_steps)
        self._nominal_tokens, self._pauses_after = nominal_tokens, pauses_after
        self._events = events
        self._waiting = False
        self._exclusions = 0  # steps in a row that were made without this group's gradients
        self.heal_seconds = 0.0

    @property
    def step(self) -> int:
        """Return the number of committed updates that this group's state has."""
        return self._rounds.position.step

    @property
    def leaving(self) -> bool:
        """Say whether this group was told to leave: the step that it has committed was its last."""
        return self._rounds.leaving

    @property
    def position(self) -> Position:
        """Return what this group holds."""
        return self._rounds.position

    def join(self, step: int = 0) -> bool:
        """Meet the other groups as one that can load `step` committed updates, or has none.

        Returns:
            Whether they are further, so that this one must `heal`.
        """
        position = self._rounds.position
        position.step = step
        behind = self._rounds.meet().behind
        if behind:
            position.step = 0
        return behind

    def start(self, step: int) -> bool:
        """Begin to train together, holding `step` committed updates; returns False if this group must `heal` first.

        The job's first step, also behind a checkpoint, waits for `group_size` groups, up to `start_timeout_seconds`.

        Raises:
            GaveUpError: fewer than `min_replica_size` groups came.
        """
        rounds, config, began = self._rounds, self._config, time.monotonic()
        rounds.position.step = step
        self.applied()
        while True:
            # Rounds of zeros: all groups decide by the same rows that the wait is over.
            rounds.position.waited = time.monotonic() - began
            made = rounds.make()
            if rounds.position.standing is Standing.BEHIND:
                return False
            if made is None:
                continue
            self._ledger.readers = tuple(made.slots(made.verdict.ready))
            present = len({row.slot for row in made.rows})
            waited = max(row.waited for row in made.rows)
            if present >= config.group_size:
                return True
            if waited >= config.start_timeout_seconds:
                break
            time.sleep(PAUSE_SECONDS)
        if present < config.min_replica_size:
            raise GaveUpError(
                f"fault_tolerance.min_replica_size must be reached within start_timeout_seconds "
                f"({config.start_timeout_seconds:g} s): it is {config.min_replica_size}, and {present} group(s) came; "
                "start the others sooner"
            )
        logger.warning("beginning with %d of %d groups: start_timeout_seconds is over", present, config.group_size)
        return True

    def arm(self) -> None:
        """Let the next backward launch the exchange; call it before the step's last backward."""
        self._rounds.arm()

    def slots_to_read(self) -> list[int]:
        """Return the slots whose data this group trains in the next step; none if another group still reads its own."""
        own, readers = self._config.replica_id, self._ledger.readers
        if self._config.batch_policy == "shrink":
            return [own]
        if own not in readers:  # the others dealt out this group's slot before they knew that it is back
            return []
        absent = set(range(self._config.group_size)) - set(readers)
        return [own, *share_out(absent, readers)[own]]

    def commit(self, contribution: Contribution, train: Callable[[list[int]], Contribution]) -> Committed | None:
        """Make rounds until the step is committed; its update is then to be applied at once.

        Args:
            contribution: what this group's gradients are made of.
            train: adds the gradients of one more step's share of each of these slots to the local ones.

        Returns:
            None if this group turns out not to hold the job's state: it must `heal`, its gradients are void.

        Raises:
            GaveUpError: more than `max_exchange_retries` exchanges in a row broke.
            DivergedError: the groups' states differ without a majority.
        """
        rounds = self._rounds
        rounds.excluded = rounds.insists = False
        exchanges = failures = 0
        while True:
            made = rounds.make(contribution)
            exchanges += 1
            if made is None:
                failures += 1
                self._give_up_after(failures)
                if any(self._group.gather(int(rounds.nonfinite))):
                    rounds.excluded, rounds.insists = True, False
                continue
            failures = 0
            if self._rounds.position.standing is Standing.BEHIND:
                return None
            if self._rounds.commits(made):
                if not (uncovered := self._rounds.uncovered(made)):
                    break
                # A group went with its share of the step. The others take it over, then exchange again.
                shares = share_out(uncovered, made.slots(made.verdict.contributors))
                contribution = contribution.plus(train(shares.get(self._config.replica_id, [])))
            elif made.verdict.excluded and not made.verdict.contributors:
                # Nobody is left to go on with: it is the model that diverges, and that is not for this layer to judge.
                rounds.excluded, rounds.insists = False, rounds.excluded
            elif not made.verdict.strays:  # with strays the same gradients go again at once, without theirs
                self._wait_for_more(made)
        self._waiting = False
        self._tell_excluded(made)
        own = made.rows[made.quorum.rank]
        update = self._rounds.update(made)
        self._rounds.advance(update)
        self._compare_speeds(made)
        if not (self.leaving or self._pauses_after(self.step)):
            # Asked for now, when all groups are at the same point, the next quorum finds everybody on time.
            self._rounds.ask()
        verdict = made.verdict
        return Committed(
            update=update,
            parent=made.lineage,
            participants=made.slots(verdict.contributors),
            valid_tokens=verdict.valid_tokens,
            loss=verdict.loss * (self._nominal_tokens / verdict.valid_tokens),
            max_loss=verdict.max_loss,
            own_tokens=own.valid_tokens,
            own_loss=own.loss * (self._nominal_tokens / own.valid_tokens) if own.valid_tokens else None,
            exchanges=exchanges,
            slowest=max(self._stragglers.ratios.values(), default=0.0),
        )

    def applied(self) -> str | None:
        """Take the digest of the state if one is due at this step; it travels with the next round.

        Returns:
            This rank's digest (hex) on steps that are multiples of `digest_every`, else None.
        """
        due = self._config.digest_every and self.step % self._config.digest_every == 0
        return self._take_digest() if due else None

    def heal(self) -> int:
        """Get the job's state from a donor while the others train on; returns the step that this group then holds.

        Raises:
            JobLostError: nobody is left who has it.
        """
        self.heal_seconds = self._heal.run()
        self.applied()
        return self.step

    def finish(self) -> str:
        """Stay until every group holds the final state, or `finish_timeout_seconds` passed without news; then leave.

        Returns:
            This rank's digest of the final state, in hex.
        """
        digest = self._take_digest()
        self._rounds.position.standing = Standing.FINISHED
        deadline = time.monotonic() + self._config.finish_timeout_seconds
        complete = False
        while True:
            made = self._rounds.make()
            if complete:  # everybody was seen to have finished; this last round only let the slowest see it too
                return digest
            if self._rounds.position.standing is Standing.BEHIND:
                self.heal()
                return self.finish()
            if made is not None:
                everybody = len(made.verdict.holders) == len(made.rows)
                missing = self._config.group_size - len({*made.quorum.slots, *self._rounds.position.left})
                # A rank that was told to leave may say so on some ranks of the others only: they must agree here.
                complete = all(self._group.gather(int(everybody and missing <= 0)))
                if not everybody:
                    deadline = time.monotonic() + self._config.finish_timeout_seconds
            if any(self._group.gather(int(time.monotonic() >= deadline))):
                logger.warning(
                    "leaving without the groups that are down: fault_tolerance.finish_timeout_seconds (%g s) is over",
                    self._config.finish_timeout_seconds,
                )
                return digest
            if not complete:
                time.sleep(PAUSE_SECONDS)

    def _wait_for_more(self, made: Round) -> None:
        """Too few groups have a gradient, or one is to be waited for: the same gradients wait."""
        if not self._waiting:
            self._waiting = True
            present, least = len(made.verdict.contributors), self._config.min_replica_size
            awaited = made.slots(made.verdict.awaited)
            why = (
                f"groups {awaited} fetch the state"
                if awaited
                else f"{present} group(s) have a gradient, {least} needed"
            )
            logger.warning("step %d waits: %s", self.step + 1, why)
            self._events.emit("waiting", step=self.step, participants=made.slots(made.verdict.contributors), reason=why)
        time.sleep(PAUSE_SECONDS)

    def _tell_excluded(self, made: Round) -> None:
        """Tell whose gradients the step leaves out, and end this group if its own have been left out too often.

        Its state comes from a peer then; if the next attempt cannot do better either, the data is what is wrong.
        """
        slots = made.slots(made.verdict.excluded)
        if slots:
            logger.warning("step %d is made without the gradients of groups %s: not finite", self.step + 1, slots)
            self._events.emit("gradient_excluded", step=self.step + 1, slots=slots)
        self._exclusions = self._exclusions + 1 if self._config.replica_id in slots else 0
        if self._exclusions >= MAX_EXCLUSIONS:
            raise NonFiniteError(
                f"the gradients of this group were not finite in {self._exclusions} steps in a row, those of others "
                f"were; last at step {self.step + 1}: look at the memory and the GPUs of this host, and at the batches "
                "that its events name"
            )

    def _compare_speeds(self, made: Round) -> None:
        """Tell when a group has become a straggler, or is none any more."""
        seconds = {made.quorum.slots[rank]: made.rows[rank].seconds for rank in made.verdict.contributors}
        for change in self._stragglers.observe(seconds):
            what = "is as fast as the others again" if change.recovered else f"is {change.ratio:.1f} times slower"
            logger.warning("group %d %s", change.slot, what)
            self._events.emit(
                "straggler_recovered" if change.recovered else "straggler",
                slot=change.slot,
                factor=change.ratio,
                step=self.step,
            )

    def _take_digest(self) -> str:
        digest = self._state.digest()
        self._rounds.position.digest = fold48(str(self._group.gather(fold48(digest))))
        return digest

    def _give_up_after(self, failures: int) -> None:
        if 0 < self._config.max_exchange_retries < failures:
            raise GaveUpError(
                f"fault_tolerance.max_exchange_retries ({self._config.max_exchange_retries}) exceeded: the exchange of "
                f"step {self.step + 1} broke {failures} times in a row; see why in this log"
            )
