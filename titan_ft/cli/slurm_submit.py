# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""`titan-ft slurm submit`: submit a run to Slurm."""

from __future__ import annotations

from collections.abc import Sequence

from titan_ft.cluster.slurm import submit
from titan_ft.options import SlurmSubmit


def run(command: SlurmSubmit, worker_args: Sequence[str]) -> int:
    """Submit the jobs of the run."""
    return submit(command, worker_args)
