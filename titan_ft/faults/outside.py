# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The faults from outside: signals that the chaos runner sends to processes of a run."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import ClassVar, Literal

from titan_ft.faults.fault import Ending, Fault, Need
from titan_ft.faults.schema import PositiveInt, PositiveNumber

SendSignal = Callable[[signal.Signals], None]
"""Sends a signal to all processes of one target. Raises `titan_ft.chaos.processes.Unreachable` if
the target has no process left."""


class Signal(Fault, frozen=True):
    """A signal to processes of the run.

    The chaos runner calls `start`, and after the fault's duration `stop`.
    """

    ends: ClassVar[Ending] = "restart"
    signum: ClassVar[signal.Signals]
    processes: ClassVar[Literal["workers", "agent", "lighthouse"]] = "workers"
    """The processes of the target that get the signal."""

    def start(self, send: SendSignal) -> None:
        """Inject the fault."""
        send(self.signum)

    def stop(self, send: SendSignal) -> None:
        """Undo the fault, `duration_seconds` after `start`. Most faults have nothing to undo."""


class _Kill(Signal, frozen=True):
    outcome = "killed"
    category = "process killed"
    signum = signal.SIGKILL


class KillRank(_Kill, frozen=True):
    """SIGKILL to one rank."""

    name = "kill_rank"
    scope = "rank"


class KillGroup(_Kill, frozen=True):
    """SIGKILL to all ranks of a group."""

    name = "kill_group"
    scope = "group"


class KillGroups(_Kill, frozen=True):
    """SIGKILL to `count` groups at once."""

    name = "kill_groups"
    scope = "groups"
    count: PositiveInt = 2

    @property
    def num_targets(self) -> int:
        return self.count


class KillAgent(_Kill, frozen=True):
    """SIGKILL to the process that keeps a group's workers, and to no other."""

    name = "kill_agent"
    scope = "group"
    needs = frozenset({Need.KEEPER})
    processes = "agent"


class TermGroup(Signal, frozen=True):
    """SIGTERM to a group, which finishes its step and leaves."""

    name = "term_group"
    scope = "group"
    outcome = "left"
    category = "process killed"
    signum = signal.SIGTERM


class _Stop(Signal, frozen=True):
    outcome = "frozen"
    category = "stopped or slow"
    ends = "undone"
    signum = signal.SIGSTOP
    seconds: PositiveNumber = 10.0

    def stop(self, send: SendSignal) -> None:
        send(signal.SIGCONT)


class StopRank(_Stop, frozen=True):
    """SIGSTOP to one rank, SIGCONT `seconds` later."""

    name = "stop_rank"
    scope = "rank"


class StopGroup(_Stop, frozen=True):
    """SIGSTOP to a group, SIGCONT `seconds` later."""

    name = "stop_group"
    scope = "group"


class KillLighthouse(Signal, frozen=True):
    """SIGKILL to the launcher's lighthouse."""

    name = "kill_lighthouse"
    scope = "lighthouse"
    outcome = "relaunched"
    category = "lighthouse killed"
    signum = signal.SIGKILL
    takes_down = False
    min_up = 1
    needs = frozenset({Need.LIGHTHOUSE})
    processes = "lighthouse"
