# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The figures that Prometheus gets, scraped over HTTP."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from socketserver import BaseServer
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import titan_ft
from tests.event_builder import build, named
from titan_ft.config import ConfigError
from titan_ft.faults.catalogue import FAULTS
from titan_ft.history.fold.run import RunFold
from titan_ft.live import status
from titan_ft.live.group_metrics import GroupMetrics
from titan_ft.live.metrics import FAILURE_CAUSES, MetricsServer, split_address
from titan_ft.live.run_status import RunStatus
from titan_ft.live.status import STATES
from titan_ft.run.events import Event
from titan_ft.run.log import encode
from titan_ft.run.paths import RunPaths

NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
Series = tuple[str, tuple[tuple[str, str], ...]]


@pytest.fixture(autouse=True)
def _servers_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own server looks twice a second whether it is to end."""
    monkeypatch.setattr(BaseServer, "serve_forever", partialmethod(BaseServer.serve_forever, 0.01))


class FedServer(MetricsServer):
    """Feeds the fold of the run before it counts, as the launcher does."""

    def __init__(self) -> None:
        self.fold = RunFold()
        super().__init__(self.fold, 0)

    def observe(self, event: Event) -> None:
        self.fold.observe(event)
        super().observe(event)


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = FedServer()
    yield server
    server.close()


def scrape(server: MetricsServer | GroupMetrics) -> dict[Series, float]:
    """Return every sample by its name and labels."""
    with NO_PROXY.open(server.url, timeout=30) as response:
        families = text_string_to_metric_families(response.read().decode())
        samples = [sample for family in families for sample in family.samples]
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}


def value(found: dict[Series, float], name: str, **labels: str) -> float:
    return found[f"titan_ft_{name}", tuple(sorted(labels.items()))]


def event(
    name: str, replica: int | None = 0, rank: int | None = 0, attempt: int = 0, **fields: Any
) -> Any:
    whose = {"replica": replica, "rank": rank, "attempt": attempt}
    return build(named(name), **{k: v for k, v in whose.items() if v is not None}, **fields)


def step(number: int, replica: int = 0, rank: int = 0, **fields: Any) -> Any:
    usual = {
        "lineage": f"{number:012x}",
        "participants": [0, 1, 2, 3],
        "tokens": 1000,
        "loss": 2.5,
        "grad_norm": 0.75,
    }
    usual |= {"lr": 1e-3, "seconds": 0.4, "exchanges": 1}
    return event("step_committed", replica, rank, step=number, **{**usual, **fields})


def test_step_that_comes_late_turns_nothing_back(server: MetricsServer) -> None:
    """A step whose event waited for disk room while other groups' events were read is counted."""
    for number, time in ((1, 1.0), (3, 3.0), (2, 2.0)):
        server.observe(step(number, time=time))
    found = scrape(server)
    assert value(found, "steps_committed_total") == 3
    assert value(found, "step_seconds_count") == 3
    assert (value(found, "step"), value(found, "last_commit_timestamp_seconds")) == (3, 3.0)


def test_step_of_all_groups_is_one_step(server: MetricsServer) -> None:
    """Four groups of two ranks report each step. Steps, tokens and seconds count once, and gauges
    show the last step.
    """
    for number in (1, 2, 3):
        for replica in range(4):
            for rank in (0, 1):
                server.observe(step(number, replica, rank, loss=3.0 - number / 4))
    found = scrape(server)
    assert value(found, "step") == 3
    assert value(found, "steps_committed_total") == 3
    assert value(found, "tokens_total") == 3000
    assert value(found, "step_seconds_count") == 3
    assert value(found, "step_seconds_sum") == pytest.approx(1.2)
    assert value(found, "step_seconds_bucket", le="0.3") == 0
    assert value(found, "step_seconds_bucket", le="0.5") == 3
    assert value(found, "loss") == 2.25
    assert value(found, "grad_norm") == 0.75
    assert value(found, "learning_rate") == 1e-3
    assert value(found, "participants") == 4


def test_before_the_first_step(server: MetricsServer) -> None:
    """Unknown values are NaN, and counters are zero."""
    found = scrape(server)
    for name in ("loss", "grad_norm", "learning_rate"):
        assert math.isnan(value(found, name))
    for name in (
        "steps_committed",
        "tokens",
        "exchanges",
        "digest_mismatches",
        "lighthouse_restarts",
    ):
        assert value(found, f"{name}_total") == 0


def test_loss_that_is_no_number(server: MetricsServer) -> None:
    """A nonfinite loss is NaN, and does not keep the previous value."""
    server.observe(step(1))
    server.observe(step(2, loss=None, grad_norm=None))
    found = scrape(server)
    assert math.isnan(value(found, "loss"))
    assert value(found, "steps_committed_total") == 2


def test_failures_and_recoveries(server: MetricsServer) -> None:
    """A death counts once for all its ranks; restarts name whether a standby took over; heals are
    timed.
    """
    server.observe(event("worker_exited", 1, rank=1, signal="SIGKILL", stopped=False))
    server.observe(event("worker_exited", 1, rank=0, signal="SIGTERM", stopped=True))
    server.observe(event("worker_exited", 1, rank=2, code=1, stopped=False))
    server.observe(event("replica_restarted", 1, None, attempt=1, standby=True))
    for rank in (0, 1):
        server.observe(event("heal_finished", 1, rank, attempt=1, seconds=1.5))
    server.observe(event("worker_exited", 1, rank=0, attempt=1, code=3, stopped=False))
    server.observe(event("replica_restarted", 1, None, attempt=2))
    found = scrape(server)
    failures = {
        key: count for key, count in found.items() if key[0] == "titan_ft_failures_total" and count
    }
    assert sorted(failures.values()) == [1, 1]
    assert value(found, "failures_total", replica="1", cause="SIGKILL") == 1
    assert value(found, "failures_total", replica="1", cause="exit code 3") == 1
    assert value(found, "restarts_total", replica="1", standby="true") == 1
    assert value(found, "restarts_total", replica="1", standby="false") == 1
    assert value(found, "heals_total", replica="1") == 1
    assert value(found, "heal_seconds_sum") == 1.5


def test_failures_of_all_kinds_are_there_from_the_start(server: MetricsServer) -> None:
    """Each kind starts at 0 for each group, so that Prometheus sees the first increase. A rare kind
    is "other", and no series appears later.
    """
    server.update(RunStatus(2).groups)
    before = scrape(server)
    failures = {key: count for key, count in before.items() if key[0] == "titan_ft_failures_total"}
    assert len(failures) == 2 * (len(FAILURE_CAUSES) + 1)
    assert set(failures.values()) == {0}
    for attempt, how in enumerate(
        ({"signal": "SIGKILL"}, {"code": 1}, {"code": 77}, {"signal": "SIGXCPU"})
    ):
        server.observe(event("worker_started", 1, attempt=attempt))
        server.observe(event("worker_exited", 1, attempt=attempt, stopped=False, **how))
    after = scrape(server)
    assert after.keys() == before.keys()
    counted = {
        dict(labels)["cause"]: count
        for (name, labels), count in after.items()
        if "failures" in name and count
    }
    assert counted == {"SIGKILL": 1, "exit code 1": 1, "other": 2}


def test_faults_of_all_kinds_are_there_once_chaos_begins(server: MetricsServer) -> None:
    """A run without chaos has none of these series; with a plan all start at 0."""
    assert not [key for key in scrape(server) if key[0] == "titan_ft_faults_injected_total"]
    server.observe(event("chaos_started", None, None, seed=1))
    assert {
        key
        for key, count in scrape(server).items()
        if key[0] == "titan_ft_faults_injected_total" and not count
    } == {("titan_ft_faults_injected_total", (("fault", name),)) for name in FAULTS}


def test_what_runs(server: MetricsServer) -> None:
    """Versions and the run's own labels stand beside the figures, to join them with."""
    other = MetricsServer(RunFold(), 0, run={"job_id": "job-1", "run_dir": "/runs/a"})
    try:
        found = scrape(other)
        assert value(found, "run_info", job_id="job-1", run_dir="/runs/a") == 1
        (labels,) = (dict(labels) for name, labels in found if name == "titan_ft_build_info")
        assert labels["version"] == titan_ft.__version__
        assert labels["torchtitan"].startswith("0.2")
        assert {"python", "torch", "torchft"} <= labels.keys()
    finally:
        other.close()


def test_last_commit_and_target(server: MetricsServer) -> None:
    """The time of the last commit, for alerts on a job that stands still, and the number of the
    final step.
    """
    assert math.isnan(value(scrape(server), "last_commit_timestamp_seconds"))
    assert math.isnan(value(scrape(server), "target_step"))
    server.observe(event("worker_started", config={"steps": 500}))
    server.observe(step(1, 0, time=1234.5))
    server.observe(step(1, 1, time=1236.0))
    found = scrape(server)
    assert value(found, "last_commit_timestamp_seconds") == 1234.5
    assert value(found, "target_step") == 500


def test_rounds_and_steps(server: MetricsServer) -> None:
    """With a semi-synchronous method steps and target are torchtitan's; the committed units are
    rounds.
    """
    server.observe(step(1, 0, inner_step=10))
    server.observe(step(2, 0, inner_step=20))
    found = scrape(server)
    assert (value(found, "step"), value(found, "steps_committed_total")) == (20, 2)


def test_step_time_of_each_group(server: MetricsServer) -> None:
    """Each group has a gauge of its own time without the exchange; an absent group has none."""
    run = RunStatus(2)
    for own, replica in ((0.5, 0), (2.0, 1)):
        run.observe(step(1, replica, compute_seconds=own, apply_seconds=0.25))
    server.update(run.groups)
    found = scrape(server)
    assert [value(found, "group_step_seconds", replica=each) for each in "01"] == [0.75, 2.25]
    run.observe(event("worker_exited", 1, signal="SIGKILL", stopped=False))
    server.update(run.groups)
    assert math.isnan(value(scrape(server), "group_step_seconds", replica="1"))


def test_no_series_of_when_a_counter_was_made(server: MetricsServer) -> None:
    """`_created` series would double the stored data without use."""
    server.update(RunStatus(1).groups)
    server.observe(step(1))
    with NO_PROXY.open(server.url, timeout=30) as response:
        text = response.read().decode()
    assert "titan_ft_step_seconds_bucket" in text
    assert "_created" not in text


def test_leaving_in_order_is_no_failure(server: MetricsServer) -> None:
    """Neither a finished group nor one that was asked to leave has failed."""
    server.observe(event("worker_exited", 0, code=0, stopped=False))
    server.observe(event("drained", 1, step=5))
    server.observe(event("worker_exited", 1, signal="SIGTERM", stopped=False))
    assert not [
        key
        for key, count in scrape(server).items()
        if key[0] == "titan_ft_failures_total" and count
    ]


def test_what_all_groups_see_counts_once(server: MetricsServer) -> None:
    """A digest mismatch, reported by every group, counts once; so do checkpoints, faults and
    lighthouse restarts.
    """
    for replica in range(3):
        server.observe(event("digest_mismatch", replica, step=50))
    server.observe(event("digest_mismatch", 0, step=100))
    server.observe(event("checkpoint_saved", 2, step=50))
    server.observe(event("lighthouse_restarted", None, None, seconds=0.5))
    server.observe(event("fault_injected", None, None, fault="kill_group", target={"replica": 1}))
    server.observe(
        event("fault_injected", 2, 1, fault="slow_rank", target={"replica": 2, "rank": 1})
    )
    found = scrape(server)
    assert value(found, "digest_mismatches_total") == 2
    assert value(found, "checkpoints_saved_total") == 1
    assert value(found, "lighthouse_restarts_total") == 1
    assert value(found, "faults_injected_total", fault="kill_group") == 1
    assert value(found, "faults_injected_total", fault="slow_rank") == 1


def test_state_of_each_group(server: MetricsServer) -> None:
    """Each group has 1 at its state and 0 at all others; counters that may increase later start at
    0.
    """
    run = RunStatus(2)
    server.update(run.groups)
    run.observe(step(1, replica=1))
    server.update(run.groups)
    found = scrape(server)
    for replica, state in (("0", "waiting"), ("1", "training")):
        states = {name: value(found, "group_state", replica=replica, state=name) for name in STATES}
        assert states == {name: float(name == state) for name in STATES}
        assert value(found, "heals_total", replica=replica) == 0
        assert value(found, "restarts_total", replica=replica, standby="true") == 0
    assert value(found, "groups") == 2


def test_every_state_is_known() -> None:
    """Every state of a group is among the exported ones."""
    names = {
        value for name, value in vars(status).items() if name.isupper() and isinstance(value, str)
    }
    assert names == set(STATES)


def test_bytes(server: MetricsServer) -> None:
    """The bytes of all ranks count: sent gradients and fetched states."""
    for rank in (0, 1):
        server.observe(step(1, 2, rank, wire_bytes=100))
        server.observe(event("heal_finished", 2, rank, bytes=7, seconds=1.0))
    server.observe(step(2, 2, wire_bytes=None))
    found = scrape(server)
    assert value(found, "gradient_sent_bytes_total", replica="2") == 200
    assert value(found, "heal_received_bytes_total", replica="2") == 14
    assert value(found, "heals_total", replica="2") == 1


def test_a_group_serves_its_own_figures(tmp_path: Path) -> None:
    """On a cluster each group serves the job's figures as it sees them, and its own, from its start
    on.
    """
    paths = RunPaths(tmp_path)
    paths.events.mkdir()

    def write(name: str, *events: Any) -> None:
        with (paths.events / f"{name}.jsonl").open("ab") as file:
            file.writelines(encode(each) + b"\n" for each in events)

    write("replica-1-rank-0-attempt-0-7", step(1, 1))
    metrics = GroupMetrics("0", paths, 1)
    try:
        config = {"steps": 500, "group_size": 4}
        write(
            "replica-1-rank-0-attempt-1-8",
            event("worker_started", 1, attempt=1, config=config),
            step(2, 1, attempt=1),
        )
        write("replica-1-rank-1-attempt-1-9", step(2, 1, 1, attempt=1))
        write("replica-11-rank-0-attempt-0-10", step(3, 11))
        write(
            "supervisor-1-6", event("worker_exited", 1, attempt=1, signal="SIGKILL", stopped=False)
        )
        write("supervisor-11-6", event("worker_exited", 11, signal="SIGKILL", stopped=False))
        metrics.poll()
        found = scrape(metrics)
        assert value(found, "run_info", run_dir=str(tmp_path), replica="1") == 1
        assert (value(found, "step"), value(found, "steps_committed_total")) == (2, 1)
        assert (
            value(found, "groups"),
            value(found, "participants"),
            value(found, "target_step"),
        ) == (4, 4, 500)
        assert value(found, "failures_total", replica="1", cause="SIGKILL") == 1
        assert value(found, "group_state", replica="1", state="died") == 1
        assert {dict(labels)["replica"] for (_, labels) in found if "replica" in dict(labels)} == {
            "1"
        }
    finally:
        metrics.close()


def test_a_lost_group_does_not_just_vanish(tmp_path: Path) -> None:
    """If a group's own agent is gone, the agent of the group that missed it shows its state until
    it is back.
    """
    paths = RunPaths(tmp_path)
    paths.events.mkdir()
    metrics = GroupMetrics("0", paths, 0)

    def write(*events: Any) -> dict[Series, float]:
        with (paths.events / "replica-0-rank-0-attempt-0-8.jsonl").open("ab") as file:
            file.write(b"".join(map(encode, events)))
        metrics.poll()
        return scrape(metrics)

    try:
        start = event("worker_started", 0, time=1000.0, config={"steps": 500, "group_size": 2})
        found = write(start, step(2, time=1001.0, participants=[0, 1]))
        assert not any(dict(labels).get("replica") == "1" for _, labels in found)
        found = write(
            event("group_lost", 0, time=1011.0, slot=1, seconds=10.0, last_step=2),
            step(3, participants=[0], time=1012.0),
        )
        assert value(found, "group_state", replica="1", state="lost") == 1
        assert value(found, "group_state", replica="1", state="training") == 0
        assert (value(found, "participants"), value(found, "groups")) == (1, 2)
        found = write(event("group_back", 0, time=1030.0, slot=1, seconds=29.0))
        names = {name for name, labels in found if dict(labels).get("replica") == "1"}
        assert "titan_ft_group_state" not in names
    finally:
        metrics.close()


def test_two_servers_share_nothing(server: MetricsServer) -> None:
    """Each run has a registry of its own."""
    other = FedServer()
    try:
        server.observe(step(1))
        assert value(scrape(other), "steps_committed_total") == 0
    finally:
        other.close()


def test_port_that_is_taken(server: MetricsServer) -> None:
    """A port in use, and an address of another host, are refused in one line: field, rule, value,
    remedy.
    """
    with pytest.raises(ConfigError) as caught:
        MetricsServer(RunFold(), server.port)
    line = str(caught.value)
    assert line.startswith(
        f"--metrics-port must be a free port of an address of this host, got 127.0.0.1:{server.port}"
    )
    assert "choose another" in line
    assert "\n" not in line
    with pytest.raises(ConfigError, match=r"got 192\.0\.2\.1:0 "):
        MetricsServer(RunFold(), 0, "192.0.2.1")


def test_closed_server_gives_its_port_back() -> None:
    """After the end nothing listens there, and the next run may."""
    server = FedServer()
    server.close()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.port)) != 0
    MetricsServer.at(RunFold(), f"127.0.0.1:{server.port}", {}).close()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9464", ("127.0.0.1", 9464)),
        ("0", ("127.0.0.1", 0)),
        ("0.0.0.0:9464", ("0.0.0.0", 9464)),
        ("[::]:9464", ("::", 9464)),
        ("node-3:80", ("node-3", 80)),
    ],
)
def test_where_to_listen(text: str, address: tuple[str, int]) -> None:
    """A port alone means loopback; a host sets who may connect."""
    assert split_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "70000",
        "host:",
        ":9464",
        "-1",
        "host:x",
        "9464:host",
        "+80",
        "http://host:80",
        "host:80/",
    ],
)
def test_where_nothing_can_listen(text: str) -> None:
    """Anything else is refused with the field and the two forms."""
    with pytest.raises(ConfigError, match=r"^--metrics-port must be PORT .* or HOST:PORT, got"):
        split_address(text)


def test_import_loads_neither_torch_nor_the_client() -> None:
    """prometheus_client and rich are loaded when they are needed, so that the launcher
    starts fast.
    """
    code = (
        "import sys, titan_ft.live.metrics, titan_ft.live.top; "
        "print(*sorted({n.partition('.')[0] for n in sys.modules} & {'torch', 'prometheus_client', 'rich'}))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert process.stdout.strip() == ""
