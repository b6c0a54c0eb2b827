# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Find out which peers this rank can exchange bytes with, in both directions.

A broken exchange does not show which link broke it. So each rank asks its counterparts in the other groups, at their
state servers: so many bytes go there and back that a path which loses large packets only is found out, and the other
end does the same on a connection of its own, for firewalls often let one direction pass.

A peer that computes for seconds without releasing Python's global interpreter lock (a large pickle) cannot answer, and
its group must not be left outside for that. Its kernel can: it acknowledges what arrives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

from titan_ft.protocol.errors import RefusedError, first_line
from titan_ft.system.address import split_address
from titan_ft.system.seal import remove_seal
from titan_ft.system.threads import call_for_each, call_within
from titan_ft.transfer.wire import Message, SealedStream, prove

CONNECT_SECONDS = 1.5  # TCP sends a lost first packet again after one second
_BACK_SECONDS = 1.0  # for the other end's own connection; below what this end waits for its answer
_PROBE_BYTES = 64 << 10  # each way: many packets of any size
_BACK_BYTES = 16 << 10
_MAX_BYTES = 1 << 20
_AT_ONCE = 32  # probes
# Sent ahead, before the other end has said anything: its kernel acknowledges it, its JSON reader skips it. More than
# one packet, and less than a line may have.
_BLANKS = b" " * 3000

T = TypeVar("T")


class BusyError(Exception):
    """The other end's kernel has everything that it was sent, and its process says nothing."""


@dataclass(frozen=True)
class Peer:
    """The counterpart of this rank in another group.

    Attributes:
        unique: names its process.
        store: host:port of its group's store.
        address: host:port of its state server; empty = not known, to be read from its group's store.
    """

    unique: str
    store: str
    address: str = ""


class Probe:
    """Asks peers for an answer over the network that exchanges use.

    Args:
        token: the run's shared secret.
        address: host:port of this rank's own state server.
        group_rank: of this rank, and so of its peers.
    """

    def __init__(self, token: str, address: str, group_rank: int) -> None:
        self._token, self._address, self._group_rank = token, address, group_rank

    def __call__(self, peers: Sequence[Peer]) -> dict[str, str]:
        """Return why those peers that cannot be reached cannot, by their `unique`; takes a few seconds at most.

        One that is another run's, whose token is wrong or that computes can be reached.
        """
        errors = self._ask_all(peers).items()
        return {
            unique: first_line(error) for unique, error in errors if not isinstance(error, RefusedError | BusyError)
        }

    def find_answering(self, peers: Sequence[Peer]) -> list[Peer]:
        """Return those of `peers` that answer, and so are neither gone nor frozen; takes a few seconds at most."""
        errors = self._ask_all(peers)
        return [peer for peer in peers if peer.unique not in errors]

    def _ask_all(self, peers: Sequence[Peer]) -> dict[str, Exception]:
        errors = call_for_each(self._ask, peers, "titan_ft_probe", _AT_ONCE)
        return {peer.unique: error for peer, error in zip(peers, errors, strict=True) if error is not None}

    def _ask(self, peer: Peer) -> Exception | None:
        try:
            if self._group_rank > 0:  # the ranks of all groups meet at a store, and its host is rank 0's
                check_listens(peer.store, CONNECT_SECONDS)
            address = peer.address or look_up(peer, self._group_rank, self._token)
            try:
                round_trip(address, self._token, CONNECT_SECONDS, _PROBE_BYTES, self._address)
            except ConnectionError:  # such as one that was taken for a broken exchange's, and closed with it
                round_trip(address, self._token, CONNECT_SECONDS, _PROBE_BYTES, self._address)
        except (OSError, ValueError, KeyError, RuntimeError, RefusedError, BusyError) as error:
            return error  # what network and store do; no bug of ours
        return None


def address_key(unique: str, group_rank: int) -> str:
    """Return the key in a group's store of the address of a rank's state server."""
    return f"titan_ft/address/{unique}/{group_rank}"


def round_trip(address: str, token: str, seconds: float, size: int, back: str = "") -> None:
    """Send `size` bytes to the state server at `address` and have them sent back.

    Args:
        seconds: for each thing that the other end does.
        back: host:port that the other end is to connect to for a round trip of its own.

    Raises:
        OSError, ValueError: it cannot be reached, or not from there.
        RefusedError: it can, but does not know the token.
        BusyError: it can, but does not answer now.
    """
    with contextlib.closing(_connect(address, seconds)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the last bytes wait for no delayed ACK
        connection.sendall(_BLANKS)
        try:
            sealed = prove(connection, address, token)
        except TimeoutError as error:
            # After the greeting silence means a bad network: large packets may be lost where small ones pass.
            if connection.fileno() >= 0 and _is_all_acknowledged(connection):
                raise BusyError(f"{address} takes what it is sent and does not answer") from error
            raise
        with contextlib.closing(sealed.connection):
            sealed.connection.settimeout(seconds + (_BACK_SECONDS if back else 0.0))
            payload = os.urandom(size)
            sealed.write({"probe": size, "back": back})
            sealed.stream.write(payload)
            sealed.stream.flush()
            answer = sealed.read()
            if answer.get("error"):
                raise ConnectionError(f"it can be reached from here, but {answer['error']}")
            if answer.get("bytes") != size or sealed.stream.read(size) != payload:
                raise ConnectionError("the bytes did not come back as they were sent")


def answer_probe(sealed: SealedStream, request: Message, token: str) -> None:
    """Do the state server's part of `round_trip`, whose handshake is over."""
    size, back = request["probe"], request.get("back", "")
    if size > _MAX_BYTES:
        raise ValueError("not a probe")
    payload = sealed.stream.read(size)
    if back:
        try:
            round_trip(back, token, _BACK_SECONDS, _BACK_BYTES)
        except BusyError:
            pass
        except (OSError, ValueError, RefusedError) as error:
            sealed.write({"error": f"not from there: {type(error).__name__}: {error}"})
            return
    sealed.write({"bytes": len(payload)})
    sealed.stream.write(payload)
    sealed.stream.flush()


def check_listens(address: str, seconds: float) -> None:
    """Connect to host:port and close the connection.

    Before torch's store is opened: its client connects again and again to a port at which nobody listens any more.

    Raises:
        OSError: nobody listens there, or the way there is dead.
    """
    _connect(address, seconds).close()


def _connect(address: str, seconds: float) -> socket.socket:
    return socket.create_connection(split_address(address), seconds)


def _is_all_acknowledged(connection: socket.socket) -> bool:
    """Say whether the other end's kernel has acknowledged all that was sent (tcp(7), SIOCOUTQ; it is TIOCOUTQ)."""
    (unacknowledged,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, struct.pack("i", 0)))
    return bool(unacknowledged == 0)


def look_up(peer: Peer, group_rank: int, token: str) -> str:
    """Read the address of the peer's state server in its group's store.

    Args:
        token: the run's shared secret.

    Raises:
        OSError, RuntimeError: the store does not answer, or a process of another run wrote the address.
    """
    check_listens(peer.store, CONNECT_SECONDS)

    def read() -> str:
        timeout = timedelta(seconds=CONNECT_SECONDS)
        store = TCPStore(*split_address(peer.store), is_master=False, wait_for_workers=False, timeout=timeout)
        key = address_key(peer.unique, group_rank)
        return remove_seal(token, key, store.get(key).decode(errors="replace"))

    return call_within(2 * CONNECT_SECONDS, read)
