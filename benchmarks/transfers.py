# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Measure how fast a joiner gets a state from several donors, whose links are slower than its own.

Each donor is a process of its own, with the state server of a worker. `transfer_max_mbps` is its
link, and all donors' links together are the joiner's. A donor also makes steps, like a rank that
drives a GPU: the host runs Python for a tenth of each step, and waits for the rest. The cost of
serving is the slowdown of these steps, and the processor time.

    python -m benchmarks.transfers FILE MBPS [tls]

is a donor of the bytes of FILE. The first line of its standard input is the token. It prints its
port, and, for each further line of input, as JSON: the processor seconds of serving so far, and the
seconds of each step since the last line.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.run import BenchError, progress
from titan_ft.transfer.snapshot import Snapshot, TrainState
from titan_ft.transfer.state_fetch import NUM_CONNECTIONS, fetch
from titan_ft.transfer.state_server import StateServer
from titan_ft.transfer.tls import Certificate

NUMS_DONORS = (1, 2, 4, 8)
LINK_MBPS = 100.0
"""Of each donor: little enough that eight of them and a joiner on two cores measure the links and
not the processor.
"""
STATE_BYTES = 256 << 20
STEP_SECONDS = 0.1
HOST_SHARE = 0.1
"""Of a donor's step, in which it runs Python; no more, so that those of eight donors fit on two
cores.
"""
USUAL_SECONDS = 3.0
"""For which donors make steps before the transfer."""
LATER_COPIES = 5
KILLED_AFTER = 1 / 3
"""Of the time that the links need, until one of several donors is killed."""

_ROOT = Path(__file__).parents[1]
_STEP, _LINEAGE = 5, 55
_TIMEOUT_SECONDS = 600.0


def measure_transfers(
    work_dir: Path, size: int = STATE_BYTES, mbps: float = LINK_MBPS
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and figures of each transfer: each number of donors, with and without a kill.

    Then of copies, and of a transfer without a limit, which the processor limits: without and with
    TLS.
    """
    state = work_dir / "state"
    work_dir.mkdir(parents=True, exist_ok=True)
    state.write_bytes(secrets.token_bytes(1 << 20) * (size >> 20))
    for number in NUMS_DONORS:
        yield f"{number}", measure(state, number, mbps)
        if number > 1:
            yield f"{number}-killed", measure(state, number, mbps, kill=True)
    yield "1-unlimited", measure(state, 1, 0.0)
    yield "1-tls", measure(state, 1, 0.0, tls=True)
    yield "copies", measure_copies(size)


def measure(
    state: Path, number: int, mbps: float, kill: bool = False, tls: bool = False
) -> dict[str, Any]:
    """Fetch the bytes of a file from so many donors.

    Args:
        mbps: rate of each donor's link; 0 = no limit.
        kill: True kills one of them by SIGKILL while it serves.
        tls: True encrypts.

    Returns:
        Seconds; Mbit/s; the share of the donors' links together (None without a limit); the lost
        donors. Without a kill (otherwise None), of the donor in the middle: processor seconds per
        GB that it sent, and the ratio of its mean step meanwhile to before.

    Raises:
        BenchError: the received bytes differ from the sent ones.
    """
    token, lost = secrets.token_hex(16), []
    size = state.stat().st_size
    with _donors(state, number, mbps, token, tls) as donors:
        for donor in donors:
            donor.usage()  # from now on
        time.sleep(0.0 if kill else USUAL_SECONDS)
        before = [donor.usage() for donor in donors]
        links = number * mbps or math.inf
        killer = threading.Timer(KILLED_AFTER * size * 8e-6 / links, donors[-1].kill)
        if kill:
            killer.start()
        started = time.monotonic()
        addresses = [f"127.0.0.1:{donor.port}" for donor in donors]
        fetched = fetch(
            addresses,
            token,
            _STEP,
            "1",
            NUM_CONNECTIONS,
            _TIMEOUT_SECONDS,
            report_lost=lambda place, _: lost.append(place),
        )
        seconds = time.monotonic() - started
        killer.cancel()
        after = [] if kill else [donor.usage() for donor in donors]
    if not torch.equal(fetched.payload, _map(state)):
        raise BenchError("other bytes came than were sent")
    rate = size * 8e-6 / seconds
    gb = size / number / 1e9
    costs = [
        (now.cpu_seconds - then.cpu_seconds) / gb
        for then, now in zip(before, after, strict=not kill)
    ]
    slowness = [
        now.step_seconds / then.step_seconds for then, now in zip(before, after, strict=not kill)
    ]
    details = f"{', one killed' if kill else ''}{', no limit' if not mbps else ''}{', TLS' if tls else ''}"
    progress(f"transfer from {number} donors{details}: {rate:.0f} Mbit/s")
    return {
        "donors": number,
        "link_mbps": mbps,
        "tls": tls,
        "bytes": size,
        "seconds": seconds,
        "mbps": rate,
        "share": rate / (number * mbps) if mbps else None,
        "lost": lost,
        "cpu_seconds_per_gb": None if kill else statistics.median(costs),
        "step_ratio": None if kill else statistics.median(slowness),
    }


def measure_copies(size: int) -> dict[str, Any]:
    """Copy a state of about so many bytes as a donor does: parameters and Adam's moments, in 64
    tensors each.

    Returns:
        Bytes; the seconds of the first copy, and the median of later ones, which take the same
        memory again.
    """
    model = torch.nn.ParameterList([torch.zeros(size // (3 * 4 * 64)) for _ in range(64)])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = TrainState([model], [optimizer], _NoCounters(), _NoCounters())
    seconds = []
    for _ in range(1 + LATER_COPIES):
        began = time.monotonic()
        snapshot = state.copy(_STEP, _LINEAGE)
        seconds.append(time.monotonic() - began)
        state.reuse_memory(snapshot)
    first, *later = seconds
    return {
        "bytes": snapshot.payload.numel(),
        "first_seconds": first,
        "later_seconds": statistics.median(later),
    }


class _NoCounters:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert not state_dict


@dataclass(frozen=True)
class _Usage:
    """A donor's costs: processor seconds without those of its steps, and the mean of its last
    steps.
    """

    cpu_seconds: float
    step_seconds: float


class _Donor:
    """A donor's process."""

    def __init__(self, state: Path, mbps: float, token: str, tls: bool) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.transfers",
                str(state),
                str(mbps),
                *(["tls"] if tls else []),
            ],
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

    def usage(self) -> _Usage:
        """Return the processor seconds of serving so far, and the mean step since the last call."""
        self._ask("")
        cpu_seconds, steps = json.loads(self._read())
        return _Usage(cpu_seconds, statistics.fmean(steps or [math.nan]))

    def kill(self) -> None:
        """End it by SIGKILL."""
        self._process.kill()

    def close(self) -> None:
        """End it, and wait for that."""
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def _donors(state: Path, number: int, mbps: float, token: str, tls: bool) -> Iterator[list[_Donor]]:
    with contextlib.ExitStack() as stack:
        donors = []
        for _ in range(number):
            donors.append(_Donor(state, mbps, token, tls))
            stack.callback(donors[-1].close)
        for donor in donors:
            donor.wait()
        yield donors


def _map(state: Path) -> torch.Tensor:
    """Return the bytes of a file in memory that all processes share."""
    return torch.from_file(str(state), shared=True, size=state.stat().st_size, dtype=torch.uint8)


def serve(state: Path, mbps: float, certificate: Certificate | None) -> None:
    """Serve as a donor until standard input ends; see this module."""
    token = sys.stdin.readline().strip()
    server = StateServer("127.0.0.1", token, _TIMEOUT_SECONDS, lambda *_: None, mbps, certificate)
    payload = _map(state)
    header = {"step": _STEP, "lineage": _LINEAGE, "bytes": payload.numel()}
    server.publish(Snapshot(_STEP, _LINEAGE, json.dumps(header).encode(), payload), 0.0)
    steps: queue.SimpleQueue[tuple[float, float]] = queue.SimpleQueue()
    threading.Thread(target=_make_steps, args=(lambda *step: steps.put(step),), daemon=True).start()
    print(server.port, flush=True)
    stepping = 0.0
    for _ in sys.stdin:
        made = [steps.get() for _ in range(steps.qsize())]
        stepping = max([stepping, *(used for _, used in made)])
        print(
            json.dumps([time.process_time() - stepping, [seconds for seconds, _ in made]]),
            flush=True,
        )


def _make_steps(told: Callable[[float, float], None]) -> None:
    """Make steps for ever, and tell the seconds of each, and those of the processor that all have
    taken.
    """
    host_seconds, number = HOST_SHARE * STEP_SECONDS, 10_000
    began = time.thread_time()
    sum(range(number))
    number = int(number * host_seconds / max(time.thread_time() - began, 1e-6))
    while True:
        began = time.monotonic()
        for _ in range(10):  # a kernel that is queued lets go of the interpreter's lock
            sum(range(number // 10))
            time.sleep(STEP_SECONDS * (1 - HOST_SHARE) / 10)
        told(time.monotonic() - began, time.thread_time())


def main(argv: Sequence[str]) -> None:
    """Be a donor."""
    serve(Path(argv[0]), float(argv[1]), Certificate.make() if "tls" in argv[2:] else None)


if __name__ == "__main__":
    main(sys.argv[1:])
