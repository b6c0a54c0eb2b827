# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Hand the exception that ends a worker to whoever started it, by torch elastic's error file.

torchrun and the supervisor name a file in TORCHELASTIC_ERROR_FILE; the format is that of
`torch.distributed.elastic.multiprocessing.errors.record`, whose own writer knows neither what may go by itself nor more
than the second. Nothing here imports torch: a mistake in the config is told before that.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from titan_ft.run.appender import DISK_ERRNOS
from titan_ft.run.whole_file import write_whole

FILE_ENV = "TORCHELASTIC_ERROR_FILE"
_CLAIMED_ENV = "TITAN_FT_ERROR_FILE"
_MAX_CHARACTERS = 400
_TRANSIENT_CLASSES = {"ConnectionError", "TimeoutError", "Timeout", "TransportError", "DistError"}
"""Of Python, requests, httpx, torch.distributed (its store, its network, NCCL); by name, so that none is imported."""
_TRANSIENT_ERRNOS = DISK_ERRNOS | {errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH}
_GLOO = re.compile(r"gloo/.*(Connection|Timed out|timeout|Broken pipe|Socket closed)", re.IGNORECASE | re.DOTALL)
"""What Gloo says of a lost peer; it raises a plain RuntimeError."""
_ADDRESSES_AND_NUMBERS = re.compile(r"0x[0-9a-f]+|\b(?=\w*\d)[0-9a-f]{6,}\b|\btmp\w+|\d+(?:\.\d+)*", re.IGNORECASE)


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

    @property
    def kind(self) -> str:
        """What is the same for the same exception in another process: without numbers, addresses, ids."""
        return kind_of(self.text)


def kind_of(text: str) -> str:
    """Return what two exceptions must have in common to be the same one."""
    return _ADDRESSES_AND_NUMBERS.sub("#", text)


def beside(log: Path) -> Path:
    """Return the error file of the worker that has this log."""
    return log.with_suffix(".error.json")


def claim_file() -> None:
    """Let nobody else in this process write the error file.

    torchtitan's `Trainer.train` is under torch elastic's `record`, which writes the file for every exception,
    also for that of a group that leaves in order. On a full disk `record` raises an OSError in its place,
    and such a group would end as one that failed.
    """
    path = os.environ.pop(FILE_ENV, "")
    if path:
        os.environ[_CLAIMED_ENV] = path


def find_file() -> Path | None:
    """Return the error file that this process was given, if it was given one."""
    path = os.environ.get(FILE_ENV) or os.environ.get(_CLAIMED_ENV)
    return Path(path) if path else None


def write_error(error: BaseException) -> None:
    """Write the exception to the file that this process was given, if it was given one."""
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
        return parse_error(json.loads(path.read_text(encoding="utf-8", errors="replace"))["message"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def parse_error(message: object) -> WorkerError | None:
    """Return the exception in the `message` of an error file, by whomever it was written; None for anything else."""
    match message:
        case {"message": str(text), "extraInfo": dict(more)}:
            when = float(more.get("time") or more.get("timestamp") or 0.0)
            transient, network = more.get("transient") is True, more.get("network") is True
            return WorkerError(_first_line(text), transient, when, network)
    return None


def is_transient(error: BaseException) -> bool:
    """Tell whether the same start may succeed later, without anybody having mended anything.

    So may one that failed for a lighthouse, a peer or a file server that is away, or for a full disk: however often
    that happens in a row, the remedy is to try again. The engine's own errors say it themselves.
    """
    if getattr(error, "restart", False):  # of a `ReplicaError`
        return bool(getattr(error, "transient", True))
    return _is_of_a_network(error)


def is_network_error(error: BaseException) -> bool:
    """Tell whether a network, a file server or the lighthouse did not answer.

    Other transient errors wait for other groups, who may be in a queue for hours.
    """
    return bool(getattr(error, "network", False)) or _is_of_a_network(error)


def _is_of_a_network(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS:
        return True
    if _TRANSIENT_CLASSES & {kind.__name__ for kind in type(error).__mro__}:
        return True
    return isinstance(error, RuntimeError) and _GLOO.search(str(error)) is not None


def _first_line(text: str) -> str:
    """Return the first line that says something; a type alone is joined with the line after it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return found if len(found) <= _MAX_CHARACTERS else f"{found[:_MAX_CHARACTERS]}..."
