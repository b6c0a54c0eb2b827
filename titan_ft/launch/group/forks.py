# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Run a Python module in a fork of this process, as `python -m` does in a new process.

Nearly all of a worker's start is imports. A process that has imported everything can fork workers
within milliseconds, and the forks share the memory of the imports. The zygote and the agents of a
cluster call these functions, in this order:

1. `check_worker_args` lets the workers' module check its command line.
2. `prepare_forks` imports everything. It returns an obstacle if this process cannot be forked.
3. `fork_module` forks, for each worker and each other process of a group.

A process that forks must have one thread: a lock that another thread holds would stay locked in the
fork. And it must not have initialized CUDA, which a fork could not use.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from titan_ft.config import ConfigError
from titan_ft.run.appender import retry_waiting
from titan_ft.run.orphan import PARENT_PID_ENV, end_with_parent
from titan_ft.run.output import protect_output

PRELOAD_HOOK = "preload"
"""Name of an optional function of a worker's module, which gets the workers' command line.

The function imports and reads, once before the forks, what each fork would import and read again.
"""

CHECK_HOOK = "check"
"""Name of an optional function of a worker's module, which gets the workers' command line.

The function raises ConfigError if there is a mistake in the command line.
"""

MAX_ANSWER_BYTES = 4096
"""A pipe takes a write of up to this size as a whole (PIPE_BUF)."""

FORK_SAFE_THREADS = {"jemalloc_bg_thd"}
"""Threads that do not prevent forks: Arrow's allocator handles forks (pthread_atfork)."""


class ForkedProcess:
    """A forked child of this process, with a part of the interface of `subprocess.Popen`.

    All methods are called on one thread.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status (negative: the signal), or None while the process runs."""
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        """Wait for the end; return the exit status (negative: the signal).

        Raises:
            subprocess.TimeoutExpired: the process has not ended within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, signum: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)


def check_worker_args(module: str, args: Sequence[str]) -> None:
    """Let a worker's module check its command line.

    A module without `CHECK_HOOK` passes, and so does one that cannot be imported.

    Raises:
        ConfigError: there is a mistake in the command line.
    """
    # Set before the imports; see `prepare_forks`.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        function = getattr(importlib.import_module(module), CHECK_HOOK, None)
        if function is not None:
            function(args)
    except ConfigError:
        raise
    except Exception:  # noqa: BLE001  # of a model's own code
        # No known mistake in the config. `prepare_forks` meets the exception again, and reports it.
        return


def call_in_fork(function: Callable[[], str]) -> str | None:
    """Call a function in a fork, and return its answer.

    Everything that the function imports, starts or breaks disappears with the fork.

    Returns:
        The answer, one line; empty if the function raised; None if it ended the process.
    """
    reads, writes = os.pipe()
    # Otherwise the fork would print its copy of the buffers again.
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reads)
            os.environ[PARENT_PID_ENV] = str(os.getppid())
            end_with_parent()
            os.write(writes, function().encode(errors="replace")[: MAX_ANSWER_BYTES - 1] + b"\n")
        except BaseException:  # noqa: BLE001  # process edge
            traceback.print_exc()
            os.write(writes, b"\n")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    os.close(writes)
    with open(reads, "rb", buffering=0) as pipe:
        # One read, and not until the pipe is closed: a process that the fork started may keep the
        # other end open.
        answer = pipe.read(MAX_ANSWER_BYTES) or b""
    _, status = os.waitpid(pid, 0)
    if not answer and os.WIFEXITED(status):
        return None
    return answer.decode(errors="replace").strip()


def prepare_forks(module: str, args: Sequence[str]) -> str:
    """Import everything that a worker needs, and exempt it from garbage collection.

    Args:
        module: Python module that the workers run. Its `PRELOAD_HOOK` is called.
        args: command line of the workers.

    Returns:
        Why no fork may be made; empty if forks are possible.
    """
    # numpy's OpenBLAS starts its threads when it is loaded, and a fork would lose them. OpenBLAS
    # does almost none of the work here.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        prepare = getattr(importlib.import_module(module), PRELOAD_HOOK, None)
        if prepare is not None:
            prepare(args)
    except Exception:  # noqa: BLE001  # of a model's own code
        # A worker meets the exception again, and reports it.
        traceback.print_exc()
        return f"{module} could not be imported beforehand"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialized, which a fork cannot use"
    threads = _other_threads()
    if threads:
        return f"threads were started, which a fork would lose: {', '.join(threads)}"
    gc.collect()
    # A collection in a fork would write to the memory that all forks share, and so copy the memory.
    gc.freeze()
    return ""


def _other_threads() -> list[str]:
    """Return the names of the threads of this process that a fork would lose."""
    if sys.platform != "linux":
        return [thread.name for thread in threading.enumerate()[1:]]
    names = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if int(thread) != os.getpid():
                names.append(Path(f"/proc/self/task/{thread}/comm").read_text().strip())
    return sorted(set(names) - FORK_SAFE_THREADS)


def fork_module(
    module: str,
    args: Sequence[str],
    env: Mapping[str, str],
    output: tuple[int, int] | None,
    *,
    title: str = "",
    close: Collection[int] = (),
    start_pipe: int | None = None,
) -> ForkedProcess:
    """Run a module in a fork, which leads a session of its own, and return when it has begun.

    Args:
        env: the whole environment of the fork.
        output: descriptors above 2 for the output and the errors of the fork; None for the output
            and the errors of this process.
        title: name of the fork in `ps` and `top`; Linux keeps 15 bytes.
        close: descriptors of this process that the fork must not have.
        start_pipe: a descriptor above 2. The module begins after the fork has read a byte there.
            The fork ends if the pipe is closed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    session_reader, session_writer = os.pipe()
    # Until the fork has its own handlers, this process's handlers would run in the fork, and the
    # signal would be lost.
    former_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        is_fork = pid == 0
        if is_fork:
            _run_as_new_process(
                module,
                args,
                env,
                output=output,
                title=title,
                close=(session_reader, *close),
                session_writer=session_writer,
                signal_mask=former_mask,
                start_pipe=start_pipe,
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former_mask)
        os.close(session_writer)
    with open(session_reader, "rb", buffering=0) as pipe:
        # The fork closes the pipe when it leads a session. Before, its process group does not
        # exist, and a signal to the group would fail.
        pipe.read()
    return ForkedProcess(pid)


def _run_as_new_process(
    module: str,
    args: Sequence[str],
    env: Mapping[str, str],
    *,
    output: tuple[int, int] | None,
    title: str,
    close: Collection[int],
    session_writer: int,
    signal_mask: Collection[int],
    start_pipe: int | None,
) -> None:
    """Turn the fork into a process as `python -m` makes one, and run the module. Never returns.

    No exception may reach the callers' frames, which are copies of the parent's: their clean-up
    (`finally`, `with`) must run in the parent only.
    """
    code = 1
    try:
        os.setsid()
        os.close(session_writer)
        for descriptor in close:
            os.close(descriptor)
        _reset_signals(signal_mask)
        _redirect(output)
        # The parent has done this, but the fork's output may be other files.
        protect_output()
        os.environ.clear()
        os.environ.update(env)
        _reseed_numpy()
        if title and sys.platform == "linux":
            Path("/proc/self/comm").write_bytes(title.encode()[:15])
        if start_pipe is not None:
            may_begin = os.read(start_pipe, 1)
            os.close(start_pipe)
            if not may_begin:
                os._exit(1)
        code = _run(module, args)
    except BaseException:  # noqa: BLE001  # process edge
        traceback.print_exc()
    finally:
        os._exit(code)


def _reset_signals(mask: Collection[int]) -> None:
    """Give signals the handlers of a new interpreter.

    Ignored signals stay ignored, as through an exec.
    """
    for signum in signal.valid_signals():
        if not callable(signal.getsignal(signum)):
            continue
        if signum == signal.SIGINT:
            signal.signal(signum, signal.default_int_handler)
        else:
            signal.signal(signum, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _redirect(output: tuple[int, int] | None) -> None:
    """Let this process read from /dev/null, and print to the given descriptors."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if output is not None:
        for descriptor, file in enumerate(output, start=1):
            os.dup2(file, descriptor)
        for file in set(output):
            os.close(file)


def _reseed_numpy() -> None:
    """Reseed numpy. Without it, all forks would draw the same numbers.

    Python's own `random` and `tempfile` reseed themselves after a fork.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _run(module: str, args: Sequence[str]) -> int:
    """Run the module as the main program; return its exit status."""
    sys.argv = [module, *args]  # runpy replaces the first word by the module's file
    # The module is imported already, and now runs once more as __main__. runpy warns of that. It is
    # harmless here, as for any module that `python -m` runs and others import.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
    code = 0
    was_interrupted = False
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        # As the interpreter does at its end: a text is printed, and the status is 1.
        if isinstance(end.code, int):
            code = end.code
        elif end.code is not None:
            print(end.code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        was_interrupted = True
        traceback.print_exc()
    except BaseException as error:  # noqa: BLE001  # process edge
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    # The interpreter's own order at its end: other threads first, then the exit functions.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    retry_waiting()  # writes events that wait because the disk was full
    if was_interrupted:
        # A parent, such as a shell, sees that SIGINT ended the process.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code & 0xFF
