# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Launches on data that may resume at a wrong place: killed twice, and compared with an
uninterrupted reader.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.client import REPOSITORY
from harness.job import CONFIG

from titan_ft.run.events import DataOpened, LoaderChecked, StepCommitted, WorkerStarted
from titan_ft.run.log import read_events
from titan_ft.run.paths import RunPaths

STEPS = 40
KILLS = ((8, 1), (22, 0))
"""Step and group of each SIGKILL; the group has contributed to the step."""

MODULE = '''
"""Data sets of a user's own: an order that each process draws anew, and a state that NumPy makes."""
import os
import numpy as np, torch
from datasets import load_dataset
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.protocols import train_spec
import dataclasses

TEXTS = os.environ["TEXTS"]
text = lambda sample: sample["text"]
by_process = lambda path: load_dataset("json", data_files=path, split="train").shuffle(seed=os.getpid())
unseeded = lambda path: load_dataset("json", data_files=path, split="train").shuffle()
for name, loader in (("by_process", by_process), ("unseeded", unseeded)):
    DATASETS[name] = DatasetConfig(path=TEXTS, loader=loader, sample_processor=text)

class Drawn(IterableDataset):
    def __init__(self, rank, length, bad):
        self.rng, self.length, self.bad = np.random.RandomState(rank), length, bad
    def __iter__(self):
        while True:
            tokens = torch.from_numpy(self.rng.randint(0, 250, self.length + 1))
            yield {"input": tokens[:-1]}, tokens[1:]
    def state_dict(self):
        return {"rng": self.rng if self.bad else self.rng.get_state()}
    def load_state_dict(self, state):
        self.rng.set_state(state["rng"])

def build(dp_world_size, dp_rank, tokenizer, job_config):
    data = Drawn(dp_rank, job_config.training.seq_len, job_config.training.dataset == "bad")
    batch = job_config.training.local_batch_size
    return ParallelAwareDataloader(data, dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=batch)

if os.environ.get("DRAWN"):
    spec = train_spec.get_train_spec("llama3")
    train_spec._extra_train_specs["drawn"] = dataclasses.replace(spec, build_dataloader_fn=build)
'''


@dataclass
class Run:
    """A finished launch."""

    paths: RunPaths
    env: dict[str, str]
    status: int
    output: str

    def check(self, *options: str) -> tuple[int, str]:
        """Return exit status and output of `titan-ft check`."""
        command = [sys.executable, "-m", "titan_ft", "check", str(self.paths.root), *options]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)
        return done.returncode, " ".join(done.stdout.split())


def launch(
    folder: Path, *flags: str, kills: tuple[tuple[int, int], ...] = KILLS, **variables: str
) -> Run:
    """Run a job of two groups. Kill each group once its current attempt has contributed to
    a step.
    """
    (folder / "user_data.py").write_text(MODULE)
    texts = folder / "texts.jsonl"
    texts.write_text(
        "".join(
            f'{{"text": "Sentence {number} has {number * 7919} words."}}\n' for number in range(300)
        )
    )
    paths = RunPaths(folder / "run")
    env = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{folder}", "TEXTS": str(texts), **variables}
    command = [
        sys.executable,
        "-m",
        "titan_ft",
        "launch",
        str(CONFIG),
        "--replicas=2",
        "--ranks-per-replica=1",
    ]
    usual = ["--training.seq_len=64", "--training.local_batch_size=1", f"--training.steps={STEPS}"]
    with (folder / "output").open("w") as output:
        run = subprocess.Popen(
            [*command, f"--run-dir={paths.root}", "--", *usual, *flags],
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        for step, group in kills:
            os.kill(_pid_after(run, paths, step, group), signal.SIGKILL)
        status = run.wait(timeout=180)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    return Run(paths, env, status, (folder / "output").read_text())


def _pid_after(run: subprocess.Popen[bytes], paths: RunPaths, step: int, group: int) -> int:
    """Wait until the last attempt of a group has contributed to a step; return the process."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and run.poll() is None:
        events = [event for event in read_events(paths.events) if event.replica == group]
        started = [event for event in events if isinstance(event, WorkerStarted)]
        made = [
            event
            for event in events
            if isinstance(event, StepCommitted) and event.pid == started[-1].pid
        ]
        if made and made[-1].step >= step and made[-1].contributed:
            return started[-1].pid
        time.sleep(0.1)
    pytest.fail(f"group {group} has not contributed to step {step}")


def short_text(folder: Path) -> Path:
    """A text of a few documents, of which a slot trains several epochs."""
    path = folder / "short.txt"
    path.write_text(
        "".join(
            f"Chapter {number}\n\nIt has {number * 7919} words, {number}.\n\n"
            for number in range(9)
        )
    )
    return path


Flags = Callable[[Path], list[str]]
EXACT: dict[str, tuple[Flags, dict[str, str]]] = {
    "shuffled stream": (lambda folder: ["--training.dataset=austen_shuffled"], {}),
    "stream, later epochs": (
        lambda folder: [
            "--training.dataset=austen_streamed",
            f"--training.dataset_path={short_text(folder)}",
        ],
        {},
    ),
    "shuffled stream, later epochs, worker": (
        lambda folder: [
            "--training.dataset=austen_shuffled",
            f"--training.dataset_path={short_text(folder)}",
            "--training.dataloader.num_workers=1",
        ],
        {},
    ),
    "NumPy's generator as the state": (
        # Without texts to tokenize steps are short: the job would be over before a group is back.
        lambda folder: [
            "--model.name=drawn",
            "--experimental.custom_import=user_data",
            "--training.seq_len=1024",
        ],
        {"DRAWN": "1"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXACT)
def test_the_batches_are_those_of_an_uninterrupted_reader(tmp_path: Path, kind: str) -> None:
    """After two deaths every batch is the right one. The run proved its openings itself, except
    those of a user's loader."""
    flags, variables = EXACT[kind]
    run = launch(tmp_path, *flags(tmp_path), **variables)
    assert run.status == 0, run.output
    opened = [
        e for e in read_events(run.paths.events) if isinstance(e, DataOpened) and e.first_batch > 0
    ]
    assert [event.exact for event in opened] == [True] * len(KILLS)
    status, said = run.check()
    if variables:
        assert status == 1, said
        assert "cannot be looked into; its first batch was right" in said
    else:
        assert status == 0, said
        assert "0 lost, 0 repeated" in said
    status, said = run.check("--reread")
    assert status == 0, said
    assert "0 lost, 0 repeated" in said
    assert "of 2 shards compared with what was trained" in said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["by_process", "unseeded"])
def test_data_that_do_not_go_on_are_never_called_whole(tmp_path: Path, kind: str) -> None:
    """An order drawn at each opening is found at the start; one drawn by each process, at its next
    opening.
    """
    run = launch(tmp_path, f"--training.dataset={kind}", "--experimental.custom_import=user_data")
    assert run.status == 0, run.output
    events = read_events(run.paths.events)
    checked = [event for event in events if isinstance(event, LoaderChecked)]
    assert {event.exact for event in checked} == {kind == "by_process"}
    opened = [event for event in events if isinstance(event, DataOpened) and event.first_batch > 0]
    assert [event.exact for event in opened] == [False] * len(KILLS)
    assert ("does not go on exactly where its state was saved" in run.output) is (
        kind == "unseeded"
    )
    assert "got another batch than follows there" in run.output
    for options in ((), ("--reread",)):
        status, said = run.check(*options)
        assert status == 1
        assert "verdict: unknown" in said
        assert "0 lost" not in said


@pytest.mark.slow
def test_a_state_that_cannot_travel_ends_the_run_at_its_start(tmp_path: Path) -> None:
    """A loader state that cannot be sent ends the run with one line and status 2, because no group
    could heal.
    """
    flags = [
        "--model.name=drawn",
        "--training.dataset=bad",
        "--experimental.custom_import=user_data",
    ]
    run = launch(tmp_path, *flags, kills=(), DRAWN="1")
    assert run.status == 2, run.output
    assert "got numpy.random.mtrand.RandomState at " in run.output
    assert "Traceback" not in run.output
