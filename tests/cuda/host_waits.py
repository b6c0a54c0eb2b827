# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Counts the host's waits for the GPU in a step; a module for `--experimental.custom_import` of a
test's worker.

torch's sync debug mode warns at each copy, `item` and `nonzero` that waits. The warnings go to
stderr, one line each.
"""

from __future__ import annotations

import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any

import harness.hooks  # noqa: F401  # what the harness needs in each worker
import torch

from titan_ft.trainer import ReplicaTrainer

_step = 0


def _show(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a wait: step, thread, and the functions of this package and of FSDP around it."""
    if "synchroniz" not in str(message):
        return
    where = [
        f"{Path(frame.filename).name}:{frame.name}"
        for frame in traceback.extract_stack()
        if "/titan_ft/" in frame.filename
        or "/fsdp/" in frame.filename
        or "/torchtitan/" in frame.filename
    ]
    print(
        f"WAIT|{_step}|{threading.current_thread().name}|{' '.join(where[-2:])}",
        file=sys.stderr,
        flush=True,
    )


def _install() -> None:
    train_step = ReplicaTrainer.train_step

    def watched(self: ReplicaTrainer, *args: Any) -> Any:
        global _step
        _step = self.step
        torch.cuda.set_sync_debug_mode("warn")
        warnings.simplefilter("always")
        warnings.showwarning = _show
        return train_step(self, *args)

    ReplicaTrainer.train_step = watched  # type: ignore[method-assign]


_install()
