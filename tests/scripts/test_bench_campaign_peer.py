# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/bench.py --campaign-peer: its commands, whom it kills, and its figures on short histories."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))  # where scripts find each other

import bench  # noqa: E402
import bench_campaign_peer  # noqa: E402
import bench_peer  # noqa: E402
from bench_campaign_peer import Campaign, format_campaign, groups_up, peer_commands  # noqa: E402
from bench_campaign_tries import Kill, measure  # noqa: E402
from bench_events import StepTried  # noqa: E402
from bench_run import BenchError  # noqa: E402

from tests.event_builder import build, untyped  # noqa: E402
from titan_ft.run.events import Event, StepCommitted, WorkerStarted  # noqa: E402
from titan_ft.run.log import EventLog, encode, read_events  # noqa: E402


def started(time: float, replica: int, attempt: int = 0, rank: int = 0, pid: int = 1) -> Event:
    return build(WorkerStarted, time=time, replica=replica, attempt=attempt, rank=rank, pid=pid)


def tried(time: float, step: int, replica: int = 0, attempt: int = 0, rank: int = 0, **fields: Any) -> Event:
    shape = {"replica": replica, "attempt": attempt, "rank": rank, "committed": True, "contributed": True}
    return build(StepTried, time=time, **{"step": step, "own_loss": 4.0, **shape, **fields})


LOST = {"committed": False, "contributed": False}


def test_each_group_has_its_own_id_and_logs_and_tells_its_tries(tmp_path: Path) -> None:
    lighthouse, *groups = peer_commands(tmp_path, 3, 4)
    assert lighthouse.service
    assert [group.name for group in groups] == ["group-0", "group-1", "group-2"]
    for replica, group in enumerate(groups):
        assert group.args[-1] == f"--fault_tolerance.replica_id={replica}"
        assert f"--log-dir={tmp_path / 'logs' / f'replica-{replica}'}" in group.args
        assert "--nproc-per-node=4" in group.args
        worker = next(index for index, arg in enumerate(group.args) if arg.endswith("bench_peer.py"))
        assert group.args[worker + 1].startswith(bench_peer.OBSERVE_FLAG)
        assert group.env == groups[0].env


def test_only_a_group_that_lives_and_has_contributed_is_up() -> None:
    """Not one that is still starting again, nor one of which a rank is dead."""
    events = [started(0.0, replica, pid=10 + replica) for replica in (0, 1, 2)]
    events += [tried(1.0, 1, replica) for replica in (0, 1, 2)]
    events += [started(2.0, 1, attempt=1, pid=21), tried(3.0, 2, 1, attempt=1, contributed=False)]
    assert groups_up(events, lambda pid: True) == {0: 0, 2: 0}
    assert groups_up(events, lambda pid: pid != 12) == {0: 0}
    events += [tried(4.0, 3, 1, attempt=1)]
    assert groups_up(events, lambda pid: True) == {0: 0, 1: 1, 2: 0}


def test_what_a_kill_destroys() -> None:
    """Steps of 1 s with two groups; a kill in step 3 throws the survivor's pass away and stalls it for 4 s.

    Lost are that pass, the one that the death cut short, and the one whose group was healing. The time from step 1 to
    5 is 8 s; of it the steps 2 and 5 count as a second each, 3 and 4 of one group as half a second.
    """
    events = [started(0.0, 0), started(0.0, 1)]
    events += [tried(float(step), step, replica) for step in (1, 2) for replica in (0, 1)]
    events += [tried(6.0, 3, 0, **LOST), tried(7.0, 3, 0), started(4.0, 1, attempt=1)]
    # While the group that is back heals, it gives nothing to the step that it commits.
    events += [tried(8.0, 4, replica, attempt=replica, contributed=replica == 0) for replica in (0, 1)]
    events += [tried(9.0, 5, replica, attempt=replica) for replica in (0, 1)]
    damage = measure(sorted(events, key=lambda event: event.time), [Kill(2.5, 1, 0)], began=0.5)
    assert (damage.steps_committed, damage.steps_tried) == (5, 6)
    assert (damage.passes, damage.passes_lost) == (11, 3)
    assert damage.effective_share == pytest.approx(3 / 8)
    assert damage.stall_seconds == [4.0]
    assert (damage.crashes, damage.steps_undone) == (0, 0)
    assert damage.loss == 4.0


def test_steps_before_the_campaign_do_not_count() -> None:
    events = [tried(1.0, 1), tried(2.0, 2, **LOST), tried(3.0, 2)]
    assert measure(events, [], began=2.5).steps_tried == 1
    with pytest.raises(BenchError, match="nothing was committed"):
        measure(events, [], began=3.5)


def test_a_try_counts_once_however_many_groups_were_in_it() -> None:
    """All three groups lose the try; one of them commits the next alone. One commit has no time to share."""
    events = [tried(1.0, 1, replica, **LOST) for replica in (0, 1, 2)] + [tried(2.0, 1, 2)]
    damage = measure(events, [], began=0.0)
    assert (damage.steps_committed, damage.steps_tried, damage.passes_lost) == (1, 2, 3)


def test_a_job_that_begins_anew_has_lost_its_steps() -> None:
    """The one group that had the state crashes by itself: the steps are made again, and are other steps."""
    events = [started(0.0, 0), *(tried(float(step), step) for step in range(1, 11))]
    events += [started(12.0, 0, attempt=1), *(tried(20.0 + step, step, attempt=1) for step in range(1, 4))]
    damage = measure(events, [], began=0.0)
    assert (damage.steps_committed, damage.steps_undone, damage.crashes) == (13, 10, 1)


def test_the_loss_at_the_end_is_of_whole_groups_in_the_last_steps() -> None:
    """Ranks tell their shares; a group of which one is missing, as in a kill, does not count."""
    events = [tried(float(step), step, own_loss=50.0, rank=rank) for step in range(1, 3) for rank in (0, 1)]
    events += [tried(float(step), step, own_loss=2.0 + rank, rank=rank) for step in range(3, 13) for rank in (0, 1)]
    events += [tried(12.0, 12, replica=1, own_loss=9.0)]
    assert measure(events, [], began=0.0).loss == pytest.approx(5.0)


def test_weights_that_differ_are_told() -> None:
    events = [tried(5.0, 5, replica, digest="a") for replica in (0, 1)]
    events += [tried(10.0, 10, replica, digest=f"b{replica}") for replica in (0, 1)]
    assert str(measure(events, [], began=0.0).digests) == "differ (step 10); differ in 1 of 2 comparisons"


def test_the_table_stands_beside_a_run_of_ours(tmp_path: Path) -> None:
    events = [tried(float(step), step, replica, digest="x") for step in (1, 2) for replica in (0, 1)]
    damage = measure([*events, tried(3.0, 3, **LOST)], [Kill(1.5, 0, 0)], began=0.0)
    campaign = Campaign(2, 2, 7, 120.0, [Kill(1.5, 0, 0)], 1, "group-0 ended with status 1", damage)
    (tmp_path / "events").mkdir()
    ours = {"participants": [0], "forward_passes": 1}
    commits = [build(StepCommitted, time=float(step), step=step, **ours) for step in (1, 2, 3)]
    (tmp_path / "events" / "a.jsonl").write_bytes(b"".join(map(encode, commits)))
    text = "\n".join(format_campaign(campaign, tmp_path))
    assert "torchtitan.experiments.ft, 2 groups x 2 ranks" in text
    assert "1 SIGKILLs of a group (1 skipped), 0 crashes of its own" in text
    assert "2 of 3 (66.7 %)" in text
    assert "equal (step 2)" in text
    assert "3 of 3 (100.0 %)" in text
    assert "the job ended early: group-0 ended with status 1" in text
    assert "3 of 3" not in "\n".join(format_campaign(campaign, None))


class FakeTrainer:
    """What `observed` derives from: a torchtitan trainer with an optimizer that steps when the vote passes."""

    def __init__(self, job_config: list[bool]) -> None:
        self.votes = iter(job_config)
        self.step = 0
        weight = torch.nn.Parameter(torch.ones(4))
        self.model_parts = [torch.nn.ParameterList([weight])]
        self.optimizers = SimpleNamespace(optimizers=[torch.optim.SGD([weight], lr=0.5)])
        manager = SimpleNamespace(current_step=lambda: self.step, is_participating=lambda: True)
        self.ft_manager = SimpleNamespace(manager=manager)

    def forward_backward_step(self, scale: float) -> torch.Tensor:
        loss = scale * self.model_parts[0][0].sum()
        loss.backward()
        return loss

    def train_step(self, data_iterator: Any) -> None:
        self.optimizers.optimizers[0].zero_grad()
        for scale in (1.0, 2.0):
            self.forward_backward_step(scale)
        if next(self.votes):
            self.optimizers.optimizers[0].step()
            self.step += 1


def test_the_observed_trainer_tells_votes_losses_and_digests(tmp_path: Path) -> None:
    """One try is lost; equal weights have equal digests, which come only with a commit at each second step."""
    log = EventLog(tmp_path / "events.jsonl", replica=0, rank=0, attempt=0)
    trainer = bench_peer.observed(FakeTrainer, log, 2)([True, False, True, True])
    for _ in range(4):
        trainer.train_step(None)
    events = [untyped(event) for event in read_events(tmp_path)]
    assert [(event["step"], event["committed"]) for event in events] == [(1, True), (2, False), (2, True), (3, True)]
    assert [event["contributed"] for event in events] == [True, False, True, True]
    assert [event["own_loss"] for event in events][:2] == [12.0, pytest.approx(-6.0)]
    assert ["digest" in event for event in events] == [False, False, True, False]
    equal, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    equal.load_state_dict(other.state_dict())
    assert bench_peer.digest([equal]) == bench_peer.digest([other])
    assert bench_peer.digest([equal]) != bench_peer.digest([torch.nn.Linear(2, 2)])


def test_the_observe_flag_is_not_torchtitans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_peer.py", "--observe-every=5", "--job.config_file=x"])
    assert bench_peer._take_observe_flag() == 5
    assert sys.argv == ["bench_peer.py", "--job.config_file=x"]
    assert bench_peer._take_observe_flag() == 0


@pytest.mark.parametrize(
    "arguments", [["--minutes", "0.5"], ["--peer-groups", "1"], ["--peer-ranks", "0"], ["--against", "/no/run"]]
)
def test_bad_usage_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["--campaign-peer", *arguments])
    assert ended.value.code == 2


def test_the_campaign_is_all_that_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """Its figures are saved, and its table is printed; the seed is told."""
    calls = []

    def run_campaign(base: Any, work_dir: Path, minutes: float, seed: int, shape: Any, tell: Any) -> Campaign:
        calls.append((minutes, seed, shape))
        return Campaign(*shape, seed, 120.0, [], 0, None, measure([tried(1.0, 1)], [], began=0.0))

    monkeypatch.setattr(bench, "run_campaign", run_campaign)
    figures = tmp_path / "figures.json"
    arguments = ["--campaign-peer", "--minutes", "2", "--seed", "9", "--peer-groups", "3", "--peer-ranks", "1"]
    assert bench.main([*arguments, "--json", str(figures), "--work-dir", str(tmp_path / "work")]) == 0
    assert calls == [(2.0, 9, (3, 1))]
    output = capsys.readouterr()
    assert "seed 9" in output.err
    assert "1 of 1 (100.0 %)" in output.out
    assert json.loads(figures.read_text())["campaign_peer"]["damage"]["steps_committed"] == 1


def test_only_workers_are_killed() -> None:
    """A pid that has gone to another program since is left alone."""
    code = "print(flush=True); import time; time.sleep(60)"
    processes = [
        subprocess.Popen([sys.executable, "-c", code, name], stdout=subprocess.PIPE) for name in ("bench_peer.py", "x")
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it runs
        worker, other = processes
        assert bench_campaign_peer.is_worker(worker.pid)
        assert not bench_campaign_peer.is_worker(other.pid)
        assert not bench_campaign_peer.is_worker(2**22 + os.getpid())
    finally:
        for process in processes:
            process.kill()
            process.communicate()
