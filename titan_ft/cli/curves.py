# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""`titan-ft curves`: write the job's curves of a run for TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence

from titan_ft.live.curves import write_curves
from titan_ft.options import Curves
from titan_ft.run.output import protect_output


def run(command: Curves, worker_args: Sequence[str]) -> int:
    """Follow the run to its end."""
    protect_output()
    return write_curves(command.run_dir, command.out)
