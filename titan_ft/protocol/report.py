# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A group's report in a round, from which the exchange's thread makes the group's row and message.

See docs/exchange.md.
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
    """This rank's part of an update besides its gradients.

    Attributes:
        valid_tokens: the whole group's tokens with a label that its loss counts.
        tokens: all tokens of the whole group.
        loss: the group's loss sum / nominal tokens of a step of all groups.
        max_loss: largest mean loss of one of the group's ranks.
        seconds: time that the group's slowest rank spent on its part.
        entries: the batches that this rank has trained.
        unfinished: the group has local steps left. It makes them, unless other groups have made all
            of theirs.
        has_earlier_changes: the group gives changes of earlier rounds, although it trained none of
            this round's batches.
        activity: the activity that took most of the group's time.
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
    LEAVE_OUT = enum.auto()  # keeps them, because they are not finite
    FORCE = enum.auto()  # gives them although they are not finite, because no group has finite ones
    OPEN = enum.auto()  # has none yet: the round is for groups that missed the last update

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
    """A group's report to one round. `complete` adds the quorum's answer and the times.

    Attributes:
        facts: the group's row without its contribution, and with its claim to the job's state.
        contribution: the group's part of the update.
        use: the use that the group makes of its gradients.
        newest_step: if a member has more updates than this, the claim does not hold
            (`Position.newest_step`).
        idle_since: time at which this rank had nothing left to do but wait, in seconds of its
            clock; infinite if it trains while the exchange is under way.
        joining_reason: why the others wait for this group, if it lacks the state.
        leave: says whether this rank got a leave request. It is read when the row is made, after
            the gradients have been summed. So this row shows a late SIGTERM as well.
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
            gave: this rank's gradients are in the sums.
            ready_at: when this rank's part of the exchange was ready, in seconds of its clock.
        """
        facts = self.facts
        opens = self.use is GradientUse.OPEN
        claim_holds = facts.has_state and quorum.max_step <= self.newest_step
        has_gradients = not self.contribution.is_empty
        holds_back = claim_holds and self.use is GradientUse.HOLD_BACK and has_gradients
        # A group that holds its gradients back still reports its tokens, so that the others know
        # that the step can be committed with them.
        given = NOTHING
        if gave or holds_back:
            given = self.contribution
        trains = bool(facts.training and claim_holds)
        standing = facts.standing
        if facts.has_state and not claim_holds:
            standing = Standing.BEHIND
        activity = self.joining_reason
        if trains:
            activity = self.contribution.activity
        # In an opening round this group has no part of its own: it was ready when it asked.
        if opens:
            ready_at = quorum.asked
        ready = max(quorum.ready, ready_at)
        row = replace(
            facts,
            standing=standing,
            valid_tokens=given.valid_tokens,
            tokens=given.tokens,
            loss=given.loss,
            max_loss=given.max_loss,
            seconds=given.seconds,
            leaving=self.leave.requested,
            forced=self.use is GradientUse.FORCE,
            excluded=self.use is GradientUse.LEAVE_OUT,
            holding_back=holds_back,
            training=trains,
            opening=claim_holds and opens,
            unfinished=claim_holds and self.contribution.unfinished,
            asked_before_seconds=quorum.answered - quorum.asked,
            ready_after_seconds=ready - quorum.answered,
            connecting=max(quorum.answered, self.idle_since) < quorum.ready,
            activity=activity,
        )
        return row.encode(), encode(given.entries)
