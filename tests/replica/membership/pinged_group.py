# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The ranks of a group as processes that ping each other.

python -m tests.replica.membership.pinged_group FOLDER NUM_RANKS FAN_OUT PATIENCE

It imports torch once and forks the ranks. Each rank writes lines to FOLDER/rank-N: "ready PID",
"lost RANK HOST", and a line for each signal. On SIGUSR1 a rank keeps Python's lock for five times
the patience ("held"). On SIGUSR2 it agrees with the others ("agreed"). On SIGTERM it leaves
("left").
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed  # noqa: F401  # once, before the fork

from benchmarks.control_ranks import FolderStore
from titan_ft.membership.control_tree import ControlTree
from titan_ft.protocol.control.node import LostRank

HELD_PATIENCES = 5
_SIGNALS = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM}


def run_rank(folder: Path, rank: int, num_ranks: int, fan_out: int, patience: float) -> None:
    """Be a rank."""
    lines = os.open(folder / f"rank-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def write(line: str) -> None:
        os.write(lines, f"{line}\n".encode())

    def note_loss(loss: LostRank) -> None:
        write(
            f"lost {loss.rank} {loss.host} {'silent' if loss.silent_seconds > patience else 'gone'}"
        )

    store: Any = FolderStore(folder)
    tree = ControlTree(
        rank,
        num_ranks,
        host="127.0.0.1",
        token="token",
        store=store,
        key="group/0",
        host_name=f"node-{rank}",
        patience=patience,
        fan_out=fan_out,
    )
    tree.listen_for_losses(note_loss)
    tree.rank0_decides([], lambda _: "go")
    write(f"ready {os.getpid()}")
    while True:
        match signal.sigwait(_SIGNALS):
            case signal.SIGUSR1:
                # PyDLL does not release the lock during a call.
                ctypes.PyDLL(None).usleep(int(HELD_PATIENCES * patience * 1e6))
                write("held")
            case signal.SIGUSR2:
                tree.rank0_decides([], lambda _: "go")
                write("agreed")
            case _:
                tree.leave(patience)
                write("left")
                return


def main(folder: str, num_ranks: str, fan_out: str, patience: str) -> None:
    """Fork the ranks, and wait for them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    run = partial(
        run_rank, num_ranks=int(num_ranks), fan_out=int(fan_out), patience=float(patience)
    )
    for rank in range(int(num_ranks)):
        if os.fork() == 0:
            try:
                run(Path(folder), rank)
            finally:
                os._exit(0)
    for _ in range(int(num_ranks)):
        os.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
