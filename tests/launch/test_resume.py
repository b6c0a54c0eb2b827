# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The allowed differences between a run's earlier launch and its resume."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_launch_plan import began
from titan_ft import resolved_config
from titan_ft.cli.main import main
from titan_ft.config import ConfigError, flat_values
from titan_ft.launch.launch_plan import LaunchPlan
from titan_ft.launch.resume import (
    ARITHMETIC,
    DATA,
    FIELDS,
    HARMLESS,
    Command,
    add_derived_values,
    check_allowed,
    compare,
    find_changes,
    kind_of_field,
    read_command,
    resolve_in_child,
)
from titan_ft.options import Launch
from titan_ft.run.events import ChangedField

TOML = """
[job]
custom_config_module = "titan_ft.config"
[model]
hf_assets_path = "titan_ft://tokenizer"
[fault_tolerance]
enable = true
[optimizer]
lr = 8e-4
[training]
dataset = "austen"
local_batch_size = 2
seq_len = 256
steps = 60
[checkpoint]
enable = true
last_save_model_only = false
"""


@functools.cache
def resolved(earlier: bool, flags: tuple[str, ...], text: str) -> Mapping[str, Any]:
    """Resolve flags for a TOML of this text. Cached, because most tests share one of the two
    launches.
    """
    return resolved_config.resolve_earlier(flags) if earlier else resolved_config.resolve(flags)


def resolve_two(
    earlier: Sequence[str], now: Sequence[str]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    texts = [Path(flags[0].partition("=")[2]).read_text() for flags in (earlier, now)]
    return resolved(True, tuple(earlier), texts[0]), resolved(False, tuple(now), texts[1])


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The TOML of an earlier launch."""
    path = tmp_path_factory.mktemp("config") / "run.toml"
    path.write_text(TOML)
    return path


def changes(
    toml: Path,
    *flags: str,
    before: tuple[str, ...] = (),
    shape: tuple[int, int] = (2, 2),
    former_shape: tuple[int, int] = (2, 2),
    text: str = "",
) -> Mapping[str, ChangedField]:
    """Return the differences from an earlier launch of `toml`. This launch has further flags, or
    another text.
    """
    now = toml
    if text:
        now = toml.with_name("now.toml")
        now.write_text(text)
    found, _ = find_changes(
        Command(toml, *former_shape, before), Command(now, *shape, flags), resolve=resolve_two
    )
    return found


def refused(found: Mapping[str, ChangedField]) -> dict[str, str]:
    return {name: change.kind for name, change in found.items() if change.kind != HARMLESS}


def all_fields(schema: Any, prefix: str = "") -> Iterator[str]:
    for field in fields(schema):
        if is_dataclass(field.type):
            yield from all_fields(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def merged_schema() -> Any:
    from titan_ft.host import cpu

    cpu.prepare()
    from torchtitan.config import ConfigManager, JobConfig

    from titan_ft import config

    return ConfigManager._merge_configs(JobConfig, config.JobConfig)


def test_each_field_is_sorted() -> None:
    """By its own name or by its table. So each new field of torchtitan or of this project gets a
    decision.
    """
    names = list(all_fields(merged_schema()))
    assert len(names) > 150
    assert {"optimizer.lr", "training.dataloader.num_workers", "fault_tolerance.job_id"} <= set(
        names
    )
    entries = [entry for kind in FIELDS.values() for entry in kind]
    assert len(entries) == len(set(entries))
    for name in names:
        assert any(name == entry or name.startswith(f"{entry}.") for entry in entries), (
            f"{name} is not sorted"
        )
    for entry in entries:
        assert any(name == entry or name.startswith(f"{entry}.") for name in names), (
            f"{entry} is no field"
        )
    assert all(reason for kind in FIELDS.values() for reason in kind.values())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("optimizer.lr", ARITHMETIC),
        ("optimizer.implementation", HARMLESS),
        ("activation_checkpoint.mode", HARMLESS),
        ("activation_checkpoint.preserve_rng_state", ARITHMETIC),
        ("quantize.linear.float8.recipe_name", ARITHMETIC),
        ("training.seq_len", DATA),
        ("training.dataloader.num_workers", DATA),
        ("training.dataloader.pin_memory", HARMLESS),
        ("metrics.log_freq", HARMLESS),
        ("mine.field", ARITHMETIC),
        ("training.mine", ARITHMETIC),
        ("fault_tolerance.mine", ARITHMETIC),
    ],
)
def test_kind_of_a_field(name: str, kind: str) -> None:
    """The longest name counts; the effect of a user's field is unknown."""
    assert kind_of_field(name) == kind


@pytest.mark.parametrize(
    "flags",
    [
        ("--optimizer.lr", "0.0008"),
        ("--optimizer.lr=8e-4", "--training.steps", "60"),
        ("--checkpoint.no-last-save-model-only",),
        ("--training.global_batch_size=8",),  # as -1 comes to: 2 x 2 groups x 2 ranks
        ("--lr_scheduler.total_steps=60",),  # as training.steps says
        ("--parallelism.data_parallel_shard_degree=2",),
        ("--metrics.log_freq=10",),
        ("--fault_tolerance.semi_sync_method=None",),
    ],
)
def test_the_same_value_is_no_change(toml: Path, flags: tuple[str, ...]) -> None:
    """The value may be in the TOML, in a flag, a default, or a resolved value."""
    assert changes(toml, *flags) == {}
    assert changes(toml, before=flags) == {}


def test_another_spelling_of_the_toml_is_no_change(toml: Path) -> None:
    """Comments, order, and a value that moved to a flag."""
    text = TOML.replace("lr = 8e-4", "# a comment\nlr = 0.0008").replace("steps = 60\n", "")
    assert changes(toml, "--training.steps=60", text=text) == {}


def test_a_path_may_be_written_in_several_ways(toml: Path, tmp_path: Path) -> None:
    """The same file is the same data."""
    text = tmp_path / "text.txt"
    text.write_text("a book")
    (tmp_path / "link.txt").symlink_to(text)
    flag = "--training.dataset_path="

    def kinds(path: str) -> dict[str, str]:
        earlier, now = (Command(toml, 2, 2, (f"{flag}{name}",), tmp_path) for name in (text, path))
        return refused(find_changes(earlier, now, resolve=resolve_two)[0])

    assert kinds("text.txt") == kinds("./link.txt") == {}
    assert kinds("other.txt") == {"training.dataset_path": DATA}


@pytest.mark.parametrize(
    ("former", "now", "same"),
    [
        ("d.txt", "d.txt", False),
        ("{a}/d.txt", "d.txt", False),
        ("d.txt", "{a}/d.txt", True),
        ("./d.txt", "../a/d.txt", True),
        ("{a}/d.txt", "../a/d.txt", True),
        ("allenai/c4", "allenai/c4", True),  # of no file, but of a data set on the Hub
        ("allenai/c4", "other/c4", False),
    ],
)
def test_a_relative_path_starts_where_its_launch_was_given(
    toml: Path, tmp_path: Path, former: str, now: str, same: bool
) -> None:
    """The same text may lead to other data, and another text to the same data."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "d.txt").write_text(name)
    first, second = (
        f"--training.dataset_path={path.format(a=tmp_path / 'a')}" for path in (former, now)
    )
    earlier, later = (
        Command(toml, 2, 2, (first,), tmp_path / "a"),
        Command(toml, 2, 2, (second,), tmp_path / "b"),
    )
    found, _ = find_changes(earlier, later, resolve=resolve_two)
    assert refused(found) == ({} if same else {"training.dataset_path": DATA})


@pytest.mark.parametrize(
    ("now", "same"), [("d.txt", True), ("./d.txt", False), ("{folder}/d.txt", False)]
)
def test_a_relative_path_of_an_earlier_version(
    toml: Path, tmp_path: Path, now: str, same: bool
) -> None:
    """The folder of that launch is unknown, so the text counts."""
    (tmp_path / "d.txt").write_text("a book")
    flag = f"--training.dataset_path={now.format(folder=tmp_path)}"
    earlier, later = (
        Command(toml, 2, 2, ("--training.dataset_path=d.txt",)),
        Command(toml, 2, 2, (flag,), tmp_path),
    )
    found, _ = find_changes(earlier, later, resolve=resolve_two)
    assert refused(found) == ({} if same else {"training.dataset_path": DATA})


@pytest.mark.parametrize(
    ("flags", "kinds"),
    [
        (("--optimizer.lr=1e-3",), {"optimizer.lr": ARITHMETIC}),
        (("--training.local_batch_size=4",), {"training.local_batch_size": DATA}),
        (("--training.global_batch_size=16",), {"training.global_batch_size": DATA}),
        (("--lr_scheduler.total_steps=100",), {"lr_scheduler.total_steps": ARITHMETIC}),
        (("--model.converters=float8",), {"model.converters": ARITHMETIC}),
        (
            ("--fault_tolerance.exchange_dtype=bfloat16",),
            {"fault_tolerance.exchange_dtype": ARITHMETIC},
        ),
        (
            ("--fault_tolerance.semi_sync_method=diloco",),
            {"fault_tolerance.semi_sync_method": ARITHMETIC},
        ),
        (
            ("--checkpoint.exclude_from_loading=optimizer",),
            {"checkpoint.exclude_from_loading": ARITHMETIC},
        ),
        (("--debug.seed=7",), {"debug.seed": ARITHMETIC}),
        (("--training.steps=90", "--metrics.log_freq=1", "--checkpoint.interval=7"), {}),
        (("--fault_tolerance.min_replica_size=2", "--fault_tolerance.hang_timeout_seconds=60"), {}),
        (
            (
                "--compile.enable",
                "--activation_checkpoint.mode=full",
                "--optimizer.implementation=foreach",
            ),
            {},
        ),
    ],
)
def test_flags_and_toml_are_compared_together(
    toml: Path, flags: tuple[str, ...], kinds: dict[str, str]
) -> None:
    """A flag after the -- changes a run as much as the TOML does, in either launch."""
    found = changes(toml, *flags)
    assert len(found) >= len(kinds)
    assert refused(found) == kinds
    assert refused(changes(toml, before=flags)) == kinds


@pytest.mark.parametrize(
    ("former", "now", "kinds"),
    [
        ((2, 2), (3, 2), {"fault_tolerance.group_size": DATA}),
        ((2, 2), (2, 1), {"parallelism.data_parallel_shard_degree": DATA}),
        # The same four shards, so that each batch is the one that it was.
        ((2, 2), (4, 1), {}),
        ((4, 1), (1, 4), {}),
    ],
)
def test_groups_and_ranks(
    toml: Path, former: tuple[int, int], now: tuple[int, int], kinds: dict[str, str]
) -> None:
    """Only the number of shards of the data counts."""
    found = changes(toml, shape=now, former_shape=former)
    assert refused(found) == kinds
    assert ("ranks_per_replica" in found) == (former[1] != now[1])


def test_groups_that_train_by_themselves_are_arithmetic(toml: Path) -> None:
    """In a semi-synchronous method, a round of four groups differs from a round of two, however the
    data is cut.
    """
    method = ("--fault_tolerance.semi_sync_method=local_sgd",)
    found = changes(toml, *method, before=method, shape=(4, 1), former_shape=(2, 2))
    assert refused(found) == {"fault_tolerance.group_size": ARITHMETIC}


def test_ranks_of_another_degree(toml: Path) -> None:
    """Twice the ranks for tensor parallelism: the data is cut as before, and only rounding
    differs.
    """
    tensor = "--parallelism.tensor_parallel_degree=2"
    found = changes(toml, tensor, shape=(2, 4))
    assert refused(found) == {}
    assert {"ranks_per_replica", "parallelism.tensor_parallel_degree"} == set(found)
    assert refused(changes(toml, tensor, shape=(2, 2))) == {
        "parallelism.data_parallel_shard_degree": DATA
    }


def message(found: Mapping[str, ChangedField], *named: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_allowed(found, named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_refusal_names_all_and_the_way_on(toml: Path) -> None:
    """The refusal names each field with both values, and the option to add to the command. That
    option is accepted.
    """
    found = changes(
        toml, "--optimizer.lr=1e-3", "--training.seq_len=128", "--metrics.log_freq=1", shape=(3, 2)
    )
    assert message(found) == (
        "--resume must keep the arithmetic and the data of the earlier launch, got fault_tolerance.group_size "
        "(--replicas) = 3 (was 2, of the data), optimizer.lr = 0.001 (was 0.0008, of the arithmetic), "
        "training.seq_len = 128 (was 256, of the data); set them back, or go on with the change by "
        "--resume-with replicas,lr,seq_len"
    )
    assert message(found, "lr").endswith("--resume-with lr,replicas,seq_len")
    check_allowed(found, ["replicas", "lr", "seq_len"])
    assert message(changes(toml, "--optimizer.lr=1e-3")).endswith(
        "got optimizer.lr = 0.001 (was 0.0008, of the arithmetic); set it back, or go on with the change by "
        "--resume-with lr"
    )


@pytest.mark.parametrize(
    "names",
    [
        ["optimizer.lr", "training.seq_len"],
        ["--optimizer.lr", "--training.seq-len"],
        ["lr", "seq-len"],
        ["lr", "seq_len", "log_freq"],  # it differs, too
    ],
)
def test_spellings_of_a_name(toml: Path, names: list[str]) -> None:
    """The full name, its last part, or the spelling of a flag."""
    check_allowed(
        changes(toml, "--optimizer.lr=1e-3", "--training.seq_len=128", "--metrics.log_freq=1"),
        names,
    )


@pytest.mark.parametrize(
    ("names", "shape"),
    [
        (["replicas"], (3, 2)),
        (["--replicas"], (3, 2)),
        (["group_size"], (3, 2)),
        (["fault_tolerance.group_size"], (3, 2)),
        (["ranks_per_replica"], (2, 1)),
        (["ranks-per-replica"], (2, 1)),
        (["data_parallel_shard_degree"], (2, 1)),
        (["replicas", "ranks_per_replica"], (3, 1)),
    ],
)
def test_options_are_names_too(toml: Path, names: list[str], shape: tuple[int, int]) -> None:
    """An option of the launcher stands for the fields that follow from it."""
    found = changes(toml, shape=shape)
    check_allowed(found, names)
    offered = message(found).rpartition("--resume-with ")[2].split(",")
    check_allowed(found, offered)


@pytest.mark.parametrize("named", [(), ("num_workers",), ("training.dataloader.num_workers", "lr")])
def test_other_workers_of_the_loader_cannot_go_on(toml: Path, named: tuple[str, ...]) -> None:
    """The loaders of the resume would refuse the saved states, at each start again."""
    found = changes(toml, "--training.dataloader.num_workers=1", "--optimizer.lr=1e-3")
    assert message(found, *named) == (
        "--resume must keep training.dataloader.num_workers, got 1 (was 0): the state of a loader fits no other number "
        "of workers, whatever --resume-with names; set it back, or begin a new run in another --run-dir"
    )


def test_a_name_that_does_not_differ(toml: Path) -> None:
    """The name may be mistyped, so the user learns that the launches agree on this field."""
    found = changes(toml, "--optimizer.lr=1e-3")
    assert message(found, "lrr") == (
        "--resume-with must name fields that differ from the earlier launch (optimizer.lr), got 'lrr'; did you mean "
        "lr? leave it out"
    )
    assert message(found, "lr", "seq_len").endswith("(optimizer.lr), got 'seq_len'; leave it out")
    assert message({}, "lr").endswith("(none does), got 'lr'; leave it out")


def test_a_name_of_two_fields(toml: Path) -> None:
    """If the last part of a name fits several fields, the error offers the full names."""
    found = changes(
        toml, "--training.dtype=bfloat16", "--training.seq_len=128", "--validation.seq_len=64"
    )
    assert message(found, "seq_len") == (
        "--resume-with must name one of training.seq_len, validation.seq_len, got 'seq_len'; give its full name"
    )
    assert message(found).endswith("--resume-with dtype,training.seq_len")


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        (
            ("--training.steps=90",),
            "the former schedule ends at step 60; set lr_scheduler.total_steps at the first",
        ),
        (("--training.steps=40",), "lr_scheduler.total_steps = 60 keeps the former schedule"),
        (("--training.steps=90", "--lr_scheduler.min_lr_factor=1.0"), ""),
        (("--training.steps=40", "--lr_scheduler.total_steps=60"), ""),
        (("--optimizer.lr=1",), ""),
    ],
)
def test_a_longer_run_has_another_lr_schedule(
    toml: Path, flags: tuple[str, ...], note: str
) -> None:
    """The change is accepted, because a resume may train longer, and it is reported."""
    command = Command(toml, 2, 2, flags)
    found, said = find_changes(Command(toml, 2, 2, ()), command, resolve=resolve_two)
    assert "training.steps" not in refused(found)
    assert bool(said) == bool(note)
    assert note in said
    assert "\n" not in said
    if note:
        assert said.startswith(
            f"training.steps was 60, is {found['training.steps'].now}, and the LR schedule follows"
        )


def test_fields_of_a_user_s_config_module(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fields are compared, and count as arithmetic, also if one of the launches has no such
    module.
    """
    (tmp_path / "mine_of_resume.py").write_text(
        "from dataclasses import dataclass, field\n"
        "@dataclass\nclass Mine:\n    factor: float = 1.0\n"
        "@dataclass\nclass JobConfig:\n    mine: Mine = field(default_factory=Mine)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = "--job.custom_config_module=mine_of_resume"
    found = changes(toml, module, "--mine.factor=2.0", before=(module,))
    assert refused(found) == {"mine.factor": ARITHMETIC}
    found = changes(toml, module)
    assert refused(found) == {"mine.factor": ARITHMETIC}
    assert found["mine.factor"].before is None
    assert "mine.factor = 1.0 (was not set, of the arithmetic)" in message(found)


def test_the_earlier_launch_is_not_checked_again(toml: Path, tmp_path: Path) -> None:
    """That launch has trained. So a tokenizer that has moved is a difference, not a mistake."""
    gone = f"--model.hf_assets_path={tmp_path / 'gone'}"
    assert refused(changes(toml, before=(gone,))) == {"model.hf_assets_path": DATA}
    with pytest.raises(
        ConfigError, match=r"model\.hf_assets_path must be the folder of a tokenizer"
    ):
        changes(toml, gone)


def test_a_mistake_in_this_launch_is_its_line(toml: Path) -> None:
    """The error is the same as without --resume."""
    with pytest.raises(
        ConfigError,
        match=r"--optimizer.lrr is no flag of torchtitan; did you mean --optimizer.lr\?",
    ):
        changes(toml, "--optimizer.lrr=3")


@pytest.mark.slow
def test_the_launcher_asks_a_process_of_its_own(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher itself never imports torch. Output of a user's module in that process is not
    taken for the answer.
    """
    (tmp_path / "loud_config.py").write_text(
        "import os, sys\nprint('{')\nos.write(1, b'noise')\n"
        "from dataclasses import dataclass\n@dataclass\nclass JobConfig:\n    pass\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    loud = "--job.custom_config_module=loud_config"
    earlier = Command(toml, 2, 2, ()).worker_flags()
    before, now = resolve_in_child(
        earlier, Command(toml, 2, 2, (loud, "--optimizer.lr=1e-3")).worker_flags()
    )
    assert (before["optimizer.lr"], now["optimizer.lr"]) == (8e-4, 1e-3)
    assert refused(compare(add_derived_values(before, 2), add_derived_values(now, 2))) == {
        "optimizer.lr": ARITHMETIC
    }
    with pytest.raises(
        ConfigError, match=r"^--training.steps must be a whole number, got 'x'; correct it$"
    ):
        resolve_in_child(earlier, [*earlier, "--training.steps=x"])


@pytest.mark.parametrize(
    ("prints", "line"),
    [
        ('{"earlier": {"a": 1}, "now": {"a": 2}}', ""),
        ('{"error": "a must be b, got c; set it"}', "^a must be b, got c; set it$"),
        (
            "",
            "^--resume must be able to read both configs, got: Error: No module named 'torchtitan'; install",
        ),
    ],
)
def test_what_that_process_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prints: str, line: str
) -> None:
    """Values, a mistake in the config, or the last line of the process's error."""
    script = tmp_path / "python"
    said = "echo Traceback >&2; echo \"Error: No module named 'torchtitan'\" >&2"
    script.write_text(f"#!/bin/sh\ncat >{tmp_path}/asked; {said}; printf %s '{prints}'\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    if not line:
        assert resolve_in_child(["--x"], ["--y"]) == ({"a": 1}, {"a": 2})
        assert json.loads((tmp_path / "asked").read_text()) == [["--x"], ["--y"]]
        return
    with pytest.raises(ConfigError, match=line) as caught:
        resolve_in_child(["--x"], ["--y"])
    assert "\n" not in str(caught.value)


# The plan of a launch


@pytest.fixture
def run(tmp_path: Path) -> LaunchPlan:
    """An earlier launch that has a checkpoint."""
    config = tmp_path / "run.toml"
    config.write_text(TOML)
    first = LaunchPlan(
        Launch(config, 2, 2, tmp_path / "run"), ["--optimizer.lr=2e-3", "--metrics.log_freq", "5"]
    )
    first.write()
    began(first.paths)
    (first.paths.checkpoint / "step-10").mkdir(parents=True)
    return first


def again(
    run: LaunchPlan, *flags: str, shape: tuple[int, int] = (2, 2), **options: Any
) -> LaunchPlan:
    launch = Launch(run.config, *shape, run.paths.root, resume=True, **options)
    return LaunchPlan(launch, list(flags), resolve=resolve_two)


def test_the_command_of_the_earlier_launch(run: LaunchPlan) -> None:
    """The first line of the run's config is the command with its flags, whatever characters the
    flags contain.
    """
    found = read_command(run.paths.config)
    assert found == Command(
        run.paths.config, 2, 2, ("--optimizer.lr=2e-3", "--metrics.log_freq", "5"), Path.cwd()
    )
    run.paths.config.write_text(
        "# titan-ft launch 'my run.toml' --replicas 3 --ranks-per-replica 1 --run-dir 'a b' --spares 1 --resume "
        "--resume-with lr -- '--job.description=it'\"'\"'s -- mine'\n[job]\n"
    )
    assert read_command(run.paths.config) == Command(
        run.paths.config, 3, 1, ("--job.description=it's -- mine",)
    )


@pytest.mark.parametrize("text", [None, "", "[training]\n", "# a comment\n"])
def test_a_folder_that_does_not_say_how_it_was_launched(run: LaunchPlan, text: str | None) -> None:
    """For example, a run whose groups were started one by one. Nothing can be compared."""
    run.paths.config.unlink()
    if text is not None:
        run.paths.config.write_text(text)
    with pytest.raises(
        ConfigError, match=r"^--resume needs the command of the earlier launch as the first line of"
    ):
        again(run)


def test_the_same_command_is_not_resolved(run: LaunchPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most resumes have the same command, and to resolve it takes seconds."""

    def resolve(*_: Any) -> Any:
        raise AssertionError("nothing to resolve")

    options = Launch(run.config, 2, 2, run.paths.root, resume=True)
    plan = LaunchPlan(options, run.worker_args, resolve=resolve)
    assert (plan.changes, plan.notes) == ({}, [])


def test_a_change_is_refused_unless_it_is_named(run: LaunchPlan) -> None:
    """The flags of the earlier launch count: without them the resume has another LR."""
    with pytest.raises(
        ConfigError, match=r"got optimizer.lr = 0.0008 \(was 0.002, of the arithmetic\); .*with lr$"
    ):
        again(run)
    plan = again(run, resume_with="lr")
    assert plan.changes["optimizer.lr"] == ChangedField(before=2e-3, now=8e-4, kind=ARITHMETIC)
    assert plan.changes["metrics.log_freq"].kind == HARMLESS
    with pytest.raises(ConfigError, match=r"\(--replicas\) = 3"):
        again(run, shape=(3, 2), resume_with=" lr, ")
    assert len(again(run, shape=(3, 2), resume_with="lr,replicas").changes) == 3


def test_each_resume_compares_with_the_launch_before(run: LaunchPlan) -> None:
    """A change that was allowed once holds from then on. The way back must be named as well."""
    again(run, resume_with="lr").write()
    header = run.paths.config.read_text().splitlines()[0]
    assert header.endswith("--resume --resume-with lr")
    assert again(run).changes == {}
    with pytest.raises(ConfigError, match=r"got optimizer.lr = 0.002 \(was 0.0008"):
        again(run, *run.worker_args)


def test_a_folder_of_checkpoints_with_another_name(run: LaunchPlan) -> None:
    """The workers' folder must have a checkpoint. Otherwise training would start over beside the
    old one.
    """
    flags = [*run.worker_args, "--checkpoint.folder=kept"]
    with pytest.raises(ConfigError, match=r"--resume needs a checkpoint in .*/run/kept, got none"):
        again(run, *flags)
    run.paths.checkpoint.rename(run.paths.root / "kept")
    assert again(run, *flags).changes.keys() == {"checkpoint.folder"}


def test_the_option_by_itself(run: LaunchPlan, capsys: pytest.CaptureFixture[str]) -> None:
    """--resume-with without --resume is a mistake."""
    words = [
        "launch",
        str(run.config),
        "--replicas=2",
        "--ranks-per-replica=2",
        "--run-dir",
        str(run.paths.root),
    ]
    assert main([*words, "--resume-with", "lr"]) == 2
    assert capsys.readouterr().err == (
        "titan-ft: --resume-with must come with --resume, got lr alone; add it, or leave this out\n"
    )


@pytest.mark.slow
def test_a_refusal_is_one_line(run: LaunchPlan) -> None:
    """The command itself ends with exit status 2, and starts nothing."""
    command = [
        sys.executable,
        "-m",
        "titan_ft",
        "launch",
        str(run.config),
        "--replicas=2",
        "--ranks-per-replica=2",
    ]
    command += ["--run-dir", str(run.paths.root), "--resume"]
    before = sorted(path for path in run.paths.root.rglob("*"))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith(
        "titan-ft: --resume must keep the arithmetic and the data of the earlier launch, got"
    )
    assert ended.stderr.count("\n") == 1
    named = [*command, "--resume-with", "lr", "--dry-run"]
    shown = subprocess.run(named, capture_output=True, text=True, timeout=120, check=False)
    assert "changed      optimizer.lr = 0.0008 (was 0.002, of the arithmetic)\n" in shown.stdout
    assert "changed      metrics.log_freq = 10 (was 5)\n" in shown.stdout
    assert sorted(path for path in run.paths.root.rglob("*")) == before


def test_config_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Every field, as the workers read it."""
    assert (
        main(["config", "llama3_debug", "--replicas", "3", "--json", "--", "--optimizer.lr=1e-3"])
        == 0
    )
    printed = json.loads(capsys.readouterr().out)
    values = dict(flat_values(printed))
    assert set(all_fields(merged_schema())) == set(values)
    assert (values["optimizer.lr"], values["fault_tolerance.group_size"]) == (1e-3, 3)
    assert os.path.isdir(values["model.hf_assets_path"])
