# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Measure how fast a joiner gets a state from several donors, whose links are slower than its own.

Each donor is a process of its own, with the state server of a worker; `transfer_max_mbps` is its link, and all of
theirs together are the joiner's. What a donor's training loses is told by the processor's time that serving takes.

    python -m benchmarks.transfers FILE MBPS    is a donor of the bytes of FILE, for the token on its standard input; it
                                                tells its port, and for each further line its processor's seconds
"""

from __future__ import annotations

import contextlib
import json
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.run import BenchError, progress
from titan_ft.replica.snapshot import Snapshot
from titan_ft.replica.state_fetch import fetch
from titan_ft.replica.state_server import StateServer

NUMS_DONORS = (1, 2, 4, 8)
LINK_MBPS = 100.0
"""Of each donor: little enough that eight of them and a joiner on two cores measure the links and not the processor."""
STATE_BYTES = 256 << 20
KILLED_AFTER = 1 / 3
"""Of the time that the links need, until one of several donors is killed."""

_ROOT = Path(__file__).parents[1]
_STEP, _LINEAGE = 5, 55
_TIMEOUT_SECONDS = 600.0


def measure_transfers(
    work_dir: Path, size: int = STATE_BYTES, mbps: float = LINK_MBPS
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and figures of a transfer from each number of donors, and with one of them killed in the midst."""
    state = work_dir / "state"
    work_dir.mkdir(parents=True, exist_ok=True)
    state.write_bytes(secrets.token_bytes(1 << 20) * (size >> 20))
    for number in NUMS_DONORS:
        yield f"{number}", measure(state, number, mbps)
        if number > 1:
            yield f"{number}-killed", measure(state, number, mbps, kill=True)


def measure(state: Path, number: int, mbps: float, kill: bool = False) -> dict[str, Any]:
    """Fetch the bytes of a file from so many donors.

    Args:
        kill: one of them is killed by SIGKILL while it serves.

    Returns:
        Seconds, Mbit/s, their share of the donors' links together, the donors that were lost, and the median of the
        seconds of processor's time of a donor for each GB that it gave (without a kill; else None).

    Raises:
        BenchError: other bytes came than were sent.
    """
    token, lost = secrets.token_hex(16), []
    size = state.stat().st_size
    with _donors(state, number, mbps, token) as donors:
        before = None if kill else statistics.median(donor.cpu_seconds() for donor in donors)
        killer = threading.Timer(KILLED_AFTER * size * 8e-6 / mbps / number, donors[-1].kill)
        if kill:
            killer.start()
        started = time.monotonic()
        addresses = [f"127.0.0.1:{donor.port}" for donor in donors]
        connections = 4  # the default of transfer_connections
        fetched = fetch(
            addresses, token, _STEP, "1", connections, _TIMEOUT_SECONDS, lose=lambda place, _: lost.append(place)
        )
        seconds = time.monotonic() - started
        killer.cancel()
        after = None if kill else statistics.median(donor.cpu_seconds() for donor in donors)
    if not torch.equal(fetched.payload, _map(state)):
        raise BenchError("other bytes came than were sent")
    rate = size * 8e-6 / seconds
    progress(f"transfer from {number} donors{', one killed' if kill else ''}: {rate:.0f} Mbit/s")
    return {
        "donors": number,
        "link_mbps": mbps,
        "bytes": size,
        "seconds": seconds,
        "mbps": rate,
        "share": rate / (number * mbps),
        "lost": lost,
        "cpu_seconds_per_gb": None if before is None or after is None else (after - before) / (size / number / 1e9),
    }


class _Donor:
    """A donor's process."""

    def __init__(self, state: Path, mbps: float, token: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transfers", str(state), str(mbps)],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ask(token)
        self.port = 0

    def _ask(self, line: str) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        print(line, file=self._process.stdin, flush=True)

    def _read(self) -> str:
        assert self._process.stdout is not None, "it is a pipe"
        if not (line := self._process.stdout.readline()):
            raise BenchError("a donor's process has ended")
        return line

    def wait(self) -> None:
        """Wait until it serves."""
        self.port = int(self._read())

    def cpu_seconds(self) -> float:
        """Return the processor's time that it has used."""
        self._ask("")
        return float(self._read())

    def kill(self) -> None:
        """End it by SIGKILL."""
        self._process.kill()

    def close(self) -> None:
        """End it, and wait for that."""
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def _donors(state: Path, number: int, mbps: float, token: str) -> Iterator[list[_Donor]]:
    with contextlib.ExitStack() as stack:
        donors = []
        for _ in range(number):
            donors.append(_Donor(state, mbps, token))
            stack.callback(donors[-1].close)
        for donor in donors:
            donor.wait()
        yield donors


def _map(state: Path) -> torch.Tensor:
    """Return the bytes of a file, whose memory all processes share."""
    return torch.from_file(str(state), shared=True, size=state.stat().st_size, dtype=torch.uint8)


def serve(state: Path, mbps: float) -> None:
    """Be a donor until standard input ends; its first line is the run's token, each other one asks for the figure."""
    server = StateServer("127.0.0.1", sys.stdin.readline().strip(), _TIMEOUT_SECONDS, lambda *_: None, mbps)
    payload = _map(state)
    header = {"step": _STEP, "lineage": _LINEAGE, "bytes": payload.numel()}
    server.publish(Snapshot(_STEP, _LINEAGE, json.dumps(header).encode(), payload), 0.0)
    print(server.port, flush=True)
    for _ in sys.stdin:
        print(time.process_time(), flush=True)


def main(argv: Sequence[str]) -> None:
    """Be a donor."""
    serve(Path(argv[0]), float(argv[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
