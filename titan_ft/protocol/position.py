# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A group's place in the job: the state that it holds, and what it has heard from the others.

See docs/design.md, "Four values".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from titan_ft.protocol.healing import Healing, Phase
from titan_ft.protocol.round import Round, Update
from titan_ft.protocol.row import Standing


@dataclass
class Position:
    """One group's place in the job, as its row shows it to the others. Equal on all of its ranks.

    Training thread only. The fields are for reading. They change by the methods below only, each of
    which is one event of a group's life. All ranks of a group call the same methods in the same
    order, with values that they have agreed on. A round that breaks changes `broken_rounds` alone.

    The class is not split into parts with one writer each. An event such as a round, or the end of
    a heal, changes several fields at once, and a state between these writes would mean nothing.
    """

    # The state.
    step: int = 0  # committed updates in the state
    lineage: int = 0
    digest: int = 0  # of the state's bytes; 0 = not taken since the last update
    corrupt: bool = False  # the bytes are not those of the lineage: only a donor's state will do
    saved_corrupt: bool = False  # the checkpoints since `agreed_step` are to be withdrawn

    # What the group does.
    standing: Standing = Standing.READY  # before training, every initial state is the job's
    training: bool = False  # the job's first step has begun, as far as this group knows
    leaving: bool = False  # the group has agreed to leave; it requests no more quorums
    broken_rounds: int = 0  # in a row
    # For the job's first step, by the group's clock; 0 while groups live outside of the quorum.
    waited_seconds: float = 0.0
    exclusions: int = 0  # steps in a row that were made without this group's gradients

    # The heal under way, as `show` copies it from `Healing`.
    donor: int = -1  # slot of the donor
    from_step: int = 0  # committed updates in the state that the donor serves
    # Step of the state after the fetched state is loaded and replayed; 0 = no state is fetched.
    target: int = 0
    others_wait: bool = False  # the others hold their next update for this group
    alone_seconds: float = 0.0  # without a holder of the state in sight, by the group's clock

    # What the group has heard.
    seen_step: int = 0  # largest number of committed updates
    saved_step: int = 0  # of the latest complete checkpoint
    agreed_step: int = 0  # of the latest digest that all holders had alike
    peers: tuple[int, ...] = ()  # slots that were ready in the last round
    keepers: tuple[int, ...] = ()  # slots that trained on with the job's state after the last round
    left: set[int] = field(default_factory=set)  # slots that left in order; may differ by rank

    @property
    def claimed_step(self) -> int:
        """Step that this group can reach without a donor. The lighthouse and the rows get it."""
        if self.target:
            return self.target
        return 0 if self.corrupt else self.step

    @property
    def newest_step(self) -> int:
        """Most updates that another group may have without voiding this group's claim to the state.

        One more update than this group's own may be that of a group whose exchange was complete
        when it broke for the rest. The rows then settle which groups heal.
        """
        return self.step + (1 if self.training else 0)

    # Rounds

    def note_broken(self) -> None:
        """Count a round that broke."""
        self.broken_rounds += 1

    def observe(self, made: Round) -> None:
        """Take in the rows of a round that worked."""
        verdict, rows = made.verdict, made.rows
        self.broken_rounds = 0
        self.seen_step = max(self.seen_step, *(row.seen_step for row in rows))
        self.saved_step = max(self.saved_step, *(row.saved_step for row in rows))
        self.left -= {row.slot for row in rows}
        self.left |= {row.slot for row in rows if row.leaving}
        self.peers = tuple(made.slots(verdict.ready))
        # A group that has loaded a checkpoint and has not started is no keeper: it misses the next
        # update of the others, and heals.
        self.keepers = tuple(rows[rank].slot for rank in verdict.holders if rows[rank].training)
        if verdict.corrupt:
            # A group with other bytes may have written the checkpoints since the last agreement.
            # Another group saves.
            self.saved_step = min(self.saved_step, self.agreed_step)
            if made.quorum.rank in verdict.corrupt:
                self.corrupt = self.saved_corrupt = True
        elif verdict.verified:
            self.agreed_step = verdict.step
        self._drop_saves_ahead(made)

    def _drop_saves_ahead(self, made: Round) -> None:
        """Count no checkpoint of an update that the job goes back from. Its writer withdraws it."""
        verdict = made.verdict
        if verdict.tie:
            return
        ahead = [rank for rank in verdict.strays if made.rows[rank].step > verdict.step]
        if ahead:
            self.saved_step = min(self.saved_step, verdict.step)
        if made.quorum.rank in ahead:
            self.agreed_step = verdict.step
            self.saved_corrupt = True

    def note_seen(self, step: int) -> None:
        """Learn that other groups hold the state after `step` updates."""
        self.seen_step = max(self.seen_step, step)

    def leave(self) -> None:
        """All ranks of the group have agreed to leave."""
        self.leaving = True

    # The state

    def start_at(self, step: int) -> None:
        """Hold the initial state, or that of a checkpoint after `step` updates."""
        self.step = step

    def restore_lineage(self, lineage: int) -> None:
        """Take over the lineage of a checkpoint."""
        self.lineage = lineage

    def advance(self, update: Update) -> None:
        """Count an update, live or replayed, as part of the state."""
        self.step = update.step
        self.lineage = update.lineage
        self.digest = 0
        self.training = True
        self.seen_step = max(self.seen_step, update.step)

    def note_excluded(self, slots: Sequence[int], own: int) -> None:
        """Note which groups' gradients the step under way is made without."""
        self.exclusions = self.exclusions + 1 if own in slots else 0

    def load(self, step: int, lineage: int) -> None:
        """Hold a donor's state."""
        self.step = step
        self.lineage = lineage
        self.digest = 0
        self.corrupt = False

    def mark_corrupt(self) -> None:
        """The loaded bytes are not those that the holders agreed on."""
        self.corrupt = True

    def note_digest(self, digest: int) -> None:
        """Note the digest of the state as it is now."""
        self.digest = digest

    # Phases

    def note_wait(self, seconds: float) -> None:
        """Note how long this group has waited for the job's first step."""
        self.waited_seconds = seconds

    def mark_training(self) -> None:
        """The job's first step begins, with the other groups."""
        self.training = True

    def fall_behind(self) -> None:
        """Give up the claim to the job's state."""
        self.training = True
        self.show(Healing())

    def finish(self) -> None:
        """Hold the final state, and stay for the groups that need it."""
        self.standing = Standing.FINISHED

    # The heal

    def show(self, healing: Healing) -> None:
        """Show the other groups where this group's heal is.

        Once all ranks have the fetched state, the group claims the step that the replay leads to.
        """
        is_fetched = healing.phase is Phase.REPLAYING
        self.standing = healing.standing
        self.donor = healing.donor
        self.from_step = healing.from_step
        self.target = healing.target_step if is_fetched else 0
        self.others_wait = healing.others_wait

    def note_alone(self, seconds: float) -> None:
        """Note how long no holder of the state has been in sight; 0 = one is."""
        self.alone_seconds = seconds

    def roll_back(self) -> None:
        """Take this group's own state, the latest that is left, for the job's."""
        self.show(Healing(Phase.READY))
        self.seen_step = self.step

    # Checkpoints

    def note_saved(self, step: int) -> None:
        """Count a complete checkpoint."""
        self.saved_step = step

    def withdraw_saved(self) -> None:
        """Count no checkpoint of a corrupt state. A group with the job's state saves again."""
        self.saved_step = min(self.saved_step, self.agreed_step)
        self.saved_corrupt = False
