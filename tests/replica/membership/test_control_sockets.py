# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A control tree over real sockets.

Strangers, dead processes, and a machine without descriptors disturb it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import strangers
from tests.replica.membership.control_group import (
    DEADLINE,
    HOST,
    RESET,
    TOKEN,
    ControlGroup,
    Relay,
    RelayedStore,
    Store,
    join_words,
    make_tree,
    wait_until,
)
from titan_ft.chaos.inside import blackhole
from titan_ft.chaos.inside.blackhole import Blackhole
from titan_ft.membership import control_sockets
from titan_ft.membership.control_handshake import (
    ANSWER_BYTES,
    HELLO_BYTES,
    REPLY_BYTES,
    SEAL_BYTES,
    ChildHandshake,
    HandshakeError,
    Identity,
    ParentHandshake,
    Secret,
)
from titan_ft.membership.control_sockets import MAX_UNPROVED
from titan_ft.membership.control_tree import ControlTree
from titan_ft.protocol.control.link import GRACE_SECONDS
from titan_ft.protocol.errors import LighthouseError
from titan_ft.system.address import split_address
from titan_ft.system.seal import add_seal, remove_seal

ROOT = Path(__file__).parents[3]

NOBODY = Identity("", "")

# Processes that die


@contextlib.contextmanager
def started_ranks(folder: Path, where: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Start 8 ranks in a tree with fan-out 2, each as a process, and end them."""
    started = []
    for rank in range(8):
        module = "tests.replica.membership.control_rank"
        command = [sys.executable, "-m", module, str(folder), str(rank), "8", "2", where]
        options: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "text": True,
            "start_new_session": True,
        }
        started.append(subprocess.Popen(command, cwd=ROOT, **options))
    try:
        yield started
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.mark.parametrize(
    ("where", "earliest", "latest"), [("here", 0.0, 0.3), ("elsewhere", 0.9, GRACE_SECONDS + 1.0)]
)
@pytest.mark.parametrize("victim", [0, 1, 7])
def test_a_killed_rank_is_named_on_all_others(
    tmp_path: Path, victim: int, where: str, earliest: float, latest: float
) -> None:
    """All ranks hear of the killed rank and its host.

    They hear of it at once if it ran on the same host, else after the grace. A process that the
    rank has forked keeps none of its connections open.
    """
    with started_ranks(tmp_path, where) as processes:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        killed = time.monotonic()
        processes[victim].kill()
        for process in processes[:victim] + processes[victim + 1 :]:
            assert process.stdout is not None
            at, _, line = process.stdout.readline().partition(" ")
            assert line.startswith(f"rank {victim} of this group (on node-{victim}) is lost: "), (
                line
            )
            assert earliest < float(at) - killed < latest


# The network


@contextlib.contextmanager
def lost_packets(loss: float, *sockets: socket.socket) -> Iterator[Blackhole]:
    """Let connections lose incoming packets."""
    inodes = {os.fstat(each.fileno()).st_ino for each in sockets}
    hole = Blackhole(loss, lambda _: inodes)
    assert hole.extend() == len(sockets)
    try:
        yield hole
    finally:
        hole.lift()


def socket_to(tree: ControlTree, peer: int) -> socket.socket:
    """Return the socket of a connection to a neighbour."""
    assert tree._sockets is not None
    return tree._sockets._neighbours[peer].socket


@pytest.mark.skipif(not blackhole.supported(), reason="socket filters are Linux's")
@pytest.mark.parametrize("end", [0, 1])
def test_a_link_that_loses_everything_for_a_while(end: int) -> None:
    """The link fails in one direction. TCP sends again, and no rank is lost."""
    with ControlGroup(3) as group:
        group.check_agreements(1)
        with lost_packets(1.0, socket_to(group.trees[end], 1 - end)):
            waits = group.agree()
            with pytest.raises(TimeoutError):
                waits[1].result(0.3)
        assert [wait.result(DEADLINE) for wait in waits] == ["w0,w1,w2"] * 3
        assert group.losses == [[], [], []]


@pytest.mark.skipif(not blackhole.supported(), reason="socket filters are Linux's")
def test_links_that_lose_one_packet_in_five() -> None:
    """Each agreement takes longer, and no rank is lost."""
    with ControlGroup(7, fan_out=2) as group:
        group.check_agreements(1)
        links = [socket_to(group.trees[rank], (rank - 1) // 2) for rank in range(1, 7)]
        with lost_packets(0.2, *links):
            group.check_agreements(5)
        assert group.losses == [[]] * 7


@pytest.mark.skipif(not blackhole.supported(), reason="socket filters are Linux's")
def test_a_rank_that_is_cut_off() -> None:
    """No connection closes.

    The parent gets no answers to its pings, and all connected ranks hear of the loss.
    """
    with ControlGroup(7, fan_out=2, patience=0.6) as group:
        group.check_agreements(1)
        sockets = group.trees[0]._sockets
        assert sockets is not None
        wait_until(lambda: sockets._pings._pingers[1]._num_answered > 0, "rank 1 answers")
        pings = sockets._pings._pingers[1]._socket
        assert pings is not None
        with lost_packets(1.0, socket_to(group.trees[0], 1), socket_to(group.trees[1], 0), pings):
            wait_until(
                lambda: all(group.losses[rank] for rank in (0, 2, 5, 6)), "the others hear of it"
            )
            assert [group.losses[rank] for rank in (0, 2, 5, 6)] == [[1]] * 4
            assert group.trees[5].losses[0].silent_seconds > 0.6


# Strangers


@pytest.fixture
def group() -> Iterator[ControlGroup]:
    """Provide a group of three ranks. A relay sees and breaks its links."""
    with ControlGroup(3, store=RelayedStore()) as made:
        made.check_agreements(1)
        yield made


def parent_address(group: ControlGroup) -> tuple[str, int]:
    """Return the address at which rank 0 of a group listens, and not its relay's."""
    sockets = group.trees[0]._sockets
    assert sockets is not None
    assert sockets.address is not None
    return sockets.address


def relay_of(group: ControlGroup) -> Relay:
    """Return the relay before rank 0."""
    assert isinstance(group.store, RelayedStore)
    return group.store.relays[0]


def check_nothing_has_changed(group: ControlGroup) -> None:
    """The group agrees, a child whose link breaks comes back, and no rank is lost."""
    group.check_agreements(2)
    relay_of(group).reset()
    group.check_agreements(2)
    assert group.losses == [[], [], []]
    assert not any(
        tree._sockets._disconnected_processes for tree in group.trees if tree._sockets is not None
    )


def is_closed(stranger: socket.socket) -> bool:
    """Return True if the other end closes the connection within the deadline."""
    stranger.settimeout(DEADLINE)
    try:
        while stranger.recv(4096):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def test_a_silent_stranger(group: ControlGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection without a proof is closed after `HANDSHAKE_SECONDS`."""
    monkeypatch.setattr(control_sockets, "HANDSHAKE_SECONDS", 0.2)
    with socket.create_connection(parent_address(group)) as stranger:
        check_nothing_has_changed(group)
        assert is_closed(stranger)
    check_nothing_has_changed(group)


@pytest.mark.parametrize("length", [1, HELLO_BYTES, 1 << 20])
def test_a_stranger_that_sends_garbage(
    group: ControlGroup, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The amount of garbage makes no difference."""
    monkeypatch.setattr(control_sockets, "HANDSHAKE_SECONDS", 0.2)
    with socket.create_connection(parent_address(group)) as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(b"\xff" * length)
        assert is_closed(stranger)
    check_nothing_has_changed(group)


def test_a_replayed_handshake(group: ControlGroup) -> None:
    """A stranger who has recorded the bytes of a child does not pass the proof."""
    chunks = relay_of(group).chunks
    hello = next(chunk for chunk in chunks if len(chunk) == HELLO_BYTES)
    answer = next(chunk for chunk in chunks if len(chunk) >= ANSWER_BYTES)  # and the first frame
    with socket.create_connection(parent_address(group)) as stranger:
        stranger.sendall(hello + answer)
        assert is_closed(stranger)
    check_nothing_has_changed(group)


def test_a_thousand_strangers(group: ControlGroup) -> None:
    """Rank 0 keeps few of them, and its children come back between them."""
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(socket.create_connection(parent_address(group)))
        sockets = group.trees[0]._sockets
        assert sockets is not None
        check_nothing_has_changed(group)
        wait_until(lambda: 0 < len(sockets._unproved) <= MAX_UNPROVED, "the others are closed")
        check_nothing_has_changed(group)


@strangers.numbers_of_strangers
def test_fuzzed_lines_cost_a_child_nothing(group: ControlGroup, number_of_strangers: int) -> None:
    """The group agrees in between, whatever bytes come at the port.

    Each kind of refusal is reported once.
    """
    said = (chunk for chunk in relay_of(group).chunks if len(chunk) >= HELLO_BYTES)
    beginnings = list(itertools.islice(said, 3))  # handshakes of real children
    chance = random.Random(38)
    sockets = group.trees[0]._sockets
    assert sockets is not None
    with strangers.bounded_cost():
        for number in range(number_of_strangers):
            strangers.knock(parent_address(group), beginnings, chance)
            if number % 100 == 0:
                check_nothing_has_changed(group)
        wait_until(lambda: not sockets._unproved, "all strangers are gone")
    kinds = [refusal.kind for refusal in group.refusals]
    assert "no_secret" in kinds
    assert len(set(kinds)) == len(kinds), "one report of each kind"


def test_each_kind_of_stranger_is_reported_once(
    group: ControlGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child is no stranger if it comes back, or if it ends during its handshake."""
    monkeypatch.setattr(control_sockets, "HANDSHAKE_SECONDS", 0.2)
    sockets = group.trees[0]._sockets
    assert sockets is not None
    check_nothing_has_changed(group)
    with socket.create_connection(parent_address(group)) as killed:
        killed.shutdown(socket.SHUT_WR)
        assert is_closed(killed)
    assert group.refusals == []
    for _ in range(2):
        with socket.create_connection(parent_address(group)) as stranger:
            stranger.sendall(b"\xff" * HELLO_BYTES)
            assert is_closed(stranger)
        with contextlib.ExitStack() as held:
            for _ in range(3 * MAX_UNPROVED):
                held.enter_context(socket.create_connection(parent_address(group)))
            wait_until(lambda: not sockets._unproved, "all are late")
    wait_until(lambda: len(group.refusals) == 3, "the reports")
    assert sorted(each.kind for each in group.refusals) == ["crowd", "no_secret", "silent"]
    check_nothing_has_changed(group)


TAMPERED: dict[str, Callable[[bytes], bytes]] = {
    "changed": lambda chunk: chunk.replace(b"aye", b"nay"),
    "repeated": lambda chunk: chunk + chunk,
    "added": lambda chunk: b"\0\0\0\3abc" + bytes(SEAL_BYTES) + chunk,
}


@pytest.mark.parametrize("how", TAMPERED)
def test_a_relay_changes_no_frame(group: ControlGroup, how: str) -> None:
    """The relay has passed the handshake on.

    A changed frame ends the connection, which is made again.
    """
    tampered: list[bytes] = []

    def tamper(chunk: bytes) -> bytes:
        if b"aye" not in chunk or tampered:
            return chunk
        tampered.append(chunk)
        return TAMPERED[how](chunk)

    relay_of(group).change = tamper
    sockets = group.trees[0]._sockets
    assert sockets is not None
    answers = group.on_each(lambda tree: tree.rank0_decides(["aye"], join_words), group.trees)
    assert tampered
    assert answers == ["aye"] * 3
    assert "a frame is not what the other end has sent" in sockets.last_error
    check_nothing_has_changed(group)


def test_a_frame_that_is_sent_back_is_none() -> None:
    """Each direction has a key of its own, and each frame a number."""
    child = ChildHandshake(SECRET, 3, 0, NOBODY)
    parent = ParentHandshake(SECRET, 0, range(1, 17), child.hello)
    parent.check(child.answer(parent.reply))
    (childs, parents), (_, seen) = child.seals(), parent.seals()
    first = childs.make(b"aye")
    assert not parents.is_seal(first, b"aye")
    assert seen.is_seal(first, b"aye")
    assert not seen.is_seal(first, b"aye")


def test_fast_strangers_leave_a_child_its_place() -> None:
    """More strangers than places come between two messages of a child's handshake."""
    store = Store()
    parent = make_tree(0, 2, store)
    address = split_address(store.get("group/0/0").decode().split(" ")[0])
    handshake = ChildHandshake(Secret(TOKEN, "group/0"), 1, 0, NOBODY)
    sockets = parent._sockets
    assert sockets is not None
    with contextlib.ExitStack() as stack:
        child = stack.enter_context(
            socket.create_connection(address, source_address=("127.0.0.2", 0))
        )
        child.sendall(handshake.hello)
        reply = child.recv(REPLY_BYTES, socket.MSG_WAITALL)
        for _ in range(2 * MAX_UNPROVED):
            stack.enter_context(socket.create_connection(address))
        wait_until(lambda: len(sockets._unproved) == MAX_UNPROVED, "some strangers are closed")
        child.sendall(handshake.answer(reply))
        wait_until(lambda: sockets.is_connected(1), "the child is connected")
    parent.close()


@pytest.mark.parametrize("sent", [b"\xff\xff\xff\xff", b"\0\0\0\0", b"\0\0\0\3abc"])
def test_a_child_that_sends_no_frames(sent: bytes) -> None:
    """A frame that is too long, an empty frame and garbage close the connection.

    The true child connects afterwards.
    """
    store = Store()
    parent = make_tree(0, 2, store)
    address = store.get("group/0/0").decode().split(" ")[0]
    with socket.create_connection(split_address(address)) as connection:
        handshake = ChildHandshake(Secret(TOKEN, "group/0"), 1, 0, NOBODY)
        connection.sendall(handshake.hello)
        answer = handshake.answer(connection.recv(REPLY_BYTES, socket.MSG_WAITALL))
        own_seal, _ = handshake.seals()
        connection.sendall(answer + sent + own_seal.make(sent[4:]))
        assert is_closed(connection)
    child = make_tree(1, 2, store)
    with ControlGroup(1) as pool:
        answers = pool.on_each(lambda tree: tree.rank0_decides(["a"], join_words), [parent, child])
        assert answers == ["a", "a"]
        pool.on_each(ControlTree.close, [parent, child])


def test_a_child_without_the_token() -> None:
    """The child's error names the token and both ends."""
    store = Store()
    with ControlGroup(1) as pool:
        parent = make_tree(0, 2, store)
        with pytest.raises(
            LighthouseError, match=r"rank 1 .*node-1.*: group/0/0 in the store .*TITAN_FT_TOKEN"
        ):
            make_tree(1, 2, store, token="another")
        child = make_tree(1, 2, store)
        answers = pool.on_each(
            lambda tree: tree.rank0_decides([], lambda _: "decided"), [parent, child]
        )
        assert answers == ["decided", "decided"]
        pool.on_each(ControlTree.close, [parent, child])


def test_a_parent_that_is_gone() -> None:
    """The address belongs to an earlier process. The start fails after the grace."""
    store = Store()
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    store.set("group/0/0", add_seal(TOKEN, "group/0/0", f"{HOST}:{port} process node-0"))
    with pytest.raises(LighthouseError, match=f"at {HOST}:{port}: ConnectionRefusedError"):
        make_tree(1, 2, store)


def test_a_parent_to_which_no_route_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt fails at once, and is repeated until the time for the start is over."""
    monkeypatch.setattr("titan_ft.membership.control_tree.CONNECT_SECONDS", 0.3)
    store = Store()
    store.set("group/0/0", add_seal(TOKEN, "group/0/0", "255.255.255.255:9 process node-0"))
    with pytest.raises(LighthouseError, match=r"at 255\.255\.255\.255:9: \w*Error"):
        make_tree(1, 2, store)


def test_two_trees_in_one_process_do_not_mix() -> None:
    """A rank of an earlier attempt knows the token, and is still no neighbour in this attempt."""
    with (
        ControlGroup(4, key="group/0") as first,
        ControlGroup(4, key="group/1", store=first.store) as second,
    ):
        first.trees[1].send_note("topic", "first")
        second.trees[1].send_note("topic", "second")
        for _ in range(5):
            first.check_agreements(1)
            second.check_agreements(1)
        assert [tree.read_note("topic") for tree in first.trees] == ["first"] * 4
        assert [tree.read_note("topic") for tree in second.trees] == ["second"] * 4
        published = remove_seal(TOKEN, "group/0/0", first.store.get("group/0/0").decode())
        first.store.set("group/2/0", add_seal(TOKEN, "group/2/0", published))
        with pytest.raises(LighthouseError, match="know this run's token"):
            make_tree(1, 4, first.store, key="group/2")


# The handshake, without sockets

SECRET = Secret("token", "group/0")


NOBODY = Identity("", "")


def test_both_ends_prove_the_token() -> None:
    """The parent also learns where the child runs. A stranger learns nothing before the proof."""
    identity = Identity("node-3", "boot,17,4711")
    child = ChildHandshake(SECRET, 3, 0, identity)
    parent = ParentHandshake(SECRET, 0, range(1, 17), child.hello)
    answer = child.answer(parent.reply)
    assert (len(child.hello), len(parent.reply), len(answer)) == (
        HELLO_BYTES,
        REPLY_BYTES,
        ANSWER_BYTES,
    )
    assert HELLO_BYTES + ANSWER_BYTES <= 256
    assert parent.child == 3
    assert parent.check(answer) == identity
    for (own, _), (_, others) in itertools.permutations([child.seals(), parent.seals()]):
        for frame in (b"one", b"two", b"two"):
            assert others.is_seal(own.make(frame), frame)
    with pytest.raises(HandshakeError):
        parent.check(answer.replace(b"node-3", b"node-4"))


def test_what_a_rank_says_about_itself() -> None:
    """A harmless text is cut if it is too long, and contains no control characters."""
    assert Identity.unpack(Identity("\x1b[2J" + "x" * 100, "1" * 100).pack()) == Identity(
        "\\x1b[2J" + "x" * 60, ""
    )


@pytest.mark.parametrize("other", [Secret("another", "group/0"), Secret("token", "group/1")])
def test_neither_end_takes_a_stranger(other: Secret) -> None:
    """The parent or the child lacks the token, or belongs to another attempt."""
    for secrets in ((SECRET, other), (other, SECRET)):
        child = ChildHandshake(secrets[0], 3, 0, NOBODY)
        parent = ParentHandshake(secrets[1], 0, range(1, 17), child.hello)
        with pytest.raises(HandshakeError):
            child.answer(parent.reply)
        own_proof = parent.reply[-32:]
        with pytest.raises(HandshakeError):
            parent.check(own_proof + NOBODY.pack())
    assert "token" not in repr(SECRET)


def test_an_end_that_is_no_neighbour() -> None:
    hello = ChildHandshake(SECRET, 17, 0, NOBODY).hello
    with pytest.raises(HandshakeError, match="rank 17 is no child of rank 0"):
        ParentHandshake(SECRET, 0, range(1, 17), hello)
    child = ChildHandshake(SECRET, 17, 1, NOBODY)
    parent = ParentHandshake(SECRET, 2, range(1, 20), child.hello)
    with pytest.raises(HandshakeError):
        child.answer(parent.reply)


# The machine


class Exhausted:
    """A listening socket of a process that has no descriptor left for a while."""

    def __init__(self, listener: socket.socket, seconds: float) -> None:
        self._listener = listener
        self.num_refusals = 0
        self.fail_for(seconds)

    def fail_for(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    def accept(self) -> Any:
        if time.monotonic() < self._ends:
            self.num_refusals += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._listener.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


def test_a_process_without_descriptors(group: ControlGroup) -> None:
    """The children wait in the kernel's queue. Rank 0 neither ends nor spins."""
    sockets = group.trees[0]._sockets
    assert sockets is not None
    assert sockets._listener is not None
    listener = Exhausted(sockets._listener, 0.3)
    with sockets._condition:
        sockets._selector.unregister(sockets._listener)
        sockets._listener = listener  # type: ignore[assignment]  # stands in for it
        sockets._selector.register(listener, 1, sockets._accept)  # type: ignore[arg-type]
    with socket.create_connection(parent_address(group)) as stranger:
        wait_until(lambda: sockets._unproved, "it is accepted")
        listener.fail_for(0.3)
        with socket.create_connection(parent_address(group)):
            assert is_closed(stranger), "the descriptor is for a child"
    check_nothing_has_changed(group)
    assert 1 <= listener.num_refusals < 20
    assert [each.kind for each in group.refusals] == ["no_descriptors"]


class Sleeper:
    """A node without a tick until an event comes."""

    def __init__(self) -> None:
        self.next_tick = math.inf
        self.ticked = threading.Event()

    def start(self, _: float) -> list[Any]:
        return []

    def hurry(self, now: float) -> list[Any]:
        self.next_tick = now + 0.01
        return []

    def tick(self, _: float) -> list[Any]:
        self.next_tick = math.inf
        self.ticked.set()
        return []


def test_an_event_of_another_thread_may_bring_the_next_tick_closer() -> None:
    """The tree's thread may already be waiting without a limit."""
    node, changed = Sleeper(), threading.Condition()
    sockets = control_sockets.ControlSockets(
        node,  # type: ignore[arg-type]  # stands in for one
        changed,
        rank=0,
        children=range(0),
        secret=SECRET,
        host=HOST,
        own=NOBODY,
        patience=math.inf,
        on_action=lambda _: None,
        on_turn=lambda: None,
        on_failure=lambda _: None,
    )
    with changed:
        sockets.start()
    wait_until(lambda: sockets._wait_ends_at == math.inf, "it waits")
    with changed:
        sockets.give_event(node.hurry)
    assert node.ticked.wait(DEADLINE)
    sockets.close()


def test_the_kernel_finds_a_host_that_vanished(group: ControlGroup) -> None:
    """Keepalive is on, and small frames are sent at once."""
    found = set()
    for tree in group.trees:
        assert tree._sockets is not None
        for connection in tree._sockets._neighbours.values():
            options = (socket.TCP_NODELAY, socket.TCP_USER_TIMEOUT)
            values = [
                connection.socket.getsockopt(socket.IPPROTO_TCP, option) for option in options
            ]
            alive = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            found.add((bool(values[0]), values[1], bool(alive)))
    assert found == {(True, 30_000, True)}


VANISHING = """
import subprocess
from tests.replica.membership.control_group import DEADLINE, ControlGroup
from titan_ft.membership import control_connection
from titan_ft.protocol.errors import RankLostError

control_connection.TCP_OPTIONS |= {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_USER_TIMEOUT": 1000}
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
with ControlGroup(2) as group:
    group.check_agreements(1)
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)  # what is sent from now on is lost
    try:
        group.trees[1].pause(DEADLINE)
    except RankLostError as error:
        print(error)
"""


def test_a_host_that_vanishes_is_lost() -> None:
    """It closes no connection, and an idle tree sends nothing.

    Without keepalive a rank would wait for ever.
    """
    alone = ["unshare", "--user", "--map-root-user", "--net"]
    if shutil.which("ip") is None or subprocess.run([*alone, "true"], check=False).returncode:
        pytest.skip("needs a network of its own, and the command ip")
    command = [*alone, sys.executable, "-c", VANISHING]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=2 * DEADLINE, check=True
    )
    assert ended.stdout.startswith("rank 0 of this group (on node-0) is lost: ")


def test_a_connection_made_again_while_the_former_one_seems_to_live(group: ControlGroup) -> None:
    """A child connects again before rank 0 sees the end of its earlier connection.

    The newer one counts.
    """
    relay = relay_of(group)
    child, parent = relay.connections[0]
    with parent.dup() as silent:  # keeps rank 0's end open
        parent.close()
        child.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        child.shutdown(socket.SHUT_RD)
        child.close()
        group.check_agreements(3)
        assert is_closed(silent)
    assert group.losses == [[], [], []]


def test_nothing_is_left_open() -> None:
    """After the trees of a group are closed, neither a thread nor a descriptor is left."""
    num_open = len(os.listdir("/proc/self/fd"))
    store = Store()
    trees = [make_tree(rank, 3, store) for rank in range(3)]
    threads = [tree._sockets._thread for tree in trees if tree._sockets is not None]
    for tree in trees:
        tree.close()
        tree.close()
    assert [thread.is_alive() for thread in threads] == [False] * 3
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_an_address_of_ipv6() -> None:
    """A group may have IPv6 addresses only."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("needs IPv6")
    store = Store()
    with ControlGroup(1) as pool:
        try:
            trees = [make_tree(rank, 2, store, host="::1") for rank in range(2)]
        except OSError as error:
            pytest.skip(f"needs IPv6: {error}")
        assert split_address(store.get("group/0/0").decode().split(" ")[0])[0] == "::1"
        answers = pool.on_each(lambda tree: tree.rank0_decides(["a"], join_words), trees)
        assert answers == ["a", "a"]
        pool.on_each(ControlTree.close, trees)
