# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The folder of checkpoints that all groups share, as each of their hosts sees it; and what is in them.

A network folder shows each host what it was a while ago. A checkpoint appears whole, by one rename.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

from tests.simulation.kernel import Kernel
from tests.simulation.network import Node
from titan_ft.replica.snapshot import Snapshot
from titan_ft.training.checkpoint_folder import MANIFEST, Manifest

PATH = "/checkpoints"


@dataclasses.dataclass
class _Kept:
    """States of one step that ranks of any groups have held."""

    step: int
    lineage: int
    parts: dict[int, Snapshot] = dataclasses.field(default_factory=dict)  # by rank


class Folder:
    """What is published, since when.

    Args:
        ranks: of a group; a checkpoint has the part of each.
        sight: seconds that a host's view may be late, at most.
        on_look: told before a process looks.
    """

    def __init__(self, kernel: Kernel, ranks: int, sight: float, on_look: Callable[[], None]) -> None:
        self._kernel, self._ranks, self._sight, self._on_look = kernel, ranks, sight, on_look
        self._kept: dict[int, _Kept] = {}
        self._published: list[tuple[float, _Kept]] = []
        self._late: dict[Node, float] = {}

    def keep(self, rank: int, snapshot: Snapshot) -> None:
        """Write a rank's part of a state, which may be published one day."""
        kept = self._kept.setdefault(snapshot.lineage, _Kept(snapshot.step, snapshot.lineage))
        kept.parts.setdefault(rank, snapshot)

    def publish(self) -> int:
        """Publish the latest state of which all parts are there, if none so late is; returns its step, or 0."""
        whole = [kept for kept in self._kept.values() if len(kept.parts) == self._ranks]
        latest = max(whole, key=lambda kept: kept.step, default=None)
        if latest is None or any(kept.step >= latest.step for _, kept in self._published):
            return 0
        self._published.append((self._kernel.now, latest))
        return latest.step

    def load(self, step: int, rank: int) -> Snapshot:
        """Return a rank's part of a published checkpoint."""
        return next(kept.parts[rank] for _, kept in self._published if kept.step == step)

    def files(self, node: Node) -> dict[str, str]:
        """Return all files as a host sees them now, by path."""
        self._on_look()
        kernel = self._kernel
        kernel.sleep(0.01 * kernel.rng.random())
        if node not in self._late:
            self._late[node] = self._sight * kernel.rng.random()
        found = {}
        for since, kept in self._published:
            if since + self._late[node] <= kernel.now:
                manifest = Manifest(kept.step, f"{kept.lineage:012x}", "model", "data", 1, 1, False)
                found[f"{PATH}/step-{kept.step}/.metadata"] = ""
                found[f"{PATH}/step-{kept.step}/{MANIFEST}"] = json.dumps(dataclasses.asdict(manifest))
        return found
