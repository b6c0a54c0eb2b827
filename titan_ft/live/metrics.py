# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Serve a run's figures to Prometheus."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from titan_ft import versions
from titan_ft.config import ConfigError
from titan_ft.history.fold.run import RunFold
from titan_ft.live import status
from titan_ft.live.figures_server import FiguresServer
from titan_ft.live.status import Groups
from titan_ft.run import events as ev
from titan_ft.system import address

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client import Counter as PrometheusCounter

LOOPBACK = "127.0.0.1"
STEP_BUCKETS = (
    0.05,
    0.1,
    0.2,
    0.3,
    0.5,
    0.75,
    1,
    1.5,
    2,
    3,
    5,
    7.5,
    10,
    15,
    20,
    30,
    60,
    120,
    300,
    600,
    1200,
    3600,
)
FAILURE_CAUSES = (
    *("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGKILL", "SIGSEGV", "SIGTERM"),
    *("exit code 1", "exit code 2", "exit code 3"),
    "agent",
)
OTHER_CAUSE = "other"
"""Label of all other signals and exit codes. So all series exist from the start."""
HEAL_BUCKETS = (0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)


def split_address(bind: str) -> tuple[str, int]:
    """Split PORT or HOST:PORT. Without a host, the loopback address is used.

    Raises:
        ConfigError: `bind` has neither form.
    """
    try:
        host, port = address.split_address(bind if ":" in bind else f"{LOOPBACK}:{bind}")
    except ValueError:
        host, port = "", 0
    if not host or "/" in bind:
        raise ConfigError(
            f"--metrics-port must be PORT (this host only) or HOST:PORT, got {bind!r}; for example "
            "9464, 0.0.0.0:9464 for Prometheus on another host, or 0 to have a port chosen"
        )
    return host, port


class MetricsServer:
    """Serves a run's figures to Prometheus over HTTP, on a thread of its own.

    Each event is counted once. Rank 0's events stand for its group. The figures count from the
    start of this process, without earlier launches in the same folder.

    Args:
        fold: the state of the run. It must take each event before `observe` does.
        port: port to listen at; 0 = a free port.
        host: address to listen at. The figures are not protected, so the default is the loopback. A
            Prometheus on another host needs "0.0.0.0" or the address of one network.
        run: labels of `titan_ft_run_info`, which name this run.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(
        self, fold: RunFold, port: int, host: str = LOOPBACK, run: Mapping[str, str] | None = None
    ) -> None:
        from prometheus_client import CollectorRegistry, disable_created_metrics, make_wsgi_app

        # Without this call each counter has a second series with its time of creation.
        disable_created_metrics()
        registry = CollectorRegistry()
        self._define_metrics(registry)
        own = versions()
        self._build.info(
            {"version": own.pop("titan_ft"), "python": platform.python_version(), **own}
        )
        self._run.info(dict(run or {}))
        self._fold = fold
        self._counted: Counter[tuple[str, ...]] = Counter()
        """Totals of the fold at the last event, by metric and labels."""
        self._shown: Groups = {}
        self._differing_steps: set[int] = set()
        try:
            self._server = FiguresServer(address.usable_bind(host), port, make_wsgi_app(registry))
        except OSError as error:
            raise ConfigError(
                f"--metrics-port must be a free port of an address of this host, got {host}:{port} "
                f"({error.strerror}); choose another, or 0 to have one chosen"
            ) from error
        self.port: int = self._server.server_port
        self.url = f"http://{address.join_address(host, self.port)}/metrics"

    @classmethod
    def at(cls, fold: RunFold, place: str, run: Mapping[str, str]) -> MetricsServer:
        """Listen at PORT or HOST:PORT."""
        host, port = split_address(place)
        return cls(fold, port, host, run)

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    def _define_metrics(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter as PrometheusCounter
        from prometheus_client import Gauge, Histogram, Info

        common: dict[str, Any] = {"namespace": "titan_ft", "registry": registry}
        counter: Callable[..., PrometheusCounter] = partial(PrometheusCounter, **common)
        gauge: Callable[..., Gauge] = partial(Gauge, **common)
        histogram: Callable[..., Histogram] = partial(Histogram, **common)
        self._build = Info("build", "Versions of what runs.", **common)
        self._run = Info("run", "The run: its job, its folder, its shape.", **common)
        unknown = "; NaN when unknown or not finite."
        self._step = gauge("step", "torchtitan's step committed last.")
        self._loss = gauge("loss", f"Mean loss of that step over its groups{unknown}")
        self._grad_norm = gauge("grad_norm", f"Gradient norm of that step before clipping{unknown}")
        self._lr = gauge("learning_rate", "Learning rate of that step.")
        self._target = gauge(
            "target_step", f"torchtitan's step that is to be the last one{unknown}"
        )
        self._last_commit = gauge(
            "last_commit_timestamp_seconds", f"Unix time of that step's commit{unknown}"
        )
        for figure in (self._loss, self._grad_norm, self._lr, self._target, self._last_commit):
            figure.set(float("nan"))
        self._participants = gauge("participants", "Groups that contributed to that step.")
        self._groups = gauge("groups", "Groups that the run should have.")
        self._state = gauge(
            "group_state", "1 for the state that the group is in, else 0.", ("replica", "state")
        )
        self._own_seconds = gauge(
            "group_step_seconds",
            "Seconds that the last step took a group without the exchange; "
            "NaN until it has made one.",
            ("replica",),
        )
        self._tokens = counter("tokens", "Tokens with a label that the committed steps trained on.")
        self._committed = counter(
            "steps_committed", "Steps committed; rounds with a semi-synchronous method."
        )
        self._exchanges = counter(
            "exchanges", "Exchanges of gradients that the committed steps took."
        )
        self._exchanges_failed = counter("exchanges_failed", "Those that failed and were repeated.")
        self._step_seconds = histogram(
            "step_seconds", "Seconds of a committed step, or round.", buckets=STEP_BUCKETS
        )
        self._restarts = counter("restarts", "Restarts of groups.", ("replica", "standby"))
        ends = "Ends of groups, by what ended the first rank, or the agent."
        self._failures = counter("failures", ends, ("replica", "cause"))
        self._heals = counter(
            "heals", "Transfers of state to a group that ended well.", ("replica",)
        )
        self._heal_bytes = counter(
            "heal_received_bytes", "Bytes of state that healing groups received.", ("replica",)
        )
        self._sent_bytes = counter(
            "gradient_sent_bytes", "Bytes of gradients sent to other groups.", ("replica",)
        )
        self._heal_seconds = histogram(
            "heal_seconds", "Seconds until the state was there.", buckets=HEAL_BUCKETS
        )
        self._faults = counter("faults_injected", "Faults injected.", ("fault",))
        self._mismatches = counter(
            "digest_mismatches", "Steps at which groups held different state."
        )
        self._lighthouses = counter("lighthouse_restarts", "Restarts of the lighthouse.")
        self._saved = counter("checkpoints_saved", "Checkpoints saved.")

    def observe(self, event: ev.Event) -> None:
        """Count an event."""
        self._count_totals()
        if self._fold.steps.newest is event:
            self._step_seconds.observe(self._fold.steps.newest.seconds)
        if self._fold.last_commit is event:
            self._show_commit(self._fold.last_commit)
        if isinstance(event, ev.GroupEvent):
            group = self._fold.groups.get(event.replica)
            if group is not None and group.failed_by is event:
                self._count_failure(event)
        # The fold does not count these events, because no other view needs them.
        is_first_rank = not event.rank
        match event:
            case ev.StepCommitted() if event.wire_bytes is not None:
                self._sent_bytes.labels(str(event.replica)).inc(event.wire_bytes)
            case ev.ChaosStarted():
                self._create_fault_series()
            case ev.HealFinished():
                self._heal_bytes.labels(str(event.replica)).inc(event.bytes)
                if is_first_rank:
                    self._heals.labels(str(event.replica)).inc()
                    self._heal_seconds.observe(event.seconds)
            case ev.DigestMismatch() if is_first_rank and event.step not in self._differing_steps:
                # Each group has the event.
                self._differing_steps.add(event.step)
                self._mismatches.inc()
            case ev.CheckpointSaved() if is_first_rank:
                self._saved.inc()

    def _count_totals(self) -> None:
        """Add the growth of the run's totals since the last event to the counters."""
        fold = self._fold
        steps = fold.steps
        if fold.target_step is not None:
            self._target.set(fold.target_step)
        self._count("tokens", self._tokens, steps.num_tokens)
        self._count("committed", self._committed, steps.num_committed)
        self._count("exchanges", self._exchanges, steps.num_attempted)
        self._count("failed", self._exchanges_failed, steps.num_attempted - steps.num_committed)
        self._count("lighthouses", self._lighthouses, fold.num_lighthouse_restarts)
        for fault, number in fold.faults.by_kind.items():
            self._count("faults", self._faults, number, fault)
        for slot, group in fold.groups.items():
            if group.num_restarts:
                others = group.num_restarts - group.num_standby_restarts
                self._count(
                    "restarts", self._restarts, group.num_standby_restarts, str(slot), "true"
                )
                self._count("restarts", self._restarts, others, str(slot), "false")

    def _count(self, name: str, metric: PrometheusCounter, total: int, *labels: str) -> None:
        """Add the growth of a total to a counter. A total that fell was reset by a new launch."""
        key = (name, *labels)
        before = self._counted[key]
        if total == before:
            return
        if total < before:
            before = 0
        self._counted[key] = total
        series = metric.labels(*labels) if labels else metric
        series.inc(total - before)

    def update(self, groups: Groups, num_groups: int | None = None) -> None:
        """Set the series of the groups. Called often.

        Args:
            groups: the groups to show. The series of other groups are removed.
            num_groups: number of groups of the run; None = all are in `groups`.
        """
        self._groups.set(len(groups) if num_groups is None else num_groups)
        for slot in self._shown.keys() - groups.keys():
            del self._shown[slot]
            self._own_seconds.remove(str(slot))
            for state in status.STATES:
                self._state.remove(str(slot), state)
        for slot, group in groups.items():
            if self._shown.get(slot) == group:
                continue
            if slot not in self._shown:
                self._create_group_series(str(slot))
            self._shown[slot] = group
            self._own_seconds.labels(str(slot)).set(_nan_if_unknown(group.own_seconds))
            for state in status.STATES:
                self._state.labels(str(slot), state).set(group.state == state)

    def _create_group_series(self, slot: str) -> None:
        """Create a group's counters with 0.

        Prometheus sees no increase in a series that starts at 1.
        """
        for metric in (self._heals, self._heal_bytes, self._sent_bytes):
            metric.labels(slot)
        for standby in ("false", "true"):
            self._restarts.labels(slot, standby)
        for cause in (*FAILURE_CAUSES, OTHER_CAUSE):
            self._failures.labels(slot, cause)

    def _create_fault_series(self) -> None:
        """Create the counters of all faults with 0."""
        # Imported here: a run without faults does not load the code of faults.
        from titan_ft.faults.catalogue import FAULTS

        for fault in FAULTS:
            self._faults.labels(fault)

    def _show_commit(self, commit: ev.StepCommitted) -> None:
        self._step.set(commit.titan_step)
        self._last_commit.set(commit.time)
        self._participants.set(len(commit.participants))
        self._loss.set(_nan_if_unknown(commit.loss))
        self._grad_norm.set(_nan_if_unknown(commit.grad_norm))
        self._lr.set(_nan_if_unknown(commit.lr))

    def _count_failure(self, event: ev.GroupEvent) -> None:
        """Count the failure of an attempt once, by the first rank or agent that failed."""
        cause = "agent"
        if isinstance(event, ev.WorkerExited):
            cause = event.cause or ""
        if cause not in FAILURE_CAUSES:
            cause = OTHER_CAUSE
        self._failures.labels(str(event.replica), cause).inc()


def _nan_if_unknown(value: float | None) -> float:
    return float("nan") if value is None else value
