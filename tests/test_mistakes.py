# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A table of mistakes: what a user types, or has in the TOML, and the one line that answers it.

Each line says what is wrong, the rule, the value and what to do. "..." stands for what is left out
here. The exit status is 2 for bad usage or a bad config, 1 for a history that cannot be read; no
mistake starts a process or leaves a file."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

import pytest

from titan_ft.cli.main import main
from titan_ft.launch import launch_plan
from titan_ft.run.events import LaunchFinished, LaunchStarted
from titan_ft.run.log import EventLog

ROOT = Path(__file__).parents[1]
CONFIG = (ROOT / "configs" / "llama3_debug.toml").read_text()
LAUNCH = "launch llama3_debug --replicas 2 --ranks-per-replica 1 --run-dir run"
MINE = LAUNCH.replace("llama3_debug", "mine.toml")


class Mistake(NamedTuple):
    command: str
    """What follows `titan-ft`."""
    answer: str
    status: int = 2
    toml: str = ""
    """What mine.toml has in place of a line of configs/llama3_debug.toml: "line -> other line"."""
    given: str = ""
    """What else there is, see `GIVEN`."""


COMMAND_LINE = [
    Mistake(
        "lanch mine.toml",
        "titan-ft: the command must be one of launch, config, ..., "
        "got 'lanch'; did you mean launch? see titan-ft --help",
    ),
    Mistake(
        "launch llama3_debug",
        "titan-ft: --replicas, --ranks-per-replica and --run-dir must be given, got nothing; for example: titan-ft "
        "launch llama3_debug --replicas 2 --ranks-per-replica 1 --run-dir runs/1 -- --training.steps=60",
    ),
    Mistake(
        "report",
        "titan-ft: RUN_DIR must be given, got nothing; for example: titan-ft report runs/1",
    ),
    Mistake(
        "launch llama3_debug --replica 2",
        "titan-ft: --replica is no option of titan-ft launch; did you mean --replicas? see titan-ft launch --help",
    ),
    Mistake(
        f"{LAUNCH} --replicas two",
        "titan-ft: --replicas must be a whole number, got 'two'; correct it",
    ),
    Mistake(
        f"{LAUNCH} --minutes soon",
        "titan-ft: --minutes must be a number, got 'soon'; correct it",
    ),
    Mistake(
        f"{LAUNCH} --spares",
        "titan-ft: --spares must be followed by a whole number, got nothing; give it, or leave --spares out",
    ),
    Mistake(
        f"{LAUNCH} --resume=yes",
        "titan-ft: --resume must be without a value, got 'yes'; leave the value out",
    ),
    Mistake(
        f"{LAUNCH} outputs/run1",
        "titan-ft: 'outputs/run1' is one argument too many; what has no -- before it is CONFIG",
    ),
    Mistake(
        f"{LAUNCH} --training.steps=60",
        "titan-ft: --training.steps must come after a --, as all of torchtitan's flags: titan-ft launch ... -- "
        "--training.steps=...",
    ),
    Mistake(
        "check run -- --training.steps=60",
        "titan-ft: titan-ft check must be without torchtitan's flags, got '-- --training.steps=60'; it starts no "
        "workers",
    ),
    Mistake(
        f"{LAUNCH} --replicas 0",
        "titan-ft: --replicas must be >= 1, got 0; correct it",
    ),
    Mistake(
        f"{LAUNCH} --lighthouse-port 70000",
        "titan-ft: --lighthouse-port must be <= 65535, got 70000; 0 lets the system choose",
    ),
    Mistake(
        f"{LAUNCH} --metrics-port here",
        "titan-ft: --metrics-port must be PORT (this host only) or HOST:PORT, got 'here'; for example 9464, "
        "0.0.0.0:9464 for Prometheus on another host, or 0 to have a port chosen",
    ),
    Mistake(
        f"{LAUNCH} --drain-timeout 0",
        "titan-ft: --drain-timeout must be > 0, got 0.0; the usual is 25",
    ),
    Mistake(
        f"{LAUNCH} --link-gbps 10",
        "titan-ft: --link-gbps must come with --dry-run, got 10 alone; a launch measures itself",
    ),
    Mistake(
        f"{LAUNCH} --dry-run --host-link-gbps 0",
        "titan-ft: --host-link-gbps must be > 0, got 0; give what one rank has of the link",
    ),
    Mistake(
        f"{LAUNCH} --chaos-seed 3",
        "titan-ft: --chaos-seed must come with --chaos FILE, got 3 alone; give the plan too",
    ),
    Mistake(
        f"{LAUNCH} --chaos every_30s",
        "titan-ft: chaos plan must be the path of a TOML file or one of blog_15s, blog_60s, campaign, ci, every_15s, "
        "every_5s, every_60s, poisson, ranks, script, trace, got every_30s; did you mean every_60s? there is no such "
        "file",
    ),
    Mistake(
        "lighthouse --bind nowhere",
        "titan-ft: --bind must be HOST:PORT, got 'nowhere'; for example [::]:29510, port 0 to have one chosen",
    ),
    Mistake(
        "chaos run kill_grup",
        "titan-ft: fault must name a fault, got 'kill_grup'; did you mean kill_group? faults: ...",
        given="run",
    ),
    Mistake(
        "chaos run kill_group",
        "titan-ft: RUN_DIR must be the folder of a running job, got .../run; it has no events (events/*.jsonl)",
        given="empty folder",
    ),
]

LAUNCHES = [
    Mistake(
        LAUNCH.replace("llama3", "lama3"),
        "titan-ft: config must be the path of a TOML file or one of llama3_1b, llama3_405b, llama3_70b, llama3_8b, "
        "llama3_debug, llama3_debug_diloco, "
        "qwen3_30b_a3b, got lama3_debug; did you mean llama3_debug? there is no such file",
    ),
    Mistake(
        LAUNCH.replace("llama3_debug", "configs/mine.toml"),
        "titan-ft: config file must be readable, got configs/mine.toml (No such file or directory); give the path of "
        "an existing TOML file",
    ),
    Mistake(
        MINE,
        "titan-ft: config file must be valid TOML, got mine.toml: Invalid value (at line ..., column ...); correct "
        "that line",
        toml="steps = 80 -> steps = ",
    ),
    Mistake(
        MINE,
        "titan-ft: fault_tolerance.enable must be true for titan-ft launch, got false; set it, or start plain training "
        "with torchrun -m titan_ft.train",
        toml="enable = true -> enable = false",
    ),
    Mistake(
        MINE,
        "titan-ft: quantize must be a table, got True; write [quantize] with the keys below it",
        toml="[job] -> quantize = true\n[job]",
    ),
    Mistake(
        MINE,
        "titan-ft: [fault_tolerence] is no table of the config; did you mean [fault_tolerance]?",
        toml="[fault_tolerance] -> [fault_tolerence]",
    ),
    Mistake(
        MINE,
        "titan-ft: fault_tolerance.grup_size is not a valid key; did you mean group_size? titan-ft config llama3_debug "
        "--json prints all of them",
        toml="group_size = 2 -> grup_size = 2",
    ),
    Mistake(
        MINE,
        "titan-ft: fault_tolerance.min_replica_size must be <= --replicas (2), got 3; lower it",
        toml="min_replica_size = 1 -> min_replica_size = 3",
    ),
    Mistake(
        MINE,
        "titan-ft: fault_tolerance.lighthouse must be empty for titan-ft launch, which starts its own lighthouse, got "
        "'http://a:1'; remove it, or start the groups with torchrun",
        toml='digest_every = 5 -> lighthouse = "http://a:1"',
    ),
    Mistake(
        f"{LAUNCH} -- --fault_tolerance.group_size=7",
        "titan-ft: --fault_tolerance.group_size must be left to titan-ft launch, got '7'; --replicas says it",
    ),
    Mistake(
        f"{LAUNCH} -- --job.dump_folder elsewhere",
        "titan-ft: --job.dump_folder must be left to titan-ft launch, got 'elsewhere'; --run-dir says it",
    ),
    Mistake(
        f"{LAUNCH} -- training.steps=60",
        "titan-ft: torchtitan's flags must begin with --, got 'training.steps=60'; for example --training.steps=60",
    ),
    Mistake(
        f"{LAUNCH} -- --help",
        "titan-ft: --help must come without a launch, got it after the --; titan-ft config CONFIG -- --help shows "
        "torchtitan's flags",
    ),
    Mistake(
        f"{LAUNCH} -- --fault_tolerance.no_enable",
        "titan-ft: fault_tolerance.enable must be true for titan-ft launch, got false; set it, or start plain training "
        "with torchrun -m titan_ft.train",
    ),
    Mistake(
        f"{LAUNCH} -- --parallelism.tensor_parallel_degree=2",
        "titan-ft: ranks of a group must be a multiple of tensor_parallel_degree (2), got 1; change a degree, or the "
        "ranks (--ranks-per-replica, or torchrun's --nnodes x --nproc-per-node)",
    ),
    Mistake(
        MINE.replace("--ranks-per-replica 1", "--ranks-per-replica 4"),
        "titan-ft: ranks of a group must be data_parallel_shard_degree (2), got 4; change a degree, or the ranks "
        "(--ranks-per-replica, or torchrun's --nnodes x --nproc-per-node)",
        toml="data_parallel_shard_degree = -1 -> data_parallel_shard_degree = 2",
    ),
    Mistake(
        f"{LAUNCH.replace('--ranks-per-replica 1', '--ranks-per-replica 2')} -- "
        "--parallelism.context_parallel_degree=2 --training.seq_len=66",
        "titan-ft: training.seq_len must be a multiple of tensor_parallel_degree (1) x 2 x context_parallel_degree "
        "(2), got 66; change it or a degree",
    ),
    Mistake(
        f"{LAUNCH} --resume",
        "titan-ft: --resume needs an earlier run in --run-dir, got run, which holds none; correct the folder, or leave "
        "--resume out to begin a run there",
    ),
    Mistake(
        LAUNCH,
        "titan-ft: --run-dir must hold no events of an earlier run, got run; give another folder, remove it, or go on "
        "from its last checkpoint with --resume",
        given="run",
    ),
    Mistake(
        LAUNCH,
        "titan-ft: --run-dir must not be in use by another launch, got run, where one is going on; wait for its end, "
        "or give another folder",
        given="run that is going on",
    ),
    Mistake(
        f"{LAUNCH} --resume",
        "titan-ft: --run-dir must not be in use by another launch, got run, where one is going on; wait for its end, "
        "or give another folder",
        given="run that is going on",
    ),
    Mistake(
        f"{LAUNCH} --dry-run",
        "titan-ft: --run-dir must not be in use by another launch, got run, where one is going on; wait for its end, "
        "or give another folder",
        given="run that is going on",
    ),
    Mistake(
        LAUNCH.replace("--ranks-per-replica 1", "--ranks-per-replica 4"),
        "titan-ft: --ranks-per-replica must be <= the GPUs of this host (2), got 4; lower it, or set "
        "CUDA_VISIBLE_DEVICES to nothing to train on the CPU",
        given="two GPUs",
    ),
    Mistake(
        f"{LAUNCH.replace('--replicas 2', '--replicas 3')} -- --fault_tolerance.process_group=nccl",
        "titan-ft: --replicas x --ranks-per-replica must be <= the GPUs of this host (2) with "
        'fault_tolerance.process_group = "nccl", got 3 x 1; lower one, or set "gloo", with which groups share GPUs',
        given="two GPUs",
    ),
]

CONFIGS = [
    Mistake(
        "config mine.toml",
        "titan-ft: fault_tolerance.group_size must be a whole number, got '2'; correct its value",
        toml='group_size = 2 -> group_size = "2"',
    ),
    Mistake(
        "config mine.toml",
        "titan-ft: fault_tolerance.process_group must be one of gloo, nccl, got 'mpi'; the default is gloo",
        toml='process_group = "gloo" -> process_group = "mpi"',
    ),
    Mistake(
        "config llama3_debug --replicas 4 -- --training.global_batch_size=6",
        "titan-ft: training.global_batch_size must be divisible by fault_tolerance.group_size (4), got 6; it counts "
        "the sequences of all groups",
    ),
    Mistake(
        "config llama3_debug -- --parallelism.tensor_parallel_degree=3",
        "titan-ft: parallelism.tensor_parallel_degree must divide the 16 attention heads of llama3 debugmodel, got 3; "
        "lower it",
    ),
    Mistake(
        "config llama3_debug -- --validation.enable --training.seq_len=128 --validation.seq_len=130",
        "titan-ft: validation.seq_len must be <= training.seq_len (128), up to which the positions of llama3 "
        "debugmodel are built, got 130; set it to 128, or raise training.seq_len",
    ),
    Mistake(
        "config llama3_debug -- --parallelism.pipeline_parallel_degree=16",
        "titan-ft: parallelism.pipeline_parallel_degree must leave each of its 16 stages a layer of the 6 layers of "
        "llama3 debugmodel (and 2 for the ends), got 16; lower it",
    ),
    Mistake(
        f"{LAUNCH.replace('--ranks-per-replica 1', '--ranks-per-replica 3')} --dry-run -- "
        "--parallelism.tensor_parallel_degree=3 --training.seq_len=258",
        "titan-ft: parallelism.tensor_parallel_degree must divide the 16 attention heads of llama3 debugmodel, got 3; "
        "lower it",
    ),
    Mistake(
        f"{LAUNCH.replace('--ranks-per-replica 1', '--ranks-per-replica 2')} --dry-run -- --model.name=gpt_oss "
        "--parallelism.context_parallel_degree=2",
        "titan-ft: model must be something that torchtitan can build, cut for 2 ranks as [parallelism] says, got "
        "gpt_oss debugmodel: CP support for gpt-oss model is still in progress; change either",
    ),
    Mistake(
        "config mine.toml",
        "titan-ft: training.steps must be a whole number, got 'many'; correct its value",
        toml='steps = 80 -> steps = "many"',
    ),
    Mistake(
        "config mine.toml",
        "titan-ft: training.stepz is not a valid key; did you mean steps? titan-ft config llama3_debug --json prints "
        "all of them",
        toml="steps = 80 -> stepz = 80",
    ),
    Mistake(
        "config mine.toml",
        "titan-ft: optimiser is not a valid table; did you mean optimizer? titan-ft config llama3_debug --json prints "
        "all of them",
        toml="[optimizer] -> [optimiser]",
    ),
    Mistake(
        "config mine.toml",
        "titan-ft: activation_checkpoint.mode must be one of selective, full, memory_budget, none, got 'nothing'; set "
        "it",
        toml='mode = "none" -> mode = "nothing"',
    ),
    Mistake(
        "config mine.toml",
        "titan-ft: model.flavor must be one of ..., got 'debug'; did you mean debugmodel? set it",
        toml='flavor = "debugmodel" -> flavor = "debug"',
    ),
    Mistake(
        "config llama3_debug -- --optimizer.name=Adamw",
        "titan-ft: optimizer.name must be one of Adam, AdamW, got 'Adamw'; did you mean Adam? set it",
    ),
    Mistake(
        "config mine.toml",
        "titan-ft: training.dataset must be one of ..., c4, c4_test, c4_validation, got 'austin'; did you mean austen? "
        "set it",
        toml='dataset = "austen" -> dataset = "austin"',
    ),
    Mistake(
        "config mine.toml",
        "titan-ft: model.hf_assets_path must be the folder of a tokenizer, got 'nowhere', which is none; download one, "
        'or set it to "titan_ft://tokenizer"',
        toml='hf_assets_path = "titan_ft://tokenizer" -> hf_assets_path = "nowhere"',
    ),
    Mistake(
        "config mine.toml",
        "titan-ft: job.custom_config_module must be a module with a class JobConfig, got one that cannot be used (No "
        "module named 'mine'); install it, or correct the name",
        toml='custom_config_module = "titan_ft.config" -> custom_config_module = "mine.config"',
    ),
    Mistake(
        "config llama3_debug -- --model.name=deepseek_v3 --validation.enable",
        "titan-ft: validation.enable must be false with model.name deepseek_v3, got true: torchtitan cannot validate "
        "that model; set it to false",
    ),
    Mistake(
        "config llama3_debug_diloco -- --model.name=deepseek_v3",
        "titan-ft: fault_tolerance.semi_sync_method is not supported yet for a model that balances the load of its "
        "experts and must be left out with deepseek_v3 debugmodel, got 'diloco'; remove it, or take another model",
    ),
    Mistake(
        "config llama3_debug_diloco -- --training.dtype=bfloat16",
        'titan-ft: training.dtype must be "float32" with fault_tolerance.semi_sync_method (a checkpoint has the '
        "weights that the groups agree on), got 'bfloat16'; training.mixed_precision_param lets the steps compute in "
        "another one",
    ),
    Mistake(
        "config llama3_debug -- --model.name=flux",
        "titan-ft: model.name must be a model that torchtitan's own trainer trains, got 'flux', which has a trainer of "
        "its own (FluxTrainer); take another model, or train this one without titan_ft: torchrun ... -m "
        "torchtitan.models.flux.train",
    ),
    Mistake(
        "config llama3_debug -- --model.name=vlm",
        'titan-ft: job.custom_config_module must be "torchtitan.experiments.vlm.job_config" with model.name vlm, which '
        "reads [data], got 'titan_ft.config'; set it",
    ),
    Mistake(
        "config llama3_debug -- --model.name=autoparallel.llama3",
        "titan-ft: model.name must be a model whose modules are installed, got 'autoparallel.llama3' (No module named "
        "'autoparallel'); install what is missing, or take another model",
    ),
    Mistake(
        "config llama3_debug -- --experimental.custom_import=of_nobody",
        "titan-ft: experimental.custom_import must be a module that can be imported, got 'of_nobody' "
        "(ModuleNotFoundError: No module named 'of_nobody'); install or correct it",
    ),
    Mistake(
        "config llama3_debug -- --experimental.custom_import=module_that_raises",
        "titan-ft: experimental.custom_import must be a module that can be imported, got 'module_that_raises' "
        "(ZeroDivisionError: division by zero); install or correct it",
        given="modules",
    ),
    Mistake(
        "config llama3_debug -- --experimental.custom_import=module_that_ends",
        "titan-ft: experimental.custom_import must be a module that can be imported, got 'module_that_ends' "
        "(SystemExit: not on this machine); install or correct it",
        given="modules",
    ),
    Mistake(
        "config llama3_debug -- --experimental.custom_import=module_that_registers --model.name=minee",
        "titan-ft: model.name must be one of ..., got 'minee'; did you mean mine? set it",
        given="modules",
    ),
    Mistake(
        "config llama3_debug -- --experimental.custom_import=module_that_registers --model.name=mine "
        "--model.flavor=debugmodl",
        "titan-ft: model.flavor must be one of ..., got 'debugmodl'; did you mean debugmodel? set it",
        given="modules",
    ),
    Mistake(
        "config llama3_debug -- --experimental.custom_import=module_that_registers --training.dataset=austin",
        "titan-ft: training.dataset must be one of ..., got 'austin'; did you mean austen? set it",
        given="modules",
    ),
    Mistake(
        "config llama3_debug -- --experimental.custom_import=module_that_registers --model.name=mine "
        "--parallelism.tensor_parallel_degree=3",
        "titan-ft: parallelism.tensor_parallel_degree must divide the 16 attention heads of mine debugmodel, got 3; "
        "lower it",
        given="modules",
    ),
    Mistake(
        "config llama3_debug -- --training.step=60",
        "titan-ft: --training.step is no flag of torchtitan; did you mean --training.steps? correct or remove it",
    ),
    Mistake(
        "config llama3_debug -- --training.steps=sixty",
        "titan-ft: --training.steps must be a whole number, got 'sixty'; correct it",
    ),
    Mistake(
        "config llama3_debug -- --training.dtype float64",
        "titan-ft: --training.dtype must be one of bfloat16, float32, got 'float64'; did you mean bfloat16? set it",
    ),
]

HISTORIES = [
    Mistake(
        "check nowhere",
        "titan-ft: RUN_DIR must be the folder of a run, got nowhere; there is no such folder",
    ),
    Mistake(
        "check run",
        "titan-ft: RUN_DIR must be the folder of a run, got run; it has no events (events/*.jsonl): give the --run-dir "
        "of a run",
        given="empty folder",
    ),
    Mistake(
        "check run",
        "verdict: unknown: run/events/a.jsonl:1 must be a JSON object with time and event, got b'{damaged'; remove "
        "it to read the rest",
        status=1,
        given="damaged line",
    ),
    Mistake(
        "check run --against mine.toml",
        "titan-ft: --against must be the folder of a run, got mine.toml; it is a file",
        given="run",
        toml="steps = 80 -> steps = 81",
    ),
    Mistake(
        "report run/events",
        "titan-ft: RUN_DIR must be the folder of a run, got run/events; it has no events (events/*.jsonl): give the "
        "folder above, .../run",
        given="run",
    ),
    Mistake(
        "report run",
        "titan-ft report: run/events/a.jsonl:1 must be a JSON object with time and event, got b'{damaged'; remove it "
        "to read the rest",
        status=1,
        given="damaged line",
    ),
    Mistake(
        "report run",
        "titan-ft report: run/events/a.jsonl must be a file of events, got Is a directory; mend or remove it",
        status=1,
        given="folder for a file",
    ),
]


def _events(text: str) -> Callable[[], None]:
    def write() -> None:
        Path("run/events").mkdir(parents=True)
        Path("run/events/a.jsonl").write_text(text)

    return write


MODULES = {
    "module_that_raises": "1 / 0",
    "module_that_ends": "raise SystemExit('not on this machine')",
    "module_that_registers": (
        "import os\n"
        "from torchtitan.protocols.train_spec import get_train_spec, register_train_spec\n"
        "assert os.environ['RANK'] == '0'\n"
        "register_train_spec('mine', get_train_spec('llama3'))\n"
    ),
}
"""Modules in the working folder, for `experimental.custom_import`."""


def _modules() -> None:
    for name, text in MODULES.items():
        Path(f"{name}.py").write_text(text)


_LOCKS: list[TextIO] = []
"""What holds the folder of a run, as its launcher does."""


def _going_on() -> None:
    GIVEN["run"]()
    held = Path("run/config.toml").open("w", encoding="utf-8")  # noqa: SIM115
    fcntl.flock(held, fcntl.LOCK_EX)
    _LOCKS.append(held)


@pytest.fixture(autouse=True)
def locks() -> Iterator[None]:
    yield
    while _LOCKS:
        _LOCKS.pop().close()


GIVEN: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "empty folder": lambda: Path("run").mkdir(),
    "run": _events('{"time": 1.0, "event": "unknown_to_us"}\n'),
    "damaged line": _events("{damaged\n"),
    "folder for a file": lambda: Path("run/events/a.jsonl").mkdir(parents=True),
    "two GPUs": lambda: None,
    "modules": _modules,
    "run that is going on": _going_on,
}


@pytest.mark.parametrize(
    "mistake",
    [*COMMAND_LINE, *LAUNCHES, *CONFIGS, *HISTORIES],
    ids=lambda mistake: mistake.toml or mistake.command,
)
def test_a_mistake_is_answered_by_one_line(
    mistake: Mistake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The line as in the table and no other, the exit status, and no file more than before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(launch_plan, "num_gpus", lambda: 2 if mistake.given == "two GPUs" else None)
    GIVEN[mistake.given]()
    if mistake.toml:
        old, new = mistake.toml.split(" -> ")
        assert old in CONFIG
        Path("mine.toml").write_text(CONFIG.replace(old, new))
    before = sorted(tmp_path.rglob("*"))

    status = main(mistake.command.split())

    printed = capsys.readouterr()
    (line,) = (printed.out + printed.err).splitlines()
    assert re.fullmatch(re.escape(mistake.answer).replace(r"\.\.\.", ".+"), line), line
    assert status == mistake.status
    assert sorted(tmp_path.rglob("*")) == before


def test_a_group_size_that_does_not_count_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--replicas goes before the TOML, as flags do, and that is a line."""
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(CONFIG.replace("group_size = 2", "group_size = 7"))
    assert main([*MINE.split(), "--dry-run"]) == 0
    assert capsys.readouterr().err == (
        "titan-ft: fault_tolerance.group_size = 7 of mine.toml does not count here, --replicas 2 does\n"
    )


def test_groups_that_share_gpus_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With gloo they can, and share the memory too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(launch_plan, "num_gpus", lambda: 1)
    assert main([*LAUNCH.split(), "--dry-run"]) == 0
    assert (
        capsys.readouterr().err
        == "titan-ft: 2 groups x 1 ranks share the 1 GPUs of this host, and their memory\n"
    )


def test_wandb_that_is_missing_is_said_by_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything starts; torchtitan says it in the log of each rank."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch_plan, "find_spec", lambda name: None)
    assert main([*LAUNCH.split(), "--dry-run", "--", "--metrics.enable_wandb"]) == 0
    assert capsys.readouterr().err == (
        "titan-ft: metrics.enable_wandb is true and wandb is not installed: nothing is written for W&B; pip install "
        "wandb, or set it to false\n"
    )


@pytest.mark.parametrize("command", ["check", "top", "report"])
@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_an_output_that_lacks_characters(command: str, encoding: str, tmp_path: Path) -> None:
    """They are replaced; it was a traceback, with the status of a check that does not hold."""
    log = EventLog(tmp_path / "events" / "launcher-1.jsonl")
    log.emit(LaunchStarted(replicas=1, ranks_per_replica=1, spares=0, job_id="a"))
    log.emit(LaunchFinished(code=1, reason="RuntimeError: \u2192 \u96fb"))
    log.close()
    ended = subprocess.run(
        [sys.executable, "-m", "titan_ft", command, str(tmp_path)],
        env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.stderr == b""
    assert b"RuntimeError: ? ?" in ended.stdout


def test_a_worker_that_nobody_has_started(tmp_path: Path) -> None:
    """One line at once, before torch is imported; it was a KeyError after half a minute."""
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "titan_ft.train", "--job.config_file=a.toml"],
        env={
            **{name: value for name, value in os.environ.items() if name != "RANK"},
            "PYTHONPATH": str(ROOT),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("import time:")]
    assert (ended.returncode, ended.stdout) == (2, "")
    assert lines == [
        "titan_ft: python -m titan_ft.train must be started by titan-ft launch, titan-ft group or torchrun, got no "
        "RANK in the environment; for one process: torchrun --nproc-per-node 1 -m titan_ft.train ..."
    ]
    assert "| torch\n" not in ended.stderr
