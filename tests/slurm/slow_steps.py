# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A worker's custom import: the tiny model, whose steps take long until the drill lets them go."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from harness import flavor

from titan_ft.trainer import ReplicaTrainer

flavor.register()
_GO = Path(os.environ["TITAN_FT_DRILL_GO"])
_train_step = ReplicaTrainer.train_step


def _slowly(self: ReplicaTrainer, data_iterator: Any) -> None:
    if not _GO.exists():
        time.sleep(0.5)
    _train_step(self, data_iterator)


ReplicaTrainer.train_step = _slowly  # type: ignore[method-assign]
