# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One rank of a group as a process.

python -m tests.replica.membership.control_rank FOLDER RANK NUM_RANKS FAN_OUT here|elsewhere

The rank agrees once, prints "ready", agrees again and again, and prints how that ends. Its store is
a folder. It imports no torch, so that it starts at once. It has a child process, as a rank with
loaders has. The other ranks take a rank that is "elsewhere" for a process of another host.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.control_ranks import FolderStore
from titan_ft.membership.control_tree import ControlTree
from titan_ft.protocol.errors import RankLostError
from titan_ft.system.process import Process


def main(folder: str, *numbers: str, where: str) -> None:
    """Be a rank."""
    if where == "elsewhere":
        own = Process(f"host-{numbers[0]}", os.getpid(), "1")
        Process.this = classmethod(lambda cls: own)  # type: ignore[method-assign,assignment]
    rank, num_ranks, fan_out = map(int, numbers)
    store: Any = FolderStore(Path(folder))
    tree = ControlTree(
        rank,
        num_ranks,
        host="127.0.0.1",
        token="token",
        store=store,
        key="group/0",
        host_name=f"node-{rank}",
        fan_out=fan_out,
    )
    if os.fork() == 0:
        time.sleep(10)
        os._exit(0)
    tree.rank0_decides([], lambda _: "go")
    print("ready", flush=True)
    try:
        while True:
            tree.rank0_decides([], lambda _: "go")
            time.sleep(0.01)
    except RankLostError as error:
        print(f"{time.monotonic():.6f} {error}", flush=True)
    tree.close()


if __name__ == "__main__":
    main(*sys.argv[1:-1], where=sys.argv[-1])
