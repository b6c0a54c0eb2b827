# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What a group reports in a round: its contribution, and the row that it sends once the quorum is known."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Protocol

from titan_ft.protocol.ledger import Entry, encode
from titan_ft.protocol.member import Quorum
from titan_ft.protocol.row import Row, Standing, Why


@dataclass(frozen=True)
class Contribution:
    """What this rank adds to the step besides gradients.

    Attributes:
        valid_tokens, tokens: of the whole group; see `Row`.
        loss: the group's loss sum / nominal tokens of a step of all groups.
        max_loss: largest mean loss of one of the group's ranks.
        seconds: that the group's slowest rank spent on it.
        entries: the batches that it was made of, as this rank read them.
        early: the group has steps of its round left, and would rather make these.
        changed: there are gradients although none of these batches made them.
        doing: what the group spent most of the time on until the gradients were there.
    """

    valid_tokens: int = 0
    tokens: int = 0
    loss: float = 0.0
    max_loss: float = 0.0
    seconds: float = 0.0
    entries: tuple[Entry, ...] = ()
    early: bool = False
    changed: bool = False
    doing: Why = Why.COMPUTING

    @property
    def empty(self) -> bool:
        """True if this group trained nothing for this update."""
        return not (self.entries or self.tokens or self.changed)

    def plus(self, other: Contribution) -> Contribution:
        """Add what further microbatches contribute."""
        return Contribution(
            valid_tokens=self.valid_tokens + other.valid_tokens,
            tokens=self.tokens + other.tokens,
            loss=self.loss + other.loss,
            max_loss=max(self.max_loss, other.max_loss),
            seconds=self.seconds + other.seconds,
            entries=self.entries + other.entries,
            doing=self.doing,
        )


NOTHING = Contribution()


class GradientUse(enum.Enum):
    """What a group does with the gradients that it has computed. Equal on all its ranks."""

    GIVE = enum.auto()
    REST = enum.auto()  # keeps them back: the step cannot be committed now
    LEAVE_OUT = enum.auto()  # they are not finite
    FORCE = enum.auto()  # gives them although they are not finite, because nobody has others
    OPEN = enum.auto()  # has none yet: the round is for those that missed the update before it

    @property
    def gives(self) -> bool:
        """Whether they go into the exchange."""
        return self in (GradientUse.GIVE, GradientUse.FORCE)


class LeaveRequest(Protocol):
    """Knows whether this rank was told to leave; any thread may read it."""

    @property
    def requested(self) -> bool:
        """True from the moment of the request."""


@dataclass(frozen=True)
class RoundReport:
    """A group's report to one round. Only the quorum's answer and the time are missing (`complete`).

    Attributes:
        facts: the row of a group whose claim to the job's state holds and that contributes nothing.
        contribution, use: what the group trained, and whether its gradients are in the exchange.
        newest_step: a member with more updates than this voids the claim (`Position.newest_step`).
        began: when this rank had nothing more to do for this round but to wait, in seconds of its
            clock; infinite where it trains while the exchange is under way.
        joining: why the others wait for this group while it lacks the state.
        leave: read when the row is made. A SIGTERM that comes while the gradients are summed is in
            this row then, and the group may leave after this round.
    """

    facts: Row
    contribution: Contribution
    use: GradientUse
    newest_step: int
    began: float
    joining: Why
    leave: LeaveRequest

    def complete(self, quorum: Quorum, gave: bool, came: float) -> tuple[list[float], bytes]:
        """Return this member's row and message.

        Args:
            gave: this rank's gradients are in the sums.
            came: when this rank's part of the exchange was there, in seconds of its clock.
        """
        facts, use = self.facts, self.use
        claims = facts.has_state and quorum.max_step <= self.newest_step
        rests = claims and use is GradientUse.REST and not self.contribution.empty
        given = self.contribution if gave or rests else NOTHING
        opens = use is GradientUse.OPEN
        came = max(quorum.ready, quorum.asked if opens else came)
        trains = bool(facts.training and claims)
        row = replace(
            facts,
            standing=facts.standing if claims or not facts.has_state else Standing.BEHIND,
            valid_tokens=given.valid_tokens,
            tokens=given.tokens,
            loss=given.loss,
            max_loss=given.max_loss,
            seconds=given.seconds,
            leaving=self.leave.requested,
            forced=use is GradientUse.FORCE,
            excluded=use is GradientUse.LEAVE_OUT,
            resting=rests,
            training=trains,
            opening=claims and opens,
            early=claims and self.contribution.early,
            asked=quorum.answered - quorum.asked,
            came=came - quorum.answered,
            connecting=max(quorum.answered, self.began) < quorum.ready,
            doing=self.contribution.doing if trains else self.joining,
        )
        return row.encode(), encode(given.entries)
