# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Find a run's zygote, and the processes of the run that are its forks."""

from __future__ import annotations

from pathlib import Path

from titan_ft.system.process import read_command


def children(pid: int) -> list[int]:
    """List the present children of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def zygote_of(pid: int) -> int | None:
    """Return the process that forks for a launcher, or for torchrun's agent, if there is one."""
    return next(
        (child for child in children(pid) if "zygote" in read_command(child)[2] and is_main(child)),
        None,
    )


def is_main(pid: int) -> bool:
    """Return True for a started process; its forks have names of their own."""
    return not Path(f"/proc/{pid}/comm").read_text().startswith("titan-ft")
