# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A group's position: the facts about its state, its activity and the other groups.

The position is the input of the group's decisions (`decision.py`), and the source of the rows that
it sends to the other groups in each round. See docs/design.md, "Four values".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from titan_ft.protocol.healing import NO_DONOR, Healing, Phase
from titan_ft.protocol.round import Round, Update
from titan_ft.protocol.row import Standing


@dataclass
class Position:
    """The facts about one group that all of its ranks know. Equal on all ranks of the group.

    `Rounds`, `ReplicaDimension`, `Heal` and the checkpoints call the methods, on the training
    thread. Other code may read the fields, but must not write them. All ranks of a group call the
    same methods in the same order, with values that they have agreed on.

    Each method records one event, such as a round or the end of a heal, and changes all fields that
    the event concerns. A round that breaks changes only `broken_rounds`.
    """

    # The state.
    step: int = 0  # committed updates in the state
    lineage: int = 0  # hash of the exchanges that made the state (`row.descend`)
    digest: int = 0  # hash of the state's bytes; 0 = not computed since the last update
    corrupt: bool = False  # the state's bytes are wrong: the group must fetch a donor's state
    # The group must withdraw its checkpoints of steps after `agreed_step`.
    saved_corrupt: bool = False

    # The group's activity.
    standing: Standing = Standing.READY  # before training, every initial state is the job's
    # The job's first step has begun, as far as this group knows. True from then on.
    training: bool = False
    leaving: bool = False  # the ranks have agreed to leave: the group requests no more quorums
    broken_rounds: int = 0  # number of broken rounds since the last round that worked
    # Time that the group has waited for the job's first step, by the group's clock. It stays 0
    # while a living group is not in the quorum.
    waited_seconds: float = 0.0
    exclusions: int = 0  # number of steps in a row that excluded this group's gradients

    # The heal under way, as `show_heal` copies it from `Healing`.
    donor: int = NO_DONOR  # slot of the donor that the row names
    from_step: int = 0  # committed updates in the state that the donor serves
    # Committed updates in the fetched state after its replay; 0 = the fetch has not ended.
    target: int = 0
    others_wait: bool = False  # the other groups hold back their next update for this group
    no_holder_seconds: float = 0.0  # time since the last sign of a holder, by the group's clock

    # Knowledge from the rows of all groups.
    seen_step: int = 0  # largest number of committed updates of any group
    saved_step: int = 0  # step of the latest complete checkpoint
    agreed_step: int = 0  # step of the latest state for which all holders had the same digest
    peers: tuple[int, ...] = ()  # slots of the groups that were ready in the last round
    # Slots of the groups that held the job's state in the last round, and had started to train.
    keepers: tuple[int, ...] = ()
    # Slots of the groups that left in order. This may differ between the ranks of the group.
    left: set[int] = field(default_factory=set)

    @property
    def claimed_step(self) -> int:
        """Number of updates in the state that this group can reach without a donor.

        The group reports this number to the lighthouse and in its rows.
        """
        if self.target:
            return self.target
        if self.corrupt:
            return 0
        return self.step

    @property
    def newest_step(self) -> int:
        """If another group has more updates than this number, this group no longer claims the job's
        state.

        A group that trains still claims the job's state if another group is one update ahead: the
        last exchange may have worked for the other group, and have broken for the others. Then the
        rows of the next round decide which groups heal (`judge`).
        """
        if self.training:
            return self.step + 1
        return self.step

    # Rounds

    def count_broken_round(self) -> None:
        """Count a round that broke."""
        self.broken_rounds += 1

    def observe(self, made: Round) -> None:
        """Record the facts that the rows of a round show. The round has worked."""
        verdict, rows = made.verdict, made.rows
        self.broken_rounds = 0
        self.seen_step = max(self.seen_step, *(row.seen_step for row in rows))
        self.saved_step = max(self.saved_step, *(row.saved_step for row in rows))
        self.left -= {row.slot for row in rows}
        self.left |= {row.slot for row in rows if row.leaving}
        self.peers = tuple(made.slots(verdict.ready))
        # A group that has loaded a checkpoint and has not started is no keeper: it misses the next
        # update of the others, and must heal.
        self.keepers = tuple(rows[rank].slot for rank in verdict.holders if rows[rank].training)
        if verdict.corrupt:
            # A corrupt group may have written the checkpoints since the step at which all holders
            # last agreed. So these checkpoints do not count, and a sound group saves again.
            self.saved_step = min(self.saved_step, self.agreed_step)
            if made.quorum.rank in verdict.corrupt:
                self.corrupt = self.saved_corrupt = True
        elif verdict.verified:
            self.agreed_step = verdict.step
        self._drop_saves_ahead(made)

    def _drop_saves_ahead(self, made: Round) -> None:
        """Do not count checkpoints of updates that are not part of the job any more.

        This happens if an exchange worked only for a few members, and the job continues from the
        state before that update. The group that wrote such a checkpoint withdraws it.
        """
        verdict = made.verdict
        if verdict.tie:
            return
        ahead = [rank for rank in verdict.strays if made.rows[rank].step > verdict.step]
        if ahead:
            self.saved_step = min(self.saved_step, verdict.step)
        if made.quorum.rank in ahead:
            self.agreed_step = verdict.step
            self.saved_corrupt = True

    def raise_seen_step(self, step: int) -> None:
        """Note that another group holds the state after `step` updates."""
        self.seen_step = max(self.seen_step, step)

    def mark_leaving(self) -> None:
        """Note that all ranks of the group have agreed to leave."""
        self.leaving = True

    # The state

    def set_step(self, step: int) -> None:
        """Note that the group holds the initial state (0), or a checkpoint after `step` updates."""
        self.step = step

    def set_lineage(self, lineage: int) -> None:
        """Set the lineage of a loaded checkpoint."""
        self.lineage = lineage

    def advance(self, update: Update) -> None:
        """Count an update, live or replayed, as part of the state."""
        self.step = update.step
        self.lineage = update.lineage
        self.digest = 0
        self.training = True
        self.seen_step = max(self.seen_step, update.step)

    def count_exclusion(self, slots: Sequence[int], own: int) -> None:
        """Count the steps in a row that are made without this group's gradients.

        Args:
            slots: groups whose gradients are not in the present step.
            own: this group's slot.
        """
        if own in slots:
            self.exclusions += 1
        else:
            self.exclusions = 0

    def adopt_state(self, step: int, lineage: int) -> None:
        """Note that the group has loaded a donor's state."""
        self.step = step
        self.lineage = lineage
        self.digest = 0
        self.corrupt = False

    def mark_corrupt(self) -> None:
        """Note that the loaded bytes are not those that the holders agreed on."""
        self.corrupt = True

    def set_digest(self, digest: int) -> None:
        """Set the digest of the present state. It is dropped at the next update."""
        self.digest = digest

    # Phases

    def set_waited_seconds(self, seconds: float) -> None:
        """Set how long this group has waited for the job's first step."""
        self.waited_seconds = seconds

    def mark_training(self) -> None:
        """Note that the job's first step begins, with the other groups."""
        self.training = True

    def start_heal(self) -> None:
        """Give up the claim to the job's state. The job has started."""
        self.training = True
        self.show_heal(Healing())

    def mark_finished(self) -> None:
        """Note that the group holds the final state. It stays for the groups that need it."""
        self.standing = Standing.FINISHED

    # The heal

    def show_heal(self, healing: Healing) -> None:
        """Copy the state of the heal into the fields that the next row shows.

        When all ranks have the fetched state, the group claims the step that the replay leads to.
        """
        self.standing = healing.standing
        self.donor = healing.donor
        self.from_step = healing.from_step
        self.target = 0
        if healing.phase is Phase.REPLAYING:
            self.target = healing.target_step
        self.others_wait = healing.others_wait

    def set_no_holder_seconds(self, seconds: float) -> None:
        """Set the time without a sign of a holder; 0 = the last round had a holder."""
        self.no_holder_seconds = seconds

    def roll_back(self) -> None:
        """Note that this group's own state is the job's now, because no later one is left."""
        self.show_heal(Healing(Phase.READY))
        self.seen_step = self.step

    # Checkpoints

    def set_saved_step(self, step: int) -> None:
        """Set the step of the latest complete checkpoint."""
        self.saved_step = step

    def withdraw_saved(self) -> None:
        """Do not count checkpoints of a corrupt state. A sound group saves again."""
        self.saved_step = min(self.saved_step, self.agreed_step)
        self.saved_corrupt = False
