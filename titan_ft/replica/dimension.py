# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The replica dimension: one group's side of the protocol that makes a step of all groups.

    quorum (asked for at the last commit) -> forward and backward -> exchange -> vote -> commit
                                                                     ^            |no
                                                                     +-- new quorum, same gradients

A group is READY while it holds the job's state. If a quorum finds it behind, or its state differs from the
majority's, it heals: `heal` takes part in the others' exchanges with zeros until the state of a donor has arrived and
the updates since have been replayed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from titan_ft.config import FaultTolerance
from titan_ft.history.events import EventLog
from titan_ft.replica.catch_up import CatchUp, Fetched, Update
from titan_ft.replica.exchange import ExchangeError, GradientExchange, Reduced
from titan_ft.replica.group import Group
from titan_ft.replica.membership import Membership, Quorum
from titan_ft.replica.row import Row, Standing, Verdict, descend, fold48, judge
from titan_ft.replica.snapshot import Snapshot, TrainState
from titan_ft.replica.transport import StateServer, fetch

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 0.1  # between quorums of groups that can only wait for others


class JobLostError(RuntimeError):
    """No living group holds the job's state."""


class DivergedError(RuntimeError):
    """The groups' states differ and no majority says which is right."""


class GaveUpError(RuntimeError):
    """The exchange kept failing, or too few groups came."""


@dataclass(frozen=True)
class Contribution:
    """What this rank adds to the step besides gradients.

    Attributes:
        valid_tokens, tokens: of the whole group; see `Row`.
        loss: the group's loss sum / `nominal_tokens`.
        max_loss: largest mean loss of one of the group's ranks.
    """

    valid_tokens: int = 0
    tokens: int = 0
    loss: float = 0.0
    max_loss: float = 0.0


@dataclass(frozen=True)
class Committed:
    """A committed exchange: its update, and what is logged of it.

    `loss` and `max_loss` are the mean per valid token over the contributing groups and the largest mean of one rank.
    `seconds` is the time that the training thread waited for the exchange and the vote.
    """

    update: Update
    participants: list[int]
    valid_tokens: int
    loss: float
    max_loss: float
    exchanges: int
    seconds: float


class ReplicaDimension:
    """Runs the protocol for one rank. All public methods are called on the training thread, by all ranks alike.

    Args:
        nominal_tokens: tokens of a step with all groups present; local losses are scaled by its inverse.
        total_steps: the step after which training ends.
        apply: applies an update through clip, optimizer and scheduler, and advances the trainer's counters.
    """

    def __init__(
        self,
        config: FaultTolerance,
        *,
        membership: Membership,
        exchange: GradientExchange,
        state: TrainState,
        server: StateServer,
        group: Group,
        events: EventLog,
        token: str,
        nominal_tokens: int,
        total_steps: int,
        apply: Callable[[Update], Any],
    ) -> None:
        self._config = config
        self._membership, self._exchange, self._state, self._server = membership, exchange, state, server
        self._group, self._events, self._token = group, events, token
        self._nominal_tokens, self._total_steps, self._apply = nominal_tokens, total_steps, apply
        self.step = 0
        self.lineage = 0
        self.heal_seconds = 0.0
        self._standing = Standing.READY  # until training begins everybody's initial state is the job's
        self._sound = True  # whether the state, though not the latest, is one that the job went through
        self._seen = 0
        self._digest = 0
        self._heals = 0
        self._served: Snapshot | None = None

    # The step

    def start(self, step: int) -> bool:
        """Enter the job, holding `step` committed updates; returns whether this group must `heal` first.

        The first step of a job waits for `group_size` groups, up to `start_timeout_seconds`.

        Raises:
            GaveUpError: fewer than `min_replica_size` groups came.
        """
        self.step = step
        deadline = time.monotonic() + self._config.start_timeout_seconds
        while True:
            self._membership.begin(self.step)
            quorum = self._membership.wait()
            present = len(set(quorum.slots))
            late = any(self._group.gather(int(time.monotonic() >= deadline)))  # one clock's word for the whole group
            if quorum.max_step > 0 or present >= self._config.group_size or late:
                break
            time.sleep(_WAIT_SECONDS)
        if quorum.max_step == 0 and present < self._config.min_replica_size:
            raise GaveUpError(
                f"fault_tolerance.min_replica_size is {self._config.min_replica_size}, but only {present} group(s) came "
                f"within start_timeout_seconds ({self._config.start_timeout_seconds:g} s); start the others sooner"
            )
        if quorum.behind:
            self._standing = Standing.BEHIND
        return quorum.behind

    def arm(self) -> None:
        """Let the next backward launch the exchange; call it before the step's last backward."""
        self._exchange.arm(self._contributes)

    def commit(self, contribution: Contribution) -> Committed | None:
        """Exchange until the step is committed; the update is then to be applied at once.

        Returns:
            None if this group turns out not to hold the job's state: it must `heal`, its gradients are void.

        Raises:
            GaveUpError: more than `max_exchange_retries` exchanges in a row broke.
            DivergedError: the groups' states differ without a majority.
        """
        started = time.monotonic()
        exchanges = failures = 0
        while True:
            reduced = self._attempt(contribution)
            exchanges += 1
            if reduced is None:
                failures += 1
                self._give_up_after(failures)
                continue
            verdict = self._judge(reduced)
            if self._standing is Standing.BEHIND:
                return None
            self._serve(reduced.quorum, verdict)
            if not self._commits(verdict):
                self._report_strays(reduced, verdict)
                time.sleep(0 if verdict.strays else _WAIT_SECONDS)
                continue
            update = self._update(reduced, verdict)
            self._advance(update)
            if self.step < self._total_steps:
                # Asked for now, when all groups are at the same point, the next quorum finds everybody on time.
                self._membership.begin(self.step)
            scale = self._nominal_tokens / verdict.valid_tokens
            return Committed(
                update=update,
                participants=[reduced.quorum.slots[rank] for rank in verdict.contributors],
                valid_tokens=verdict.valid_tokens,
                loss=verdict.loss * scale,
                max_loss=verdict.max_loss,
                exchanges=exchanges,
                seconds=time.monotonic() - started,
            )

    def applied(self) -> str | None:
        """Take the digest of the state if it is due after the step just applied; it travels with the next exchange.

        Returns:
            This rank's digest (hex) on steps that are multiples of `digest_every`, else None.
        """
        self._digest = 0
        if not self._config.digest_every or self.step % self._config.digest_every:
            return None
        digest = self._state.digest()
        self._digest = fold48(str(self._group.gather(fold48(digest))))
        return digest

    # The heal

    def heal(self) -> int:
        """Get the job's state from a donor while the others train on; returns the step that this group then holds.

        Raises:
            JobLostError: nobody is left who has it.
        """
        self._standing = Standing.BEHIND
        self._heals = 0
        attempt: CatchUp | None = None
        started = time.monotonic()
        while True:
            if not self._membership.asked:
                self._membership.begin(self.step)
            reduced = self._attempt(Contribution())
            if reduced is not None:
                verdict = self._judge(reduced)
                if not verdict.holders:
                    if self._recall(reduced, verdict):
                        return self.step
                elif attempt is None:
                    attempt = self._begin_catch_up(reduced, verdict)
                if attempt is not None and self._commits(verdict):
                    update = self._update(reduced, verdict, keep=True)
                    if not attempt.queue(update, self._holder(reduced, verdict).lineage):
                        attempt = self._fail_catch_up(attempt, f"missed an update before step {update.step}")
            if attempt is None:
                continue
            fetched = Fetched(min(self._group.gather(attempt.fetched())))
            if fetched is Fetched.FAILED:
                attempt = self._fail_catch_up(attempt, attempt.error or "another rank's fetch failed")
            elif fetched is Fetched.DONE and not attempt.fits:
                attempt = self._fail_catch_up(attempt, "the donor's state is not the one the others went on from")
            elif fetched is Fetched.DONE:
                self._finish_catch_up(attempt)
                self.heal_seconds = time.monotonic() - started
                return self.step
            elif reduced is not None and not self._commits(verdict):
                time.sleep(_WAIT_SECONDS)  # the holders are idle: do not hurry them through empty exchanges

    def _begin_catch_up(self, reduced: Reduced, verdict: Verdict) -> CatchUp:
        donor = verdict.donors[reduced.quorum.rank]
        address = self._membership.peer_address(donor)
        joiner, step, config = str(self._config.replica_id), verdict.step, self._config
        self._standing = Standing.CATCHING_UP
        self._heals += 1
        slot = reduced.quorum.slots[donor]
        self._events.emit("heal_started", donor=slot, from_step=step, step=step)
        return CatchUp(
            slot,
            step,
            lambda: fetch(
                address, self._token, step, joiner, config.transfer_connections, config.transfer_timeout_seconds
            ),
        )

    def _fail_catch_up(self, attempt: CatchUp, reason: str) -> None:
        """Give this attempt up; the next exchange asks another donor."""
        self._standing = Standing.BEHIND
        self._events.emit("heal_failed", donor=attempt.donor, from_step=attempt.from_step, error=reason)
        logger.warning("healing from group %d failed, asking another donor: %s", attempt.donor, reason)

    def _finish_catch_up(self, attempt: CatchUp) -> None:
        """Load the state, replay what was queued and be READY."""
        # The quorum is asked for with the step that the replay leads to, so that nobody has to wait for the replay.
        self._membership.begin(attempt.target_step)
        snapshot = attempt.snapshot()
        self._state.load(snapshot)
        self.step, self.lineage = snapshot.step, snapshot.lineage
        for update in attempt.updates:
            self._apply(update)
            self._advance(update)
        self._standing, self._sound = Standing.READY, True
        self.applied()
        self._events.emit(
            "heal_finished",
            donor=attempt.donor,
            from_step=attempt.from_step,
            step=self.step,
            bytes=snapshot.payload.numel(),
            seconds=attempt.seconds,
            replayed=len(attempt.updates),
        )

    def _recall(self, reduced: Reduced, verdict: Verdict) -> bool:
        """Nobody holds the latest state: go on from the latest that is left, if this group has it."""
        rows = self._rows(reduced)
        seen = max(row.seen for row in rows)
        if verdict.step == 0 and seen > 0:
            raise JobLostError(
                f"every group that held the state after step {seen} is gone; restart the job from a checkpoint"
            )
        if self.step < verdict.step:
            return False
        logger.warning("the state after step %d is lost with its groups; going on from step %d", seen, self.step)
        self._events.emit("rolled_back", step=self.step, lost=seen - self.step)
        self._standing = Standing.READY
        self._seen = self.step
        return True

    # The end

    def finish(self) -> str:
        """Stay until every group holds the final state, or `finish_timeout_seconds` passed without one; then leave.

        Returns:
            This rank's digest of the final state, in hex.
        """
        self._standing = Standing.FINISHED
        digest = self._state.digest()
        self._digest = fold48(str(self._group.gather(fold48(digest))))
        deadline = time.monotonic() + self._config.finish_timeout_seconds
        complete = False
        while True:
            reduced = self._attempt(Contribution())
            if complete:  # everybody has seen everybody finish; this last exchange only lets the slowest see it too
                return digest
            if reduced is not None:
                verdict = self._judge(reduced)
                if self._standing is Standing.BEHIND:
                    self.heal()
                    return self.finish()
                self._serve(reduced.quorum, verdict)
                everybody = len(verdict.holders) == len(reduced.quorum.members)
                complete = everybody and len(set(reduced.quorum.slots)) >= self._config.group_size
                if not everybody:
                    deadline = time.monotonic() + self._config.finish_timeout_seconds
            if any(self._group.gather(int(time.monotonic() >= deadline))):
                logger.warning("left without the groups that are down: none came back within finish_timeout_seconds")
                return digest
            if not complete:
                time.sleep(_WAIT_SECONDS)

    def close(self) -> None:
        """Leave the job at once."""
        self._membership.close()
        self._server.close()

    # One exchange

    def _attempt(self, contribution: Contribution) -> Reduced | None:
        """Make one exchange and vote on it; None if it broke on a rank of this group. Asks for a quorum if need be."""
        if not self._membership.asked:
            self._membership.begin(self.step)
        started = time.monotonic()
        reduced = None
        try:
            reduced = self._exchange.finish(self._contributes, lambda quorum: self._row(quorum, contribution).encode())
        except ExchangeError as error:
            self._emit_failure(str(error), started)
        if self._membership.vote(self.step, reduced is not None):
            return reduced
        if reduced is not None:
            self._emit_failure("broke on another rank of this group", started)
        return None

    def _emit_failure(self, error: str, started: float) -> None:
        logger.warning("exchange broke at step %d: %s", self.step, error)
        self._events.emit("exchange_failed", error=error, seconds=time.monotonic() - started, step=self.step)

    def _contributes(self, quorum: Quorum) -> bool:
        return self._standing is Standing.READY and not quorum.behind

    def _row(self, quorum: Quorum, contribution: Contribution) -> Row:
        standing = Standing.BEHIND if self._standing.has_state and quorum.behind else self._standing
        weighs = self._contributes(quorum)
        return Row(
            slot=self._config.replica_id,
            standing=standing,
            step=self.step if self._sound else 0,
            seen=max(self._seen, self.step),
            lineage=self.lineage,
            digest=self._digest,
            valid_tokens=contribution.valid_tokens if weighs else 0,
            tokens=contribution.tokens if weighs else 0,
            loss=contribution.loss if weighs else 0.0,
            max_loss=contribution.max_loss if weighs else 0.0,
            heals=self._heals,
        )

    @staticmethod
    def _rows(reduced: Reduced) -> list[Row]:
        return [Row.decode(values) for values in reduced.rows.tolist()]

    def _judge(self, reduced: Reduced) -> Verdict:
        """Read the rows; takes this group's standing back if they say that its state is not the job's.

        Raises:
            DivergedError: the states differ without a majority.
        """
        rows = self._rows(reduced)
        verdict = judge(rows)
        self._seen = max(self._seen, *(row.seen for row in rows))
        own = reduced.quorum.rank
        if verdict.tie:
            self._report_strays(reduced, verdict)
            raise DivergedError(
                f"the groups' states differ after step {verdict.step} and no majority says which is right "
                f"(digests {({row.slot: f'{row.digest:012x}' for row in rows})}); restart the job from a checkpoint"
            )
        if self._standing.has_state and own not in verdict.holders:
            if own in verdict.strays:
                self._report_strays(reduced, verdict)
                self._sound = False
            self._standing = Standing.BEHIND
        return verdict

    def _commits(self, verdict: Verdict) -> bool:
        """Say whether this exchange is an update; with strays among the contributors it is repeated without them."""
        return (
            not verdict.strays
            and verdict.valid_tokens > 0
            and len(verdict.contributors) >= self._config.min_replica_size
        )

    def _holder(self, reduced: Reduced, verdict: Verdict) -> Row:
        return self._rows(reduced)[verdict.holders[0]]

    def _update(self, reduced: Reduced, verdict: Verdict, keep: bool = False) -> Update:
        """Turn the buckets' sums into the token-weighted mean over the contributors."""
        self._exchange.scale(self._nominal_tokens / verdict.valid_tokens)
        step = verdict.step + 1
        return Update(
            step=step,
            tokens=verdict.tokens,
            lineage=descend(self._holder(reduced, verdict).lineage, reduced.quorum.key, step),
            gradients=self._exchange.reduced() if keep else None,
        )

    def _advance(self, update: Update) -> None:
        self.step, self.lineage = update.step, update.lineage
        self._seen = max(self._seen, self.step)
        self._digest = 0

    def _report_strays(self, reduced: Reduced, verdict: Verdict) -> None:
        if verdict.strays or verdict.tie:
            rows, slots = self._rows(reduced), reduced.quorum.slots
            self._events.emit(
                "digest_mismatch",
                step=verdict.step,
                digests={str(row.slot): f"{row.digest:012x}" for row in rows if row.has_state},
                lineages={str(row.slot): f"{row.lineage:012x}" for row in rows if row.has_state},
                minority=sorted(slots[rank] for rank in verdict.strays),
            )

    def _serve(self, quorum: Quorum, verdict: Verdict) -> None:
        """Copy the state to host memory if a joiner was sent to this group; before the optimizer writes it."""
        if quorum.rank in verdict.donors.values():
            if self._served is None or self._served.step != verdict.step:
                self._withdraw()
                started = time.monotonic()
                self._served = self._state.copy(verdict.step, self.lineage)
                self._server.publish(self._served, time.monotonic() - started)
        elif not verdict.catching_up:
            self._withdraw()

    def _withdraw(self) -> None:
        self._served = None
        if (snapshot := self._server.withdraw()) is not None:
            self._state.reuse(snapshot)

    def _give_up_after(self, failures: int) -> None:
        if 0 < self._config.max_exchange_retries < failures:
            raise GaveUpError(
                f"the exchange of step {self.step + 1} broke {failures} times in a row, more than "
                f"fault_tolerance.max_exchange_retries ({self._config.max_exchange_retries}); see the group's log"
            )
