# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Decide whether a run may go on in the folder of an earlier one; reads files, changes none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan_ft.config import ConfigError, load_toml, read_flags
from titan_ft.run.paths import RunPaths

HEADER = "# titan-ft launch "
MISSING = "not set"


def split_headers(text: str) -> tuple[str, str]:
    """Split a run's config into the lines that name the commands of its launches, and the TOML as it was given."""
    lines = text.splitlines(keepends=True)
    count = next((index for index, line in enumerate(lines) if not line.startswith(HEADER)), len(lines))
    return "".join(lines[:count]), "".join(lines[count:])


def check_resume(paths: RunPaths, values: Mapping[str, Any], worker_args: list[str]) -> None:
    """Check that a run with this config can go on from a checkpoint in its folder; a folder without a run is fine.

    Raises:
        ConfigError: no checkpoint to go on from, or another config than before.
    """
    if not paths.has_events():
        return
    if not _saves_checkpoints(values, worker_args):
        raise ConfigError(
            "--resume needs checkpoint.enable = true, got false; without checkpoints training would start anew "
            f"in {paths.root}: give another --run-dir"
        )
    if not paths.has_checkpoint():
        raise ConfigError(
            f"--resume needs a checkpoint in {paths.checkpoint}, got none; training would start anew in this folder: "
            "give another --run-dir, or remove this one"
        )
    earlier = load_toml(paths.config) if paths.config.exists() else {}
    difference = first_difference(earlier, values)
    if difference is not None:
        name, old, new = difference
        raise ConfigError(
            f"--resume needs the config of the earlier run ({paths.config}): {name} was {old}, got {new}; set it back, "
            f"or give the change after a --, as in -- --{name}=..."
        )


def first_difference(
    earlier: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> tuple[str, str, str] | None:
    """Return name, earlier and present value of the first key that differs between two TOMLs.

    An empty table equals none.
    """
    for key in (*earlier, *(key for key in now if key not in earlier)):
        values = earlier.get(key), now.get(key)
        if values[0] == values[1]:
            continue
        old, new = ({} if value is None else value for value in values)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            difference = first_difference(old, new, f"{prefix}{key}.")
            if difference is not None:
                return difference
        else:
            shown = [MISSING if value is None else repr(value) for value in values]
            return prefix + key, shown[0], shown[1]
    return None


def _saves_checkpoints(values: Mapping[str, Any], worker_args: list[str]) -> bool:
    """Tell whether checkpoint.enable holds after the workers' flags, whose last one wins."""
    enabled = bool(values.get("checkpoint", {}).get("enable", False))
    for name, value in read_flags(worker_args):
        if name in ("checkpoint.enable", "checkpoint.no_enable"):
            enabled = name == "checkpoint.enable" and value.lower() != "false"
    return enabled
