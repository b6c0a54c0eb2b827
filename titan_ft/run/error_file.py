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
"""By name, so that none is imported. Of aiohttp also those that follow from a base:
`_IN_LOADER_WORKER`.
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
"""Of HTTP: a server that is overloaded, or away behind its proxy."""
_FILE_ERRORS = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
"""They say what is wrong with a file, whatever was tried before; see `_is_of_a_network`."""
_NOT_IN_CACHE = "LocalEntryNotFoundError"
"""A FileNotFoundError of huggingface_hub, which says only that the file is not in the cache
either.
"""
_IN_LOADER_WORKER = re.compile(r"Caught (\w+) in DataLoader worker process")
"""A DataLoader makes the error of its worker anew from a text: without errno, cause and, at times,
class.

See torch/_utils.py, `ExceptionWrapper.reraise`.
"""
_ERRNO = re.compile(r"\[Errno (-?\d+)\]")
_GLOO = re.compile(
    r"gloo/.*(Connection|Timed out|timeout|Broken pipe|Socket closed)", re.IGNORECASE | re.DOTALL
)
"""What Gloo says of a lost peer; it raises a plain RuntimeError (gloo/transport/tcp/pair.cc)."""
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^[ |]+File "(.+)", line (\d+)', re.MULTILINE)
_ADDRESSES_AND_NUMBERS = re.compile(
    r"0x[0-9a-f]+|\b(?=\w*\d)[0-9a-f]{6,}\b|\btmp\w+|\d+(?:\.\d+)*", re.IGNORECASE
)


_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0e-\x1b\x7f]")
"""Colours and other commands to a terminal, which `titan-ft logs` and `launch` would carry out."""


@dataclass(frozen=True)
class WorkerError:
    """The exception that ended a worker."""

    text: str
    """Its type and the first line of its message."""
    transient: bool
    """Whether it may go by itself: a network, a file server, a full disk, other groups."""
    time: float
    """Unix seconds."""
    network: bool = False
    """Whether it may go because a network, a file server or the lighthouse answers again."""
    where: str = ""
    """File and line that raised it, as `find_where` names them; empty if its traceback does not
    say.
    """

    @property
    def kind(self) -> str:
        """What is the same for the same exception in another process: without numbers, addresses,
        ids.
        """
        return kind_of(self.text)

    @property
    def type_name(self) -> str:
        """The exception's type by itself."""
        return self.text.partition(":")[0]


def kind_of(text: str) -> str:
    """Return what two exceptions must have in common to be the same one."""
    return _ADDRESSES_AND_NUMBERS.sub("#", text)


def beside(log: Path) -> Path:
    """Return the error file of the worker that has this log."""
    return log.with_suffix(".error.json")


def claim_file() -> None:
    """Let no other code in this process write the error file.

    torchtitan's `Trainer.train` is under torch elastic's `record`, which writes the file for every
    exception, also for that of a group that leaves in order. On a full disk `record` raises an
    OSError in its place, and such a group would end as a failed one.
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
    except OSError:  # a full disk; the exception is in the log, too
        return


def read_error(path: Path) -> WorkerError | None:
    """Read an error file; None where there is none, or it is damaged."""
    try:
        return parse_error(
            json.loads(path.read_text(encoding="utf-8", errors="replace"))["message"]
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None


def parse_error(message: object) -> WorkerError | None:
    """Return the exception in the `message` of an error file, by any writer; None for other
    content.
    """
    match message:
        case {"message": str(text), "extraInfo": dict(more)}:
            when = float(more.get("time") or more.get("timestamp") or 0.0)
            transient, network = more.get("transient") is True, more.get("network") is True
            where = find_where(str(more.get("py_callstack", "")))
            return WorkerError(_first_line(text), transient, when, network, where)
    return None


def find_where(traceback_text: str) -> str:
    """Return file and line of the most useful frame of a traceback, such as "mybug.py:15"; empty
    without one.

    In order: the innermost frame of the user's own code, of another installed package, of all
    frames. Of chained exceptions the last one counts.
    """
    last = traceback_text.rpartition(_TRACEBACK)[2]
    frames = [(Path(file), line) for file, line in _FRAME.findall(last) if not file.startswith("<")]
    if not frames:
        return ""
    libraries = [
        Path(path) for path in {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    ]
    own, standard = Path(__file__).parents[1], Path(sysconfig.get_path("stdlib"))
    installed = [
        frame for frame in frames if any(frame[0].is_relative_to(path) for path in libraries)
    ]
    installed = [frame for frame in installed if not frame[0].is_relative_to(own)]
    others = [
        frame for frame in frames if frame not in installed and not frame[0].is_relative_to(own)
    ]
    users = [frame for frame in others if not frame[0].is_relative_to(standard)]
    file, line = (users or installed or frames)[-1]
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
    if restart is not None:  # of a `ReplicaError`
        return bool(restart) and bool(getattr(error, "transient", True))
    return _is_of_a_network(error)


def is_network_error(error: BaseException) -> bool:
    """Return True if a network, a file server or the lighthouse did not answer.

    Other transient errors wait for other groups, which may be in a queue for hours.
    """
    network = getattr(error, "network", None)
    return _is_of_a_network(error) if network is None else bool(network)


def _is_of_a_network(error: BaseException) -> bool:
    """Return True if the error, or a cause of it, is that of a network.

    A library wraps the error of a network in one of its own: `URLError` holds it as its reason, and
    huggingface_hub's error is raised from it. An error about a file that was raised from a network
    error counts as an error about a file: the file may be missing for good.
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
    """Return True if the error's own errno, HTTP status or text is that of a network."""
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
    numbers = _ERRNO.findall(text)  # the last one is that of the error itself
    errno_in_worker = int(numbers[-1]) if numbers else 0
    # A negative one is no errno, but the resolver's: the name server did not answer.
    return (
        in_worker[1] in _TRANSIENT_CLASSES
        or errno_in_worker < 0
        or errno_in_worker in _TRANSIENT_ERRNOS
    )


def _http_status(error: BaseException) -> object:
    """Return the status of an HTTP error of urllib, aiohttp, requests or httpx; None for other
    errors.
    """
    if "HTTPError" not in {kind.__name__ for kind in type(error).__mro__}:
        return (
            getattr(error, "status", None)
            if type(error).__name__ == "ClientResponseError"
            else None
        )
    response = getattr(error, "response", None)
    return (
        getattr(error, "code", None) if response is None else getattr(response, "status_code", None)
    )


def _first_line(text: str) -> str:
    """Return the first line that says something; a type alone is joined with the line after it."""
    lines = [line.strip() for line in _CONTROL.sub("", text).splitlines() if line.strip()]
    found = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return found if len(found) <= _MAX_CHARACTERS else f"{found[:_MAX_CHARACTERS]}..."
