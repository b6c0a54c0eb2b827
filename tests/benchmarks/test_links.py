# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/bench.py --only rounds-links: throttled sockets of other processes, and the
measurements.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import links
from benchmarks.links import Links, measure_links, measure_rate, socket_of, throughput
from benchmarks.rounds import Case
from benchmarks.run import BenchError
from tests.benchmarks.histories import commit
from titan_ft.config import load_toml
from titan_ft.run.events import StepCommitted
from titan_ft.system.process import own_sockets

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="needs pidfd_getfd and SO_MAX_PACING_RATE"
)
MAX_PACING_RATE = slice(112, 120)  # of struct tcp_info

PEER = """
import socket, sys
port = int(sys.argv[1])
if port:
    end = socket.create_connection(("127.0.0.1", port))
    print("connected", flush=True)
else:
    server = socket.create_server(("127.0.0.1", 0))
    print(server.getsockname()[1], flush=True)
    end, _ = server.accept()
    print("connected", flush=True)
for line in sys.stdin:
    end.sendall(bytes(int(line)))
    print("sent", flush=True)
"""


Start = Callable[[int], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start connected processes: the first with port 0, the second with the first one's port."""
    started: list[subprocess.Popen[str]] = []

    def run(port: int) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, "-c", PEER, str(port)], stdin=pipe, stdout=pipe, text=True
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def say(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_the_sockets_between_two_groups_are_throttled_and_counted(
    start: Start,
) -> None:
    """Both ends are throttled from outside the processes; connections to other processes
    are not.
    """
    server = start(0)
    client = start(int(say(server)))
    assert (say(server), say(client)) == ("connected", "connected")
    between = Links({0: [server.pid], 1: [client.pid]})
    found = between.find()
    assert sorted(found.values()) == [(0, server.pid), (1, client.pid)]

    def rates() -> list[int]:
        rates = []
        for inode, (_, pid) in found.items():
            with socket_of(pid, inode) as borrowed:
                assert borrowed is not None
                told = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                rates.append(int.from_bytes(told[MAX_PACING_RATE], "little"))
        return rates

    between.throttle(10.0)
    assert rates() == [1_250_000] * 2
    between.throttle(links.UNTHROTTLED)
    assert rates() == [2**64 - 1] * 2
    (before,) = between.bytes_sent(0).values()
    assert server.stdin is not None
    server.stdin.write("1000\n")
    server.stdin.flush()
    assert say(server) == "sent"
    assert list(between.bytes_sent(0).values()) == [before + 1000]
    assert list(between.bytes_sent(1).values()) == [0]


def test_groups_without_connections_are_no_measurement(start: Start) -> None:
    alone = start(0)
    say(alone)
    with pytest.raises(BenchError, match="no connection between the groups"):
        Links({0: [alone.pid], 1: [os.getpid()]}).throttle(10.0)


def test_a_socket_that_is_closed_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        inode = os.fstat(server.fileno()).st_ino
        assert inode in {own for _, own in own_sockets()}
        with socket_of(os.getpid(), inode) as borrowed:
            assert borrowed is not None
    with socket_of(os.getpid(), inode) as borrowed:
        assert borrowed is None


def test_a_connection_is_no_faster_than_it_is_paced() -> None:
    """Loopback makes thousands of Mbit/s; a busy machine may make less than it is allowed."""
    assert 0.0 < measure_rate(40.0, 0.5) < 80.0


def test_only_exchanges_that_were_throttled_as_a_whole_count() -> None:
    """The rate is set at time 10: after the first commit, and before the exchange of the second."""

    def made(time: float, step: int, exchange_seconds: float) -> StepCommitted:
        found = commit(
            time,
            step,
            inner_steps=4,
            compute_seconds=8.0,
            exchange_seconds=exchange_seconds,
            tokens=100,
        )
        assert isinstance(found, StepCommitted)
        return found

    # Their last steps, of 2 s, began at 8, 14 and 26.
    commits = [made(11.0, 1, 1.0), made(20.0, 2, 4.0), made(30.0, 3, 2.0)]
    assert throughput(commits, 10.0) == [(9.0, 100), (10.0, 100)]
    assert throughput(commits, 14.5) == [(10.0, 100)]
    assert throughput(commits[:1], 0.0) == []


@pytest.mark.slow
def test_a_real_run_is_slower_behind_a_slow_link(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """24.7 MB at 40 Mbit/s take five seconds, a hundred times as long as on loopback."""
    monkeypatch.setattr(links, "RATES_MBPS", (40.0,))
    monkeypatch.setattr(links, "MEASURE_SECONDS", 3.0)
    base = load_toml(Path(__file__).parents[2] / "configs" / "llama3_debug.toml")
    (_, paced), (name, found) = measure_links(base, tmp_path, {}, [Case(2)])
    assert set(paced) == {"40"}
    assert name == "sync-groups2"
    free, slow = found["rates"]
    assert free["bytes_per_exchange"] == pytest.approx(24.7e6, rel=0.5)
    assert slow["tokens_per_second"] <= 1.2 * slow["mbps"] * 1e6 / 8 / 24.65e6 * 512
