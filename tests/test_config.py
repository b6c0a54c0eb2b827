# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The `[fault_tolerance]` table: its schema, its rules, and how torchtitan merges it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titan_ft import config as config_module
from titan_ft.config import (
    REMOVED,
    ConfigError,
    FaultTolerance,
    JobConfig,
    check_toml,
    load_toml,
    resolve_lighthouse,
    validate,
)
from titan_ft.round_settings import outer_optimizer, quantizes, steps_per_round
from titan_ft.training.job_config import parse_config


def make_config(changes: dict[str, Any] | None = None) -> Any:
    """Return an enabled config of two groups, shaped as torchtitan's, with `section.key` values
    changed.
    """
    config = SimpleNamespace(
        fault_tolerance=FaultTolerance(enable=True, group_size=2),
        training=SimpleNamespace(local_batch_size=8, global_batch_size=-1, dtype="float32"),
        parallelism=SimpleNamespace(
            data_parallel_replicate_degree=1,
            data_parallel_shard_degree=-1,
            context_parallel_degree=1,
        ),
        optimizer=SimpleNamespace(early_step_in_backward=False),
        checkpoint=SimpleNamespace(enable=False, create_seed_checkpoint=False),
        comm=SimpleNamespace(mode="default"),
    )
    for key, value in (changes or {}).items():
        section, name = key.split(".") if "." in key else ("fault_tolerance", key)
        assert hasattr(getattr(config, section), name)
        setattr(getattr(config, section), name, value)
    return config


def error_of(changes: dict[str, Any]) -> str:
    """Return the line with which `validate` refuses a changed config."""
    with pytest.raises(ConfigError) as caught:
        validate(make_config(changes))
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_defaults_with_a_group_size_are_valid() -> None:
    """Two groups need nothing but `enable` and `group_size`."""
    validate(make_config())


@pytest.mark.parametrize(
    ("replicate", "shard", "context"), [(1, 1, 1), (2, -1, 1), (2, 2, 1), (2, 1, 2)]
)
def test_copies_inside_a_group_that_shards_are_valid(
    replicate: int, shard: int, context: int
) -> None:
    """torchtitan trains these with FSDP; a shard degree of -1 is known to the worker alone."""
    parallelism = {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": shard,
        "context_parallel_degree": context,
    }
    validate(make_config({f"parallelism.{name}": degree for name, degree in parallelism.items()}))


def test_nothing_is_checked_when_disabled() -> None:
    """With `enable = false` torchtitan's own rules are the only ones."""
    validate(
        make_config(
            {"enable": False, "group_size": 0, "process_group": "mpi", "checkpoint.enable": True}
        )
    )


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"min_replica_size": 6, "group_size": 4},
            "fault_tolerance.min_replica_size must be <= group_size (4), got 6; lower it, or raise group_size",
        ),
        (
            {"replica_id": 2},
            "fault_tolerance.replica_id must be < group_size (2), got 2; number the groups from 0, or raise group_size",
        ),
        (
            {
                "parallelism.data_parallel_replicate_degree": 2,
                "parallelism.data_parallel_shard_degree": 1,
            },
            "parallelism.data_parallel_replicate_degree must be 1 in a group that does not shard the model "
            "(data_parallel_shard_degree and context_parallel_degree are 1), got 2; set it to 1 and start 2 times as "
            "many groups (fault_tolerance.group_size), or shard: data_parallel_shard_degree >= 2",
        ),
        (
            {"semi_sync_method": "Di-LoCo"},
            "fault_tolerance.semi_sync_method must be one of local_sgd, diloco, or left out, got 'Di-LoCo'; "
            "did you mean diloco? without it gradients are exchanged at each step",
        ),
    ],
)
def test_error_is_one_line_of_field_rule_value_and_remedy(
    changes: dict[str, Any], line: str
) -> None:
    """An error says which field breaks which rule with which value, and what to do."""
    assert error_of(changes) == line


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"process_group": "mpi"}, ["process_group", "gloo, nccl", "'mpi'"]),
        ({"group_size": -1}, ["group_size must be >= 1", "-1"]),
        ({"replica_id": -1}, ["replica_id must be >= 0", "-1"]),
        ({"min_replica_size": 0}, ["min_replica_size must be >= 1"]),
        ({"min_replica_size": 3}, ["min_replica_size must be <= group_size (2)", "3"]),
        ({"transfer_max_mbps": -0.5}, ["transfer_max_mbps must be >= 0", "-0.5"]),
        ({"catch_up_max_gb": -1.0}, ["catch_up_max_gb must be >= 0"]),
        ({"batch_policy": "grow"}, ["batch_policy must be one of shrink, constant"]),
        (
            {"semi_sync_method": "LocalSGD"},
            ["semi_sync_method must be one of", "did you mean local_sgd?"],
        ),
        ({"semi_sync_method": "easgd"}, ["semi_sync_method must be one of", "'easgd'; without it"]),
        ({"lr_policy": "log"}, ["lr_policy must be one of none, sqrt, linear"]),
        ({"hang_timeout_seconds": -1.0}, ["hang_timeout_seconds must be >= 0"]),
        ({"job_id": "a/b"}, ["job_id must be without spaces and slashes", "'a/b'"]),
        ({"digest_every": -5}, ["digest_every must be >= 0"]),
        ({"bucket_size_mb": 0}, ["bucket_size_mb must be > 0"]),
        ({"heartbeat_timeout_ms": 49}, ["heartbeat_timeout_ms must be >= 50", "49", "every 20 ms"]),
        (
            {"heartbeat_timeout_ms": 10000},
            ["heartbeat_timeout_ms", "< process_group_timeout_ms (10000)"],
        ),
        (
            {"process_group_timeout_ms": 500},
            ["heartbeat_timeout_ms", "< process_group_timeout_ms (500)"],
        ),
        ({"join_timeout_ms": 0}, ["join_timeout_ms must be > 0"]),
        (
            {"optimizer.early_step_in_backward": True},
            ["optimizer.early_step_in_backward is not supported yet"],
        ),
        (
            {"checkpoint.create_seed_checkpoint": True},
            ["checkpoint.create_seed_checkpoint is not supported yet"],
        ),
        ({"comm.mode": "fake_backend"}, ['comm.mode must be "default"', "'fake_backend'"]),
        ({"training.global_batch_size": 0}, ["training.global_batch_size must be > 0, or -1"]),
        (
            {"training.global_batch_size": 17},
            ["divisible by fault_tolerance.group_size (2)", "17", "all groups"],
        ),
        (
            {"training.global_batch_size": 24},
            ["multiple of", "group_size (2) x training.local_batch_size (8)", "24"],
        ),
        (
            {"training.global_batch_size": 48, "parallelism.data_parallel_shard_degree": 2},
            ["multiple of", "x the data-parallel degree of a group (2)", "48"],
        ),
        (
            {"lighthouse": "localhost"},
            ["fault_tolerance.lighthouse must look like http://host:port", "'localhost'"],
        ),
        (
            {"advertise_address": "node7"},
            ["advertise_address must be a numeric address", "'node7'"],
        ),
        ({"advertise_address": "0.0.0.0"}, ["advertise_address", "can reach", "leave it out"]),
    ],
)
def test_broken_rule_is_named(changes: dict[str, Any], parts: list[str]) -> None:
    """Each rule names the field, its limit and the value that breaks it."""
    line = error_of(changes)
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    "changes",
    [
        {"group_size": 1},
        {"process_group": "nccl"},
        {"min_replica_size": 2},
        {"heartbeat_timeout_ms": 50},
        {"bucket_size_mb": 1, "start_timeout_seconds": 5},
        {"digest_every": 0},
        {"transfer_max_mbps": 0, "catch_up_max_gb": 0, "hang_timeout_seconds": 0},
        {"batch_policy": "constant", "lr_policy": "linear"},
        {"checkpoint.enable": True},
        {"training.global_batch_size": 32},
        {"training.global_batch_size": 32, "parallelism.data_parallel_shard_degree": 2},
        {"lighthouse": "http://[::1]:29510/"},
        {"lighthouse": "file:/shared/run 1/lighthouse.json"},
        {"advertise_address": "fe80::1"},
        {"sync_steps": 20, "num_fragments": 3},
        {
            "sync_steps": 0,
            "should_quantize": True,
            "outer_lr": 0.0,
            "outer_momentum": 2.0,
            "hang_timeout_seconds": 0,
        },
    ],
)
def test_values_at_the_limits_are_valid(changes: dict[str, Any]) -> None:
    """A limit that belongs to the range is accepted, and so are fields of semi-sync methods that
    nothing reads.
    """
    validate(make_config(changes))


SEMI_SYNC = {"semi_sync_method": "diloco"}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"sync_steps": 0}, ["sync_steps must be >= 1", "0"]),
        ({"fragment_sync_delay": 5}, ["fragment_sync_delay must be >= 0 and <= 4", "got 5"]),
        ({"fragment_sync_delay": -1}, ["fragment_sync_delay must be >= 0 and <= 4", "got -1"]),
        (
            {"sync_steps": 6, "num_fragments": 3, "fragment_sync_delay": 2},
            ["fragment_sync_delay must be >= 0 and <= 1"],
        ),
        ({"fragment_update_alpha": 1.0}, ["fragment_update_alpha must be >= 0 and < 1", "1.0"]),
        ({"num_fragments": 0}, ["num_fragments must be >= 1", "0"]),
        (
            {"num_fragments": 2},
            ["sync_steps must be a multiple of the number of fragments (2)", "5"],
        ),
        (
            {"module_fqns_per_model_fragment": [["a"], []]},
            ["module_fqns_per_model_fragment must name a module"],
        ),
        (
            {"module_fqns_per_model_fragment": [["a"], ["b", "a"]]},
            ["must name a module or more in each list, and none"],
        ),
        (
            {"num_fragments": 3, "module_fqns_per_model_fragment": [["a"], ["b"]]},
            ["num_fragments must be 2, or be left out", "3"],
        ),
        (
            {"should_quantize": True, "exchange_dtype": "bfloat16"},
            [
                'exchange_dtype must be "float32" with should_quantize',
                "'bfloat16'",
                "leave one out",
            ],
        ),
        (
            {"sync_deadline_seconds": -1.0},
            ["sync_deadline_seconds must be >= 0", "0 makes all steps of a round"],
        ),
        (
            {"semi_sync_method": "local_sgd", "fragment_sync_delay": 1},
            ["fragment_sync_delay is not used", '"diloco"'],
        ),
        (
            {"semi_sync_method": "local_sgd", "num_fragments": 5},
            ["num_fragments is not used", '"local_sgd"', "5"],
        ),
        ({"outer_lr": 0}, ["outer_lr must be > 0", "0.7"]),
        ({"outer_momentum": -0.1}, ["outer_momentum must be >= 0 and < 1", "-0.1"]),
        ({"outer_momentum": 1}, ["outer_momentum must be >= 0 and < 1", "0.9"]),
        (
            {"semi_sync_method": "local_sgd", "should_quantize": True},
            ["should_quantize is not used", '"local_sgd"', "got True", '"diloco"'],
        ),
        (
            {"semi_sync_method": "local_sgd", "outer_lr": 1.0},
            ["outer_lr is not used", '"local_sgd"', '"diloco"'],
        ),
        (
            {"semi_sync_method": "local_sgd", "outer_momentum": 0.0},
            ["outer_momentum is not used", "left out"],
        ),
        (
            {"batch_policy": "constant"},
            ['batch_policy must be "shrink" with semi_sync_method', "'constant'"],
        ),
        ({"lr_policy": "sqrt"}, ['lr_policy must be "none" with semi_sync_method', "'sqrt'"]),
        (
            {"hang_timeout_seconds": 0},
            ["hang_timeout_seconds must be > 0 with semi_sync_method", "hangs"],
        ),
        (
            {"training.dtype": "bfloat16"},
            ['training.dtype must be "float32" with', "'bfloat16'", "mixed_"],
        ),
    ],
)
def test_broken_rule_of_semi_synchronous_training_is_named(
    changes: dict[str, Any], parts: list[str]
) -> None:
    """What a semi-synchronous method needs, cannot do, or would not look at is one line as well."""
    line = error_of({**SEMI_SYNC, **changes})
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"semi_sync_method": "local_sgd"},
        {"semi_sync_method": "local_sgd", "outer_lr": 0.7, "outer_momentum": 0.9},
        {"sync_steps": 1, "outer_lr": 1, "outer_momentum": 0},
        {"should_quantize": True},
    ],
)
def test_semi_synchronous_training_is_valid(changes: dict[str, Any]) -> None:
    """Both methods with little more than their name; no momentum needs no word about Nesterov's."""
    validate(make_config({**SEMI_SYNC, **changes}))


DURATIONS = [
    f.name
    for f in dataclasses.fields(FaultTolerance)
    if f.name.endswith(("_ms", "_seconds"))
    and f.name not in ("hang_timeout_seconds", "sync_deadline_seconds")
]


@pytest.mark.parametrize("name", DURATIONS)
@pytest.mark.parametrize("value", [0, -1])
def test_durations_are_positive(name: str, value: int) -> None:
    """No duration may be zero or negative."""
    assert f"fault_tolerance.{name} must be > 0, got {value}" in error_of({name: value})


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"group_size": "2"}, ["fault_tolerance.group_size must be a whole number", "'2'"]),
        ({"group_size": True}, ["fault_tolerance.group_size must be a whole number", "True"]),
        ({"group_size": 2.0}, ["fault_tolerance.group_size must be a whole number", "2.0"]),
        ({"bucket_size_mb": False}, ["fault_tolerance.bucket_size_mb must be a number", "False"]),
        ({"bucket_size_mb": math.nan}, ["fault_tolerance.bucket_size_mb must be finite", "nan"]),
        (
            {"start_timeout_seconds": math.inf},
            ["fault_tolerance.start_timeout_seconds must be finite", "inf"],
        ),
        ({"enable": "no"}, ["fault_tolerance.enable must be true or false", "'no'"]),
        (
            {"lighthouse": "file:run"},
            ["fault_tolerance.lighthouse must have an absolute path behind file:", "'file:run'"],
        ),
        ({"lighthouse": 29510}, ["fault_tolerance.lighthouse must be a string", "29510"]),
        ({"semi_sync_method": 1}, ["fault_tolerance.semi_sync_method must be of type str | None"]),
        ({"module_fqns_per_model_fragment": ["a"]}, ["must be of type list[list[str]]"]),
        (
            {"training.global_batch_size": "64"},
            ["training.global_batch_size must be a whole number", "'64'"],
        ),
    ],
)
def test_wrong_types_are_named(changes: dict[str, Any], parts: list[str]) -> None:
    """A value of a wrong type is refused by name; torchtitan itself would only warn."""
    line = error_of(changes)
    for part in parts:
        assert part in line


def test_a_round_and_what_makes_its_update() -> None:
    """DiLoCo takes the outer optimizer of the table, LocalSGD the mean as it is; without either
    each step is one.
    """
    assert steps_per_round(FaultTolerance(sync_steps=20)) == 1
    local_sgd = FaultTolerance(semi_sync_method="local_sgd", sync_steps=20)
    assert (steps_per_round(local_sgd), outer_optimizer(local_sgd)) == (20, (1.0, 0.0, False))
    diloco = FaultTolerance(semi_sync_method="diloco", sync_steps=30)
    assert (steps_per_round(diloco), outer_optimizer(diloco)) == (30, (0.7, 0.9, True))
    diloco.outer_lr, diloco.outer_momentum = 0.4, 0.5
    assert outer_optimizer(diloco) == (0.4, 0.5, True)


def test_only_rounds_are_quantized() -> None:
    """torchtitan's field means nothing without a method, there as here: gradients of single steps
    travel whole.
    """
    assert not quantizes(FaultTolerance(should_quantize=True))
    assert not quantizes(FaultTolerance(semi_sync_method="diloco"))
    assert quantizes(FaultTolerance(semi_sync_method="diloco", should_quantize=True))


def test_nesterov_without_momentum_is_plain_sgd() -> None:
    """torch refuses that pair; outer_momentum = 0 alone is enough to ask for plain SGD."""
    import torch

    lr, momentum, nesterov = outer_optimizer(
        FaultTolerance(semi_sync_method="diloco", outer_momentum=0.0)
    )
    assert not nesterov
    torch.optim.SGD(
        [torch.nn.Parameter(torch.zeros(1))], lr=lr, momentum=momentum, nesterov=nesterov
    )


def test_unknown_key_names_the_closest_one() -> None:
    """A misspelt key is refused with the one that was meant, and where the others are: a line of 48
    keys hides it.
    """
    with pytest.raises(ConfigError) as caught:
        check_toml({"fault_tolerance": {"enable": True, "min_replicas_size": 1}})
    assert str(caught.value) == (
        "fault_tolerance.min_replicas_size is not a valid key; did you mean min_replica_size? titan-ft config "
        "llama3_debug --json prints all of them"
    )
    with pytest.raises(
        ConfigError, match=r"fault_tolerance\.zzz is not a valid key; titan-ft config llama3_debug "
    ):
        check_toml({"fault_tolerance": {"zzz": 1}})


def test_misspelt_or_malformed_table_is_named() -> None:
    """A table that is none, or whose name is misspelt, is refused; other tables are torchtitan's
    matter.
    """
    with pytest.raises(
        ConfigError, match=r"fault_tolerance must be a table, got True; write \[fault_tolerance\]"
    ):
        check_toml({"fault_tolerance": True})
    with pytest.raises(
        ConfigError, match=r"\[fault_tolerence\] is no table .* did you mean \[fault_tolerance\]\?"
    ):
        check_toml({"fault_tolerence": {"enable": True}})
    check_toml({"job": {"anything": 1}, "training": {}})


def test_wrong_type_in_toml_is_named() -> None:
    """Types are checked in the TOML already; a whole number may stand for a float."""
    check_toml(
        {"fault_tolerance": {"bucket_size_mb": 4, "module_fqns_per_model_fragment": [["a", "b"]]}}
    )
    with pytest.raises(
        ConfigError, match=r"fault_tolerance\.group_size must be a whole number, got 'two'"
    ):
        check_toml({"fault_tolerance": {"group_size": "two"}})


def test_schema_of_a_custom_module_is_accepted() -> None:
    """Fields that a user's own config module adds to the table are valid keys when its schema is
    given.
    """

    @dataclasses.dataclass
    class Extended(FaultTolerance):
        extra: str = ""

    check_toml({"fault_tolerance": {"extra": "x", "group_size": 2}}, Extended)
    with pytest.raises(ConfigError, match=r"fault_tolerance\.extra"):
        check_toml({"fault_tolerance": {"extra": "x"}})


def test_load_toml_names_file_and_place(tmp_path: Path) -> None:
    """A file that is missing, no file, no TOML or no UTF-8 is one line with its path, and the line
    of the mistake.
    """
    good = tmp_path / "good.toml"
    good.write_text("[fault_tolerance]\nenable = true\n")
    assert load_toml(good) == {"fault_tolerance": {"enable": True}}
    (tmp_path / "bad.toml").write_text("[fault_tolerance]\nenable = yes\n")
    (tmp_path / "digits.toml").write_text("a = " + "9" * 5000 + "\n")
    (tmp_path / "dots.toml").write_text("a" + ".a" * 1000 + " = 1\n")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"\n')
    for name, part in {
        "missing.toml": "No such file",
        ".": "Is a directory",
        "bad.toml": "line 2",
        "latin.toml": "not UTF-8",
        "digits.toml": "4300 digits",
        "dots.toml": "1000 parts",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load_toml(tmp_path / name)
        line = str(caught.value)
        assert part in line
        assert str(tmp_path / name) in line
        assert "\n" not in line


def test_lighthouse_comes_from_the_config_first() -> None:
    """The config's address wins over the environment's; one of them must be there."""
    ft = FaultTolerance(enable=True, lighthouse="http://10.0.0.1:1/")
    assert resolve_lighthouse(ft, "http://other:2") == "http://10.0.0.1:1"
    assert resolve_lighthouse(FaultTolerance(), "http://other:2") == "http://other:2"
    for fallback in (None, ""):
        with pytest.raises(
            ConfigError, match=r"fault_tolerance\.lighthouse must be set.*TORCHFT_LIGHTHOUSE"
        ):
            resolve_lighthouse(FaultTolerance(), fallback)


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_setting_is_refused_with_its_remedy(name: str, tmp_path: Path) -> None:
    """By its own name, in a TOML and as a flag in each spelling; each has what holds instead."""
    assert name not in {f.name for f in dataclasses.fields(FaultTolerance)}
    line = r"{}fault_tolerance[.]{} is no setting any more \(.+\) and must be left out, got {}; (remove it|set ).*"
    with pytest.raises(ConfigError) as refused:
        check_toml({"fault_tolerance": {name: 7}})
    assert re.fullmatch(line.format("", name, 7), str(refused.value))
    for written in (name, name.replace("_", "-")):
        for flags in ([f"--fault_tolerance.{written}=7"], [f"--fault_tolerance.{written}", "7"]):
            with pytest.raises(ConfigError) as refused:
                parse_config(flags, None)
            assert re.fullmatch(line.format("--", name, "'7'"), str(refused.value))


@pytest.mark.parametrize(
    "address",
    [
        *(
            "localhost",
            "localhost:29510",
            "http://localhost",
            "http://:29510",
            "http://h:0",
            "http://h:70000",
        ),
        *(
            "http://h:x",
            "https://h:1",
            "http://h:1/path",
            "http://h:1?q",
            "http://u@h:1",
            "http://a b:1",
        ),
        "http://[::1:1",
    ],
)
def test_malformed_lighthouse_is_named_with_its_source(address: str) -> None:
    """A malformed address says whether the config or the environment holds it."""
    with pytest.raises(ConfigError, match=r"^TORCHFT_LIGHTHOUSE must look like http://host:port"):
        resolve_lighthouse(FaultTolerance(), address)
    with pytest.raises(
        ConfigError, match=r"^fault_tolerance\.lighthouse must look like http://host:port"
    ):
        resolve_lighthouse(FaultTolerance(lighthouse=address), None)


def test_every_field_has_a_docstring() -> None:
    """Each field of the schema says below itself what it means."""
    (schema,) = ast.parse(inspect.getsource(FaultTolerance)).body
    assert isinstance(schema, ast.ClassDef)
    for statement, following in zip(schema.body, [*schema.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign):
            assert isinstance(following, ast.Expr), ast.unparse(statement)


def test_field_types_are_objects() -> None:
    """torchtitan's merge reads the types as objects, so the module must not postpone
    annotations.
    """
    assert not hasattr(config_module, "annotations")
    assert all(
        not isinstance(f.type, str)
        for cls in (JobConfig, FaultTolerance)
        for f in dataclasses.fields(cls)
    )


# What follows imports torchtitan's config package.

CUSTOM = "torchtitan.components.ft.config"


def parse(args: list[str]) -> Any:
    """Parse as the worker does: our fields merged into torchtitan's config."""
    from torchtitan.config.job_config import JobConfig as TitanJobConfig
    from torchtitan.config.manager import ConfigManager

    return ConfigManager(ConfigManager._merge_configs(TitanJobConfig, JobConfig)).parse_args(args)


def write_toml(folder: Path, text: str) -> str:
    path = folder / "config.toml"
    path.write_text(text)
    return f"--job.config_file={path}"


def test_torchtitan_fields_keep_name_type_and_default() -> None:
    """Every field of torchtitan's two schemas is there, with the same type and default."""
    from torchtitan.components.ft.config.job_config import FaultTolerance as TitanFaultTolerance

    ours, theirs = FaultTolerance(), TitanFaultTolerance()
    types = {f.name: f.type for f in dataclasses.fields(FaultTolerance)}
    for f in dataclasses.fields(TitanFaultTolerance):
        assert getattr(ours, f.name) == getattr(theirs, f.name), f.name
        assert types[f.name] == f.type, f.name


def test_merged_defaults_are_ours() -> None:
    """Without TOML and flags, the merged table equals our defaults, and is disabled."""
    assert dataclasses.asdict(parse([]).fault_tolerance) == dataclasses.asdict(FaultTolerance())


def test_merged_config_takes_toml_and_flags(tmp_path: Path) -> None:
    """Our fields come from TOML and flags, flags first; torchtitan's other tables are untouched;
    all validates.
    """
    flag = write_toml(
        tmp_path,
        "[training]\nsteps = 7\n[fault_tolerance]\nenable = true\ngroup_size = 3\nbucket_size_mb = 4\n",
    )
    config = parse(
        [flag, "--fault_tolerance.replica_id=2", "--fault_tolerance.bucket_size_mb", "8"]
    )
    ft = config.fault_tolerance
    assert (ft.enable, ft.group_size, ft.replica_id, ft.bucket_size_mb, ft.digest_every) == (
        True,
        3,
        2,
        8.0,
        50,
    )
    assert config.training.steps == 7
    validate(config)


def test_wrong_type_in_merged_config_is_named(tmp_path: Path) -> None:
    """A type that torchtitan lets through with a warning is refused by name."""
    flag = write_toml(tmp_path, '[fault_tolerance]\nenable = true\ngroup_size = "two"\n')
    with (
        pytest.warns(UserWarning, match="group-size"),
        pytest.raises(ConfigError, match=r"fault_tolerance\.group_size must be a whole number"),
    ):
        validate(parse([flag]))


@pytest.mark.parametrize("module", [CUSTOM, "titan_ft.config"])
@pytest.mark.parametrize("method", [None, "diloco", "DiLoCo"])
def test_torchtitan_ft_toml_runs_as_it_is(tmp_path: Path, module: str, method: str | None) -> None:
    """A TOML that names torchtitan's own FT schema, or ours, as custom config module parses and
    validates; a method may be written in upper case too."""
    text = (
        f'[job]\ncustom_config_module = "{module}"\n'
        '[fault_tolerance]\nenable = true\nprocess_group = "gloo"\nprocess_group_timeout_ms = 20000\n'
        "replica_id = 1\ngroup_size = 2\nmin_replica_size = 1\nsync_steps = 20\nnum_fragments = 2\n"
        + (f'semi_sync_method = "{method}"\n' if method else "")
    )
    flag = write_toml(tmp_path, text)
    check_toml(load_toml(flag.partition("=")[2]))
    config = parse([flag, "--fault_tolerance.digest_every=5"])
    validate(config)
    expected = FaultTolerance(
        enable=True,
        process_group_timeout_ms=20000,
        replica_id=1,
        group_size=2,
        sync_steps=20,
        num_fragments=2,
        semi_sync_method=method and "diloco",
        digest_every=5,
    )
    assert dataclasses.asdict(config.fault_tolerance) == dataclasses.asdict(expected)


def test_module_extends_plain_torchtitan(tmp_path: Path) -> None:
    """The module also serves as a custom config module of torchtitan's unmodified ConfigManager."""
    from torchtitan.config.manager import ConfigManager

    flag = write_toml(
        tmp_path,
        '[job]\ncustom_config_module = "titan_ft.config"\n[fault_tolerance]\ndigest_every = 9\n',
    )
    assert ConfigManager().parse_args([flag]).fault_tolerance.digest_every == 9
