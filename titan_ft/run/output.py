# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Keep printing from ending a process whose output is a file on a full disk.

Python's own streams raise an OSError then: in the middle of a training step, or at the end of the
process, whose exit status becomes 120.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from titan_ft.run.appender import DescriptorAppender, Outage

WAITING_BYTES = 2**20
"""Memory for printed lines that cannot be written. Lines beyond it are lost, and counted."""


def choose_native_log(environ: Mapping[str, str]) -> str:
    """Return the value of RUST_LOG for torchft's code: "warn", or the user's "error".

    At "info" torchft's client logs the lighthouse's address with the run's secret, and each step
    costs more time. torchft knows single levels only: it takes a list, such as
    "warn,torchft::manager=warn", and any other word for "info".
    """
    return "error" if environ.get("RUST_LOG") == "error" else "warn"


def replace_unprintable() -> None:
    """Print a substitute for each character that the output's encoding lacks.

    In a Latin-1 or ASCII locale `titan-ft check` ended with a UnicodeEncodeError and the status of
    "does not hold".
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def protect_output() -> None:
    """Keep this process's output in memory while the disk is full; see `Appender`.

    For processes whose work does not depend on their output. A command whose work is its output
    must fail if it cannot print. Streams that other code has replaced are left alone. Call it again
    after a fork with other output files.
    """
    shared: DescriptorAppender | None = None
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        is_protected = isinstance(getattr(stream, "buffer", None), _ProtectedFile)
        is_original = stream is getattr(sys, f"__{name}__")
        if stream is None or not (is_protected or is_original):
            continue
        # The disk may be full already, or the stream closed.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
        try:
            descriptor = stream.fileno()
            if shared is None or not _is_same_file(shared.descriptor, descriptor):
                # One appender for both outputs if they are one file. Two appenders that wait for
                # room in the same file would mix halves of their lines.
                shared = _appender(descriptor)
        except (OSError, ValueError):  # The stream has no file.
            continue
        setattr(sys, name, _wrap(stream, _ProtectedFile(shared, descriptor)))


def _appender(descriptor: int) -> DescriptorAppender:
    def report_loss(outage: Outage) -> None:
        """Print a line at the place of the missing lines."""
        if not outage.dropped:
            return
        first, last = _clock(outage.first_dropped), _clock(outage.last_dropped)
        lost = f"{outage.dropped.total()} lines of {first} to {last} are lost here"
        appender.append(f"titan_ft: {lost}: {outage.reason}\n".encode())

    appender = DescriptorAppender(descriptor, on_recovery=report_loss, limit=WAITING_BYTES)
    return appender


def _is_same_file(one: int, other: int) -> bool:
    return os.path.samestat(os.fstat(one), os.fstat(other))


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def _wrap(stream: Any, raw: io.RawIOBase) -> io.TextIOWrapper:
    """Return a stream like `stream` that prints each line in one piece."""
    return io.TextIOWrapper(
        raw,  # type: ignore[arg-type]  # Without a buffer, as with python -u.
        encoding=stream.encoding,
        errors="replace" if stream.errors == "strict" else stream.errors,
        line_buffering=True,
    )


class _ProtectedFile(io.RawIOBase):
    """An output of this process that accepts every write.

    Args:
        appender: writes to the same file as the descriptor.
    """

    def __init__(self, appender: DescriptorAppender, descriptor: int) -> None:
        self._appender, self._descriptor = appender, descriptor

    @property
    def name(self) -> int:
        return self._descriptor

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        record = bytes(data)
        self._appender.append(record)
        return len(record)


@contextlib.contextmanager
def protected_native_output(descriptor: int = 2) -> Iterator[None]:
    """Let native code print to a pipe; a thread copies the pipe to the original file.

    torchft's Rust code panics if it cannot print. A panic in the quorum task of a lighthouse ends
    its quorums for good, while the process lives on.
    """
    former = os.dup(descriptor)
    appender = DescriptorAppender(former, limit=WAITING_BYTES)
    reads, writes = os.pipe()
    os.dup2(writes, descriptor)
    os.close(writes)

    def copy() -> None:
        while block := os.read(reads, 65536):
            # The native code must go on even if the original file has no reader.
            with contextlib.suppress(OSError):
                appender.append(block)

    thread = threading.Thread(target=copy, name="titan_ft_output", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.dup2(former, descriptor)  # This closes the last writer of the pipe, and `copy` ends.
        thread.join()
        appender.close(0.0)
        os.close(reads)
        os.close(former)
