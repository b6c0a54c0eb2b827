# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Pass the exception that ends a worker to its supervisor, by torch elastic's error file.

torchrun and the agent name a file in TORCHELASTIC_ERROR_FILE. The format is that of
`torch.distributed.elastic.multiprocessing.errors.record`. Its own writer does not record which
errors are transient, and records no fraction of a second. Nothing here imports torch, because a
mistake in the config is reported before that import.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sysconfig
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from titan_ft.run.appender import DISK_ERRNOS
from titan_ft.system.ownership import read_note
from titan_ft.system.whole_file import write_whole

FILE_ENV = "TORCHELASTIC_ERROR_FILE"
_CLAIMED_ENV = "TITAN_FT_ERROR_FILE"
_MAX_CHARACTERS = 400
_TRANSIENT_CLASSES = {
    # Python, requests, httpx, botocore
    "ConnectionError",
    "TimeoutError",
    "Timeout",
    "TransportError",
    "ChunkedEncodingError",
    "gaierror",
    "herror",
    "IncompleteRead",
    "SSLEOFError",
    "SSLZeroReturnError",
    # urllib3
    "NewConnectionError",
    "ProtocolError",
    # aiohttp
    "ClientConnectionError",
    "ClientConnectorError",
    "ClientConnectorDNSError",
    "ClientOSError",
    "ClientPayloadError",
    "ServerDisconnectedError",
    "ServerTimeoutError",
    # torch.distributed (its store, its network, NCCL)
    "DistError",
}
"""Classes of errors of a network, by name, so that no library is imported.

Of aiohttp, classes are listed whose base class is listed too: `_IN_LOADER_WORKER` has the name
only.
"""
_LASTING_CLASSES = {"SSLCertVerificationError"}
"""A wrong certificate stays wrong, although aiohttp counts it among the errors of a connection."""
_TRANSIENT_ERRNOS = DISK_ERRNOS | {
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
    errno.EPIPE,
}
_TRANSIENT_STATUSES = {408, 429, 500, 502, 503, 504}
"""HTTP statuses of a server that is overloaded, or away behind its proxy."""
_FILE_ERRORS = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
"""Errors about a file, even if another error came before; see `_is_of_a_network`."""
_NOT_IN_CACHE = "LocalEntryNotFoundError"
"""A FileNotFoundError of huggingface_hub: after an error of the network, the file was not in the
cache either.
"""
_IN_LOADER_WORKER = re.compile(r"Caught (\w+) in DataLoader worker process")
"""A DataLoader builds the error of its worker again from a text.

The new error has no errno, no cause and, at times, another class. See torch/_utils.py,
`ExceptionWrapper.reraise`.
"""
_ERRNO = re.compile(r"\[Errno (-?\d+)\]")
_GLOO = re.compile(
    r"gloo/.*(Connection|Timed out|timeout|Broken pipe|Socket closed)", re.IGNORECASE | re.DOTALL
)
"""Gloo's text about a lost peer, in a plain RuntimeError (gloo/transport/tcp/pair.cc)."""
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^[ |]+File "(.+)", line (\d+)', re.MULTILINE)
_ADDRESSES_AND_NUMBERS = re.compile(
    r"0x[0-9a-f]+|\b(?=\w*\d)[0-9a-f]{6,}\b|\btmp\w+|\d+(?:\.\d+)*", re.IGNORECASE
)


_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0e-\x1b\x7f]")
"""Colours and other commands to a terminal. `titan-ft logs` and `launch` would pass them on."""


@dataclass(frozen=True)
class WorkerError:
    """The exception that ended a worker.

    Attributes:
        text: its type and the first line of its message.
        transient: True if the cause may end without a repair: a network, a file server, a full
            disk, other groups.
        time: Unix seconds.
        network: True if the cause is a network, a file server or the lighthouse that is away.
        where: file and line that raised the exception, see `find_where`; empty if unknown.
    """

    text: str
    transient: bool
    time: float
    network: bool = False
    where: str = ""

    @property
    def kind(self) -> str:
        """The text without numbers, addresses and ids: the same in every process."""
        return kind_of(self.text)

    @property
    def type_name(self) -> str:
        """Name of the exception's class."""
        return self.text.partition(":")[0]


def kind_of(text: str) -> str:
    """Return an exception's text without numbers, addresses and ids.

    Two exceptions with the same result count as the same exception.
    """
    return _ADDRESSES_AND_NUMBERS.sub("#", text)


def beside(log: Path) -> Path:
    """Return the error file of the worker that has this log."""
    return log.with_suffix(".error.json")


def claim_file() -> None:
    """Let no other code in this process write the error file.

    torch elastic's `record` wraps torchtitan's `Trainer.train`, and writes the file for every
    exception, even for that of a group that leaves in order. On a full disk `record` raises an
    OSError instead, and such a group would count as failed.
    """
    path = os.environ.pop(FILE_ENV, "")
    if path:
        os.environ[_CLAIMED_ENV] = path


def find_file() -> Path | None:
    """Return this process's error file; None if it has none."""
    path = os.environ.get(FILE_ENV) or os.environ.get(_CLAIMED_ENV)
    return Path(path) if path else None


def write_error(error: BaseException) -> None:
    """Write the exception to this process's error file, if it has one."""
    path = find_file()
    if path is None:
        return
    now = time.time()
    stack = "".join(traceback.format_exception(error))
    more = {"py_callstack": stack, "timestamp": str(int(now)), "time": now}
    more |= {"transient": is_transient(error), "network": is_network_error(error)}
    data = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": more}}
    try:
        write_whole(path, json.dumps(data).encode(errors="replace"))
    except OSError:
        # The disk may be full. The log has the exception as well.
        return


def read_error(path: Path) -> WorkerError | None:
    """Read an error file; None if it is missing or damaged."""
    try:
        text = read_note(path, errors="replace")
        return parse_error(json.loads(text)["message"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def parse_error(message: object) -> WorkerError | None:
    """Return the exception in the `message` of an error file; None for other content.

    The writer may be torch elastic or this module.
    """
    match message:
        case {"message": str(text), "extraInfo": dict(more)}:
            when = float(more.get("time") or more.get("timestamp") or 0.0)
            transient = more.get("transient") is True
            network = more.get("network") is True
            where = find_where(str(more.get("py_callstack", "")))
            return WorkerError(_first_line(text), transient, when, network, where)
    return None


def find_where(traceback_text: str) -> str:
    """Return file and line of the most useful frame of a traceback, such as "mybug.py:15".

    The choice is, in this order: the innermost frame of the user's own code, of an installed
    package, of any code. Of chained exceptions the last one counts. Empty without a traceback.
    """
    last = traceback_text.rpartition(_TRACEBACK)[2]
    libraries = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    own = Path(__file__).parents[1]
    standard = Path(sysconfig.get_path("stdlib"))
    innermost: tuple[Path, str] | None = None
    installed: tuple[Path, str] | None = None
    users: tuple[Path, str] | None = None
    for name, line in _FRAME.findall(last):
        if name.startswith("<"):
            continue
        file = Path(name)
        innermost = file, line
        if file.is_relative_to(own):
            continue
        if any(file.is_relative_to(path) for path in libraries):
            installed = file, line
        elif not file.is_relative_to(standard):
            users = file, line
    best = users or installed or innermost
    if best is None:
        return ""
    file, line = best
    for folder in (*libraries, Path.cwd()):
        if file.is_relative_to(folder):
            return f"{file.relative_to(folder)}:{line}"
    return f"{file}:{line}"


def is_transient(error: BaseException) -> bool:
    """Return True if the same start may succeed later without a repair.

    Examples are a lighthouse, a peer or a file server that is away, and a full disk. However often
    they occur in a row, the remedy is to try again. The engine's own errors carry the answer as an
    attribute.
    """
    restart = getattr(error, "restart", None)
    if restart is not None:  # A `ReplicaError` has this attribute.
        return bool(restart) and bool(getattr(error, "transient", True))
    return _is_of_a_network(error)


def is_network_error(error: BaseException) -> bool:
    """Return True if a network, a file server or the lighthouse did not answer.

    Other transient errors wait for other groups, which may be in a queue for hours.
    """
    network = getattr(error, "network", None)
    return _is_of_a_network(error) if network is None else bool(network)


def _is_of_a_network(error: BaseException) -> bool:
    """Return True if the error, or one of its causes, is the error of a network.

    Libraries wrap the error of a network in their own: `URLError` has it as its reason, and
    huggingface_hub raises its error from it. An error about a file that was raised from the error
    of a network still counts as an error about a file: the file may be missing for good.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        classes = {kind.__name__ for kind in type(cause).__mro__}
        if classes & _LASTING_CLASSES:
            return False
        if classes & _TRANSIENT_CLASSES or _says_network(cause):
            return True
        if isinstance(cause, _FILE_ERRORS) and _NOT_IN_CACHE not in classes:
            return False
        reason = getattr(cause, "reason", None)
        cause = reason if isinstance(reason, BaseException) else cause.__cause__
    return False


def _says_network(error: BaseException) -> bool:
    """Return True if the error's own errno, HTTP status or text is a sign of a network error."""
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS:
        return True
    if _http_status(error) in _TRANSIENT_STATUSES:
        return True
    text = str(error)
    if isinstance(error, RuntimeError) and _GLOO.search(text) is not None:
        return True
    in_worker = _IN_LOADER_WORKER.search(text)
    if in_worker is None:
        return False
    if in_worker[1] in _TRANSIENT_CLASSES:
        return True
    numbers = _ERRNO.findall(text)
    if not numbers:
        return False
    number = int(numbers[-1])  # The error itself comes last in the text.
    # A negative number is the resolver's, not an errno: the name server did not answer.
    return number < 0 or number in _TRANSIENT_ERRNOS


def _http_status(error: BaseException) -> object:
    """Return the status of an HTTP error; None for other errors.

    Knows the errors of urllib, aiohttp, requests and httpx.
    """
    if type(error).__name__ == "ClientResponseError":
        return getattr(error, "status", None)
    if "HTTPError" not in {kind.__name__ for kind in type(error).__mro__}:
        return None
    response = getattr(error, "response", None)
    if response is None:
        return getattr(error, "code", None)
    return getattr(response, "status_code", None)


def _first_line(text: str) -> str:
    """Return the first line that is not empty. A type alone is joined with the next line."""
    lines = [line.strip() for line in _CONTROL.sub("", text).splitlines() if line.strip()]
    has_type_alone = bool(lines) and lines[0].endswith(":")
    found = " ".join(lines[: 2 if has_type_alone else 1])
    if len(found) > _MAX_CHARACTERS:
        return f"{found[:_MAX_CHARACTERS]}..."
    return found
