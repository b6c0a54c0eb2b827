# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A virtual clock, and a seeded scheduler for code that blocks in threads.

A thread becomes a *task*: a greenlet, of which one runs at a time. Tasks yield where they block
and, as the seed decides, at every pause point. There is a pause point wherever others could see the
effect of an interruption of a real thread. When no task can run, the clock jumps to the next timer,
so an hour of waiting costs nothing.
"""

from __future__ import annotations

import heapq
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import greenlet  # type: ignore[import-untyped]  # it has no types of its own

STEP_SECONDS = 1e-6
"""Virtual time that a task takes from one switch to the next: a loop that never blocks cannot stop
the clock.
"""


class Killed(
    BaseException
):  # not an error: the end of a process, which no `except Exception` may catch
    """Unwinds a task whose process has ended."""


class NotSimulatedError(RuntimeError):
    """The engine asked for a part of the real world that has no stand-in."""


@dataclass(frozen=True)
class Crash:
    """A task that ended by an exception."""

    at: float
    task: Task
    error: Exception
    stack: str


class Process:
    """A simulated process with clocks of its own. It can die or freeze. Its tasks are its threads.

    Attributes:
        lag: largest delay in seconds at a pause point of its tasks.
        clock, wall: offsets of its monotonic and its wall clock from the virtual time.
        rate: seconds of its monotonic clock in a virtual second.
    """

    def __init__(self, kernel: Kernel, name: str, *, pid: int = 0) -> None:
        self.kernel, self.name, self.pid = kernel, name, pid
        self.dead = self.frozen = False
        self.exited = False  # the process ended itself, and not the world
        self.lag = self.clock = self.wall = 0.0
        self.rate = 1.0
        self.on_end: list[Callable[[], None]] = []
        self.on_change: list[Callable[[], None]] = []
        self.held: list[Task] = []

    @property
    def runs(self) -> bool:
        """True if the process's threads run."""
        return not (self.dead or self.frozen)

    def end(self) -> None:
        """End the process at once: none of its tasks runs again."""
        if not self.dead:
            self.dead = True
            self.held.clear()
            for act in self.on_end:
                act()
            for act in self.on_change:
                act()

    def freeze(self) -> None:
        """Stop all its tasks where they are, as SIGSTOP does."""
        if not self.dead and not self.frozen:
            self.frozen = True
            for act in self.on_change:
                act()

    def thaw(self) -> None:
        """Continue the frozen tasks, as SIGCONT does."""
        if not self.dead and self.frozen:
            self.frozen = False
            self.kernel.ready.extend(self.held)
            self.held.clear()
            for act in self.on_change:
                act()


class Task:
    """A thread of a simulated process."""

    __slots__ = (
        "done",
        "fn",
        "green",
        "joiners",
        "name",
        "process",
        "queued",
        "ticket",
        "timed_out",
    )

    def __init__(self, fn: Callable[[], object], name: str, process: Process) -> None:
        self.fn, self.name, self.process = fn, name, process
        self.green: greenlet.greenlet | None = None  # None = it has not started
        self.done = self.queued = self.timed_out = False
        self.ticket = 0  # number of the wait under way; timers of earlier waits are void
        self.joiners: list[Task] = []

    def __repr__(self) -> str:
        return f"{self.process.name}:{self.name}"


class Kernel:
    """Runs tasks on a virtual clock. One kernel at a time exists in a process; see `current`.

    Args:
        seed: determines every choice.
        switch: probability that a pause point lets another task run.
    """

    def __init__(self, seed: int, switch: float = 0.3) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.switch = switch
        self.ready: list[Task] = []
        self.task: Task | None = None  # the running task
        self.hub = greenlet.getcurrent()
        self.crashes: list[Crash] = []
        self.on_crash: Callable[[Crash], None] = lambda crash: None
        self.missing: list[str] = []  # calls of the engine that have no stand-in
        self.switches = 0
        self.closed = False
        self.stopped = False
        self._random = self.rng.random
        # The end of `run`, and the number of task switches that are left to it.
        self._until, self._left = (0.0, 0)
        self._went_on: bool | None = None  # the result of `run`; None = `run` goes on
        # raised by the world's code; `run` raises it again
        self._error: BaseException | None = None
        self._timers: list[tuple[float, int, Callable[[], None] | Task, int]] = []
        self._order = 0
        self._tasks: list[Task] = []
        # Greenlets of tasks that are done, to be used again: a new one costs a page of memory.
        self._idle: list[greenlet.greenlet] = []

    # Calls of tasks

    @property
    def current(self) -> Task:
        """Return the task that runs."""
        if self.task is None:
            raise NotSimulatedError("a task of the simulation is needed here")
        return self.task

    @property
    def process(self) -> Process:
        """Return the process of the task that runs."""
        task = self.task
        return task.process if task is not None else self.current.process

    def spawn(self, fn: Callable[[], object], name: str, process: Process | None = None) -> Task:
        """Make a task that runs `fn`.

        It belongs to the caller's process, unless another process is given.
        """
        task = Task(fn, name, process or self.process)
        self._tasks.append(task)
        self.wake(task)
        return task

    def wake(self, task: Task) -> None:
        """Make a blocked task ready to run."""
        if not task.queued and not task.done:
            task.queued = True
            task.ticket += 1
            self.ready.append(task)

    def block(self, timeout: float | None = None) -> bool:
        """Wait until another task wakes this one; return False if `timeout` seconds pass first."""
        if self.closed:
            raise Killed
        task = self.task
        assert task is not None, "only tasks block"
        task.timed_out = False
        if timeout is not None:
            self._push(timeout if timeout > 0 else 0.0, task, task.ticket)
        self._give_way()
        return not task.timed_out

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`. A wake-up for another reason does not end the wait."""
        end = self.now + seconds
        while self.now < end:
            self.block(end - self.now)

    def pause(self) -> None:
        """Mark a point at which another thread could run.

        As the seed decides, another task runs, or time passes.
        """
        if self.closed:
            raise Killed
        task = self.task
        if task is None:
            return
        draw = self._random()
        if draw < 0.02 and task.process.lag:
            self.block(draw * 50 * task.process.lag)
        elif draw < self.switch and self.ready:
            self.wake(task)
            self._give_way()

    # Calls of the world

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` in `seconds`; it must not block."""
        self._push(seconds, act, 0)

    def stop(self) -> None:
        """End `run` after the task that runs now."""
        self.stopped = True

    def run(self, until: float, max_switches: int = 3_000_000) -> bool:
        """Run tasks until the clock reaches `until`, or until `stop` is called.

        Returns:
            False if no event is left.
        """
        self._until, self._left, self._went_on = until, max_switches, None
        while (task := self.task or self._next()) is not None:
            if task.green is None:
                task.green = (
                    self._idle.pop() if self._idle else greenlet.greenlet(self._run_tasks, self.hub)
                )
            task.green.switch()
            if self._error is not None:
                raise self._error
        return self._went_on is not False

    def waits(self) -> list[tuple[str, str]]:
        """Return, for each task of a live process, its name and the place in the engine where it
        waits.
        """
        found = []
        for task in self._tasks:
            frame = (
                None
                if task.done or task.process.dead or task.green is None
                else task.green.gr_frame
            )
            places = []
            while frame is not None:
                file = frame.f_code.co_filename
                if "titan_ft" in file:
                    places.append(
                        f"{file.rsplit('/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}"
                    )
                frame = frame.f_back
            if places:
                found.append((repr(task), " < ".join(places[:5])))
        return found

    def close(self) -> None:
        """Unwind the remaining tasks, so that none of their code runs at garbage collection."""
        self.closed = True
        for task in self._tasks:
            if not task.done and task.green is not None:
                self.task = task
                task.green.throw(Killed)
            self.task = None
        for green in self._idle:
            green.throw()
        self._tasks.clear()
        self._idle.clear()

    def _give_way(self) -> None:
        """Let the next task run.

        Returns when it is the caller's turn again, or when the caller's greenlet has a new task.
        """
        me = self.task
        try:
            task = self._next()
        except BaseException as error:  # noqa: BLE001  # the world's, which is no concern of the task that gives way
            self._error, task = error, None
        if task is not None and task.green is None and self._idle:
            task.green = self._idle.pop()
        # `run` makes new greenlets. A greenlet made here would stand on the caller's stack.
        if task is None or task.green is None:
            self.hub.switch()
        elif task is not me:
            task.green.switch()

    def _next(self) -> Task | None:
        """Let time pass until a task can run, and make it `self.task`.

        Returns:
            None if `run` must end.
        """
        self.task = None
        ready, timers = self.ready, self._timers
        while not self.stopped and self._went_on is None:
            if timers and (not ready or timers[0][0] <= self.now):
                at, _, what, ticket = heapq.heappop(timers)
                if at > self._until:
                    self.now, self._went_on = self._until, True
                    break
                if type(what) is Task:
                    if what.ticket != ticket or what.done:
                        continue
                    self.now = max(self.now, at)
                    self.wake(what)
                    what.timed_out = True
                else:
                    self.now = max(self.now, at)
                    what()  # not a task
                continue
            if not ready:
                self._went_on = False
                break
            place = int(self._random() * len(ready))
            task, ready[place] = ready[place], ready[-1]
            ready.pop()
            process = task.process
            # The process has ended, or the task is done and its greenlet may belong to another
            # task.
            if process.dead or task.done:
                continue
            if process.frozen:
                process.held.append(task)
                continue
            task.queued = False
            self.now += STEP_SECONDS
            self.switches += 1
            self._left -= 1
            if self._left < 0:
                raise RuntimeError(f"no end at {self.now:.3f} s: {task} runs in circles")
            self.task = task
            return task
        return None

    def _push(self, seconds: float, what: Callable[[], None] | Task, ticket: int) -> None:
        self._order += 1
        heapq.heappush(self._timers, (self.now + seconds, self._order, what, ticket))

    def _run_tasks(self) -> None:
        while not self.closed:
            self._run_task()
            if not self.closed:
                self._idle.append(greenlet.getcurrent())
                self._give_way()

    def _run_task(self) -> None:
        task = self.current
        try:
            task.fn()
        except Killed:
            pass
        except Exception as error:  # noqa: BLE001  # a thread's edge: the world judges it
            if not self.closed:
                crash = Crash(self.now, task, error, traceback.format_exc())
                self.crashes.append(crash)
                self.on_crash(crash)
        task.done = True
        for joiner in task.joiners:
            self.wake(joiner)
        self.task = None  # `run` chooses the next task


_kernel: Kernel | None = None


def current() -> Kernel:
    """Return the kernel of the simulation under way."""
    if _kernel is None:
        raise NotSimulatedError("no simulation is under way")
    return _kernel


def use(kernel: Kernel | None) -> None:
    """Make `kernel` the current kernel of the stand-ins."""
    global _kernel
    _kernel = kernel


def missing(what: str) -> NotSimulatedError:
    """Return the error for a call without a stand-in.

    The error counts even if the engine catches it.
    """
    text = f"{what} has no stand-in in tests/simulation/standins.py"
    if _kernel is not None:
        _kernel.missing.append(text)
        _kernel.stop()
    return NotSimulatedError(text)
