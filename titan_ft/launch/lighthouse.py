# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Run torchft's lighthouse: the process where groups meet to form quorums."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import os
import signal
import socket
import sys
import time
from concurrent.futures import wait
from dataclasses import fields
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_ft.config import ConfigError
from titan_ft.launch.gate import BACKLOG, raise_descriptor_limit
from titan_ft.launch.guarded_lighthouse import GuardedLighthouse, OpenLighthouse
from titan_ft.launch.succession import Succession
from titan_ft.membership.pulse import StatusPage
from titan_ft.options import Lighthouse, LighthouseSettings
from titan_ft.run.appender import DISK_ERRNOS, retry_waiting
from titan_ft.run.lighthouse import Announcement, LighthouseAddress
from titan_ft.run.orphan import PARENT_PID_ENV, exit_with_parent
from titan_ft.run.output import protected_native_output
from titan_ft.run.paths import RunPaths
from titan_ft.system.address import (
    bracketed,
    find_own_address,
    is_loopback,
    is_unspecified,
    join_address,
    split_address,
    usable_bind,
)
from titan_ft.system.namespace import allow_namespaces
from titan_ft.system.refusal import Refusal
from titan_ft.system.stop import StopRequests
from titan_ft.system.threads import call_aside
from titan_ft.system.token import TOKEN_ENV, check_token, read_token

if TYPE_CHECKING:  # imported when there is an event: a lighthouse must start fast
    from titan_ft.run.log import EventLog

ANNOUNCEMENT = "lighthouse listening at "
LISTENER_VARIABLE = "TITAN_FT_LISTENER"
"""Descriptor of a listening socket that the launcher hands over, in place of --bind."""
_QUORUM_TICK_MS = 20
"""From one look of the lighthouse at its groups to the next. A failure costs the survivors this
much at most beside the heartbeat's timeout; a look takes microseconds."""
MOST_FORMER_NAMES = 1000
"""Names of processes that have ended. torchft's lighthouse keeps each name for ever, and each
restart of a group brings one. With 10,000 of them a page has 2.4 MB, and costs each of its readers
32 ms of CPU (docs/benchmarks.md)."""
FORMER_SECONDS = 60.0
"""Without a heartbeat. A process that is alive after all only comes back under its name."""
_LOOK_SECONDS = 10.0
_PAGE_SECONDS = 1.0  # of this very process
_EVENT_SECONDS = 1.0  # for an event before the lighthouse starts anew


def check_settings(settings: LighthouseSettings) -> None:
    """Raise ConfigError for a value that torchft would take and never work with."""
    for field in fields(LighthouseSettings):
        value = getattr(settings, field.name)
        if value <= 0:
            raise ConfigError(
                f"the lighthouse's {field.name} must be > 0, got {value}; the default is "
                f"{field.default}"
            )


def changed_settings(settings: LighthouseSettings) -> list[str]:
    """Return the options of `titan-ft lighthouse` for settings that differ from its defaults."""
    changed = []
    for field in fields(LighthouseSettings):
        value = getattr(settings, field.name)
        if value != field.default:
            changed += [f"--{field.name.replace('_', '-')}", str(value)]
    return changed


def split_bind(bind: str) -> tuple[str, int]:
    """Split HOST:PORT; HOST is a numeric address of this host, IPv6 in brackets.

    Raises:
        ConfigError: the text does not have that form.
    """
    try:
        host, port = split_address(bind)
    except ValueError:
        host, port = "", 0
    if not host or "/" in bind:
        raise ConfigError(
            f"--bind must be HOST:PORT, got {bind!r}; for example [::]:29510, port 0 to have one "
            "chosen"
        )
    # A name stands for several addresses, of which torchft would take one, and the groups another.
    _check_numeric("--bind", host, "[::] listens at all addresses of this host")
    return host, port


def _native_torchft() -> Any:
    """Load torchft's native module alone, in milliseconds. Its package imports torch, which takes
    seconds.

    Training pauses until a lighthouse that died is back, so its start must be fast.

    Raises:
        ConfigError: torchft is not installed.
    """
    package = importlib.util.find_spec("torchft")
    folders = package.submodule_search_locations if package is not None else None
    spec = PathFinder.find_spec("torchft._torchft", folders)
    if spec is None or spec.loader is None:
        raise ConfigError("the lighthouse needs torchft, got no such package; install torchft")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def serve(command: Lighthouse) -> int:
    """Run a lighthouse until SIGTERM or SIGINT; announce its address on stdout once it is up.

    Returns:
        143 or 130 after a signal; 0 if another lighthouse has taken its place.

    Raises:
        ConfigError: it cannot listen at its address, or cannot announce itself.
    """
    host, port = split_bind(command.bind)
    check_settings(command)
    _check_announcement(command)
    token = read_token(os.environ)
    check_token(token, is_local=is_loopback(join_address(host, 0)))
    refusal = allow_namespaces() if token else ""  # before there is another thread
    # Started by a launcher; by hand, it may outlive the shell that started it.
    if PARENT_PID_ENV in os.environ:
        exit_with_parent()
    # The Rust side reads it when it is loaded; its own default, info, doubles the cost of a quorum.
    os.environ.setdefault("RUST_LOG", "warn")
    stop = StopRequests(signal.SIGTERM, signal.SIGINT)
    with protected_native_output():
        again = _serve(command, usable_bind(host), port, stop, token, refusal)
    if again and not stop:
        # Anew: a server that is shut down goes on answering those who are connected to it. Inside
        # this process's user namespace, root's token file would belong to nobody.
        os.environ[TOKEN_ENV] = token
        os.execv(
            sys.executable, [sys.executable, "-m", "titan_ft", *sys.argv[1:], f"--bind={again}"]
        )
    return stop.status


def _serve(
    command: Lighthouse, host: str, port: int, stop: StopRequests, token: str, refusal: str
) -> str:
    """Serve until a signal, until another lighthouse is announced, or until too many ended
    processes are known.

    Returns:
        HOST:PORT at which this process must start anew; empty if it must not.

    Raises:
        ConfigError: it cannot listen at its address, or cannot announce itself.
    """
    bind = join_address(host, port)
    raise_descriptor_limit()  # torchft's accept loop ends for good when it has no descriptor left
    served: GuardedLighthouse | OpenLighthouse
    try:
        if token:
            served = GuardedLighthouse(
                _listen(host, port),
                token,
                partial(_start_server, command),
                partial(_report, command),
                refusal,
            )
        else:
            served = OpenLighthouse(_start_server(command, bind))
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"the lighthouse cannot listen at {bind}: {error}; choose another --bind"
        ) from error
    reachable = command.advertise or (find_own_address(host) if is_unspecified(host) else host)
    address = f"http://{bracketed(reachable)}:{served.port}"
    crowd = Crowd(StatusPage(LighthouseAddress(address, token)))
    _say(f"{ANNOUNCEMENT}{address}")
    _say(served.describe_access())
    if command.announce is not None:
        own = Announcement.of_this_process(address, os.environ)
        with contextlib.suppress(OSError):  # said when it is to be announced
            own.prepare(command.announce)
        try:
            succession = Succession(command.announce, own, standby=command.standby, token=token)
            _take_turns(command.announce, succession, stop, crowd)
        finally:
            own.discard(command.announce)
    else:
        while not (stop or crowd.is_due()):
            retry_waiting()
            time.sleep(0.1)
    if not stop and crowd.was_due:
        _report_renewal(command, crowd.num_former, address)
        return join_address(host, served.port)
    if not stop and command.standby:
        return command.bind  # without a shutdown: this process becomes the standby of the other one
    served.close()
    return ""


def _start_server(command: Lighthouse, bind: str) -> Any:
    """Start torchft's lighthouse.

    Raises:
        RuntimeError: it cannot listen there.
    """
    return _native_torchft().LighthouseServer(
        bind=bind,
        min_replicas=command.min_replicas,
        join_timeout_ms=command.join_timeout_ms,
        quorum_tick_ms=_QUORUM_TICK_MS,
        heartbeat_timeout_ms=command.heartbeat_timeout_ms,
    )


def _listen(host: str, port: int) -> socket.socket:
    """Return the socket that groups reach: the launcher's, which outlives a lighthouse, or a new
    one.
    """
    inherited = os.environ.get(LISTENER_VARIABLE)
    if inherited:
        return socket.socket(fileno=int(inherited))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = family == socket.AF_INET6 and is_unspecified(host) and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)


class Crowd:
    """Decides when a lighthouse knows so many ended processes that it must start anew to forget
    them.

    Groups continue at a restarted lighthouse, which is back within a second. The restart happens at
    a moment when no group waits for a quorum.

    Args:
        page: the lighthouse's status page.

    Attributes:
        num_former: ended processes at the last look.
        was_due: the lighthouse must start anew.
    """

    def __init__(self, page: StatusPage) -> None:
        self._page = page
        self._look_at = time.monotonic() + _LOOK_SECONDS
        self.num_former = 0
        self.was_due = False

    def is_due(self) -> bool:
        """True if the lighthouse must start anew now. Looks at its page now and then."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + _LOOK_SECONDS
        status = self._page.read(_PAGE_SECONDS)
        if status is None:
            return False
        self.num_former = sum(seconds > FORMER_SECONDS for seconds in status.heartbeats.values())
        self.was_due = self.num_former > MOST_FORMER_NAMES and not status.num_asking
        return self.was_due


def _take_turns(path: Path, succession: Succession, stop: StopRequests, crowd: Crowd) -> None:
    """Announce this lighthouse at its turn; return when another one is announced, at a stop, or to
    start anew.

    Raises:
        ConfigError: it cannot announce itself.
    """
    served, watched, waits = False, "", False
    while not (stop or crowd.is_due()):
        retry_waiting()
        try:
            turn = succession.poll()
        except OSError as error:
            if error.errno not in DISK_ERRNOS:
                got = f"got {path} ({error.strerror})"
                raise ConfigError(
                    f"--announce must be a file that can be written, {got}; give another"
                ) from error
            if not waits:  # the groups wait for it: it serves as soon as they can know
                waits = True
                _say(
                    f"{path} cannot be written ({error.strerror}): this lighthouse announces "
                    "itself when it can"
                )
            time.sleep(0.1)
            continue
        other = succession.other
        if not turn:
            assert other is not None, "it steps down for another one"
            _say(
                f"{other.address} (on {other.host}) is announced in {path}: this lighthouse steps "
                "down"
            )
            return
        if succession.serves and not served:
            served = True
            _say(f"lighthouse announced in {path}")
        elif other is not None and other.id != watched:
            watched = other.id
            _say(f"standby of the lighthouse at {other.address} (on {other.host})")
        time.sleep(0.1)


def _report(command: Lighthouse, refusal: Refusal) -> None:
    """Report a refusal, on a thread: the members at the gate must not wait for storage that
    hangs.
    """
    call_aside(partial(_write_refusal, command, refusal), "titan_ft_refusal")


def _write_refusal(command: Lighthouse, refusal: Refusal) -> None:
    """Write a line, and an event of the run if its folder is known."""
    _say(f"refused {refusal.text}, from {refusal.source}; said once")
    folder = _find_run_dir(command)
    if folder is None:
        return
    # Imported now: the groups of a run wait for a lighthouse that starts again, and nearly none
    # refuses anybody.
    from titan_ft.run.refused import emit_refusal

    emit_refusal(_open_log(folder), None, refusal)


def _report_renewal(command: Lighthouse, num_ended: int, address: str) -> None:
    """Report that this lighthouse starts anew. Groups do not wait for storage that hangs."""
    _say(
        f"{num_ended} processes of groups have ended: this lighthouse starts anew, and forgets "
        "their names"
    )
    folder = _find_run_dir(command)
    if folder is None:
        return

    def write() -> None:
        from titan_ft.run.events import LighthouseRenewed

        _open_log(folder).emit(LighthouseRenewed(num_ended=num_ended, address=address))

    # Without a thread for the event, the lighthouse must start anew all the same.
    with contextlib.suppress(RuntimeError):
        wait([call_aside(write, "titan_ft_renewal")], _EVENT_SECONDS)


def _find_run_dir(command: Lighthouse) -> Path | None:
    """Return the run's folder; None if it is not known."""
    if command.run_dir is None and command.announce is not None:
        return command.announce.parent
    return command.run_dir


def _open_log(folder: Path) -> EventLog:
    from titan_ft.run.log import EventLog

    host = socket.gethostname().partition(".")[0]
    return EventLog(RunPaths(folder).lighthouse_events(host, os.getpid()))


def _say(text: str) -> None:
    # One write: print makes two when unbuffered, and a log line of torchft's could come between.
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _check_announcement(command: Lighthouse) -> None:
    if command.announce is None and command.standby:
        raise ConfigError(
            "--standby must come with --announce FILE, got it alone; give the file that the "
            "groups read"
        )
    if command.advertise:
        _check_numeric(
            "--advertise", command.advertise, "give that of the network that the groups use"
        )


def _check_numeric(option: str, host: str, remedy: str) -> None:
    try:
        ipaddress.ip_address(host)
    except ValueError as error:
        raise ConfigError(f"{option} must be a numeric address, got {host!r}; {remedy}") from error
