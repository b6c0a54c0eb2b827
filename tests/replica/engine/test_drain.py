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
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.replica.conftest import Trees, wait_until
from titan_ft.engine import drain
from titan_ft.engine.drain import TERMINATED, Drain
from titan_ft.membership.control_tree import ControlTree
from titan_ft.run.marks import remove_training_mark
from titan_ft.system.threads import call_for_each

ROOT = Path(__file__).parents[3]
DEADLINE = 60.0  # seconds; only a bug reaches it
NEVER = 3600.0  # seconds

# The ranks' store is a folder. These processes need no torch, whose import takes seconds.
PREAMBLE = """
import ctypes, os, pathlib, signal, sys, time
import titan_ft.engine.drain
from tests.replica.membership.control_rank import FolderStore
from titan_ft.engine.drain import Drain
from titan_ft.membership.control_tree import ControlTree
titan_ft.engine.drain._LEAVE_SECONDS = 0.2
def say(text): print(text, flush=True)
def drain(timeout, rank=0, num_ranks=1):
    store = FolderStore(pathlib.Path(sys.argv[1]))
    control = ControlTree(rank, num_ranks, host="127.0.0.1", token="token", store=store, key="group/0")
    made = Drain(control, num_ranks=num_ranks,
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
    """Start Python code with `drain(...)`, and wait until it prints "ready".

    The process ends with the test.
    """
    processes = []

    def start(code: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PREAMBLE + code, str(tmp_path)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, cwd=ROOT, text=True, stdin=pipe, stdout=pipe, stderr=pipe
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Provide the exit statuses with which ranks of the test process would have ended."""
    statuses: list[int] = []

    def end(status: int, *final_calls: Callable[[], object]) -> None:
        for call in final_calls:
            call()
        statuses.append(status)

    monkeypatch.setattr(drain, "end_process", end)
    return statuses


def build(tree: ControlTree, num_ranks: int = 1, timeout_seconds: float = NEVER) -> Drain:
    """Build a rank of this process."""
    return Drain(
        tree,
        num_ranks=num_ranks,
        timeout_seconds=timeout_seconds,
        on_abandon=pytest.fail,
    )


def build_group(trees: list[ControlTree]) -> list[Drain]:
    """Build all ranks of a group."""
    return [build(tree, len(trees)) for tree in trees]


def vote(trees: list[ControlTree]) -> None:
    """Let all ranks agree, as in a vote. Then each has heard all earlier notes."""
    call_for_each(lambda tree: tree.rank0_decides((), lambda _: ""), trees, "vote", len(trees))


def leave_all(ranks: list[Drain]) -> None:
    """Let ranks leave together. A rank that only closes its tree would be lost."""
    call_for_each(Drain.leave, ranks, "leave", len(ranks))


@pytest.mark.parametrize(
    ("told", "after", "urgent"), [(False, 90.0, False), (True, 74.0, False), (True, 76.0, True)]
)
def test_three_quarters_of_the_time_are_what_a_group_may_wait_for_others(
    monkeypatch: pytest.MonkeyPatch, trees: Trees, told: bool, after: float, urgent: bool
) -> None:
    """The time counts from this rank's leave request. Without one, nothing is urgent."""
    made = build(trees.connect(), timeout_seconds=100.0)
    monkeypatch.setattr(made, "_expire", lambda: None)
    now = 1000.0
    monkeypatch.setattr("titan_ft.engine.drain.time", SimpleNamespace(monotonic=lambda: now))
    if told:
        made.request()
    now += after
    assert made.is_urgent is urgent
    assert made.spent_share == pytest.approx(after / 100.0 if told else 0.0)
    assert made.seconds_left == pytest.approx(100.0 - after if told else 100.0)
    now += 1000.0
    assert made.seconds_left == (0.0 if told else 100.0)


# Waiting for others


class Waiting:
    """The two ranks of a group that waits for others. The test ends their time.

    The second rank to speak is rank 0, which hears its own notes at once.
    """

    def __init__(self, trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trees = trees.connect_group(2)
        self.second, self.first = build_group(self.trees)
        self._monkeypatch = monkeypatch

    def hurry(self, *ranks: Drain) -> None:
        self._monkeypatch.setattr(Drain, "is_urgent", property(lambda drain: drain in ranks))

    def hear(self) -> None:
        """Let both ranks hear the notes."""
        vote(self.trees)


@pytest.fixture
def waiting(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> Waiting:
    return Waiting(trees, monkeypatch)


def test_a_group_waits_no_longer_when_all_its_ranks_have_said_so(waiting: Waiting) -> None:
    """One rank is not enough: a sibling may have its answer, and be in the exchange already."""
    first, second = waiting.first, waiting.second
    assert not first.agree_to_stop_waiting(False)
    waiting.hurry(first, second)
    assert not first.agree_to_stop_waiting(False)  # the other rank has not said it yet
    waiting.hear()
    assert second.agree_to_stop_waiting(False)
    waiting.hear()
    assert first.agree_to_stop_waiting(False)


def test_a_rank_without_a_request_follows_its_sibling(waiting: Waiting) -> None:
    """A signal may reach one rank alone."""
    first, second = waiting.first, waiting.second
    assert not second.agree_to_stop_waiting(False)
    waiting.hurry(first)
    assert not first.agree_to_stop_waiting(False)
    waiting.hear()
    assert second.agree_to_stop_waiting(False)
    waiting.hear()
    assert first.agree_to_stop_waiting(False)


def test_an_answer_before_a_rank_has_said_so_is_taken_by_all(waiting: Waiting) -> None:
    """The group cannot leave without this rank's "hurry".

    Ranks that have said it wait for the answer.
    """
    first, second = waiting.first, waiting.second
    waiting.hurry(first, second)
    assert not first.agree_to_stop_waiting(False)
    waiting.hear()
    assert not second.agree_to_stop_waiting(True)
    assert not first.agree_to_stop_waiting(False)
    assert not first.agree_to_stop_waiting(True)


@pytest.mark.parametrize("answer_first", [False, True])
def test_an_answer_beside_the_last_word_ends_alike_on_all_ranks(
    waiting: Waiting, answer_first: bool
) -> None:
    """Both ranks have said "hurry", and only one has an answer.

    The first proposal decides for both.
    """
    first, second = waiting.first, waiting.second
    waiting.hurry(first, second)
    assert not first.agree_to_stop_waiting(False)
    waiting.hear()
    if answer_first:
        assert not first.agree_to_stop_waiting(True)
        assert not second.agree_to_stop_waiting(False)
        assert not second.agree_to_stop_waiting(True)
    else:
        assert second.agree_to_stop_waiting(False)
        assert first.agree_to_stop_waiting(True)


def test_a_word_counts_for_one_round(waiting: Waiting) -> None:
    """The others came, and the group could not leave after that round.

    In the next round it says "hurry" again.
    """
    first, second = waiting.first, waiting.second
    waiting.hurry(first, second)
    assert not first.agree_to_stop_waiting(False)
    assert not first.agree_to_stop_waiting(True)
    assert not second.agree_to_stop_waiting(True)
    for rank in (first, second):
        rank.before_vote(lambda: False)
    waiting.hear()
    assert not any(rank.after_vote() for rank in (first, second))
    assert not first.agree_to_stop_waiting(False)
    waiting.hear()
    assert second.agree_to_stop_waiting(False)
    waiting.hear()
    assert first.agree_to_stop_waiting(False)


def test_a_rank_pauses_until_it_is_answered_or_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, trees: Trees
) -> None:
    """The rank looks at the answer and at its time once more at the end."""
    rank = build(trees.connect())
    pauses: list[int] = []
    assert rank.wait_for_others(lambda: len(pauses) == 3, lambda: pauses.append(1))
    assert len(pauses) == 3
    monkeypatch.setattr(Drain, "is_urgent", property(lambda _: len(pauses) == 5))
    assert not rank.wait_for_others(lambda: False, lambda: pauses.append(1))
    assert len(pauses) == 5


def test_a_group_of_one_rank_decides_by_itself(
    monkeypatch: pytest.MonkeyPatch, trees: Trees
) -> None:
    """No sibling must agree. An answer after "hurry" finds the decision settled."""
    rank = build(trees.connect())
    assert not rank.agree_to_stop_waiting(False)
    monkeypatch.setattr(Drain, "is_urgent", True)
    assert rank.agree_to_stop_waiting(False)
    assert rank.agree_to_stop_waiting(True)


# The agreement


def test_a_rank_that_looks_late_does_not_leave_early(trees: Trees) -> None:
    """The note for the next vote must not count for the last one.

    A rank may look late after a vote.
    """
    group = trees.connect_group(2)
    fast, slow = build_group(group)
    for rank in (fast, slow):
        rank.before_vote(lambda: True)
    vote(group)
    assert not fast.after_vote()
    fast.request()
    # The note for the second vote, before the other rank has looked after the first one.
    fast.before_vote(lambda: True)
    wait_until(lambda: group[1].read_note("leave/2") is not None, "the other rank has heard it")
    assert not slow.after_vote()
    slow.before_vote(lambda: True)
    vote(group)
    assert fast.after_vote()
    assert slow.after_vote()
    assert slow.requested
    assert slow.after_vote(), "the agreement holds even if this vote did not end a step"
    leave_all([fast, slow])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_that_may_not_leave_yet_tells_its_siblings_later(
    trees: Trees, num_ranks: int
) -> None:
    """The group stays for one more round: the other groups have not read that it leaves."""
    group = trees.connect_group(num_ranks)
    ranks = build_group(group)
    told = ranks[-1]
    told.mark_busy()
    told.request()
    for may_leave in (False, False, True):
        for rank in ranks:
            rank.before_vote(lambda rank=rank, may_leave=may_leave: may_leave or rank is not told)
        vote(group)
        assert {rank.after_vote() for rank in ranks} == {may_leave}
    for rank in ranks:
        rank.before_vote(lambda: False)
    vote(group)
    assert all(rank.after_vote() for rank in ranks), "the agreement stays"
    leave_all(ranks)


@pytest.mark.parametrize("told", [0, 1, 2])
def test_all_ranks_leave_after_the_same_vote(trees: Trees, told: int) -> None:
    """Ranks vote at their own pace, and requests come at any moment.

    All ranks stop after one vote.
    """
    for trial in range(3):
        group = trees.connect_group(3)

        def train(rank: int, group: list[ControlTree] = group, trial: int = trial) -> int:
            made = build(group[rank], 3)
            made.mark_busy()
            if rank == told:
                threading.Timer(0.01 + trial * 0.003, made.request).start()
            for votes in range(1, 100_000):
                made.before_vote(lambda: True)
                group[rank].rank0_decides((), lambda _: "")
                if made.after_vote():
                    made.leave()
                    return votes
            raise AssertionError("never left")

        left = call_for_each(train, range(3), "train", 3)
        assert len(set(left)) == 1, left


def test_leaving_waits_for_the_others_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, trees: Trees
) -> None:
    """A rank that leaves alone waits for its whole time. Ranks that leave together do not."""

    def leave(ranks: list[Drain], seconds: float) -> float:
        monkeypatch.setattr(drain, "_LEAVE_SECONDS", seconds)
        began = time.monotonic()
        leave_all(ranks)
        return time.monotonic() - began

    assert leave(build_group(trees.connect_group(2))[:1], 0.3) >= 0.3
    assert leave(build_group(trees.connect_group(2)), DEADLINE) < DEADLINE / 2


# One rank


def test_sigterm_ends_training_at_the_next_vote(start: Start) -> None:
    """After SIGTERM the vote under way is completed, and the group leaves after it."""
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
    """The timeout runs even if the training thread is stuck in a C call.

    The reason is logged, and the exit status is 0.
    """
    process = start("made = drain(0.5); vote(made); say('ready'); block()")
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0
    assert output == "abandoned: fault_tolerance.drain_timeout_seconds (0.5 s) is over\n"
    assert "drain_timeout_seconds" in errors


def test_before_the_first_vote_nothing_is_waited_for(start: Start, tmp_path: Path) -> None:
    """A worker that still loads has nothing to finish. It ends in order."""
    error_file = tmp_path / "error.json"
    marks = f"from titan_ft.run import marks; os.environ['TORCHELASTIC_ERROR_FILE'] = {str(error_file)!r}\n"
    process = start(f"{marks}marks.mark_training(); made = drain(1000); say('ready'); block()")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=DEADLINE)
    assert (process.returncode, output) == (0, "abandoned: it had not begun to train\n")
    assert not remove_training_mark(error_file)


def test_a_second_sigterm_ends_at_once(start: Start) -> None:
    """The same request from two senders is one request. A later one ends the process at once."""
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
    """SIGTERM ends a forked child at any time, and is no leave request for this rank."""
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


@pytest.mark.parametrize("dead", [0, 1])
def test_a_dead_sibling_ends_a_rank_at_once(start: Start, dead: int) -> None:
    """The agent sends SIGTERM because a sibling died.

    The rank does not wait for the step, or for its first vote.
    """
    voting = "" if dead else "made.before_vote(lambda: True);"
    ranks = [
        start(f"made = drain(1000, {rank}, 2); {voting} say('ready'); block()") for rank in range(2)
    ]
    ranks[dead].kill()
    other = ranks[1 - dead]
    other.send_signal(signal.SIGTERM)
    output, errors = other.communicate(timeout=DEADLINE)
    assert (other.returncode, output) == (TERMINATED, "")
    assert f"rank {dead} of this group" in errors
    assert "its step cannot be finished" in errors


def test_a_sibling_that_is_lost_before_the_leave_request(
    trees: Trees, ends: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    """The loss alone ends no rank. The agent's leave request, which follows the loss, does."""
    group = trees.connect_group(3)
    rank = build_group(group)[2]
    heard: list[int] = []
    group[2].listen_for_losses(lambda loss: heard.append(loss.rank))
    group[1].close()
    wait_until(lambda: bool(heard), "the rank has heard of it")
    assert ends == []
    rank.request()
    assert ends == [TERMINATED]
    assert "rank 1 of this group (on node-1) is gone" in capfd.readouterr().err


def test_a_sibling_that_left_is_not_taken_for_dead(start: Start) -> None:
    """The end of a rank that left in order does not end a rank that leaves slowly."""
    process = start("made = drain(1, 0, 2); made.before_vote(lambda: True); say('ready'); block()")
    sibling = start("made = drain(1000, 1, 2); say('ready'); sys.stdin.readline(); made.leave()")
    sibling.communicate("\n", timeout=DEADLINE)
    assert sibling.returncode == 0
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0
    assert "drain_timeout_seconds" in output


def test_ranks_give_up_together(start: Start) -> None:
    """When one rank gives up, its sibling follows.

    Both end with status 0: the group has left, but not in order.
    """
    code = "made = drain({}, {}, 2); made.before_vote(lambda: True); say('ready'); block()"
    ranks = [start(code.format(seconds, rank)) for rank, seconds in enumerate((0.5, 1000))]
    for rank in reversed(ranks):
        rank.send_signal(signal.SIGTERM)
    outputs = [rank.communicate(timeout=DEADLINE)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert outputs == [
        "abandoned: fault_tolerance.drain_timeout_seconds (0.5 s) is over\n",
        "abandoned: another rank of this group had to end\n",
    ]


def test_a_rank_without_a_request_follows_a_sibling_that_gave_up(start: Start) -> None:
    """Without the sibling, the rank could make no further step.

    It ends with status 0 as well, because the group has left.
    """
    rank = start("made = drain(1000, 0, 2); made.before_vote(lambda: True); say('ready'); block()")
    sibling = start(
        "made = drain(0.2, 1, 2); made.before_vote(lambda: True); say('ready'); block()"
    )
    sibling.send_signal(signal.SIGTERM)
    assert sibling.wait(DEADLINE) == 0
    output, _ = rank.communicate(timeout=DEADLINE)
    assert (rank.returncode, output) == (0, "abandoned: another rank of this group had to end\n")
