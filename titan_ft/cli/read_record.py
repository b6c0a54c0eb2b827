# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Read the events of a run for a command, or report in one line why that is impossible."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

from titan_ft.config import ConfigError
from titan_ft.history.record.run_record import RunRecord
from titan_ft.run.paths import RunPaths


def read_record(run_dir: Path, *, whole: bool = False) -> RunRecord:
    """Read the events of a run.

    Args:
        whole: read all events unreduced, however many.

    Raises:
        ConfigError: the folder has no events.
        ValueError: a file is damaged; the error names the line and the remedy.
    """
    try:
        with _without_garbage_collector():
            record = RunRecord.read(RunPaths(run_dir).events, whole=whole)
    except OSError as error:
        kind = "a folder with events"
        if str(error.filename).endswith(".jsonl"):
            kind = "a file of events"
        raise ValueError(
            f"{error.filename} must be {kind}, got {error.strerror}; mend or remove it"
        ) from error
    if not record.events:
        right_folder = "the --run-dir of a run"
        if any(run_dir.glob("*.jsonl")):
            # The user gave the folder of the events.
            right_folder = f"the folder above, {run_dir.absolute().parent}"
        raise ConfigError(
            f"RUN_DIR must be the folder of a run, got {run_dir}; it has no events "
            f"(events/*.jsonl): give {right_folder}"
        )
    return record


@contextlib.contextmanager
def _without_garbage_collector() -> Iterator[None]:
    """Disable the garbage collector: it would walk millions of live events again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
