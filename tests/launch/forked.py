# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Find the processes of a run that are forks of one that has imported everything, and that one."""

from __future__ import annotations

from pathlib import Path

from titan_ft.system.process import read_command


def children(pid: int) -> list[int]:
    """List the processes that a process started and that still are its children."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def zygote_of(pid: int) -> int | None:
    """Return the process that forks for a launcher, or for torchrun's agent, if there is one."""
    return next(
        (child for child in children(pid) if "zygote" in read_command(child)[2] and is_main(child)),
        None,
    )


def is_main(pid: int) -> bool:
    """Tell a process that was started from those that were forked from it, which have a name of
    their own.
    """
    return not Path(f"/proc/{pid}/comm").read_text().startswith("titan-ft")
