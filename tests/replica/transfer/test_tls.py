# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A transfer with TLS. Nobody on the network can read it, even with a certificate of his own."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from state_donor import CHUNK, DEADLINE, TOKEN, Donor, check_equal, make_snapshot, wait_until
from test_wire import SECRET, Relay, publish_secret, start_relay  # noqa: F401  # a fixture

from titan_ft.protocol.errors import RefusedError
from titan_ft.transfer import reach, tls
from titan_ft.transfer.reach import Peer, Probe, answer_probe
from titan_ft.transfer.state_fetch import ask_offer, fetch
from titan_ft.transfer.state_server import StateServer
from titan_ft.transfer.tls import Certificate
from titan_ft.transfer.wire import Message, _skip_blanks, handshake_as_donor

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl makes the certificate"
)


@pytest.fixture(scope="module")
def certificate() -> Certificate:
    """Provide a donor's certificate."""
    return Certificate.make()


@pytest.fixture
def secure(donor: Donor, certificate: Certificate) -> Donor:
    """Provide a donor with TLS."""
    donor.server._certificate = certificate
    return donor


def test_a_state_an_offer_and_probes_pass(secure: Donor) -> None:
    """All requests work over TLS, with several connections and many slices."""
    sent = secure.publish(make_snapshot(5, 10 * CHUNK + 7))
    check_equal(secure.fetch(5, connections=3), sent)
    secure.server.offer(Message(step=5, lineage=1005, digest=7))
    found = ask_offer(secure.address, TOKEN)
    assert found is not None
    assert found[:3] == (5, 1005, 7)
    assert Probe(TOKEN, secure.address, 0).find_answering([Peer("u", "", secure.address)])
    assert Probe(TOKEN, secure.address, 0)([Peer("u", "", secure.address)]) == {}


def test_one_on_the_wire_reads_nothing(secure: Donor, start_relay: Callable[..., Relay]) -> None:  # noqa: F811
    """Without TLS the same relay reads the weights (`test_wire.py`)."""
    publish_secret(secure)
    relay = start_relay(secure)
    secure.server.address = relay.address
    fetched = fetch([relay.address], TOKEN, 5, "4", 1, DEADLINE)
    assert bytes(fetched.payload[: len(SECRET)].tolist()) == SECRET
    assert len(relay.read) > CHUNK
    assert SECRET not in relay.read
    assert b"tensors" not in relay.read


def accept_one(listener: socket.socket, talk: Callable[[socket.socket], None]) -> None:
    def run() -> None:
        connection, _ = listener.accept()
        with connection:
            talk(connection)

    threading.Thread(target=run, daemon=True).start()


def test_another_certificate_does_not_pass(secure: Donor, background: ThreadPoolExecutor) -> None:
    """A relay that ends TLS on both sides shows its own certificate.

    The proofs cover the certificate's fingerprint.
    """
    publish_secret(secure)
    own = Certificate.make()
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        secure.server.address = address

        def talk(joiner: socket.socket) -> None:
            with socket.create_connection(("127.0.0.1", secure.server.port), DEADLINE) as donor:
                joiner.sendall(donor.recv(4096))  # the greeting
                with own.accept(joiner) as near, tls.connect(donor)[0] as far:
                    far.sendall(near.recv(4096))  # the joiner's proof
                    heard.extend(far.recv(4096))
                    near.sendall(heard)

        accept_one(listener, talk)
        with pytest.raises(RefusedError, match="token"):
            fetch([address], TOKEN, 5, "4", 1, DEADLINE)
    assert b"refused" in heard, "the donor has not taken the joiner's proof for its own certificate"


def test_tls_cannot_be_talked_away(secure: Donor) -> None:
    """A relay removes "tls" from the greeting.

    The joiner goes on without TLS, and the donor does not.
    """
    publish_secret(secure)
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        secure.server.address = address

        def talk(joiner: socket.socket) -> None:
            with socket.create_connection(("127.0.0.1", secure.server.port), DEADLINE) as donor:
                joiner.sendall(donor.recv(4096).replace(b',"tls":true', b""))
                with tls.connect(donor)[0] as far:
                    far.sendall(joiner.recv(4096))
                    heard.extend(far.recv(4096))
                    joiner.sendall(heard)

        accept_one(listener, talk)
        with pytest.raises(RefusedError, match="token"):
            fetch([address], TOKEN, 5, "4", 1, DEADLINE)
    assert b"refused" in heard


def test_a_donor_that_stops_in_the_handshake_of_tls_costs_a_stall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The donor is stopped after its greeting."""
    monkeypatch.setattr("titan_ft.transfer.state_fetch._STALL_SECONDS", 0.2)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def talk(joiner: socket.socket) -> None:
            joiner.sendall(b'{"nonce":"00","version":3,"tls":true}\n')
            over.wait(DEADLINE)

        accept_one(listener, talk)
        try:
            with pytest.raises(Exception, match="timed out"):
                fetch([address], TOKEN, 5, "4", 1, 600.0)
        finally:
            over.set()


def test_a_stranger_leaves_no_connection_behind(secure: Donor, certificate: Certificate) -> None:
    """With and without TLS."""
    sent = secure.publish(make_snapshot(5, CHUNK))
    with socket.create_connection(("127.0.0.1", secure.server.port), DEADLINE) as stranger:
        stranger.sendall(b"   GET / HTTP/1.1\r\n\r\n")
        assert b"tls" in stranger.recv(4096)
        wait_until(lambda: _is_closed(stranger))
    near, far = socket.socketpair()
    with near, far:
        ended = threading.Thread(target=lambda: _swallow(near, certificate))
        ended.start()
        far.recv(4096)
        with tls.connect(far)[0] as secured:
            secured.sendall(b'{"nonce":"00","proof":"11","version":3}\n')
            assert b"refused" in secured.recv(4096)
            assert secured.recv(4096) == b""
        ended.join(DEADLINE)
        assert not ended.is_alive()
    check_equal(secure.fetch(5), sent)


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(4096) == b""
    except ConnectionResetError:
        return True


def _swallow(connection: socket.socket, certificate: Certificate) -> None:
    with pytest.raises(ConnectionError):
        handshake_as_donor(connection, "127.0.0.1:1", TOKEN, certificate)


PLAIN_TEXT = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "hello": b'{"nonce":"00","proof":"11","version":3}\n',
    "record": b"\x16\x03\x01\x00\x04evil",
}


@pytest.mark.parametrize("sent", PLAIN_TEXT.values(), ids=PLAIN_TEXT)
def test_a_stranger_without_tls_is_reported_once(secure: Donor, sent: bytes) -> None:
    """He shows no secret, as a stranger at a port without TLS."""
    for _ in range(2):
        with socket.create_connection(("127.0.0.1", secure.server.port), DEADLINE) as stranger:
            stranger.recv(4096)
            stranger.sendall(sent)
            wait_until(lambda: _is_closed(stranger))
    wait_until(lambda: bool(secure.refusals))
    assert [(each.kind, each.source) for each in secure.refusals] == [("no_secret", "127.0.0.1")]


def test_a_stranger_that_breaks_the_records_of_tls_is_reported(secure: Donor) -> None:
    """He starts TLS, and then goes on without it."""
    with socket.create_connection(("127.0.0.1", secure.server.port), DEADLINE) as stranger:
        stranger.recv(4096)
        descriptor = stranger.dup()
        with descriptor, tls.connect(stranger)[0]:
            descriptor.sendall(b"GET / HTTP/1.1\r\n\r\n")
            wait_until(lambda: bool(secure.refusals))
    assert [each.kind for each in secure.refusals] == ["no_secret"]


def test_a_joiner_that_is_killed_is_no_stranger(secure: Donor, certificate: Certificate) -> None:
    """Its connection ends in the middle of the handshake of TLS, or after it."""
    for begun in (b"", b"   ", PLAIN_TEXT["record"][:3]):
        with socket.create_connection(("127.0.0.1", secure.server.port), DEADLINE) as killed:
            killed.recv(4096)
            killed.sendall(begun)
            killed.shutdown(socket.SHUT_WR)
            wait_until(lambda: _is_closed(killed))
    with socket.create_connection(("127.0.0.1", secure.server.port), DEADLINE) as killed:
        killed.recv(4096)
        with tls.connect(killed)[0] as secured:
            secured.shutdown(socket.SHUT_WR)
            wait_until(lambda: _is_closed(secured))
    wait_until(lambda: not secure.server._unproved._accepted)  # each of them has been judged
    assert secure.refusals == []


def test_a_host_without_openssl_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """If TLS is configured, the error is reported, and no state is sent without TLS."""
    monkeypatch.setattr(tls, "_COMMAND", ("no-such-openssl",))
    with pytest.raises(OSError, match="no-such-openssl"):
        Certificate.make()
    monkeypatch.setattr(
        tls, "_COMMAND", ("sh", "-c", "echo 'bad openssl.cnf:' >&2; echo 'line 7' >&2; exit 3")
    )
    with pytest.raises(OSError, match=r"openssl ended with status 3: bad openssl\.cnf: line 7$"):
        Certificate.make()


def test_a_certificate_is_new_each_time(certificate: Certificate) -> None:
    """So the certificate of an earlier attempt is worth nothing."""
    assert Certificate.make().fingerprint != certificate.fingerprint
    assert len(certificate.fingerprint) == 64


def test_a_server_has_it_from_the_start(certificate: Certificate) -> None:
    """The certificate is an argument of the server, as a worker starts it."""
    server = StateServer("127.0.0.1", TOKEN, DEADLINE, lambda *_: None, 0.0, certificate)
    try:
        with socket.create_connection(("127.0.0.1", server.port), DEADLINE) as joiner:
            greeting = joiner.recv(4096)
            assert b'"tls":true' in greeting
            with tls.connect(joiner)[0] as secured:
                assert secured.version() == "TLSv1.3"
    finally:
        server.close()


def test_a_peer_that_becomes_busy_can_be_reached(
    secure: Donor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long call takes the GIL after the greeting, before TLS begins.

    The peer's kernel takes the bytes.
    """
    monkeypatch.setattr(reach, "CONNECT_SECONDS", 0.3)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk(connection: socket.socket) -> None:
            connection.sendall(b'{"nonce":"00","version":3,"tls":true}\n')
            over.wait(DEADLINE)

        accept_one(listener, talk)
        try:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            assert Probe(TOKEN, secure.address, 0)([Peer("busy", "", address)]) == {}
        finally:
            over.set()


@pytest.mark.parametrize("after_tls", [False, True])
def test_a_connection_that_is_cut_is_made_again(
    secure: Donor, certificate: Certificate, background: ThreadPoolExecutor, after_tls: bool
) -> None:
    """A peer takes a probe for a broken exchange's connection, and closes it.

    The second probe finds the peer alive.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        listener.settimeout(DEADLINE)  # the former code did not come again

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b'{"nonce":"00","version":3,"tls":true}\n')
                _skip_blanks(connection)
                if after_tls:
                    with certificate.accept(connection) as secured:
                        secured.recv(4096)
                        secured.shutdown(socket.SHUT_RDWR)
                else:
                    connection.recv(4096)  # unread bytes would make the cut a reset
            connection, _ = listener.accept()
            sealed = handshake_as_donor(connection, address, TOKEN, certificate)
            with contextlib.closing(sealed.connection):
                answer_probe(sealed, sealed.read(), TOKEN)

        peer = background.submit(serve)
        assert Probe(TOKEN, "", 0)([Peer("cut", "", address)]) == {}
        peer.result(DEADLINE)
