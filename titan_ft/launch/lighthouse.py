# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Run torchft's lighthouse, where the groups of a run meet: `titan-ft lighthouse`.

`serve` is the whole process, on its main thread. It proceeds in these steps:

1. Check the options, and start torchft's server behind a gate (`guarded_lighthouse`). Without a
   token there is no gate.
2. Announce the address on stdout, and with --announce in a file of the run (`succession`).
3. Wait for a signal, for another lighthouse that takes the place of this one, or for the moment to
   start anew (`RenewalPolicy`).
4. To start anew, replace this process by a new one at the same port.

A launcher restarts the lighthouse if it dies (`lighthouse_keeper`); on a cluster its scheduler
does. See docs/membership.md.
"""

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

if TYPE_CHECKING:
    # At run time imported for an event only: a lighthouse must start fast.
    from titan_ft.run.log import EventLog

ANNOUNCEMENT = "lighthouse listening at "
"""Beginning of the line with the address; scripts and tests read it."""
LISTENER_VARIABLE = "TITAN_FT_LISTENER"
"""Environment variable: descriptor of the launcher's listening socket, to be used for --bind."""
MAX_ENDED_NAMES = 1000
"""With more names of ended processes, the lighthouse starts anew.

torchft's lighthouse keeps each name for ever, and each restart of a group adds one. With 10,000 of
them the status page has 2.4 MB, and costs each of its readers 32 ms of CPU (docs/benchmarks.md).
"""
ENDED_SECONDS = 60.0
"""A process without a heartbeat for this long counts as ended.

If the process lives after all, its next heartbeat only adds its name again.
"""
_QUORUM_TICK_MS = 20
"""Pause between two looks of torchft's lighthouse at its groups.

A failure costs the survivors at most this time beside the heartbeat's timeout. A look takes
microseconds.
"""
_LOOK_SECONDS = 10.0
"""Pause before the status page is read again, to count ended processes."""
_PAGE_SECONDS = 1.0
"""Time limit for the status page, which this very process serves."""
_EVENT_SECONDS = 1.0
"""Time limit for writing the event of a new start: storage may hang, and the groups wait."""
_PAUSE_SECONDS = 0.1


def check_settings(settings: LighthouseSettings) -> None:
    """Check values that torchft would accept without ever forming a quorum.

    Raises:
        ConfigError: a value is not > 0.
    """
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
    # A name may stand for several addresses. torchft would take one, and the groups another.
    _check_numeric("--bind", host, "[::] listens at all addresses of this host")
    return host, port


def _native_torchft() -> Any:
    """Load torchft's native module alone, which takes milliseconds.

    The package torchft imports torch, which takes seconds. A lighthouse must start fast, because
    training pauses until a lighthouse that died is back.

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
        ConfigError: the lighthouse cannot listen at its address, or cannot announce itself.
    """
    host, port = split_bind(command.bind)
    check_settings(command)
    _check_announcement(command)
    token = read_token(os.environ)
    check_token(token, is_local=is_loopback(join_address(host, 0)))
    namespace_refusal = ""
    if token:
        # Before any other thread starts: only a process of one thread can make a user namespace.
        namespace_refusal = allow_namespaces()
    # A launcher started this process. A lighthouse that a user started may outlive its shell.
    if PARENT_PID_ENV in os.environ:
        exit_with_parent()
    # Before torchft's native module is loaded, which reads the variable. The module's own default,
    # info, doubles the cost of a quorum.
    os.environ.setdefault("RUST_LOG", "warn")
    stop = StopRequests(signal.SIGTERM, signal.SIGINT)
    with protected_native_output():
        next_bind = _serve_once(command, usable_bind(host), port, stop, token, namespace_refusal)
    must_start_anew = bool(next_bind) and not stop
    if must_start_anew:
        # As a new process: torchft's server answers connected groups even after its shutdown.
        # The new process gets the token itself, not the name of its file. Inside this process's
        # user namespace, a file of root's seems to belong to nobody, and would be refused.
        os.environ[TOKEN_ENV] = token
        own_arguments = [*sys.argv[1:], f"--bind={next_bind}"]
        os.execv(sys.executable, [sys.executable, "-m", "titan_ft", *own_arguments])
    return stop.status


def _serve_once(
    command: Lighthouse,
    host: str,
    port: int,
    stop: StopRequests,
    token: str,
    namespace_refusal: str,
) -> str:
    """Serve until a signal, until another lighthouse takes over, or until it is time to start anew.

    Args:
        token: the run's secret; empty: the lighthouse has no gate.
        namespace_refusal: why the system permits no network namespace; empty if it does.

    Returns:
        HOST:PORT at which this process must start anew; empty if the process must end.

    Raises:
        ConfigError: the lighthouse cannot listen at its address, or cannot announce itself.
    """
    bind = join_address(host, port)
    # torchft's accept loop ends for good when the process has no descriptor left.
    raise_descriptor_limit()
    server: GuardedLighthouse | OpenLighthouse
    try:
        if token:
            server = GuardedLighthouse(
                _listen(host, port),
                token,
                partial(_start_server, command),
                partial(_report_refusal, command),
                namespace_refusal,
            )
        else:
            server = OpenLighthouse(_start_server(command, bind))
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"the lighthouse cannot listen at {bind}: {error}; choose another --bind"
        ) from error
    address = f"http://{bracketed(_find_reachable_host(command, host))}:{server.port}"
    renewal = RenewalPolicy(StatusPage(LighthouseAddress(address, token)))
    _print_line(f"{ANNOUNCEMENT}{address}")
    _print_line(server.describe_access())
    if command.announce is not None:
        own = Announcement.of_this_process(address, os.environ)
        # If there is no room for the file, the lighthouse says so later, when it must write the
        # file.
        with contextlib.suppress(OSError):
            own.prepare(command.announce)
        try:
            succession = Succession(command.announce, own, standby=command.standby, token=token)
            _follow_succession(command.announce, succession, stop, renewal)
        finally:
            own.discard(command.announce)
    else:
        while not (stop or renewal.is_due()):
            retry_waiting()
            time.sleep(_PAUSE_SECONDS)
    if stop:
        server.close()
        return ""
    if renewal.was_due:
        _report_renewal(command, renewal.num_ended, address)
        return join_address(host, server.port)
    if command.standby:
        # Another lighthouse has taken the place, and the new process becomes its standby.
        return command.bind
    server.close()
    return ""


def _find_reachable_host(command: Lighthouse, host: str) -> str:
    """Return the numeric address at which groups reach a lighthouse that listens at `host`."""
    if command.advertise:
        return command.advertise
    if is_unspecified(host):
        return find_own_address(host)
    return host


def _start_server(command: Lighthouse, bind: str) -> Any:
    """Start torchft's lighthouse.

    Raises:
        RuntimeError: the lighthouse cannot listen at the address.
    """
    return _native_torchft().LighthouseServer(
        bind=bind,
        min_replicas=command.min_replicas,
        join_timeout_ms=command.join_timeout_ms,
        quorum_tick_ms=_QUORUM_TICK_MS,
        heartbeat_timeout_ms=command.heartbeat_timeout_ms,
    )


def _listen(host: str, port: int) -> socket.socket:
    """Return the socket that groups reach.

    The launcher's socket, if there is one, outlives this lighthouse. Otherwise the socket is new.
    """
    inherited = os.environ.get(LISTENER_VARIABLE)
    if inherited:
        return socket.socket(fileno=int(inherited))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = family == socket.AF_INET6 and is_unspecified(host) and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)


class RenewalPolicy:
    """Decides when the lighthouse must start anew, to forget the names of ended processes.

    Groups continue at the new lighthouse, which is back within a second. The policy chooses a
    moment when no group waits for a quorum. The lighthouse's main thread calls `is_due`.

    Args:
        page: the lighthouse's status page.

    Attributes:
        num_ended: number of ended processes at the last look.
        was_due: answer at the last look.
    """

    def __init__(self, page: StatusPage) -> None:
        self._page = page
        self._next_look = time.monotonic() + _LOOK_SECONDS
        self.num_ended = 0
        self.was_due = False

    def is_due(self) -> bool:
        """True if the lighthouse must start anew now. Reads the status page now and then."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + _LOOK_SECONDS
        status = self._page.read(_PAGE_SECONDS)
        if status is None:
            return False
        self.num_ended = 0
        for silent_seconds in status.heartbeats.values():
            if silent_seconds > ENDED_SECONDS:
                self.num_ended += 1
        self.was_due = self.num_ended > MAX_ENDED_NAMES and not status.num_asking
        return self.was_due


def _follow_succession(
    path: Path, succession: Succession, stop: StopRequests, renewal: RenewalPolicy
) -> None:
    """Announce this lighthouse when its turn comes.

    Return at a stop, when it is time to start anew, or when another lighthouse is announced.

    Raises:
        ConfigError: the file cannot be written.
    """
    has_reported_serving = False
    has_reported_full_disk = False
    reported_id = ""  # id of the announced lighthouse about which this standby printed a line
    while not (stop or renewal.is_due()):
        retry_waiting()
        try:
            goes_on = succession.poll()
        except OSError as error:
            if error.errno not in DISK_ERRNOS:
                got = f"got {path} ({error.strerror})"
                raise ConfigError(
                    f"--announce must be a file that can be written, {got}; give another"
                ) from error
            # A full disk must not end the lighthouse: the groups wait for its announcement.
            if not has_reported_full_disk:
                has_reported_full_disk = True
                _print_line(
                    f"{path} cannot be written ({error.strerror}): this lighthouse announces "
                    "itself when it can"
                )
            time.sleep(_PAUSE_SECONDS)
            continue
        other = succession.other
        if not goes_on:
            assert other is not None, "this lighthouse steps down for another one"
            _print_line(
                f"{other.address} (on {other.host}) is announced in {path}: this lighthouse steps "
                "down"
            )
            return
        if succession.serves and not has_reported_serving:
            has_reported_serving = True
            _print_line(f"lighthouse announced in {path}")
        elif other is not None and other.id != reported_id:
            reported_id = other.id
            _print_line(f"standby of the lighthouse at {other.address} (on {other.host})")
        time.sleep(_PAUSE_SECONDS)


def _report_refusal(command: Lighthouse, refusal: Refusal) -> None:
    """Report a refusal, on a thread of its own.

    The gate's thread must not wait for storage that hangs: the members would wait for the gate.
    """
    call_aside(partial(_write_refusal, command, refusal), "titan_ft_refusal")


def _write_refusal(command: Lighthouse, refusal: Refusal) -> None:
    """Write a line, and an event of the run if its folder is known."""
    _print_line(f"refused {refusal.text}, from {refusal.source}; said once")
    folder = _find_run_dir(command)
    if folder is None:
        return
    # Imported now, because a refusal is rare: the groups of a run wait for the start of this
    # process.
    from titan_ft.run.refused import emit_refusal

    emit_refusal(_open_log(folder), None, refusal)


def _report_renewal(command: Lighthouse, num_ended: int, address: str) -> None:
    """Report that this lighthouse starts anew; wait for the event only for a moment."""
    _print_line(
        f"{num_ended} processes of groups have ended: this lighthouse starts anew, and forgets "
        "their names"
    )
    folder = _find_run_dir(command)
    if folder is None:
        return

    def write() -> None:
        from titan_ft.run.events import LighthouseRenewed

        _open_log(folder).emit(LighthouseRenewed(num_ended=num_ended, address=address))

    # If no thread can start, the lighthouse starts anew without the event.
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


def _print_line(text: str) -> None:
    # In one write: an unbuffered print makes two, and a log line of torchft could come in between.
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
