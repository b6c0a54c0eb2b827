# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Measure the sizes of a job by a dry run: the memory of its GPUs, the length of its exchange.

`titan-ft plan` passes `Sizes.fit` to `choice.compare`, which calls it for each candidate. The sizes
come from `titan-ft launch --dry-run --json`. It runs as a process of its own, so that planning itself
does not import torch. A JSON file caches the sizes.
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
    """The sizes of a job by its shape.

    Args:
        cache: JSON file in which the sizes are kept for the next run of `titan-ft plan`.
    """

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._cached: dict[str, dict[str, Any]]
        try:
            self._cached = json.loads(cache.read_text())
        except (OSError, ValueError):
            # There is no file yet, or a full disk has cut it off: measure again.
            self._cached = {}

    def fit(self, candidate: Candidate) -> Candidate:
        """Return the candidate with the part of the exchange that computing does not hide.

        Without `job.config`, and for a job that restarts, the candidate is returned unchanged.

        Raises:
            ConfigError: the model cannot be sharded over so many GPUs, or its state does not fit
                into the memory of a GPU.
        """
        job, cluster = candidate.scenario.job, candidate.scenario.cluster
        if job.config is None or candidate.strategy == "restart":
            return candidate
        sizes = self._look_up(job.config, candidate.groups, candidate.gpus, job.link_gbps)
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
        return replace(candidate, exchange=max(candidate.exchange, seconds), has_sizes=True)

    def _look_up(
        self, config: str, groups: int, ranks: int, link_gbps: float | None
    ) -> dict[str, Any]:
        """Return the sizes from the cache, or measure them.

        Args:
            ranks: ranks of a group.

        Returns:
            sizes: the JSON of the dry run; or {"refused": reason} if the shape is impossible.
        """
        path = find_config(Path(config))
        digest = "none"
        if path.is_file():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        # The key has everything that the sizes depend on.
        key = f"{__version__}/{digest}/{groups}x{ranks}/{link_gbps}"
        if key in self._cached:
            return self._cached[key]
        sizes, is_final = _measure(path, groups, ranks, link_gbps)
        if is_final:
            self._cached[key] = sizes
            try:
                make_folder(self._cache.parent)
                write_whole(self._cache, json.dumps(self._cached, indent=1).encode())
            except OSError as error:
                raise unwritable_folder_error("--out", self._cache.parent, error) from error
        return sizes


def _measure(
    config: Path, groups: int, ranks: int, link_gbps: float | None
) -> tuple[dict[str, Any], bool]:
    """Make a dry run.

    Returns:
        sizes: the JSON of the dry run; or {"refused": reason} if it failed.
        is_final: False if another try may have another result, for example with torch installed.
    """
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
    # Status 2 means that the configuration is impossible. Other failures may pass.
    is_final = done.returncode == 2
    return {"refused": lines[-1].removeprefix("titan-ft: ")}, is_final
