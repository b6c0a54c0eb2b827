# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What a group holds and has heard: its place in the job. Equal on all of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from titan_ft.protocol.healing import Healing, Phase
from titan_ft.protocol.round import Round, Update
from titan_ft.protocol.row import Standing


@dataclass
class Position:
    """One group's place in the job, as its row shows it to the others.

    Fields are for reading; they change by the methods below only, each of which is one event of a group's life. All
    ranks of a group call the same ones in the same order, with values that they have agreed on.

    The parts below are no values of their own with one writer each: the events that matter (a round, falling behind,
    the end of a heal) change two or three of them at once, and a state between the writes would mean nothing. So the
    method is the unit that is written and read, and the whole is what the ranks of a group are compared by.
    """

    # The state.
    step: int = 0  # committed updates in it
    lineage: int = 0
    digest: int = 0  # of its bytes; 0 = not taken since the last update
    corrupt: bool = False  # its bytes are not those that its lineage stands for: only a donor's state will do
    saved_corrupt: bool = False  # what this group saved since `agreed` is to be withdrawn

    # What the group does.
    standing: Standing = Standing.READY  # until training begins everybody's initial state is the job's
    training: bool = False  # the job's first step has begun, as far as this group knows
    leaving: bool = False  # told to leave; it asks for no quorum any more
    failures: int = 0  # rounds in a row that broke
    waited: float = 0.0  # seconds by the group's clock, for the job's first step; 0 while others live outside
    exclusions: int = 0  # steps in a row that were made without this group's gradients

    # The heal under way, as `show` takes it over from `Healing`.
    donor: int = -1  # slot that it fetches from
    from_step: int = 0  # of the state that it fetches there
    target: int = 0  # step of the state when all that is fetched has been replayed; 0 = nothing is fetched
    awaited: bool = False  # the others wait for the transfer, or the replay
    alone: float = 0.0  # seconds by the group's clock, without a holder of the state in sight

    # What it has heard.
    seen: int = 0  # largest number of committed updates
    saved: int = 0  # step of the latest complete checkpoint
    agreed: int = 0  # step of the latest digest that all holders had alike
    peers: tuple[int, ...] = ()  # slots that were ready in the last round
    keepers: tuple[int, ...] = ()  # slots that held the job's state in the last round, and went on from it
    left: set[int] = field(default_factory=set)  # slots of groups that left in order; may differ between ranks

    @property
    def claim(self) -> int:
        """Return the step that this group can answer for without a donor: what the lighthouse and the rows get."""
        return self.target or (0 if self.corrupt else self.step)

    @property
    def newest_step(self) -> int:
        """Return the most updates that another group may have without voiding this group's claim to the job's state.

        One update more may be that of a group whose exchange was complete when it broke for the rest: the rows settle
        who goes back.
        """
        return self.step + (1 if self.training else 0)

    # Rounds

    def broke(self) -> None:
        """Count a round that broke."""
        self.failures += 1

    def observe(self, made: Round) -> None:
        """Take in the rows of a round that worked."""
        verdict, rows = made.verdict, made.rows
        self.failures = 0
        self.seen = max(self.seen, *(row.seen for row in rows))
        self.saved = max(self.saved, *(row.saved for row in rows))
        self.left -= {row.slot for row in rows}
        self.left |= {row.slot for row in rows if row.leaving}
        self.peers = tuple(made.slots(verdict.ready))
        # A group that has loaded a checkpoint and has yet to begin misses the others' next update, and heals.
        self.keepers = tuple(rows[rank].slot for rank in verdict.holders if rows[rank].training)
        if verdict.corrupt:
            # What a group with other bytes saved since the last agreement is not to be trusted; another one saves.
            self.saved = min(self.saved, self.agreed)
            if made.quorum.rank in verdict.corrupt:
                self.corrupt = self.saved_corrupt = True
        elif verdict.verified:
            self.agreed = verdict.step
        self._drop_saves_ahead(made)

    def _drop_saves_ahead(self, made: Round) -> None:
        """Count no checkpoint of an update that the job goes back from; who has saved it withdraws it."""
        verdict = made.verdict
        ahead = [rank for rank in verdict.strays if made.rows[rank].step > verdict.step]
        if ahead and not verdict.tie:
            self.saved = min(self.saved, verdict.step)
        if made.quorum.rank in ahead and not verdict.tie:
            self.agreed, self.saved_corrupt = verdict.step, True

    def hear(self, step: int) -> None:
        """Learn that others hold the state after `step` updates."""
        self.seen = max(self.seen, step)

    def leave(self) -> None:
        """All ranks of the group have agreed to leave."""
        self.leaving = True

    # The state

    def start_at(self, step: int) -> None:
        """Hold the initial state, or that of a checkpoint after `step` updates."""
        self.step = step

    def restore(self, lineage: int) -> None:
        """Take over a checkpoint's lineage."""
        self.lineage = lineage

    def advance(self, update: Update) -> None:
        """Count an update, live or replayed, as part of the state."""
        self.step, self.lineage, self.digest, self.training = update.step, update.lineage, 0, True
        self.seen = max(self.seen, update.step)

    def exclude(self, slots: Sequence[int], own: int) -> None:
        """Count that the step under way is made without the gradients of the groups `slots`."""
        self.exclusions = self.exclusions + 1 if own in slots else 0

    def load(self, step: int, lineage: int) -> None:
        """Hold a donor's state."""
        self.step, self.lineage, self.digest, self.corrupt = step, lineage, 0, False

    def disown(self) -> None:
        """Mark the state as corrupt: the bytes that were loaded are not the ones that the holders agreed on."""
        self.corrupt = True

    def take_digest(self, digest: int) -> None:
        """Note the digest of the state as it is now."""
        self.digest = digest

    # Phases

    def wait(self, seconds: float) -> None:
        """Go on waiting for the job's first step."""
        self.waited = seconds

    def begin(self) -> None:
        """Begin to train together with the others."""
        self.training = True

    def fall_behind(self) -> None:
        """Give up the claim to the job's state."""
        self.training = True
        self.show(Healing())

    def finish(self) -> None:
        """Hold the final state, and stay for those that need it."""
        self.standing = Standing.FINISHED

    # The heal

    def show(self, healing: Healing) -> None:
        """Let the other groups see where this group's heal is.

        Once all ranks have the fetched state, the group claims the step that the replay leads to.
        """
        is_fetched = healing.phase is Phase.REPLAYING
        self.standing = healing.standing
        self.donor, self.from_step = healing.donor, healing.from_step
        self.target = healing.target_step if is_fetched else 0
        self.awaited = healing.others_wait

    def be_alone(self, seconds: float) -> None:
        """Go on without a holder of the state in sight; 0 = one is there."""
        self.alone = seconds

    def roll_back(self) -> None:
        """Take this group's own state, the latest that is left, for the job's."""
        self.show(Healing(Phase.READY))
        self.seen = self.step

    # Checkpoints

    def note_saved(self, step: int) -> None:
        """Count a complete checkpoint."""
        self.saved = step

    def withdraw_saved(self) -> None:
        """Count no checkpoint of a corrupt state; a group that holds the job's state saves again."""
        self.saved, self.saved_corrupt = min(self.saved, self.agreed), False
