# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Leaving on SIGTERM: the ranks' agreement, and real processes with real signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titan_ft.engine import drain
from titan_ft.engine.drain import TERMINATED, Drain
from titan_ft.run.marks import remove_training_mark
from titan_ft.system.process import Process

DEADLINE = 60.0  # seconds; only ever reached by a bug
NEVER = 3600.0  # seconds

# A store in a folder: the processes of these tests need no torch, whose import costs seconds.
PREAMBLE = """
import ctypes, os, pathlib, signal, sys, time
import titan_ft.engine.drain
from titan_ft.engine.drain import Drain
titan_ft.engine.drain._LEAVE_SECONDS = 0.2
class Store:
    def set(self, key, value):
        part = self.file(str(os.getpid()) + key); part.write_text(value); part.rename(self.file(key))
    def get(self, key): return self.file(key).read_bytes()
    def check(self, keys): return all(self.file(key).exists() for key in keys)
    def wait(self, keys, timeout):
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline: raise RuntimeError("timeout")
            time.sleep(0.01)
    def file(self, key): return pathlib.Path(sys.argv[1], key.replace("/", "_"))
def say(text): print(text, flush=True)
def drain(timeout, rank=0, num_ranks=1):
    made = Drain(Store if num_ranks > 1 else None, key="drain", rank=rank, num_ranks=num_ranks,
                 timeout_seconds=timeout, on_abandon=lambda reason: say(f"abandoned: {reason}"))
    made.install()
    return made
def vote(made):
    made.before_vote(lambda: True)
    return made.after_vote()
def block(): ctypes.CDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)  # no handler of Python's runs
"""

Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start Python code with `drain(...)` at hand, and wait until it said "ready"; ends what is left of it."""
    processes = []

    def start(code: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PREAMBLE + code, str(tmp_path)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=pipe)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def build(store: Any, rank: int, num_ranks: int = 2) -> Drain:
    """Build a rank of this process."""

    def on_abandon(reason: str) -> None:
        raise AssertionError(reason)

    return Drain(
        lambda: store, key="drain", rank=rank, num_ranks=num_ranks, timeout_seconds=NEVER, on_abandon=on_abandon
    )


def leave_all(*ranks: Drain) -> None:
    """Let ranks leave together, which ends their threads."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(Drain.leave, ranks))


@pytest.mark.parametrize(("told", "after", "urgent"), [(False, 90.0, False), (True, 74.0, False), (True, 76.0, True)])
def test_three_quarters_of_the_time_are_what_a_group_may_wait_for_others(
    monkeypatch: pytest.MonkeyPatch, told: bool, after: float, urgent: bool
) -> None:
    """It counts from when this rank was told to leave; without that nothing is urgent."""
    made = Drain(None, key="drain", rank=0, num_ranks=1, timeout_seconds=100.0, on_abandon=lambda reason: None)
    monkeypatch.setattr(made, "_expire", lambda: None)
    now = 1000.0
    monkeypatch.setattr("titan_ft.engine.drain.time", SimpleNamespace(monotonic=lambda: now))
    if told:
        made.request()
    now += after
    assert made.is_urgent is urgent
    assert made.spent == pytest.approx(after / 100.0 if told else 0.0)
    assert made.seconds_left == pytest.approx(100.0 - after if told else 100.0)
    now += 1000.0
    assert made.seconds_left == (0.0 if told else 100.0)


# Waiting for others


class Seats:
    """Ranks of one group whose time is over when a test says so."""

    def __init__(self, number: int) -> None:
        import torch.distributed as dist

        self.store = dist.HashStore()
        self.ranks = [build(self.store, rank, number) for rank in range(number)]

    def hurry(self, monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
        monkeypatch.setattr(Drain, "is_urgent", property(lambda drain: drain in [self.ranks[n] for n in numbers]))


def test_a_group_waits_no_longer_when_all_its_ranks_have_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when one has: a sibling may have its answer already, and be in the exchange."""
    seats = Seats(2)
    first, second = seats.ranks
    assert not first.stops_waiting(False)
    seats.hurry(monkeypatch, 0, 1)
    assert not first.stops_waiting(False)  # the other has yet to say so
    assert second.stops_waiting(False)
    assert first.stops_waiting(False)


def test_a_rank_that_nobody_told_takes_its_siblings_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may come to one rank alone. Ranks that wait look into the store once a second."""
    now = 1000.0
    monkeypatch.setattr("titan_ft.engine.drain.time", SimpleNamespace(monotonic=lambda: now))
    seats = Seats(2)
    first, second = seats.ranks
    assert not second.stops_waiting(False)
    seats.hurry(monkeypatch, 0)
    assert not first.stops_waiting(False)
    assert not second.stops_waiting(False)  # it has just looked
    now += 1.0
    assert second.stops_waiting(False)
    assert first.stops_waiting(False)


def test_an_answer_before_a_rank_has_said_so_is_taken_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group cannot leave without its word; the ranks that have said so wait for the answer."""
    seats = Seats(2)
    first, second = seats.ranks
    seats.hurry(monkeypatch, 0, 1)
    assert not first.stops_waiting(False)
    assert not second.stops_waiting(True)
    assert not first.stops_waiting(False)
    assert not first.stops_waiting(True)


@pytest.mark.parametrize("answer_first", [False, True])
def test_an_answer_beside_the_last_word_ends_alike_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, answer_first: bool
) -> None:
    """Both have said so; one is answered, the other is not yet: the first of the two words counts."""
    seats = Seats(2)
    first, second = seats.ranks
    seats.hurry(monkeypatch, 0, 1)
    assert not first.stops_waiting(False)
    if answer_first:
        assert not first.stops_waiting(True)
        assert not second.stops_waiting(False)
        assert not second.stops_waiting(True)
    else:
        assert second.stops_waiting(False)
        assert first.stops_waiting(True)


def test_a_word_counts_for_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others came, and the group could not leave with that round: it says so again in the next one."""
    seats = Seats(2)
    seats.hurry(monkeypatch, 0, 1)
    assert not any(rank.stops_waiting(False) for rank in seats.ranks[:1])
    assert not any(rank.stops_waiting(True) for rank in seats.ranks)
    for rank in seats.ranks:
        rank.before_vote(lambda: False)
    assert not any(rank.after_vote() for rank in seats.ranks)
    assert not seats.ranks[0].stops_waiting(False)
    assert seats.ranks[1].stops_waiting(False)
    assert seats.ranks[0].stops_waiting(False)


def test_a_rank_pauses_until_it_is_answered_or_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last look at its time and the one at the answer are the same."""
    rank = Drain(None, key="drain", rank=0, num_ranks=1, timeout_seconds=NEVER, on_abandon=lambda reason: None)
    pauses: list[int] = []
    assert rank.wait_for_others(lambda: len(pauses) == 3, lambda: pauses.append(1))
    assert len(pauses) == 3
    monkeypatch.setattr(Drain, "is_urgent", property(lambda _: len(pauses) == 5))
    assert not rank.wait_for_others(lambda: False, lambda: pauses.append(1))
    assert len(pauses) == 5


def test_a_group_of_one_rank_decides_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no store to write to."""
    rank = Drain(None, key="drain", rank=0, num_ranks=1, timeout_seconds=NEVER, on_abandon=lambda reason: None)
    assert not rank.stops_waiting(False)
    monkeypatch.setattr(Drain, "is_urgent", True)
    assert rank.stops_waiting(False)
    assert not rank.stops_waiting(True)


# The agreement


def test_a_rank_that_looks_late_does_not_leave_early() -> None:
    """What a rank writes before its next vote is not taken for the last one by a rank that has yet to look there."""
    import torch.distributed as dist

    store = dist.HashStore()
    fast, slow = build(store, 0), build(store, 1)
    fast.before_vote(lambda: True)
    slow.before_vote(lambda: True)
    assert not fast.after_vote()
    fast.request()
    fast.before_vote(lambda: True)  # of the second vote, while the other rank has not looked after the first
    assert not slow.after_vote()
    slow.before_vote(lambda: True)
    assert fast.after_vote()
    assert slow.after_vote()
    assert slow.requested
    assert slow.after_vote(), "an agreement holds, also when this vote did not end a step"
    leave_all(fast, slow)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_that_may_not_leave_yet_tells_its_siblings_later(num_ranks: int) -> None:
    """Its group stays for another round: the other groups have not read that it leaves."""
    import torch.distributed as dist

    store = dist.HashStore()
    if num_ranks == 1:
        told = other = Drain(None, key="", rank=0, num_ranks=1, timeout_seconds=NEVER, on_abandon=pytest.fail)
    else:
        told, other = build(store, 0), build(store, 1)
    ranks = {told, other}
    for rank in ranks:
        rank.before_vote(lambda: True)
    assert {rank.after_vote() for rank in ranks} == {False}
    told.request()
    for may_leave in (False, False, True):
        for rank in ranks:
            rank.before_vote(lambda rank=rank, may_leave=may_leave: may_leave or rank is not told)
        assert {rank.after_vote() for rank in ranks} == {may_leave}
    for rank in ranks:
        rank.before_vote(lambda: False)
    assert all(rank.after_vote() for rank in ranks), "what is agreed stays agreed"
    leave_all(*ranks)


class Connection:
    """A connection to a store as torch's TCPStore is one: what is set is under way until a question is answered."""

    def __init__(self, store: Any) -> None:
        self._store, self._sent = store, list[tuple[str, str]]()

    def set(self, key: str, value: str) -> None:
        self._sent.append((key, value))

    def check(self, keys: list[str]) -> bool:
        self._arrive()
        return bool(self._store.check(keys))

    def get(self, key: str) -> bytes:
        self._arrive()
        return bytes(self._store.get(key))

    def wait(self, *args: Any) -> None:
        self._arrive()
        self._store.wait(*args)

    def _arrive(self) -> None:
        while self._sent:
            self._store.set(*self._sent.pop(0))


def test_the_number_is_there_before_the_vote() -> None:
    """What a rank sent to the store a moment ago may come later than its vote: it waits until the others find it."""
    import torch.distributed as dist

    store = dist.HashStore()
    told, other = build(Connection(store), 0), build(Connection(store), 1)
    told.request()
    told.before_vote(lambda: True)
    other.before_vote(lambda: True)
    assert other.after_vote()
    assert told.after_vote()
    leave_all(told, other)


def test_all_ranks_leave_after_the_same_vote() -> None:
    """Ranks at their own pace, told at any moment, with the store that groups have: all stop at one vote."""
    import torch.distributed as dist

    num_ranks = 3
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]

    def connect() -> Any:
        return dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]

    for trial in range(5):
        barrier = threading.Barrier(num_ranks, timeout=DEADLINE)
        key = f"drain/{trial}"

        def train(
            rank: int, barrier: threading.Barrier = barrier, key: str = key, trial: int = trial
        ) -> tuple[int, float]:
            made = Drain(
                connect, key=key, rank=rank, num_ranks=num_ranks, timeout_seconds=NEVER, on_abandon=pytest.fail
            )
            if rank == trial % num_ranks:
                threading.Timer(0.01 + trial * 0.003, made.request).start()
            for votes in range(1, 100_000):
                made.before_vote(lambda: True)
                barrier.wait()
                if made.after_vote():
                    began = time.monotonic()
                    made.leave()
                    return votes, time.monotonic() - began
            raise AssertionError("never left")

        with ThreadPoolExecutor(num_ranks) as pool:
            left = list(pool.map(train, range(num_ranks)))
        assert len({votes for votes, _ in left}) == 1, left


def test_leaving_waits_for_the_others_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that leaves alone is held up for its grace; the last one not at all."""
    import torch.distributed as dist

    monkeypatch.setattr(drain, "_LEAVE_SECONDS", 0.5)
    store = dist.HashStore()
    first, last = build(store, 0), build(store, 1)
    waited = []

    def leave(made: Drain) -> None:
        began = time.monotonic()
        made.leave()
        waited.append(time.monotonic() - began)

    leave(first)
    leave(last)
    assert waited[0] > 0.4
    assert waited[1] < waited[0]


def test_processes_are_recognized() -> None:
    """This process lives; one of another start time under its pid is another one; other hosts cannot be looked at."""
    this = Process.parse(str(Process.this()))
    assert this == Process.this()
    assert not this.is_gone()
    assert replace(this, start="1").is_gone()
    assert not replace(this, start="1", host="elsewhere").is_gone()
    assert not replace(this, start="").is_gone(), "where there is no /proc"


# One rank


def test_sigterm_ends_training_at_the_next_vote(start: Start) -> None:
    """After SIGTERM the vote under way is finished, and the group leaves after it."""
    process = start("""
made = drain(1000)
assert not vote(made)
say("ready")
while not vote(made): time.sleep(0.01)
made.leave()
say("left")
""")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=DEADLINE)
    assert (process.returncode, output) == (0, "left\n")


def test_the_timeout_ends_a_rank_that_cannot_leave(start: Start) -> None:
    """A training thread stuck in a C call does not keep the timeout from running: the reason is told, status 0."""
    process = start("made = drain(0.5); vote(made); say('ready'); block()")
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0
    assert output == "abandoned: fault_tolerance.drain_timeout_seconds (0.5 s) is over\n"
    assert "drain_timeout_seconds" in errors


def test_before_the_first_vote_nothing_is_waited_for(start: Start, tmp_path: Path) -> None:
    """A worker that is still loading has nothing to finish; its end is one in order."""
    error_file = tmp_path / "error.json"
    marks = f"from titan_ft.run import marks; os.environ['TORCHELASTIC_ERROR_FILE'] = {str(error_file)!r}\n"
    process = start(f"{marks}marks.mark_training(); made = drain(1000); say('ready'); block()")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=DEADLINE)
    assert (process.returncode, output) == (0, "abandoned: it had not begun to train\n")
    assert not remove_training_mark(error_file)


def test_a_second_sigterm_ends_at_once(start: Start) -> None:
    """The same request from two senders is one; a second one later ends the process, whatever it is doing."""
    process = start("""
titan_ft.engine.drain._ONE_REQUEST_SECONDS = 1000
reads, read = [], os.read
def count(*arguments): reads.append(arguments); return read(*arguments)
os.read = count
made = drain(1000); vote(made); say("ready")
while not made.requested: time.sleep(0.001)
say("requested")
while len(reads) < 3: time.sleep(0.001)  # the second signal has been read and counts as the same request
titan_ft.engine.drain._ONE_REQUEST_SECONDS = 0
say("alive")
block()
""")
    assert process.stdout is not None
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "requested\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "alive\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE) == TERMINATED


def test_forked_children_keep_the_default(start: Start) -> None:
    """SIGTERM ends a forked child, however early it comes, and does not ask this rank to leave."""
    process = start("""
made = drain(1000)
parent, endings = os.getpid(), set()
for _ in range(20):
    child = os.fork()
    if child == 0:
        while os.getppid() == parent: time.sleep(0.01)
        os._exit(1)
    os.kill(child, signal.SIGTERM)
    endings.add(os.WTERMSIG(os.waitpid(child, 0)[1]))
say("ready")
time.sleep(0.3)
say(f"{endings} {made.requested}")
""")
    output, _ = process.communicate(timeout=DEADLINE)
    assert output == f"{ {int(signal.SIGTERM)} } False\n"


# Several ranks


@pytest.mark.parametrize("reaped", [False, True])
def test_a_dead_sibling_ends_a_rank_at_once(start: Start, reaped: bool) -> None:
    """Sent SIGTERM because a sibling died, a rank does not wait for the step; nor before its first vote."""
    sibling = start("made = drain(1000, 1, 2); say('ready'); time.sleep(1000)")
    voting = "" if reaped else "made.before_vote(lambda: True);"
    process = start(f"made = drain(1000, 0, 2); {voting} say('ready'); block()")
    sibling.kill()
    if reaped:
        sibling.wait(DEADLINE)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=DEADLINE)
    assert (process.returncode, output) == (TERMINATED, "")
    assert "rank 1 of this group is gone" in errors


def test_a_sibling_that_left_is_not_taken_for_dead(start: Start) -> None:
    """A rank that is slow to leave is not cut short by the end of one that left in order."""
    sibling = start("made = drain(1000, 1, 2); say('ready'); sys.stdin.readline(); made.leave()")
    process = start("made = drain(1, 0, 2); made.before_vote(lambda: True); say('ready'); block()")
    sibling.communicate("\n", timeout=DEADLINE)
    assert sibling.returncode == 0
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0
    assert "drain_timeout_seconds" in output


def test_ranks_give_up_together(start: Start) -> None:
    """When one rank has given up its siblings follow, with status 0: the group left, only not in order."""
    process = start("made = drain(1000, 0, 2); made.before_vote(lambda: True); say('ready'); block()")
    process.send_signal(signal.SIGTERM)
    sibling = start("made = drain(0.5, 1, 2); made.before_vote(lambda: True); say('ready'); block()")
    sibling.send_signal(signal.SIGTERM)
    for rank in (process, sibling):
        output, _ = rank.communicate(timeout=DEADLINE)
        assert rank.returncode == 0
        assert output.startswith("abandoned: ")
