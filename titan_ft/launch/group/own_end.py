# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Judge the end of a worker: whether the worker caused it, and whether two ends have one cause.

A worker causes its own end by an exception, a crash in native code, or an exit status. An end by
any other signal comes from outside. `RestartPolicy` counts own ends only. Pure functions.
"""

from __future__ import annotations

import re
import signal

from titan_ft.run.error_file import kind_of
from titan_ft.run.events import WorkerExited

OWN_SIGNALS = frozenset(
    {
        signal.SIGABRT,  # abort(): an assertion, an uncaught C++ exception, Gloo, NCCL's watchdog
        signal.SIGBUS,  # memory that is mapped and not there, such as a full /dev/shm
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGSEGV,
        signal.SIGSYS,  # a system call that a container forbids
        signal.SIGTRAP,  # __builtin_trap(): an assertion in a release build
        signal.SIGXCPU,  # a limit (`ulimit`) that the next start runs into as well
        signal.SIGXFSZ,
    }
)
"""Signals that a process causes itself, so that the next start may cause them again.

Any other signal may come from outside: from a person, Slurm, Kubernetes, an injected fault, or the
kernel's OOM killer (SIGKILL). A group that is killed every few seconds is no crash loop, so an end
by such a signal never counts. A signal that is not listed here counts as one from outside, because
a needless restart costs less than a group that is given up.
"""
EARLY_END = "exit status 0 before the last step"
"""The end of a worker whose own code called exit during training, as if all were done."""
_SIGNAL_STATUS_OFFSET = 128
"""A shell reports an end by signal N as exit status 128 + N, and so does a rank at SIGTERM."""
_BROKEN_GPU = re.compile(
    r"CUDA error: .*(ECC|NVLink|hardware|busy or unavailable|no CUDA-capable device)"
    r"|No CUDA GPUs are available",
    re.IGNORECASE,
)
"""PyTorch's words for a GPU that is broken or gone.

A mistake in the code raises the same class with another text, so the class alone shows nothing. The
first text is from c10/cuda/CUDAException.cpp, the second from c10/cuda/CUDAFunctions.cpp and
torch/csrc/cuda/Module.cpp.
"""
_HANG = "HungError"
"""`titan_ft.protocol.errors.HungError`, which needs torch. A GPU or a disk may cause a hang."""


def may_come_from_host(error: str | None, kind: str | None) -> bool:
    """True if the host may have caused an end.

    Args:
        error: the exception that ended the worker; None after a crash in native code.
        kind: the type of the exception.
    """
    if error is None or kind == _HANG:
        return True
    return _BROKEN_GPU.search(error) is not None


def cause_of_end(code: int, error: str | None) -> str:
    """Return a text that ends of the same cause share; empty if the worker did not cause the end.

    Args:
        code: exit status; negative: the signal.
        error: the exception that ended the worker; None if it left none.
    """
    if error is not None:
        return f"exception {kind_of(error)}"
    if code == 0:
        return ""
    signum = _signal_of(code)
    if signum is not None and signum not in OWN_SIGNALS:
        return ""
    return describe_code(code)


def describe_code(code: int) -> str:
    """Return an end in words: "SIGABRT", "exit status 7"."""
    signum = _signal_of(code)
    return f"exit status {code}" if signum is None else signum.name


def exit_code_of(event: WorkerExited) -> int:
    """Return the exit status of an event; negative: the signal."""
    if event.signal is None:
        return event.code or 0
    return -signal.Signals[event.signal]


def _signal_of(code: int) -> signal.Signals | None:
    number = -code if code < 0 else code - _SIGNAL_STATUS_OFFSET
    try:
        return signal.Signals(number)
    except ValueError:
        return None
