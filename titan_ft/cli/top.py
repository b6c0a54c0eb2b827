# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""`titan-ft top`: show a run live."""

from __future__ import annotations

from collections.abc import Sequence

from titan_ft.live.top import top
from titan_ft.options import Top


def run(command: Top, worker_args: Sequence[str]) -> int:
    """Show the run until the user leaves, or once."""
    return top(command.run_dir, once=command.once)
