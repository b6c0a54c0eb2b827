# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""`titan-ft chaos`: inject faults into a running job."""

from __future__ import annotations

from collections.abc import Sequence

from titan_ft.chaos.command import run_chaos
from titan_ft.faults.catalogue import describe
from titan_ft.options import Chaos
from titan_ft.run.output import protect_output


def run(command: Chaos, worker_args: Sequence[str]) -> int:
    """Inject one fault or a whole plan, or list the faults."""
    if command.list_faults:
        print(describe())
        return 0
    protect_output()
    return run_chaos(command)
