# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One rank's saves, as those of `ReplicaCheckpoints` with `async_mode = "async"`.

That class (`titan_ft/training/checkpoint/manager.py`) needs torchtitan and writes files. This
module has the same rules: which group saves when, what the others learn of it, and which saves are
withdrawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from titan_ft.transfer.snapshot import Snapshot

if TYPE_CHECKING:
    from tests.simulation.rank import Rank

_LOOK_SECONDS = 0.02


class _State(IntEnum):
    UNDER_WAY = 0
    COMPLETE = 1
    FAILED = 2


@dataclass
class Partial:
    """A checkpoint that one attempt of a group writes.

    For each rank its finished part, or None if the part failed.
    """

    parts: dict[int, Snapshot | None] = field(default_factory=dict)


@dataclass
class _Save:
    step: int
    state: _State = _State.UNDER_WAY


class Saves:
    """Saves every `save_every` steps.

    A group saves if it is the first of the participants of the last step.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank, self._options = rank, rank.world.options
        self.participants: list[int] = []  # slots that contributed to the last step
        self._under_way: _Save | None = None
        self._published: set[int] = set()  # steps that this process saved
        self._failed = 0  # step of the latest save of this group that failed

    @property
    def _every(self) -> int:
        return self._options.save_every

    def save(self, step: int, last: bool) -> None:
        """Save the state after `step` if it is this group's turn.

        Every group calls it after every step.
        """
        if not self._every:
            return
        self._settle(wait=last)
        due = step if last else step // self._every * self._every
        writer = bool(self.participants) and min(self.participants) == self._rank.slot
        if (
            writer
            and self._under_way is None
            and due > max(self._rank.position.saved_step, self._failed)
        ):
            self._write(step, last)

    def due_at(self, step: int) -> bool:
        """Return True if a group may save after `step`."""
        return self._every > 0 and step % self._every == 0

    def finish(self, step: int) -> None:
        """Save the final state if the group that was to save it is lost."""
        if self._every:
            self._settle(wait=True)
            if self._rank.position.saved_step < step:
                self._write(step, last=True)

    def lacks_state(self) -> bool:
        """Return True if no checkpoint has this group's state, after the running save has ended."""
        if not self._every:
            return False
        self._settle(wait=True)
        return self._rank.position.step > self._rank.position.saved_step

    def holds_state(self) -> bool:
        """Return True if a checkpoint has this group's state, as the host of rank 0 sees it."""
        rank, folder = self._rank, self._rank.world.folder
        assert folder is not None
        found = (
            rank.number == 0
            and folder.lineage(rank.position.step, rank.node) == rank.position.lineage
        )
        return bool(rank.gather(found)[0])

    def watch_others(self) -> Callable[[], bool]:
        """Return a function that looks whether another group writes this group's step.

        It returns True if such a group has begun to write since this call.
        """
        rank, folder = self._rank, self._rank.world.folder
        assert folder is not None
        earlier = folder.written_by_others(rank.slot, rank.position.step)

        def is_begun() -> bool:
            found = (
                rank.number == 0
                and folder.written_by_others(rank.slot, rank.position.step) != earlier
            )
            return bool(rank.gather(found)[0])

        return is_begun

    def save_on_leave(self) -> None:
        """Save the state of this leaving group."""
        self._write(self._rank.position.step, last=True)

    def withdraw(self) -> None:
        """Withdraw doubtful saves if this group's bytes differ from those of the others.

        These are its saves since its bytes last equalled those of the others.
        """
        position, folder = self._rank.position, self._rank.world.folder
        if not self._every or not position.saved_corrupt:
            return
        self._settle(wait=True)
        self._failed = 0
        position.withdraw_saved()
        for step in sorted(step for step in self._published if step > position.agreed_step):
            self._published.remove(step)
            if (
                self._rank.number == 0
                and folder is not None
                and folder.writer(step) == self._rank.slot
            ):
                self._rank.world.withdraws(self._rank, step)
                folder.remove(step)

    def close(self) -> None:
        """Wait for a save under way, as long as a group may take to leave."""
        self._await(self._rank.config.drain_timeout_seconds)

    def _write(self, step: int, last: bool) -> None:
        rank = self._rank
        self._under_way = save = _Save(step)
        snapshot = rank.state.copy(*rank.held)
        rank.world.kernel.spawn(lambda: self._carry_out(save, snapshot, last), "save")
        self._settle(wait=last)

    def _carry_out(self, save: _Save, snapshot: Snapshot, last: bool) -> None:
        rank, kernel, folder = self._rank, self._rank.world.kernel, self._rank.world.folder
        assert folder is not None
        kernel.sleep(self._options.save_seconds * kernel.rng.random())
        rank.world.moment("saving", rank.node)
        fails = not last and kernel.rng.random() < self._options.save_failures
        parts = folder.partial(rank.slot, rank.group.attempt, save.step).parts
        parts[rank.number] = None if fails else snapshot
        while rank.number == 0 and None not in parts.values() and len(parts) < self._options.ranks:
            kernel.sleep(_LOOK_SECONDS)
        if None in parts.values():
            save.state = _State.FAILED
            return
        if rank.number == 0:
            # Another group may have saved this step in the meantime.
            if rank.position.saved_corrupt:
                save.state = _State.FAILED
                return
            rank.world.publishes(rank, save.step)
            folder.publish_saved(rank.slot, parts)
        save.state = _State.COMPLETE

    def _settle(self, wait: bool = False) -> None:
        """Conclude the running save if it has ended on all ranks of this group."""
        save, rank = self._under_way, self._rank
        if save is None:
            return
        if wait:
            self._await(float("inf"))
        states = rank.gather(save.state)
        if _State.UNDER_WAY in states:
            return
        self._under_way = None
        if _State.FAILED in states:
            self._failed = save.step
            rank.world.save_failed(rank, save.step)
            return
        rank.position.set_saved_step(max(rank.position.saved_step, save.step))
        self._published.add(save.step)

    def _await(self, seconds: float) -> None:
        save, kernel = self._under_way, self._rank.world.kernel
        end = kernel.now + seconds
        while save is not None and save.state is _State.UNDER_WAY and kernel.now < end:
            kernel.sleep(_LOOK_SECONDS)
