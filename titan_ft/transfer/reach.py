# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Probes: which peers can this rank exchange bytes with, in both directions?

A broken exchange does not show which link broke. So each rank asks its counterparts in the other
groups, at their state servers:

- So many bytes travel both ways that a path which loses large packets only is noticed.
- The other end makes a connection of its own in the opposite direction, because a firewall may let
  one direction pass.

A peer may compute for seconds without releasing Python's global interpreter lock (a large pickle),
and cannot answer. Its group must not be left outside for that. Its kernel still acknowledges the
bytes that arrive, so such a peer counts as reachable.

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
from titan_ft.transfer.wire import Message, SealedStream, prove

CONNECT_SECONDS = 1.5  # TCP sends a lost first packet again after one second
_BACK_SECONDS = 1.0
"""Limit of each part of the opposite probe. It ends before this end stops waiting for the
answer."""
_PROBE_BYTES = 64 << 10  # each way: many packets of any size
_BACK_BYTES = 16 << 10  # each way, in the opposite probe
_MAX_BYTES = 1 << 20  # a request for more is no probe
_AT_ONCE = 32  # probes
_BLANKS = b" " * 3000
"""Sent before the other end has said anything. Its kernel acknowledges them, and its JSON reader
skips them. They are more than one packet, and fewer bytes than a line may have."""


class BusyError(Exception):
    """The other end's kernel has acknowledged all bytes, but its process does not answer."""


@dataclass(frozen=True)
class Peer:
    """The counterpart of this rank in another group.

    Attributes:
        unique: name of its process.
        store: host:port of its group's store.
        address: host:port of its state server; empty = not known, but in its group's store.
    """

    unique: str
    store: str
    address: str = ""


class Probe:
    """Probes peers over the network that the exchanges use.

    `Partition` and `Membership` call it. Each call makes up to 32 probes at a time on threads of
    their own, and takes a few seconds at most.

    Args:
        token: the run's shared secret.
        address: host:port of this rank's own state server.
        group_rank: number of this rank, and so of its peers.
    """

    def __init__(self, token: str, address: str, group_rank: int) -> None:
        self._token = token
        self._address = address
        self._group_rank = group_rank

    def __call__(self, peers: Sequence[Peer]) -> dict[str, str]:
        """Return the peers that cannot be reached, and the reasons, by `unique`.

        A peer of another run, with another token, or busy with a computation can be reached. The
        same holds for a peer whose address in its group's store has no seal: a stranger has written
        there, and must not turn a living peer into a dead link.
        """
        reasons = {}
        for unique, error in self._ask_all(peers).items():
            if not isinstance(error, RefusedError | BusyError | UnsealedError):
                reasons[unique] = first_line(error)
        return reasons

    def find_answering(self, peers: Sequence[Peer]) -> list[Peer]:
        """Return the peers that answer, and so are neither gone nor frozen."""
        errors = self._ask_all(peers)
        return [peer for peer in peers if peer.unique not in errors]

    def _ask_all(self, peers: Sequence[Peer]) -> dict[str, Exception]:
        """Return the errors of the probes that failed, by `unique`."""
        errors = call_for_each(self._ask, peers, "titan_ft_probe", _AT_ONCE)
        by_unique = {}
        for peer, error in zip(peers, errors, strict=True):
            if error is not None:
                by_unique[peer.unique] = error
        return by_unique

    def _ask(self, peer: Peer) -> Exception | None:
        try:
            if self._group_rank > 0:
                # The ranks of all groups meet at a store, which is on rank 0's host.
                check_listens(peer.store, CONNECT_SECONDS)
            address = peer.address or look_up(peer, self._group_rank, self._token)
            try:
                round_trip(address, self._token, CONNECT_SECONDS, _PROBE_BYTES, self._address)
            except (ConnectionError, ssl.SSLError):
                # Once more: an abort of the exchange may have closed this connection as well.
                # Within TLS that is an SSLError.
                round_trip(address, self._token, CONNECT_SECONDS, _PROBE_BYTES, self._address)
        except (OSError, ValueError, KeyError, RuntimeError, RefusedError, BusyError) as error:
            return error  # errors of the network and the store; other errors are bugs
        return None


def address_key(unique: str, group_rank: int) -> str:
    """Return the key under which a group's store has the address of a rank's state server."""
    return f"titan_ft/address/{unique}/{group_rank}"


def round_trip(address: str, token: str, seconds: float, size: int, back: str = "") -> None:
    """Send `size` random bytes to a state server, which sends them back.

    Args:
        address: host:port of the server.
        seconds: limit of each part of the conversation.
        back: host:port to which the other end makes a round trip of its own; empty = none.

    Raises:
        OSError, ValueError: the server cannot be reached, or cannot reach `back`.
        RefusedError: the server can be reached, but does not know the token.
        BusyError: the server can be reached, but does not answer now.
    """
    # TLS takes the descriptor of the connection away. The copy can still ask the kernel.
    with contextlib.closing(_connect(address, seconds)) as connection, connection.dup() as copy:
        # The last bytes must not wait for a delayed acknowledgement.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_BLANKS)
        try:
            sealed = prove(connection, address, token)
        except TimeoutError as error:
            # After the handshake, silence means a bad network: it may lose large packets and pass
            # small ones.
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
    """Answer the request of `round_trip`; the state server calls it after the handshake."""
    size = request["probe"]
    back = request.get("back", "")
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
    """Check that a process listens at host:port.

    Call it before opening torch's store, whose client connects again and again to a port at which
    nobody listens any more.

    Raises:
        OSError: nobody listens there, or the network to it is dead.
    """
    _connect(address, seconds).close()


def _connect(address: str, seconds: float) -> socket.socket:
    return socket.create_connection(split_address(address), seconds)


def _is_all_acknowledged(connection: socket.socket) -> bool:
    """True if the other end's kernel has acknowledged all sent bytes.

    See tcp(7), SIOCOUTQ, which has the same number as TIOCOUTQ.
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
