# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A group's report in a round, from which the group's row is made.

In each exchange a group sends a `Row` of facts, and a message with the batches that it has trained.
The training thread knows most of the facts when it starts the exchange, and passes them on as a
`RoundReport`. The exchange's thread (`Flight`) adds the others at the end of the exchange, and gets
the row and the message from `RoundReport.complete`. See docs/exchange.md.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Protocol

from titan_ft.protocol.ledger import Entry, encode
from titan_ft.protocol.member import Quorum
from titan_ft.protocol.row import Row, Standing, Why


@dataclass(frozen=True)
class Contribution:
    """Facts about this rank's gradients and the batches that they are made of.

    Attributes:
        valid_tokens: the whole group's tokens that have a label and count in its loss.
        tokens: all tokens of the whole group.
        loss: sum of the group's losses, divided by the tokens of a step with all groups.
        max_loss: largest mean loss of one of the group's ranks.
        seconds: time that the group's slowest rank spent on its own computation.
        entries: the batches that this rank has trained.
        unfinished: the group has more local steps to make. It makes them, unless other groups have
            made all of theirs. Semi-synchronous methods only.
        has_earlier_changes: the group has trained no batch for this update, but gives changes of
            its weights from before. Semi-synchronous methods only.
        activity: the activity that took most of the group's time before the exchange.
    """

    valid_tokens: int = 0
    tokens: int = 0
    loss: float = 0.0
    max_loss: float = 0.0
    seconds: float = 0.0
    entries: tuple[Entry, ...] = ()
    unfinished: bool = False
    has_earlier_changes: bool = False
    activity: Why = Why.COMPUTING

    @property
    def is_empty(self) -> bool:
        """True if this group trained nothing for this update."""
        return not (self.entries or self.tokens or self.has_earlier_changes)

    def plus(self, other: Contribution) -> Contribution:
        """Return the sum of this contribution and that of further microbatches."""
        return Contribution(
            valid_tokens=self.valid_tokens + other.valid_tokens,
            tokens=self.tokens + other.tokens,
            loss=self.loss + other.loss,
            max_loss=max(self.max_loss, other.max_loss),
            seconds=self.seconds + other.seconds,
            entries=self.entries + other.entries,
            activity=self.activity,
        )


NOTHING = Contribution()


class GradientUse(enum.Enum):
    """The use that a group makes of its gradients in a round. Equal on all its ranks."""

    GIVE = enum.auto()
    HOLD_BACK = enum.auto()  # keeps them, because the step cannot be committed now
    EXCLUDE = enum.auto()  # gives none, because its own are not finite
    FORCE = enum.auto()  # gives them although they are not finite, because no group has finite ones
    # Has none yet: this *opening* round is made only for groups that missed the last update.
    OPEN = enum.auto()

    @property
    def gives(self) -> bool:
        """True if the gradients go into the exchange."""
        return self in (GradientUse.GIVE, GradientUse.FORCE)


class LeaveRequest(Protocol):
    """Knows whether this rank got a leave request. Any thread may read it."""

    @property
    def requested(self) -> bool:
        """True from the moment of the request."""


@dataclass(frozen=True)
class RoundReport:
    """The facts that a group knows before an exchange.

    Attributes:
        facts: the group's row, still without the facts about its gradients and about the quorum.
        contribution: facts about the group's gradients.
        use: the use that the group makes of its gradients.
        newest_step: the group claims to have the job's state. If a member of the quorum has more
            updates than this, the row does not show this claim (`Position.newest_step`).
        idle_since: time from which on this rank only waits for the exchange, in seconds of its
            clock; infinite if it trains while the exchange is under way.
        joining_reason: the reason why the others wait for this group, if it lacks the state.
        leave: tells whether this rank got a leave request. It is read at the end of the exchange,
            after the gradients have been summed. So the row shows a late SIGTERM as well.
    """

    facts: Row
    contribution: Contribution
    use: GradientUse
    newest_step: int
    idle_since: float
    joining_reason: Why
    leave: LeaveRequest

    def complete(self, quorum: Quorum, gave: bool, ready_at: float) -> tuple[list[float], bytes]:
        """Return this member's row and message. The exchange's thread calls this.

        Args:
            gave: True if this rank's gradients are in the sums.
            ready_at: time at which this rank's gradients were ready, in seconds of its clock.
        """
        facts = self.facts
        opens = self.use is GradientUse.OPEN
        # If another member has more updates, this group missed an update, and must heal.
        claim_holds = facts.has_state and quorum.max_step <= self.newest_step
        has_gradients = not self.contribution.is_empty
        holds_back = claim_holds and self.use is GradientUse.HOLD_BACK and has_gradients
        reported = NOTHING
        if gave or holds_back:
            # Also a group that holds its gradients back reports their tokens. From this the others
            # know that the step can be committed when the group gives them.
            reported = self.contribution
        trains = bool(facts.training and claim_holds)
        standing = facts.standing
        if facts.has_state and not claim_holds:
            standing = Standing.BEHIND
        activity = self.joining_reason
        if trains:
            activity = self.contribution.activity
        if opens:
            # In an opening round this group has no gradients, so it was ready at its request.
            ready_at = quorum.requested_at
        all_ready_at = max(quorum.connected_at, ready_at)
        row = replace(
            facts,
            standing=standing,
            valid_tokens=reported.valid_tokens,
            tokens=reported.tokens,
            loss=reported.loss,
            max_loss=reported.max_loss,
            seconds=reported.seconds,
            leaving=self.leave.requested,
            forced=self.use is GradientUse.FORCE,
            excluded=self.use is GradientUse.EXCLUDE,
            holding_back=holds_back,
            training=trains,
            opening=claim_holds and opens,
            unfinished=claim_holds and self.contribution.unfinished,
            asked_before_seconds=quorum.answered_at - quorum.requested_at,
            ready_after_seconds=all_ready_at - quorum.answered_at,
            connecting=max(quorum.answered_at, self.idle_since) < quorum.connected_at,
            activity=activity,
        )
        return row.encode(), encode(reported.entries)
