# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Network namespaces, as root and as an ordinary user."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from titan_ft.system import namespace
from titan_ft.system.namespace import allow_namespaces, enter_network_namespace
from titan_ft.system.threads import call_aside

_SET_DUMPABLE = 4  # linux/prctl.h


def in_child(call: Callable[[], None], user: int) -> None:
    """Make a call in a child process as a user. If it fails, the traceback is on stderr."""
    child = os.fork()
    if child == 0:
        try:
            "host".encode("idna")  # imported now: another user may not read Python's own files
            if user != os.getuid():
                os.setgroups([])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
                # As after an exec: /proc/self belongs to the user again.
                ctypes.CDLL(None).prctl(_SET_DUMPABLE, 1)
            call()
        except BaseException:  # noqa: BLE001  # the parent's test must not run in this process
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def open_to_all(folder: Path) -> None:
    """Let another user write in a pytest folder, which only this user may enter."""
    folder.chmod(0o777)
    for above in folder.parents[:3]:
        above.chmod(above.stat().st_mode | 0o011)


@pytest.mark.parametrize("user", [os.getuid(), 12345])
def test_a_thread_has_a_loopback_of_its_own(user: int, tmp_path: Path) -> None:
    """The rest of the process stays outside, and files keep their users."""
    if user != os.getuid() and os.getuid() != 0:
        pytest.skip("only root can be another user")
    open_to_all(tmp_path)
    own_file, refused = tmp_path / "file", tmp_path / "refused"

    # Bound outside and not listening: no other process listens at the port there.
    reserved = socket.socket()
    reserved.bind(("127.0.0.1", 0))
    address = reserved.getsockname()

    def listen() -> None:
        enter_network_namespace()
        server = socket.create_server(address)
        socket.create_connection(address).close()  # the loopback is up
        servers.append(server)

    servers: list[socket.socket] = []

    def call() -> None:
        if refusal := allow_namespaces():
            refused.write_text(refusal)
            return
        call_aside(listen, "inside").result(20.0)
        assert socket.socket().connect_ex(address) != 0
        own_file.write_text("written outside")
        assert (os.getuid(), own_file.stat().st_uid) == (user, user)

    in_child(call, user)
    reserved.close()
    if refused.exists():
        pytest.skip(f"this system allows no network namespaces: {refused.read_text()}")
    assert own_file.stat().st_uid == user


def test_the_rights_last_through_an_exec(tmp_path: Path) -> None:
    """A lighthouse sometimes replaces its process, and Linux allows only 32 nested user
    namespaces.
    """
    user = os.getuid() or 12345  # root needs no user namespace
    open_to_all(tmp_path)
    refused, status = tmp_path / "refused", tmp_path / "status"

    def call() -> None:
        if refusal := allow_namespaces():
            refused.write_text(refusal)
        else:
            os.execv("/bin/sh", ["sh", "-c", f"cat /proc/self/status > {status}"])

    in_child(call, user)
    if refused.exists():
        pytest.skip(f"this system allows no network namespaces: {refused.read_text()}")
    assert namespace.has_rights(status.read_text())


def test_a_refusal_is_said_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ubuntu's AppArmor rule and most containers refuse."""

    def refuse(name: str, *arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("titan_ft.system.namespace._call", refuse)
    before = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "user")]
    assert allow_namespaces() == "Operation not permitted"
    assert [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "user")] == before


def test_a_system_that_ends_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seccomp profile may kill the child that tries. That counts as a refusal."""

    def end(name: str, *arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGSYS)

    monkeypatch.setattr("titan_ft.system.namespace._call", end)
    assert allow_namespaces() == f"wait status {int(signal.SIGSYS)}"
