# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The checkpoint folder that all groups share, as each host sees it.

A network folder shows each host an earlier state. A checkpoint appears as a whole, by one rename.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping

from tests.simulation.kernel import Kernel
from tests.simulation.network import Node
from tests.simulation.saving import Partial
from titan_ft.training.checkpoint.folder import MANIFEST, Manifest
from titan_ft.transfer.snapshot import Snapshot

PATH = "/checkpoints"


@dataclasses.dataclass
class _Kept:
    """One step's states, which ranks of any group held, or which group `writer` saved."""

    step: int
    lineage: int
    parts: dict[int, Snapshot] = dataclasses.field(default_factory=dict)  # by rank
    writer: int = -1


class Folder:
    """Published checkpoints, now and earlier, as each host sees them.

    Args:
        ranks: of a group; a checkpoint has a part of each.
        sight: largest delay of a host's view, in seconds.
        on_look: called before a process reads the folder.
    """

    def __init__(
        self, kernel: Kernel, ranks: int, sight: float, on_look: Callable[[], None]
    ) -> None:
        self._kernel, self._ranks, self._sight, self._on_look = kernel, ranks, sight, on_look
        self._kept: dict[int, _Kept] = {}
        # the published checkpoints by step, each with the time from which they were there
        self._views: list[tuple[float, dict[int, _Kept]]] = [(0.0, {})]
        self._late: dict[Node, float] = {}
        self._partials: dict[tuple[int, int, int], Partial] = {}  # by slot, attempt and step
        self._taken = -math.inf  # when a checkpoint was last removed
        self._replaced = -math.inf  # when a checkpoint of another state last replaced one

    @property
    def missed(self) -> float:
        """Return when the last host saw that a checkpoint was removed."""
        return self._taken + self._sight

    @property
    def replaced(self) -> float:
        """Return when the last host saw that a checkpoint of another state replaced one."""
        return self._replaced + self._sight

    @property
    def settled(self) -> float:
        """Return when all hosts see the current state."""
        return self._views[-1][0] + self._sight

    @property
    def _published(self) -> dict[int, _Kept]:
        return self._views[-1][1]

    def keep(self, rank: int, snapshot: Snapshot) -> None:
        """Store a rank's part of a state that may be published later."""
        kept = self._kept.setdefault(snapshot.lineage, _Kept(snapshot.step, snapshot.lineage))
        kept.parts.setdefault(rank, snapshot)

    def publish(self) -> int:
        """Publish the latest complete state, unless a later one is published.

        Returns:
            Its step; 0 = nothing was published.
        """
        latest = max(self._whole(), key=lambda kept: kept.step, default=None)
        if latest is None or self.latest >= latest.step:
            return 0
        self._show({**self._published, latest.step: latest})
        return latest.step

    @property
    def latest(self) -> int:
        """Return the step of the latest checkpoint; 0 = there is none."""
        return max(self._published, default=0)

    def lasting(self, since: float) -> int:
        """Return the latest step whose checkpoint all hosts have seen without a break.

        0 = there is none.
        """
        before = [view for at, view in self._views if at <= since - self._sight][-1:]
        later = [view for at, view in self._views if at > since - self._sight]
        return max(set.intersection(*(set(view) for view in before + later)), default=0)

    def partial(self, slot: int, attempt: int, step: int) -> Partial:
        """Return the folder in which an attempt of a group writes its checkpoint of a step."""
        return self._partials.setdefault((slot, attempt, step), Partial())

    def written_by_others(self, slot: int, step: int) -> set[tuple[int, int, int]]:
        """Return the attempts of other groups that began to write a checkpoint of a step."""
        return {key for key in self._partials if key[0] != slot and key[2] == step}

    def lineage(self, step: int, node: Node) -> int:
        """Return the lineage of the checkpoint of a step, as a host sees it; -1 = there is none."""
        kept = self._see(node).get(step)
        return -1 if kept is None else kept.lineage

    def writer(self, step: int) -> int:
        """Return the slot of the group that has saved the checkpoint of a step; -1 = none has."""
        return self._published[step].writer if step in self._published else -1

    def publish_saved(self, slot: int, parts: Mapping[int, Snapshot | None]) -> None:
        """Publish the checkpoint of group `slot` in place of another checkpoint of its step."""
        whole = {rank: part for rank, part in parts.items() if part is not None}
        kept = _Kept(whole[0].step, whole[0].lineage, whole, slot)
        before = self._published.get(kept.step, kept)
        if before.lineage != kept.lineage:
            self._replaced = self._kernel.now
        self._show({**self._published, kept.step: kept})

    def remove(self, step: int) -> None:
        """Remove the checkpoint of a step, whichever group saved it."""
        if step in self._published:
            self._taken = self._kernel.now
            self._show({other: kept for other, kept in self._published.items() if other != step})

    def take_away(self) -> int:
        """Remove the latest checkpoint; returns its step, or 0."""
        step = self.latest
        self.remove(step)
        return step

    def put_back(self, step: int) -> None:
        """Publish a checkpoint of a step again if there is none.

        If another state of this step is known, publish that one.
        """
        found = [kept for kept in self._whole() if kept.step == step]
        if found and step not in self._published:
            self._show({**self._published, step: self._kernel.rng.choice(found)})

    def load(self, step: int, rank: int, node: Node) -> Snapshot:
        """Return a rank's part of a published checkpoint.

        Raises:
            FileNotFoundError: this host does not see the checkpoint.
        """
        kept = self._see(node).get(step)
        if kept is None:
            raise FileNotFoundError(f"step-{step}")
        return kept.parts[rank]

    def files(self, node: Node) -> dict[str, str]:
        """Return all files as a host sees them now, by path."""
        self._on_look()
        kernel = self._kernel
        kernel.sleep(0.01 * kernel.rng.random())
        found = {}
        for kept in self._see(node).values():
            manifest = Manifest(kept.step, f"{kept.lineage:012x}", "model", "data", 1, 1, False)
            found[f"{PATH}/step-{kept.step}/.metadata"] = ""
            found[f"{PATH}/step-{kept.step}/{MANIFEST}"] = json.dumps(dataclasses.asdict(manifest))
        return found

    def _see(self, node: Node) -> dict[int, _Kept]:
        late = self._late.get(node)
        if late is None:
            late = self._late[node] = self._sight * self._kernel.rng.random()
        return next(
            view
            for since, view in reversed(self._views)
            if since + late <= self._kernel.now or not since
        )

    def _show(self, published: dict[int, _Kept]) -> None:
        self._views.append((self._kernel.now, published))

    def _whole(self) -> list[_Kept]:
        return [kept for kept in self._kept.values() if len(kept.parts) == self._ranks]
