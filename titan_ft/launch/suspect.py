# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Suspect hosts on which workers die again and again: a group leaves such a host.

A group is normally restarted on its host, which is quickest. But on a host with a bad GPU or bad
memory the workers die again. After some deaths within a time window, the group's agent ends with
`HOST_SUSPECTED_CODE`, and the scheduler can start the group elsewhere. The deaths of all groups on
the host count, because one group may follow another there.

Only agents on a cluster use this module, on their only thread.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from titan_ft.config import ConfigError
from titan_ft.launch.group.own_end import may_come_from_host
from titan_ft.launch.restart_policy import CONFIG_ERROR_CODE, NO_RESTART_CODE
from titan_ft.run.events import WorkerExited
from titan_ft.run.tail import EventTail
from titan_ft.system.ownership import no_follow
from titan_ft.system.token import TOKEN_ENV

_COMMAND_SECONDS = 60.0
"""Time limit of the user's command."""


@dataclass(frozen=True)
class SuspectPolicy:
    """The rule by which a host is suspected, and the actions that follow.

    Attributes:
        deaths_until_suspected: number of deaths on one host within the window that make the host
            suspected (see `HostDeaths`); 0 switches the rule off.
        window_seconds: length of the window.
        command: the user's command, which gets the host and the reason as further arguments; empty
            for no command.
        file: file for lines with the host and the end of the suspicion (Unix seconds); None for no
            file.
    """

    deaths_until_suspected: int = 0
    window_seconds: float = 3600.0
    command: tuple[str, ...] = ()
    file: Path | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> SuspectPolicy:
        """Read the policy from the environment, as scripts/replica_group.sh sets it.

        Raises:
            ConfigError: a value is wrong.
        """
        deaths = _read_number(environ, "TITAN_FT_HOST_DEATHS", "0")
        window_seconds = float(_read_number(environ, "TITAN_FT_HOST_WINDOW", "3600"))
        file = environ.get("TITAN_FT_SUSPECTED_HOSTS")
        return cls(
            deaths_until_suspected=deaths,
            window_seconds=window_seconds,
            command=tuple(shlex.split(environ.get("TITAN_FT_ON_HOST_SUSPECTED", ""))),
            file=Path(file) if file else None,
        )

    def act(self, host: str, reason: str) -> None:
        """Write the host into the file for the batch script, and run the user's command.

        If one of them fails, a line says so, and the group leaves the host nevertheless.
        """
        if self.file is not None:
            try:
                with open(self.file, "a", opener=no_follow) as file:
                    file.write(f"{host} {time.time() + self.window_seconds:.0f}\n")
            except OSError as error:
                print(
                    f"titan_ft: {self.file} cannot be written ({error.strerror})", file=sys.stderr
                )
        if not self.command:
            return
        try:
            # The user's command needs no token, and may print its environment.
            env = {name: value for name, value in os.environ.items() if name != TOKEN_ENV}
            done = subprocess.run(
                [*self.command, host, reason], env=env, timeout=_COMMAND_SECONDS, check=False
            )
            failure = f"ended with exit status {done.returncode}" if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            failure = f"failed: {error}"
        if failure:
            print(f"titan_ft: the command for suspected hosts {failure}", file=sys.stderr)


def _read_number(environ: Mapping[str, str], name: str, default: str) -> int:
    value = environ.get(name) or default
    if not value.isdecimal():
        raise ConfigError(
            f"{name} must be a whole number, at least 0, got {value!r}; correct it, or unset it"
        )
    return int(value)


def counts_against_host(event: WorkerExited) -> bool:
    """True if the host may have caused a worker's end.

    These ends do not count: the agent stopped the worker because of another worker; the config is
    wrong; the group must not return; the reason is transient; the fault was injected. An exception
    counts only if it is a hang or a GPU's error. A mistake in the code would otherwise follow the
    group from host to host until all hosts were excluded.
    """
    if event.stopped or event.transient:
        return False
    if event.code in (0, CONFIG_ERROR_CODE, NO_RESTART_CODE):
        return False
    return may_come_from_host(event.error, event.error_kind)


class HostDeaths:
    """Counts the deaths on one host in the events of the whole job.

    The ends of all ranks of an attempt on the host are one death, because the end of one rank
    causes the ends of the others. An agent announces the root cause of an attempt's end first. That
    event decides whether the death counts.

    The agent's only thread calls `count`.

    Args:
        events: folder of the run's events.
        pattern: pattern of the event files that announce workers' ends.
        host: name of the host.
        window_seconds: a death counts for this long.
        clock: returns Unix seconds.
    """

    def __init__(
        self,
        events: Path,
        pattern: str,
        host: str,
        window_seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._tail = EventTail(events, WorkerExited, pattern=pattern, from_start=True)
        self._host = host
        self._window_seconds = window_seconds
        self._clock = clock
        self._death_times: dict[tuple[int, int], float | None] = {}
        """Times of the deaths by group and attempt; None for a death that does not count."""

    def count(self) -> int:
        """Return the number of deaths within the window that ends now."""
        for event in self._tail.poll():
            if not isinstance(event, WorkerExited) or event.host != self._host or event.stopped:
                continue
            attempt = (event.replica, event.attempt)
            if attempt not in self._death_times:
                self._death_times[attempt] = event.time if counts_against_host(event) else None
        window_start = self._clock() - self._window_seconds
        num_deaths = 0
        for death_time in self._death_times.values():
            if death_time is not None and death_time > window_start:
                num_deaths += 1
        return num_deaths
