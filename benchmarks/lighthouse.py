# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Measure quorums at a lighthouse: of many groups, with the names of many ended processes, and
after a kill, with the gate and without it.

The groups are threads of this process, which send requests to torchft's lighthouse and train
nothing. The group that is killed is a process.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torchft.coordination import LighthouseClient

from benchmarks.run import progress
from titan_ft.launch.gate import raise_descriptor_limit
from titan_ft.membership.pulse import LighthouseStatus
from titan_ft.protocol.member import Member
from titan_ft.run.lighthouse import LighthouseAddress
from titan_ft.system.threads import call_for_each

SIZES = ((30, 0), (30, 1_000), (30, 10_000), (300, 0), (1_000, 0))
"""Groups, and names of processes that have ended."""
QUORUMS = 15
_WARMUP = 2
_BEAT_SECONDS = 0.5
"""Of a group, as with a `heartbeat_timeout_ms` of 5,000."""
_SILENT_SECONDS = 5.5
"""Until the lighthouse counts an ended process as one."""
_LIMIT = timedelta(seconds=120)
_AT_ONCE = 8
"""Threads that heartbeat."""
_SERVER = """
import sys
from titan_ft.launch import lighthouse
lighthouse._LOOK_SECONDS = 1e9
from titan_ft.cli.main import main
sys.exit(main())
"""
"""A lighthouse that keeps all names, as torchft's does."""
KILL_SIZES = (8, 30)
"""Groups that survive."""
KILL_ROUNDS = 4
"""Lighthouses with the gate and without it, which take turns: a busy machine is busy for both."""
KILLS = 3
"""At each of these lighthouses."""
_KILL_BEAT_SECONDS = 0.1
_VICTIM = """
import sys, threading
from datetime import timedelta
from titan_ft.launch.lighthouse import _native_torchft

url, name, beat_seconds, limit_seconds = sys.argv[1:]
limit = timedelta(seconds=float(limit_seconds))
client = _native_torchft().LighthouseClient(url, limit)
client.heartbeat(name, limit)
print("beats", flush=True)

def beat():
    own = _native_torchft().LighthouseClient(url, limit)
    while True:
        own.heartbeat(name, limit)
        threading.Event().wait(float(beat_seconds))

threading.Thread(target=beat, daemon=True).start()
while True:
    client.quorum(name, limit)
    print("quorum", flush=True)
    sys.stdin.readline()
"""
_TOKEN = "0123456789abcdef" * 2
_ROOT = Path(__file__).parents[1]


def measure_lighthouses(
    sizes: Sequence[tuple[int, int]] = SIZES,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and figures of each number of groups and names, and of kills."""
    for num_groups, num_former in sizes:
        yield f"lighthouse-{num_groups}-{num_former}", measure(num_groups, num_former)
    for num_groups in KILL_SIZES:
        yield f"kill-{num_groups}", measure_kills(num_groups)


@contextlib.contextmanager
def run_lighthouse(has_gate: bool, *options: str) -> Iterator[tuple[int, str]]:
    """Run a lighthouse; yields its process id and the URL for torchft's clients."""
    command = [sys.executable, "-m", "titan_ft", "lighthouse", "--bind", "127.0.0.1:0", *options]
    token = _TOKEN if has_gate else ""
    process = subprocess.Popen(
        command,
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TITAN_FT_TOKEN": token},
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        yield process.pid, LighthouseAddress(address, token).url_for_client(address)
    finally:
        process.kill()
        process.wait()


def measure_kills(
    num_groups: int, num_rounds: int = KILL_ROUNDS, num_kills: int = KILLS
) -> dict[str, Any]:
    """Kill a group beside `num_groups` others, again and again, with the gate and without it.

    Returns:
        Of each way (`gate`, `open`): milliseconds from the kill until the last of the others has
        the quorum without the killed group (`median`, `longest`), and of a quorum in which nothing
        has changed (`steady`).
    """
    found: dict[str, list[tuple[float, float]]] = {"open": [], "gate": []}
    for _ in range(num_rounds):
        for name, kills in found.items():
            kills += _make_kills(num_groups, name == "gate", num_kills)
    figures: dict[str, Any] = {"survivors": num_groups}
    for name, kills in found.items():
        after_kill = [1000 * seconds for seconds, _ in kills]
        figures[name] = {
            "median": statistics.median(after_kill),
            "longest": max(after_kill),
            "steady": 1000 * statistics.median(steady for _, steady in kills),
        }
        progress(f"a kill beside {num_groups} groups ({name}): {figures[name]['median']:.0f} ms")
    return figures


def _make_kills(num_groups: int, has_gate: bool, num_kills: int) -> list[tuple[float, float]]:
    """Return the seconds of the quorum after each kill, and of a steady one before it."""
    names = [_member(slot, slot).replica_id for slot in range(num_groups)]
    found = []
    with contextlib.ExitStack() as stack:
        options = ("--min-replicas", str(num_groups))
        _, url = stack.enter_context(run_lighthouse(has_gate, *options))
        stop = threading.Event()
        stack.callback(stop.set)
        for share in _shares(names):
            beat = (url, share, stop, _KILL_BEAT_SECONDS)
            threading.Thread(target=_beat, args=beat, daemon=True).start()
        groups = call_for_each(lambda _: LighthouseClient(url, _LIMIT), names, "connect", _AT_ONCE)
        for number in range(num_kills):
            victim = _member(num_groups, num_groups + number).replica_id
            arguments = [url, victim, str(_KILL_BEAT_SECONDS), str(_LIMIT.total_seconds())]
            pipe = subprocess.PIPE
            process = subprocess.Popen(
                [sys.executable, "-c", _VICTIM, *arguments], cwd=_ROOT, stdin=pipe, stdout=pipe
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdin is not None
            process.stdout.readline()  # it beats, and asks
            _meet(groups, names, victim)
            process.stdout.readline()
            process.stdin.write(b"\n")
            process.stdin.flush()
            (steady,) = _make_quorums(groups, names, 1)
            process.stdout.readline()
            process.kill()
            killed_at = time.monotonic()
            _make_quorums(groups, names, 1)
            found.append((time.monotonic() - killed_at, steady))
    return found


def measure(num_groups: int, num_former: int, num_quorums: int = QUORUMS) -> dict[str, Any]:
    """Let groups ask for quorums.

    Returns:
        Milliseconds of a quorum from the first request to the last reply (`median`, `longest`), and
        of the server's CPU (`cpu`); `page_mb`, and milliseconds of its reader's CPU (`page_cpu`);
        `memory_mb` of the server.
    """
    command = [sys.executable, "-c", _SERVER, "lighthouse", "--bind", "127.0.0.1:0"]
    # Without it the first quorum leaves out the groups that ask a moment late, and these wait for
    # the next one, which needs half of all.
    command += ["--min-replicas", str(num_groups)]
    raise_descriptor_limit()
    with contextlib.ExitStack() as stack:
        process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True)
        stack.callback(process.wait)
        stack.callback(process.kill)
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        former = [_member(slot % num_groups, slot).replica_id for slot in range(num_former)]
        call_for_each(lambda names: _beat_once(address, names), _shares(former), "former", _AT_ONCE)
        if former:
            time.sleep(_SILENT_SECONDS)
        names = [_member(slot, num_former + slot).replica_id for slot in range(num_groups)]
        stop = threading.Event()
        stack.callback(stop.set)
        for share in _shares(names):
            threading.Thread(target=_beat, args=(address, share, stop), daemon=True).start()
        groups = call_for_each(
            lambda _: LighthouseClient(address, _LIMIT), names, "connect", _AT_ONCE
        )
        _make_quorums(groups, names, _WARMUP)
        before = read_cpu(process.pid)
        seconds = _make_quorums(groups, names, num_quorums)
        cpu = read_cpu(process.pid) - before
        with urllib.request.urlopen(f"{address}/status") as answer:
            page = answer.read()
        began = time.thread_time()
        LighthouseStatus.parse(page.decode())
        page_cpu = time.thread_time() - began
        memory = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
        figures = {
            "groups": num_groups,
            "former": num_former,
            "median": 1000 * statistics.median(seconds),
            "longest": 1000 * max(seconds),
            "cpu": 1000 * cpu / num_quorums,
            "page_mb": len(page) / 1e6,
            "page_cpu": 1000 * page_cpu,
            "memory_mb": int(memory[1]) / 1000 if memory else None,
        }
    progress(f"{num_groups} groups, {num_former} ended processes: {figures['median']:.1f} ms")
    return figures


def _meet(groups: Sequence[LighthouseClient], names: Sequence[str], newcomer: str) -> None:
    """Let all groups ask until a quorum has the newcomer.

    The lighthouse answers at once if all members of the last quorum ask. So the first answer may
    come before the newcomer's request.
    """

    def ask(slot: int) -> set[str]:
        members = groups[slot].quorum(names[slot], _LIMIT).participants
        return {member.replica_id for member in members}

    while newcomer not in call_for_each(ask, range(len(groups)), "ask", len(groups))[0]:
        pass


def _member(slot: int, number: int) -> Member:
    """Return a name as long as those of a job are."""
    return Member(
        slot,
        1.7e9 + number,
        f"{number:032x}",
        "c0ffee0123456789",
        "bench",
        "10.0.0.1:29500",
        "0" * 16,
    )


def _shares(names: Sequence[str]) -> list[Sequence[str]]:
    return [share for share in (names[number::_AT_ONCE] for number in range(_AT_ONCE)) if share]


def _beat_once(address: str, names: Sequence[str]) -> None:
    client = LighthouseClient(address, _LIMIT)
    for name in names:
        client.heartbeat(name)


def _beat(
    address: str, names: Sequence[str], stop: threading.Event, seconds: float = _BEAT_SECONDS
) -> None:
    """Heartbeat for some groups until the server is about to end."""
    client = LighthouseClient(address, _LIMIT)
    while not stop.is_set():
        with contextlib.suppress(RuntimeError):  # the server has ended just now
            for name in names:
                client.heartbeat(name)
        stop.wait(seconds)


def _make_quorums(
    groups: Sequence[LighthouseClient], names: Sequence[str], num_quorums: int
) -> list[float]:
    """Let all groups ask together; return the seconds of each quorum."""
    barrier = threading.Barrier(len(groups))
    times: list[list[tuple[float, float]]] = []

    def ask(slot: int) -> None:
        own = []
        try:
            for step in range(num_quorums):
                barrier.wait()
                began = time.monotonic()
                groups[slot].quorum(names[slot], _LIMIT, step=step)
                own.append((began, time.monotonic()))
        except Exception:
            barrier.abort()  # the other groups would wait for this one for ever
            raise
        times.append(own)

    call_for_each(ask, range(len(groups)), "ask", len(groups))
    return [
        max(end for _, end in quorum) - min(began for began, _ in quorum)
        for quorum in zip(*times, strict=True)
    ]


def read_cpu(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
