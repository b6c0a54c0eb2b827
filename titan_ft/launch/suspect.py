# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Hosts on which workers die again and again: a group leaves such a host, so that it can be started
elsewhere.

A group is normally restarted on its host, which is quickest. But a host with a bad GPU or bad
memory ends everything that runs there. All of the job's ends on the host count, because groups may
follow each other there.
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
from titan_ft.launch.restart_policy import CONFIG_ERROR_CODE, FINAL_CODE
from titan_ft.run.events import WorkerExited
from titan_ft.run.tail import EventTail
from titan_ft.system.ownership import no_follow
from titan_ft.system.token import TOKEN_ENV

_COMMAND_SECONDS = 60.0


@dataclass(frozen=True)
class SuspectPolicy:
    """When a host is suspected, and what happens then.

    Attributes:
        deaths: deaths on one host within the window that make it suspected (see `HostDeaths`); 0
            for never.
        window_seconds: the window.
        command: the user's command, run with the host and the reason as further arguments; may be
            empty.
        file: file for lines with the host and the end of its suspicion (Unix seconds); None for no
            file.
    """

    deaths: int = 0
    window_seconds: float = 3600.0
    command: tuple[str, ...] = ()
    file: Path | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> SuspectPolicy:
        """Read the policy from the environment, as scripts/replica_group.sh sets it.

        Raises:
            ConfigError: a value is wrong.
        """
        numbers = {}
        for name, default in (("TITAN_FT_HOST_DEATHS", "0"), ("TITAN_FT_HOST_WINDOW", "3600")):
            value = environ.get(name) or default
            if not value.isdecimal():
                raise ConfigError(
                    f"{name} must be a whole number, at least 0, got {value!r}; correct it, or "
                    "unset it"
                )
            numbers[name] = int(value)
        file = environ.get("TITAN_FT_SUSPECTED_HOSTS")
        return cls(
            numbers["TITAN_FT_HOST_DEATHS"],
            float(numbers["TITAN_FT_HOST_WINDOW"]),
            tuple(shlex.split(environ.get("TITAN_FT_ON_HOST_SUSPECTED", ""))),
            Path(file) if file else None,
        )

    def act(self, host: str, reason: str) -> None:
        """Run the user's command and write for the batch script. Failures are printed and do not
        keep the group there.
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
            env = {name: value for name, value in os.environ.items() if name != TOKEN_ENV}
            done = subprocess.run(
                [*self.command, host, reason], env=env, timeout=_COMMAND_SECONDS, check=False
            )
            said = f"ended with exit status {done.returncode}" if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            said = f"failed: {error}"
        if said:
            print(f"titan_ft: the command for suspected hosts {said}", file=sys.stderr)


def counts_against_host(event: WorkerExited) -> bool:
    """True if the host may have caused a worker's end.

    Not for a worker that was stopped because of another one, a wrong config, a group that must not
    return, a transient reason or an injected fault. An exception does not count either, except a
    hang and a GPU's error: a mistake in the code would follow the group from host to host until all
    were excluded.
    """
    if event.stopped or event.transient or event.code in (0, CONFIG_ERROR_CODE, FINAL_CODE):
        return False
    return may_come_from_host(event.error, event.error_kind)


class HostDeaths:
    """Counts the deaths on one host in the events of the whole job.

    All ranks of an attempt die one death there: one end causes others, and all ranks may be killed.
    The first rank that ended by itself is announced first, and decides whether the death counts.

    Args:
        events: folder of the run's events.
        pattern: pattern of the event files that announce workers' ends.
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
        self._host, self._window_seconds, self._clock = host, window_seconds, clock
        self._counted: dict[tuple[int, int], float | None] = {}
        """Times of the deaths by group and attempt; None for one that does not count."""

    def count(self) -> int:
        """Return how many there were within the window until now."""
        for event in self._tail.poll():
            if isinstance(event, WorkerExited) and event.host == self._host and not event.stopped:
                moment = event.time if counts_against_host(event) else None
                self._counted.setdefault((event.replica, event.attempt), moment)
        begin = self._clock() - self._window_seconds
        return sum(moment is not None and moment > begin for moment in self._counted.values())
