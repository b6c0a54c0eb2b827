# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Launch a whole run on this host: a lighthouse and supervised replica groups, with live status."""

from __future__ import annotations

import os
import re
import secrets
import signal
import sys
import time
from types import FrameType

from titan_ft.history.events import EventLog
from titan_ft.launch import status
from titan_ft.launch.children import Child, Children
from titan_ft.launch.event_tail import EventTail
from titan_ft.launch.launch_plan import LaunchPlan
from titan_ft.launch.lighthouse import ANNOUNCEMENT
from titan_ft.launch.log_tail import last_error_line
from titan_ft.launch.restart_policy import CONFIG_ERROR_CODE
from titan_ft.launch.status_view import StatusView, make_view
from titan_ft.launch.supervisor import GRACE_SECONDS

TICK_SECONDS = 0.1
LIGHTHOUSE_START_SECONDS = 120.0


class LocalRun:
    """The processes of one run and what is known of them."""

    def __init__(self, plan: LaunchPlan, view: StatusView) -> None:
        self.plan = plan
        self.view = view
        self.groups = status.initial(plan.num_replicas)
        self.num_signals = 0
        self._tail = EventTail(plan.paths.events)
        self._events = EventLog(plan.paths.launcher_events(os.getpid()))
        # The token is not on any command line, where other users of the host could read it.
        env = {"TITAN_FT_TOKEN": secrets.token_hex(16), "RUST_LOG": os.environ.get("RUST_LOG", "warn")}
        self._children = Children(env)
        self._supervisors: dict[int, Child] = {}
        self._told: set[int] = set()

    def run(self) -> int:
        """Return 0 when all groups finished, 2 when their configuration is wrong, else 1."""
        code, reason = 1, "the launcher failed"
        try:
            code, reason = self._run()
        finally:
            self._children.stop(GRACE_SECONDS + 2.0, impatient=lambda: self.num_signals > 1)
            self._refresh()
            self._events.emit("launch_finished", code=code, reason=reason)
            self._events.close()
            self.view.close()
        return code

    def _run(self) -> tuple[int, str]:
        plan = self.plan
        self._events.emit("launch_started", replicas=plan.num_replicas, ranks_per_replica=plan.num_ranks)
        lighthouse = self._children.start("lighthouse", plan.lighthouse_command(), plan.paths.lighthouse_log)
        # Supervisors import torch while the lighthouse does, and then wait for its address.
        for replica in range(plan.num_replicas):
            name, log = f"supervisor of replica {replica}", plan.paths.supervisor_log(replica)
            self._supervisors[replica] = self._children.start(name, plan.supervisor_command(replica), log)
        address = self._wait_for_lighthouse(lighthouse)
        if address is None:
            return self._interrupted() if self.num_signals else self._lighthouse_ended(lighthouse)
        self.view.line(
            f"lighthouse at {address}; {plan.num_replicas} groups x {plan.num_ranks} ranks; {plan.paths.root}"
        )
        for child in self._supervisors.values():
            child.tell(address)
        return self._watch(lighthouse)

    def _wait_for_lighthouse(self, lighthouse: Child) -> str | None:
        """Return the address that the lighthouse announces, or None when it ends or a signal arrives before that."""
        pattern = re.compile(rf"^{ANNOUNCEMENT}(\S+)\n", re.MULTILINE)
        deadline = time.monotonic() + LIGHTHOUSE_START_SECONDS
        while not self.num_signals and lighthouse.code is None and time.monotonic() < deadline:
            found = pattern.search(lighthouse.log.read_text(errors="replace"))
            if found:
                return found.group(1)
            time.sleep(0.05)
        return None

    def _watch(self, lighthouse: Child) -> tuple[int, str]:
        """Follow the run to its end; return the exit status and the reason."""
        while True:
            codes = {replica: child.code for replica, child in self._supervisors.items()}
            self._refresh()
            if self.num_signals:
                return self._interrupted()
            self._tell_failures(codes)
            if CONFIG_ERROR_CODE in codes.values():
                # All groups read the same file: the others would only wait for each other.
                return CONFIG_ERROR_CODE, "the configuration is wrong"
            if None not in codes.values():
                return self._finished(codes)
            if lighthouse.code is not None:
                return self._lighthouse_ended(lighthouse)
            time.sleep(TICK_SECONDS)

    def _refresh(self) -> None:
        """Fold and show what happened since the last call."""
        for event in self._tail.poll():
            before, self.groups = self.groups, status.fold(self.groups, event)
            line = status.describe(before, self.groups, event)
            # When the whole run is stopped, workers do not "die" one by one.
            if line is not None and not self.num_signals:
                self.view.line(line)
        self.view.update(self.groups)

    def _tell_failures(self, codes: dict[int, int | None]) -> None:
        """Report a supervisor that ended without having said why in an event."""
        for replica, code in codes.items():
            if code and replica not in self._told:
                self._told.add(replica)
                if self.groups[replica].state != status.FAILED:
                    child = self._supervisors[replica]
                    self._error(f"{child.describe_end()}; {child.log}: {last_error_line(child.log)}")

    def _finished(self, codes: dict[int, int | None]) -> tuple[int, str]:
        failed = [replica for replica, code in codes.items() if code != 0]
        if failed:
            reason = f"{len(failed)} of {len(codes)} groups failed: {', '.join(map(str, failed))}"
            self._error(f"{reason}; logs below {self.plan.paths.root / 'logs'}")
            return 1, reason
        self.view.line(f"all groups finished; see titan-ft report {self.plan.paths.root}")
        return 0, "all groups finished"

    def _interrupted(self) -> tuple[int, str]:
        self.view.line("stopping all groups (again to kill them at once)")
        return 1, "stopped by a signal"

    def _lighthouse_ended(self, lighthouse: Child) -> tuple[int, str]:
        """Report it. Groups cannot meet without a lighthouse, so the run ends."""
        log = lighthouse.log
        if lighthouse.code is None:
            reason = f"the lighthouse did not come up within {LIGHTHOUSE_START_SECONDS:.0f} s"
        else:
            reason = f"the {lighthouse.describe_end()}"
        self._error(f"{reason}, so all groups are stopped; {log}: {last_error_line(log)}")
        return 1, reason

    def _error(self, text: str) -> None:
        print(f"titan-ft launch: {text}", file=sys.stderr, flush=True)


def launch(plan: LaunchPlan) -> int:
    """Carry out a plan; Ctrl-C, SIGTERM and a closed terminal end everything that it started.

    Raises:
        ConfigError: the run directory cannot be used.
    """
    plan.write()
    run: LocalRun | None = None
    num_early = 0

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal num_early
        if run is None:
            num_early += 1
        else:
            run.num_signals += 1

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signum == signal.SIGINT or signal.getsignal(signum) != signal.SIG_IGN:  # nohup has SIGHUP ignored
            signal.signal(signum, note)
    run = LocalRun(plan, make_view(plan.num_replicas))
    run.num_signals += num_early
    return run.run()
