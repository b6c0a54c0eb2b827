# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A drill on a real Slurm: a run of titan-ft slurm submit loses no step and no batch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster, why_not
from titan_ft.run import events as ev
from titan_ft.run.lighthouse import Announcement
from titan_ft.run.log import read_events
from titan_ft.run.paths import RunPaths

REPOSITORY = Path(__file__).parents[2]
GROUPS, STEPS = 4, 900
FLAGS = (
    "--model.flavor=tiny",
    "--training.seq_len=32",
    "--training.local_batch_size=2",
    f"--training.steps={STEPS}",
    "--metrics.no-enable-tensorboard",
    "--fault_tolerance.digest_every=1",
    "--fault_tolerance.bucket_size_mb=0.1",
    "--fault_tolerance.heartbeat_timeout_ms=2000",  # as the lighthouse's
    "--experimental.custom_import=tests.slurm.slow_steps",
)

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(why_not()), reason=why_not())]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Provide a folder with a short path."""
    made = Path(tempfile.mkdtemp(prefix="drill-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


class Drill:
    """A run on the cluster."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.paths, self.go = cluster, RunPaths(folder / "run"), folder / "go"
        path = [REPOSITORY, REPOSITORY / "tests" / "integration"]
        cluster.env.update(
            PYTHONPATH=":".join(map(str, path)),
            TITAN_FT_PYTHON=sys.executable,
            TITAN_FT_DRILL_GO=str(self.go),
            TITAN_FT_SLURM_SECONDS="1",
            TITAN_FT_REQUEUE_SECONDS="3",
            OMP_NUM_THREADS="1",
        )
        self.told = folder / "suspected"
        command = folder / "on-host-suspected"
        command.write_text(f"""printf '%s|%s\\n' "$1" "$2" >>{self.told}\n""")
        options = [
            "--standby",
            "--on-host-suspected",
            f"sh {command}",
            "--groups",
            str(GROUPS),
            "--ranks-per-node",
            "1",
            "--time",
            "60",
            "--host-deaths",
            "2",
            "--run-dir",
            str(self.paths.root),
        ]
        config = REPOSITORY / "configs" / "llama3_debug.toml"
        said = cluster.run(
            "bash",
            "slurm/submit.sh",
            "--config",
            str(config),
            *options,
            "--",
            *FLAGS,
            cwd=REPOSITORY,
        )
        assert f"titan-ft top {self.paths.root}" in said
        self.array = (self.paths.root / "slurm" / "jobs").read_text().split()[0]

    def of(self, *kinds: type[ev.Event]) -> list[Any]:
        return [event for event in read_events(self.paths.events) if isinstance(event, kinds)]

    def job(self, replica: int) -> dict[str, str]:
        """Return the job of a group."""
        element = {"array": self.array, "element": str(replica)}
        return next(job for job in self.cluster.jobs() if job.items() >= element.items())

    def lighthouses(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the jobs of the serving lighthouse and of its standby, once both run."""

        def both() -> list[dict[str, str]]:
            mine = ("titan_ft-lighthouse", "RUNNING")
            houses = [job for job in self.cluster.jobs() if (job["name"], job["state"]) == mine]
            said = Announcement.read(self.paths.root / "lighthouse.json")
            serving = [job for job in houses if said is not None and job["id"] == said.job]
            others = [job for job in houses if job not in serving]
            return [*serving, *others] if serving and others else []

        serves, standby = self.wait_until(both, "a lighthouse and its standby run")
        return serves, standby

    def wait_until(self, condition: Callable[[], Any], what: str, seconds: float = 150) -> Any:
        try:
            return self.cluster.wait_until(condition, seconds, what)
        except AssertionError as error:
            logs = sorted((self.paths.root / "logs").glob("*.log"))
            tails = "".join(
                f"\n--- {log}\n{log.read_text(errors='replace')[-3000:]}" for log in logs
            )
            raise AssertionError(
                f"{error}\n{self.cluster.jobs()}\n{self.cluster.states()}{tails}"
            ) from None

    def wait_for_all(self, what: str) -> None:
        """Wait for a step of all groups that is later than the current one."""
        last = max((event.step for event in self.of(ev.StepCommitted)), default=0)
        everybody = list(range(GROUPS))
        self.wait_until(
            lambda: any(
                e.step > last and e.participants == everybody for e in self.of(ev.StepCommitted)
            ),
            f"a step of all groups {what}",
        )

    def command(self, *arguments: str) -> Any:
        """Run a command of titan-ft on the run, as from the login node; returns its JSON."""
        done = subprocess.run(
            [sys.executable, "-m", "titan_ft", arguments[0], str(self.paths.root), *arguments[1:]],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.stdout, done.stderr
        return json.loads(done.stdout) if "--json" in arguments else done.stdout


@pytest.fixture
def drill(folder: Path) -> Iterator[Drill]:
    """Provide a run of four groups on four nodes, which trains."""
    cluster = Cluster(folder)
    try:
        cluster.start()
        drill = Drill(cluster, folder)
        drill.wait_for_all("at the start")
        yield drill
    finally:
        cluster.close()


AGENT = """#!/bin/bash
touch "$RUN/life-$SLURM_RESTART_COUNT-$SLURM_PROCID"
((SLURM_PROCID)) || kill -KILL $$
exec sleep 600
"""


def test_a_group_that_lost_an_agent_is_requeued(folder: Path) -> None:
    """The agents on the group's other hosts wait for a replacement that nothing starts, so Slurm
    ends them.
    """
    cluster = Cluster(folder, nodes=2)
    try:
        cluster.start()
        agent, batch = folder / "agent", REPOSITORY / "titan_ft" / "cluster" / "batch"
        agent.write_text(AGENT)
        agent.chmod(0o755)
        (folder / "token").write_text("a secret of this run")
        cluster.env["RUN"] = str(folder)
        script = [str(batch / "replicas.sbatch"), str(batch), str(agent), str(folder)]
        submitted = cluster.run(
            "sbatch", "--parsable", "--nodes=2", f"--output={folder}/out", *script
        )
        cluster.wait_until(lambda: (folder / "life--1").exists(), 60, "both agents run")
        shown = ["scontrol", "show", "job", submitted.strip()]
        cluster.wait_until(
            lambda: "Restarts=1 " in cluster.run(*shown), 120, "the group is requeued"
        )
        assert "killed with its agent" in (folder / "out").read_text()
    finally:
        cluster.close()


def test_drill(drill: Drill) -> None:
    """A kill, a requeue, a lost node, a lost lighthouse node, a bad host and the time limit lose
    nothing.
    """
    cluster = drill.cluster

    def is_back(replica: int, attempt: int) -> bool:
        return any(
            e.replica == replica and e.attempt >= attempt and e.contributed
            for e in drill.of(ev.StepCommitted)
        )

    cluster.run("scancel", "--signal=KILL", f"{drill.job(1)['id']}.0")
    drill.wait_until(lambda: is_back(1, 1), "group 1 is back after a kill")
    cluster.run("scontrol", "requeue", drill.job(2)["id"])
    drill.wait_until(lambda: is_back(2, 1), "group 2 is back after a requeue")

    houses = {job["node"] for job in drill.lighthouses()}
    lost = next(job for job in map(drill.job, (3, 2, 1)) if job["node"] not in houses)
    replica = int(lost["element"])
    attempt = max(e.attempt for e in drill.of(ev.WorkerStarted) if e.replica == replica) + 1
    cluster.lose_node(lost["node"])
    drill.wait_until(lambda: is_back(replica, attempt), "a group is back after its node was lost")
    assert drill.job(replica)["node"] != lost["node"]
    cluster.start_node(lost["node"])
    cluster.run("scontrol", "update", f"NodeName={lost['node']}", "State=RESUME")

    house, standby = drill.lighthouses()
    moment = time.time()
    cluster.lose_node(house["node"])
    drill.wait_until(
        lambda: any(
            e.job == standby["id"] and e.time > moment for e in drill.of(ev.LighthouseMoved)
        ),
        "the groups follow to the standby",
    )
    drill.wait_for_all("after the lighthouse's node was lost")
    serves, standby = drill.lighthouses()
    assert standby["id"] == house["id"], "the one that was lost is the standby now"
    assert house["node"] not in (serves["node"], standby["node"])
    cluster.start_node(house["node"])
    cluster.run("scontrol", "update", f"NodeName={house['node']}", "State=RESUME")

    # Twice on one host, and by its agent the group is not started there a third time.
    suspected = drill.job(1)["node"]
    for _ in range(2):
        worker = max(
            (e for e in drill.of(ev.WorkerStarted) if e.replica == 1), key=lambda e: e.attempt
        )
        drill.wait_until(lambda attempt=worker.attempt: is_back(1, attempt), "group 1 trains")
        os.kill(worker.pid, signal.SIGKILL)
        drill.wait_until(
            lambda attempt=worker.attempt: any(
                e.replica == 1 and e.attempt > attempt for e in drill.of(ev.WorkerStarted)
            ),
            "group 1 is started again",
        )
    (host_left,) = drill.of(ev.HostLeft)
    assert (host_left.replica, host_left.host) == (1, suspected)
    assert drill.told.read_text() == f"{suspected}|{host_left.reason}\n"
    assert drill.job(1)["node"] != suspected
    drill.wait_for_all("after a host was left")

    replica = 0
    attempt = max(e.attempt for e in drill.of(ev.WorkerStarted) if e.replica == replica) + 1
    minutes = (
        int(cluster.run("squeue", "-h", "-j", drill.job(0)["id"], "-o", "%M").rsplit(":", 2)[-2])
        + 2
    )
    cluster.run("scontrol", "update", f"JobId={drill.job(0)['id']}", f"TimeLimit={minutes}")
    drill.wait_until(lambda: is_back(0, attempt), "group 0 is back after its time limit")
    cluster.run("scontrol", "update", f"JobId={drill.job(0)['id']}", "TimeLimit=60")
    drill.wait_for_all("at the end")

    drill.go.touch()
    drill.wait_until(lambda: not cluster.jobs(), "all jobs are over, the lighthouse's too", 240)
    assert {e.replica for e in drill.of(ev.TrainingFinished)} == set(range(GROUPS))
    assert len({e.digest for e in drill.of(ev.TrainingFinished)}) == 1
    checked = drill.command("check", "--json")
    # Of the rest, one needs a run to compare with, and one compares with the speed after the gate
    # was opened.
    verdicts = {
        found["promise"]: found["verdict"]
        for found in checked["judgements"]
        if found["promise"] not in (1, 5)
    }
    assert set(verdicts.values()) == {"holds"}, json.dumps(checked, indent=1)
    audited = checked["audit"]
    assert (audited["verdict"], audited["num_lost"], audited["num_repeated"]) == ("holds", 0, 0)
    report = drill.command("report", "--json")
    assert (report["recomputed_forward_passes"], report["rework"]["setbacks"]) == (0, []), report[
        "rework"
    ]
    assert report["steps_committed"] == STEPS
    assert {e.step for e in drill.of(ev.StepCommitted)} == set(range(1, STEPS + 1))
    figures = {each["host"]: each for each in report["hosts"]}
    assert figures.keys() <= set(cluster.nodes)
    assert figures[suspected]["left"] == 1
    assert figures[suspected]["deaths"] >= 2
    assert "drained" in {e.name for e in drill.of(ev.Drained)}
    assert "finished" in drill.command("top", "--once")
