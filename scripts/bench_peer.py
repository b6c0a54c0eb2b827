# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Run torchtitan's own fault-tolerant trainer, `torchtitan.experiments.ft.train`, as the benchmark's peer.

The trainer is torchtitan's, unmodified. It gets from this project only what it cannot do without: the CPU seam (where
there is no accelerator) and the packaged text. Takes torchtitan's TOML and flags; run it under torchrun.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

from titan_ft import device
from titan_ft.history.events import EventLog
from titan_ft.launch.orphan import exit_with_parent
from titan_ft.launch.run_paths import RunPaths


def main() -> None:
    """Run one worker of one replica group."""
    exit_with_parent()
    device.prepare()
    # Only now: torchtitan reads the device when it is imported.
    import torchtitan.experiments.ft.train as peer
    from torchtitan.config import ConfigManager

    from titan_ft import spec
    from titan_ft.data.datasets import register_datasets

    register_datasets()
    job_config = ConfigManager().parse_args(sys.argv[1:])
    # `enable=False` wraps nothing but the CPU seam: torchtitan's own FT config has what the peer itself needs.
    spec.register(job_config.model.name, SimpleNamespace(enable=False))  # type: ignore[arg-type]
    _announce(Path(job_config.job.dump_folder), job_config.fault_tolerance.replica_id)
    peer.main(peer.FTTrainer)


def _announce(run_dir: Path, replica: int) -> None:
    """Leave a `worker_started` event, which says whom to kill."""
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    path = RunPaths(run_dir).worker_events(replica, rank, attempt, os.getpid())
    EventLog(path, replica=replica, rank=rank, attempt=attempt).emit("worker_started")


if __name__ == "__main__":
    main()
