# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Bound a candidate by sizes: the memory of a GPU, the part of the exchange that nothing hides.

The sizes are those of `titan-ft launch --dry-run --json`, a process of its own, because it alone
needs torch. A file keeps them, by everything that they depend on. `titan-ft plan` passes
`Sizes.bound` to `choice.compare`.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_ft import __version__
from titan_ft.config import ConfigError, unwritable_folder_error
from titan_ft.data.assets import find_config
from titan_ft.forecast.candidate import Candidate
from titan_ft.system.ownership import make_folder
from titan_ft.system.whole_file import write_whole


class Sizes:
    """Sizes of a job by its shape.

    Args:
        cache: the file in which they are kept.
    """

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._known: dict[str, dict[str, Any]]
        try:
            self._known = json.loads(cache.read_text())
        except (OSError, ValueError):  # no file yet, or one that a full disk has cut: measure again
            self._known = {}

    def bound(self, candidate: Candidate) -> Candidate:
        """Return the candidate with the exchange that nothing hides.

        Raises:
            ConfigError: the model cannot be cut so, or its state does not fit into a GPU.
        """
        job, cluster = candidate.scenario.job, candidate.scenario.cluster
        if job.config is None or candidate.strategy == "restart":
            return candidate
        sizes = self._of(job.config, candidate.groups, candidate.gpus, job.link_gbps)
        if "refused" in sizes:
            raise ConfigError(sizes["refused"])
        gigabytes = sizes["gpu_bytes"] / 1e9
        if cluster.gpu_memory_gb is not None and gigabytes > cluster.gpu_memory_gb:
            rule = f"must hold {gigabytes:.1f} GB and activations"
            got = f"{cluster.gpu_memory_gb:g}"
            raise ConfigError(f"cluster.gpu_memory_gb {rule}, got {got}; take larger groups")
        seconds = sizes["exchange"]["seconds"]
        if candidate.strategy == "groups":
            seconds = max(0.0, seconds - job.overlap * job.step)
        return replace(candidate, exchange=max(candidate.exchange, seconds), bounded=True)

    def _of(self, config: str, groups: int, ranks: int, link_gbps: float | None) -> dict[str, Any]:
        path = find_config(Path(config))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else "none"
        key = f"{__version__}/{digest}/{groups}x{ranks}/{link_gbps}"
        if key in self._known:
            return self._known[key]
        sizes, is_final = _measure(path, groups, ranks, link_gbps)
        if is_final:
            self._known[key] = sizes
            try:
                make_folder(self._cache.parent)
                write_whole(self._cache, json.dumps(self._known, indent=1).encode())
            except OSError as error:
                raise unwritable_folder_error("--out", self._cache.parent, error) from error
        return sizes


def _measure(
    config: Path, groups: int, ranks: int, link_gbps: float | None
) -> tuple[dict[str, Any], bool]:
    """Return the sizes, or why there are none; and whether another try would say the same."""
    words = [sys.executable, "-m", "titan_ft", "launch", str(config), "--dry-run", "--json"]
    words += ["--run-dir", "not-made"]
    words += ["--replicas", str(groups), "--ranks-per-replica", str(ranks)]
    if link_gbps is not None:
        words += ["--link-gbps", str(link_gbps)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        sizes: dict[str, Any] = json.loads(done.stdout)
        return sizes, True
    lines = done.stderr.strip().splitlines() or ["it said nothing"]
    # Status 2 is a configuration that cannot be; any other one, such as a missing torch, may pass.
    return {"refused": lines[-1].removeprefix("titan-ft: ")}, done.returncode == 2
