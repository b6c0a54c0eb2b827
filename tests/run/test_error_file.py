# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The exception that ends a worker, on its way to the worker's supervisor."""

from __future__ import annotations

import errno
import http.client
import json
import os
import runpy
import socket
import ssl
import sysconfig
import urllib.error
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from unittest.mock import Mock

import aiohttp
import httpx
import pytest
import torch.distributed
from huggingface_hub import errors as hub
from requests import exceptions as requests
from torch._utils import ExceptionWrapper
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, get_error_handler

from titan_ft.protocol.errors import (
    DivergedError,
    GaveUpError,
    HungError,
    JobLostError,
    LighthouseError,
    RankSilentError,
)
from titan_ft.run import error_file
from titan_ft.run.error_file import (
    FILE_ENV,
    beside,
    claim_file,
    find_where,
    is_network_error,
    is_transient,
    kind_of,
    read_error,
    write_error,
)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The error file of this process."""
    path = beside(tmp_path / "rank-0.log")
    monkeypatch.setenv(FILE_ENV, str(path))
    return path


def test_what_is_written_is_read(path: Path) -> None:
    """Type, first line of the message, moment; torchrun understands the file as well."""
    try:
        raise ValueError("wrong flavor 'nope'\nmore about it")
    except ValueError as error:
        write_error(error)
    read = read_error(path)
    assert read is not None
    assert (read.text, read.transient) == ("ValueError: wrong flavor 'nope'", False)
    assert path.stat().st_mtime == pytest.approx(read.time, abs=5.0)
    failure = ProcessFailure(0, 1, 1, str(path))
    assert failure.timestamp == int(read.time)
    assert "in test_what_is_written_is_read" in failure.message["extraInfo"]["py_callstack"]  # type: ignore[index]


@pytest.mark.parametrize("write", [write_error, get_error_handler().record_exception])
def test_the_line_to_look_at(
    path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Exception], None]
) -> None:
    """A traceback is named by the user's own line that is nearest to the exception, below the
    working folder.
    """
    monkeypatch.chdir(path.parent)
    code = "import json\n\ndef forward(text):\n    return json.loads(text)\n"
    Path("models").mkdir()
    Path("models/mybug.py").write_text(code, encoding="utf-8")
    forward = runpy.run_path(str(path.parent / "models" / "mybug.py"))["forward"]
    try:
        forward("{")
    except ValueError as error:
        write(error)
    read = read_error(path)
    assert read is not None
    assert read.where == "models/mybug.py:4"


def test_the_line_to_look_at_elsewhere() -> None:
    """Without code of the user's it is the library's line; of chained exceptions the last one
    counts.
    """
    package = Path(sysconfig.get_path("purelib")) / "datasets" / "load.py"
    own = Path(error_file.__file__).parents[1] / "trainer.py"
    frames = [
        f'  File "{file}", line {number}, in f\n    f()\n'
        for number, file in enumerate((own, package, json.__file__))
    ]
    text = f"Traceback (most recent call last):\n{''.join(frames)}ConnectionError: no route\n"
    assert find_where(text) == "datasets/load.py:1"
    raised = 'Traceback (most recent call last):\n  File "/home/me/mybug.py", line 7, in f\nValueError: x\n'
    assert find_where(
        f"{raised}\nDuring handling of the above exception, another one occurred:\n\n{text}"
    ) == ("datasets/load.py:1")
    assert find_where(f"{text}\n{raised}") == "/home/me/mybug.py:7"
    assert find_where("RuntimeError: no traceback") == ""


def test_torchs_own_file_is_read(path: Path) -> None:
    """As `@record` writes it, for example in a worker that is not this project's."""
    get_error_handler().record_exception(KeyError("nope"))
    read = read_error(path)
    assert read is not None
    assert read.text == "KeyError: 'nope'"
    assert read.time == int(read.time) > 0


def test_a_claimed_file_is_left_alone_by_torch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan's `train` is under `record`, which would write for a group that leaves in order,
    too.
    """
    monkeypatch.setattr(os, "environ", dict(os.environ))
    claim_file()
    get_error_handler().record_exception(KeyError("nope"))
    assert not path.exists()
    write_error(ValueError("ours"))
    read = read_error(path)
    assert read is not None
    assert read.text == "ValueError: ours"


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", "3", '{"message": "text"}', '{"message": {"message": 3}}']
)
def test_a_file_that_is_none(path: Path, text: str | None) -> None:
    """A worker that was killed leaves no file, or a part of one."""
    if text is not None:
        path.write_text(text)
    assert read_error(path) is None


def test_a_file_that_cannot_be_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed write must not hide the exception itself. Without an error file nothing is
    written.
    """
    monkeypatch.setenv(FILE_ENV, str(path / "no" / "folder"))
    write_error(ValueError())
    monkeypatch.delenv(FILE_ENV)
    write_error(ValueError())
    assert not path.exists()


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("E: ", "E:"),
        ("E: \n  first\nsecond", "E: first"),
        ("E: \x1b[31mred\x1b[0m \x07and\x1b]0;title", "E: red and]0;title"),
        ("E: " + "x" * 500, "E: " + "x" * 397 + "..."),
        ("", ""),
    ],
)
def test_one_line(path: Path, message: str, line: str) -> None:
    """The first line that says something, and not more than a terminal shows."""
    path.write_text(json.dumps({"message": {"message": message, "extraInfo": {"timestamp": "7"}}}))
    read = read_error(path)
    assert read is not None
    assert (read.text, read.time) == (line, 7.0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("E: at 0x7f3a pid 12", "E: at 0x1 pid 9876"),
        ("E: [127.0.0.1]:40123", "E: [10.1.2.30]:7"),
        ("E: /tmp/tmpab_1x/f of rank 3", "E: /tmp/tmpzzz/f of rank 0"),
        ("E: id 9f8e7d6c5b", "E: id 0a1b2c3d4e5f"),
        ("E: took 3.25 s", "E: took 10 s"),
    ],
)
def test_the_same_exception(one: str, other: str) -> None:
    """Addresses, ports, pids, ids and times differ from start to start."""
    assert kind_of(one) == kind_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("KeyError: 'nope'", "KeyError: 'none'"),
        ("KeyError: 'a'", "ValueError: 'a'"),
        ("E: decade", "E: facade"),
    ],
)
def test_other_exceptions(one: str, other: str) -> None:
    """Another type, or other words, is another exception."""
    assert kind_of(one) != kind_of(other)


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def http_error(status: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("http://a", status, "x", Message(), None)


NO_NAME = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
CONNECTION = Mock(host="a", port=443, ssl=True)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(),
        NO_NAME,
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        urllib.error.URLError(NO_NAME),
        urllib.error.URLError(ConnectionRefusedError(errno.ECONNREFUSED, "refused")),
        http_error(503),
        http.client.IncompleteRead(b""),
        http.client.RemoteDisconnected("no answer"),
        ssl.SSLEOFError(8, "EOF occurred in violation of protocol"),
        aiohttp.ClientConnectorError(CONNECTION, OSError(errno.ECONNREFUSED, "refused")),
        aiohttp.ClientConnectorDNSError(CONNECTION, NO_NAME),
        aiohttp.ServerDisconnectedError(),
        aiohttp.ClientPayloadError("Response payload is not completed"),
        requests.ChunkedEncodingError("broken"),
        raised_from(hub.LocalEntryNotFoundError("not in the cache"), httpx.ConnectError("no")),
        raised_from(RuntimeError("the data set cannot be built"), NO_NAME),
        raised_from(ValueError("a"), raised_from(OSError("b"), urllib.error.URLError(NO_NAME))),
        TimeoutError(),
        OSError(errno.ESTALE, "Stale file handle"),
        OSError(errno.ENOSPC, "No space left on device"),
        torch.distributed.DistStoreError("wait timeout"),
        torch.distributed.DistBackendError("NCCL error"),
        RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1"
        ),
        LighthouseError("away"),
    ],
)
def test_what_may_go_by_itself(error: Exception) -> None:
    """Networks, file servers, full disks, lost peers, and what the engine knows to be worth another
    start.
    """
    assert is_transient(error)
    assert is_network_error(error)


@pytest.mark.parametrize(
    "error", [GaveUpError("too few groups came"), JobLostError("gone"), RankSilentError("frozen")]
)
def test_what_other_groups_and_hosts_may_mend(error: Exception) -> None:
    """Other groups may be in a queue for hours: their absence is no dead network, however long it
    lasts.
    """
    assert is_transient(error)
    assert not is_network_error(error)


def test_a_network_error_is_told_as_one(path: Path) -> None:
    """The supervisor learns of it before it decides about the next start."""
    for error, network in (
        (ConnectionRefusedError("no"), True),
        (GaveUpError("alone"), False),
        (KeyError("x"), False),
    ):
        write_error(error)
        read = read_error(path)
        assert read is not None
        assert read.network is network


@pytest.mark.parametrize(
    "error",
    [
        KeyError("nope"),
        FileNotFoundError(errno.ENOENT, "no data"),
        raised_from(FileNotFoundError("no data"), NO_NAME),
        raised_from(RuntimeError("no data"), raised_from(FileNotFoundError("no data"), NO_NAME)),
        raised_from(ValueError("wrong"), KeyError("nope")),
        hub.LocalEntryNotFoundError("not in the cache, and local_files_only is set"),
        urllib.error.URLError("no host given"),
        http_error(404),
        ssl.SSLCertVerificationError("self-signed"),
        aiohttp.ClientConnectorCertificateError(
            CONNECTION, ssl.SSLCertVerificationError("self-signed")
        ),
        raised_from(DivergedError("two states"), NO_NAME),
        RuntimeError("CUDA error: device-side assert triggered"),
        DivergedError("two states"),
        HungError("no progress"),  # a deadlock comes back at each start
    ],
)
def test_what_somebody_must_mend(error: Exception) -> None:
    assert not is_transient(error)
    assert not is_network_error(error)


@pytest.mark.parametrize(
    "error", [JobLostError("gone"), RankSilentError("frozen"), GaveUpError("too few")]
)
def test_the_engine_says_itself_what_its_errors_are(error: Exception) -> None:
    """A lost connection may be its symptom, while it waits for other groups and hosts."""
    assert not is_network_error(raised_from(error, ConnectionResetError()))


def test_causes_in_a_circle() -> None:
    """Each is looked at once."""
    one, other = ValueError("a"), ValueError("b")
    one.__cause__, other.__cause__ = other, one
    assert not is_transient(one)


class UnbuildableError(Exception):
    """An error that cannot be made from a text alone."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one, two)


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (NO_NAME, True),
        (urllib.error.URLError(NO_NAME), True),
        (aiohttp.ClientConnectorDNSError(CONNECTION, NO_NAME), True),
        (aiohttp.ServerDisconnectedError(), True),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), True),
        (OSError(errno.ENOENT, "nope"), False),
        (KeyError("nope"), False),
        (UnbuildableError(1, 2), False),
    ],
)
def test_an_error_in_a_loader_worker(error: Exception, transient: bool) -> None:
    """The DataLoader hands on a text, of which it makes an error of the same class or a
    RuntimeError.
    """
    try:
        raise error
    except Exception:  # noqa: BLE001  # as the worker does
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(Exception) as caught:  # noqa: PT011  # whatever it can be made into
        wrapped.reraise()
    assert is_transient(caught.value) is transient
