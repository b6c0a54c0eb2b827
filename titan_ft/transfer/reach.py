# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Probes: find out which peers this rank can exchange bytes with, in both directions.

A *peer* is the rank of the same number in another group. When an exchange breaks, nobody knows
which link between two peers broke. So each rank sends a probe to the state servers of its peers
(`state_server.py`):

1. This rank connects, and makes the handshake of a transfer (`wire.py`).
2. It sends random bytes. They are many, because some paths lose only large packets.
3. The peer makes a connection of its own to this rank's state server, and sends bytes there. A
   firewall may let only one direction pass.
4. The peer sends this rank's bytes back.

A peer that computes for seconds without releasing Python's global interpreter lock (a large pickle)
cannot answer. It counts as reachable, because its group would be left out otherwise. It is
recognized by its kernel, which still acknowledges the bytes that arrive.

See docs/failures.md.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import ssl
import struct
import termios
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

from titan_ft.protocol.errors import RefusedError, first_line
from titan_ft.system.address import split_address
from titan_ft.system.seal import UnsealedError, remove_seal
from titan_ft.system.threads import call_for_each, call_within
from titan_ft.transfer.wire import Message, SealedStream, handshake_as_joiner

CONNECT_SECONDS = 1.5
"""Limit of a connection's set-up. TCP sends a lost first packet again after one second."""
_BACK_SECONDS = 1.0
"""Limit of each step of the opposite probe. The peer's answer must come before this rank stops
waiting."""
_PROBE_BYTES = 64 << 10
"""Random bytes of a probe in each direction. They need many packets of any size."""
_BACK_BYTES = 16 << 10
"""Random bytes of the opposite probe in each direction."""
_MAX_PROBE_BYTES = 1 << 20
"""A request with more bytes is refused."""
_MAX_PROBES = 32
"""Number of probes at the same time."""
_BLANKS = b" " * 3000
"""Sent before the peer has said anything, to see whether its kernel acknowledges them. The peer's
JSON reader skips blanks. They need more than one packet, and are fewer than a line may have."""


class BusyError(Exception):
    """The other end's kernel has acknowledged all bytes, but its process does not answer."""


@dataclass(frozen=True)
class Peer:
    """The counterpart of this rank in another group.

    Attributes:
        unique: unique name of its process.
        store: host:port of its group's store (torch's TCPStore).
        address: host:port of its state server; empty = the address must be read from its group's
            store.
    """

    unique: str
    store: str
    address: str = ""


class Probe:
    """Probes peers over the network that the exchanges use.

    `Partition` and `Membership` call the methods. Each call makes its probes on threads of their
    own, up to 32 at the same time, and takes a few seconds at most.

    Args:
        token: the run's shared secret.
        address: host:port of this rank's own state server.
        group_rank: number of this rank in its group. Its peers have the same number.
    """

    def __init__(self, token: str, address: str, group_rank: int) -> None:
        self._token = token
        self._address = address
        self._group_rank = group_rank

    def __call__(self, peers: Sequence[Peer]) -> dict[str, str]:
        """Return why each peer that cannot be reached is unreachable, by `unique`.

        Three kinds of peers are reachable although their probes fail: a peer with another token; a
        peer that is busy with a computation; and a peer whose address in its group's store has no
        seal. A stranger has written that address, and must not turn a living peer into a dead link.
        """
        reasons = {}
        for unique, error in self._ask_all(peers).items():
            if not isinstance(error, RefusedError | BusyError | UnsealedError):
                reasons[unique] = first_line(error)
        return reasons

    def find_answering(self, peers: Sequence[Peer]) -> list[Peer]:
        """Return the peers whose probes work: they are neither gone nor frozen."""
        errors = self._ask_all(peers)
        return [peer for peer in peers if peer.unique not in errors]

    def _ask_all(self, peers: Sequence[Peer]) -> dict[str, Exception]:
        """Return the errors of the probes that failed, by `unique`."""
        errors = call_for_each(self._ask, peers, "titan_ft_probe", _MAX_PROBES)
        by_unique = {}
        for peer, error in zip(peers, errors, strict=True):
            if error is not None:
                by_unique[peer.unique] = error
        return by_unique

    def _ask(self, peer: Peer) -> Exception | None:
        """Return the error of a probe to one peer; None = the probe worked."""
        try:
            if self._group_rank > 0:
                # The ranks of all groups meet at a store, which is on rank 0's host.
                check_listens(peer.store, CONNECT_SECONDS)
            address = peer.address or look_up(peer, self._group_rank, self._token)
            try:
                round_trip(address, self._token, CONNECT_SECONDS, _PROBE_BYTES, self._address)
            except (ConnectionError, ssl.SSLError):
                # Try once more. An abort of the exchange may have closed this connection as well.
                # With TLS, a closed connection may be an SSLError.
                round_trip(address, self._token, CONNECT_SECONDS, _PROBE_BYTES, self._address)
        except (OSError, ValueError, KeyError, RuntimeError, RefusedError, BusyError) as error:
            return error  # an error of the network or of the store; any other error is a bug
        return None


def address_key(unique: str, group_rank: int) -> str:
    """Return the key under which a group's store has the address of a rank's state server."""
    return f"titan_ft/address/{unique}/{group_rank}"


def round_trip(address: str, token: str, seconds: float, size: int, back: str = "") -> None:
    """Send `size` random bytes to a state server, which sends them back.

    Args:
        address: host:port of the server.
        seconds: limit of each step: the connection, the handshake, the answer.
        back: host:port to which the server makes a round trip of its own; empty = none.

    Raises:
        OSError, ValueError: the server cannot be reached, or cannot reach `back`.
        RefusedError: the server can be reached, but does not know the token.
        BusyError: the server can be reached, but does not answer now.
    """
    # TLS takes over the descriptor of the connection. With the copy, the kernel can still be asked
    # which bytes are acknowledged.
    with contextlib.closing(_connect(address, seconds)) as connection, connection.dup() as copy:
        # The last bytes must not wait for a delayed acknowledgement.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_BLANKS)
        try:
            sealed = handshake_as_joiner(connection, address, token)
        except TimeoutError as error:
            # A busy peer is silent here already. Silence after the handshake means a bad network,
            # which may lose large packets and pass small ones.
            if _is_all_acknowledged(copy):
                text = f"{address} takes what it is sent and does not answer"
                raise BusyError(text) from error
            raise
        with contextlib.closing(sealed.connection):
            timeout = seconds
            if back:
                timeout += _BACK_SECONDS
            sealed.connection.settimeout(timeout)
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
    """Answer the request of `round_trip`; on the thread of a state server's connection."""
    size = request["probe"]
    back = request.get("back", "")
    if size > _MAX_PROBE_BYTES:
        raise ValueError("not a probe")
    payload = sealed.stream.read(size)
    if back:
        try:
            round_trip(back, token, _BACK_SECONDS, _BACK_BYTES)
        except BusyError:
            pass  # this rank can be reached
        except (OSError, ValueError, RefusedError) as error:
            sealed.write({"error": f"not from there: {type(error).__name__}: {error}"})
            return
    sealed.write({"bytes": len(payload)})
    sealed.stream.write(payload)
    sealed.stream.flush()


def check_listens(address: str, seconds: float) -> None:
    """Check that a process listens at host:port.

    Call this before opening a client of torch's store. If nobody listens, that client would try
    again and again.

    Raises:
        OSError: nobody listens there, or the network to it is dead.
    """
    _connect(address, seconds).close()


def _connect(address: str, seconds: float) -> socket.socket:
    return socket.create_connection(split_address(address), seconds)


def _is_all_acknowledged(connection: socket.socket) -> bool:
    """True if the other end's kernel has acknowledged all sent bytes.

    The kernel returns the number of bytes that are not acknowledged (SIOCOUTQ in tcp(7), which has
    the same number as TIOCOUTQ).
    """
    answer = fcntl.ioctl(connection, termios.TIOCOUTQ, struct.pack("i", 0))
    (num_unacknowledged,) = struct.unpack("i", answer)
    return bool(num_unacknowledged == 0)


def look_up(peer: Peer, group_rank: int, token: str) -> str:
    """Read the address of the peer's state server from its group's store.

    Args:
        token: the run's shared secret.

    Raises:
        OSError, RuntimeError: the store does not answer, or the address has no valid seal.
    """
    check_listens(peer.store, CONNECT_SECONDS)

    def read() -> str:
        timeout = timedelta(seconds=CONNECT_SECONDS)
        host, port = split_address(peer.store)
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        key = address_key(peer.unique, group_rank)
        return remove_seal(token, key, store.get(key).decode(errors="replace"))

    return call_within(2 * CONNECT_SECONDS, read)
