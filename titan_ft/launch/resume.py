# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Compare the launch of a run with the launch that continues from a checkpoint of the run.

With --resume, `LaunchPlan` calls this module on the launcher's main thread:

1. `read_command` reads the command of the run's latest launch from the config in the run's folder.
2. `find_changes` compares the effective values of both launches: TOML, flags and defaults together.
3. `check_allowed` refuses changes that make another run of it, unless --resume-with names them.

Each field of the config has one of three kinds, by the effect of a change (`FIELDS`):

- *harmless*: the change affects only how the run is carried out, or rounding. It is allowed.
- *arithmetic*: the change affects how an update follows from its batch.
- *data*: the change affects which batches there are.

A changed number of dataloader workers is never allowed. See docs/operations.md.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any, Final, Literal

import tyro

from titan_ft.config import TABLE, ConfigError, suggest_name
from titan_ft.options import Launch
from titan_ft.run.events import ChangedField
from titan_ft.system.text import printable
from titan_ft.usage import refusing

_COMMAND_PREFIX = "# titan-ft launch "
"""Prefix of a line with the command of a launch, for people.

Each launch of a run adds such a line above the TOML in the run's config, the latest first.
"""
_RECORD_PREFIX = "# titan-ft launched: "
"""Prefix of the next line: the same command and its working folder, as JSON.

The line for people cannot be read back, because a flag may contain a line break. Runs of earlier
versions of titan-ft lack the line with JSON.
"""

ChangeKind = Literal["harmless", "arithmetic", "data"]
"""Kind of a field; see the module's head."""
HARMLESS: Final = "harmless"
ARITHMETIC: Final = "arithmetic"
DATA: Final = "data"

_ROUNDING = "another order of the same sums: only rounding differs"
_SPEED = "speed and memory"
_WAITS = "time limits of waits"
_WATCHING = "logs and figures of a run"
_SAVING = "when and how checkpoints are written"
_NETWORK = "how groups reach each other"
_NOT_READ = "not read if the run has a checkpoint"
_ROUNDS = "how a semi-synchronous round combines the groups' steps"

FIELDS: Mapping[ChangeKind, Mapping[str, str]] = {
    HARMLESS: {
        "job": _WATCHING,
        "profiling": _WATCHING,
        "metrics": _WATCHING,
        "memory_estimation": "torchtitan's trainer does not use this table",
        "comm": f"{_WAITS}, and traces of them",
        "compile": _ROUNDING,
        "validation": "weights do not depend on validation",
        "model.print_after_conversion": _WATCHING,
        "optimizer.implementation": _ROUNDING,
        "training.steps": "a resume may train longer; the LR schedule: `lr_schedule_note`",
        "training.enable_cpu_offload": _SPEED,
        "training.gc_freq": _SPEED,
        "training.gc_debug": _WATCHING,
        "training.dataloader.persistent_workers": _SPEED,
        "training.dataloader.pin_memory": _SPEED,
        "training.dataloader.prefetch_factor": "how far workers read ahead of the trained batch",
        "parallelism.fsdp_reshard_after_forward": _SPEED,
        "parallelism.tensor_parallel_degree": _ROUNDING,
        "parallelism.disable_loss_parallel": _ROUNDING,
        "parallelism.enable_async_tensor_parallel": _ROUNDING,
        "parallelism.pipeline_parallel_degree": _ROUNDING,
        "parallelism.module_fqns_per_model_part": _SPEED,
        "parallelism.pipeline_parallel_first_stage_less_layers": _SPEED,
        "parallelism.pipeline_parallel_last_stage_less_layers": _SPEED,
        "parallelism.pipeline_parallel_layers_per_stage": _SPEED,
        "parallelism.pipeline_parallel_schedule": _ROUNDING,
        "parallelism.pipeline_parallel_schedule_csv": _ROUNDING,
        "parallelism.pipeline_parallel_microbatch_size": _ROUNDING,
        "parallelism.pipeline_parallel_expert_parallel_overlap": _SPEED,
        "parallelism.context_parallel_degree": _ROUNDING,
        "parallelism.context_parallel_load_balancer": _ROUNDING,
        "parallelism.context_parallel_rotate_method": _ROUNDING,
        "parallelism.expert_parallel_degree": _ROUNDING,
        "parallelism.expert_tensor_parallel_degree": _ROUNDING,
        "parallelism.expert_parallel_comm_backend": _ROUNDING,
        "checkpoint.enable": "a resume requires checkpoints",
        "checkpoint.enable_ft_dataloader_checkpoints": "for torchft's manager, which is not used",
        "checkpoint.folder": "a checkpoint names its run, so another run's is refused",
        "checkpoint.interval": _SAVING,
        "checkpoint.initial_load_path": _NOT_READ,
        "checkpoint.initial_load_model_only": _NOT_READ,
        "checkpoint.initial_load_in_hf": _NOT_READ,
        "checkpoint.initial_load_in_hf_quantized": _NOT_READ,
        "checkpoint.last_save_model_only": _SAVING,
        "checkpoint.last_save_in_hf": _SAVING,
        "checkpoint.export_dtype": _SAVING,
        "checkpoint.async_mode": _SAVING,
        "checkpoint.keep_latest_k": _SAVING,
        "checkpoint.load_step": "the user chooses the step from which to continue",
        "checkpoint.enable_first_step_checkpoint": _SAVING,
        "checkpoint.create_seed_checkpoint": "refused in a fault-tolerant run",
        "checkpoint.load_only": _SAVING,
        # Recomputed activations are those of the forward: the same kernels on the same inputs.
        "activation_checkpoint": _SPEED,
        "debug.deterministic": _ROUNDING,
        "debug.deterministic_warn_only": _WATCHING,
        f"{TABLE}.enable": "titan-ft launch requires it",
        f"{TABLE}.process_group": _ROUNDING,
        f"{TABLE}.process_group_timeout_ms": _WAITS,
        f"{TABLE}.replica_id": "given to each group by titan-ft launch",
        f"{TABLE}.min_replica_size": "how many groups a step waits for, not how it averages them",
        f"{TABLE}.job_id": "each launch has its own job id",
        f"{TABLE}.lighthouse": _NETWORK,
        f"{TABLE}.start_timeout_seconds": _WAITS,
        f"{TABLE}.heartbeat_timeout_ms": _WAITS,
        f"{TABLE}.join_timeout_ms": _WAITS,
        f"{TABLE}.advertise_address": _NETWORK,
        f"{TABLE}.bucket_size_mb": _ROUNDING,
        f"{TABLE}.digest_every": "how often the groups compare their state",
        f"{TABLE}.heal_donors": _SPEED,
        f"{TABLE}.transfer_max_mbps": _SPEED,
        f"{TABLE}.transfer_tls": _NETWORK,
        f"{TABLE}.catch_up_max_gb": _SPEED,
        f"{TABLE}.drain_timeout_seconds": _WAITS,
        f"{TABLE}.hang_timeout_seconds": _WAITS,
        f"{TABLE}.chaos": "faults change no step",
    },
    ARITHMETIC: {
        "model.name": "another model, which the checkpoint does not fit",
        "model.flavor": "another model, which the checkpoint does not fit",
        "model.converters": "float8 and the like round each product differently",
        "quantize": "how float8 and the like round",
        "optimizer": "how an update follows from a gradient",
        "lr_scheduler": "the LR of each step",
        "training.max_norm": "how gradients are clipped",
        "training.dtype": "precision of weights and optimizer",
        "training.mixed_precision_param": "precision of the forward",
        "training.mixed_precision_reduce": "precision of gradients",
        "checkpoint.exclude_from_loading": "excluded parts, such as the moments, start from zero",
        "activation_checkpoint.preserve_rng_state": "a recomputed dropout would draw again",
        "debug.seed": "random numbers from here on, such as those of dropout",
        "debug.moe_force_load_balance": "which expert a token goes to",
        "experimental": "the user's own code, which may change anything",
        f"{TABLE}.exchange_dtype": "precision of gradients in the exchange",
        f"{TABLE}.batch_policy": "the batch of an update while a group is away",
        f"{TABLE}.lr_policy": "the LR of an update while a group is away",
        f"{TABLE}.semi_sync_method": _ROUNDS,
        f"{TABLE}.sync_steps": _ROUNDS,
        f"{TABLE}.should_quantize": _ROUNDS,
        f"{TABLE}.fragment_sync_delay": _ROUNDS,
        f"{TABLE}.fragment_update_alpha": _ROUNDS,
        f"{TABLE}.module_fqns_per_model_fragment": _ROUNDS,
        f"{TABLE}.num_fragments": _ROUNDS,
        f"{TABLE}.sync_deadline_seconds": _ROUNDS,
        f"{TABLE}.outer_lr": _ROUNDS,
        f"{TABLE}.outer_momentum": _ROUNDS,
    },
    DATA: {
        "model.hf_assets_path": "another tokenizer makes other tokens",
        "model.tokenizer_path": "another tokenizer makes other tokens",
        "training.dataset": "the text that is read",
        "training.dataset_path": "the text that is read",
        "training.seq_len": "how text is cut into sequences",
        "training.local_batch_size": "how sequences are cut into batches, which are counted",
        "training.global_batch_size": "how many sequences an update is made from",
        "training.dataloader.num_workers": "each worker has its own position in the data",
        # These three change the data only if their product changes; see `compare`.
        f"{TABLE}.group_size": "how the data is cut",
        "parallelism.data_parallel_replicate_degree": "how the data is cut",
        "parallelism.data_parallel_shard_degree": "how the data is cut",
    },
}
"""All fields of the config by their kind, each with the reason.

A key is the full name of a field, or the name of a table, which stands for all of its fields. If
several keys fit a field, the longest counts. A field without an entry, such as a field of a user's
config module, counts as arithmetic, because its effect is unknown here.
"""

_GROUP_SIZE = f"{TABLE}.group_size"
_RANKS_PER_GROUP = "ranks_per_replica"
"""An option of titan-ft launch, which is compared like a field of the config."""
_REPLICATE = "parallelism.data_parallel_replicate_degree"
_SHARD = "parallelism.data_parallel_shard_degree"
_DATA_CUT_FIELDS = (_GROUP_SIZE, _REPLICATE, _SHARD)
"""Fields whose product is the number of shards that the data is cut into."""
_DEGREES_WITHOUT_FSDP = (
    _REPLICATE,
    "parallelism.context_parallel_degree",
    "parallelism.tensor_parallel_degree",
    "parallelism.pipeline_parallel_degree",
)
"""With a degree of -1, FSDP gets a group's ranks divided by these degrees."""
_OPTION_FIELDS = {
    "replicas": (_GROUP_SIZE,),
    _RANKS_PER_GROUP: (_RANKS_PER_GROUP, _REPLICATE, _SHARD),
}
"""Options of titan-ft launch that --resume-with may name, with the fields that follow from each."""
_OPTION_HINT = {_GROUP_SIZE: " (--replicas)"}
"""What follows a field's name in a message, if the user sets the field by an option."""
_PATH_FIELDS = ("model.hf_assets_path", "model.tokenizer_path", "training.dataset_path")
"""Fields that hold a path. Two different paths may lead to the same file."""
_LOADER_WORKERS = "training.dataloader.num_workers"
_STEPS = "training.steps"
_TOTAL_STEPS = "lr_scheduler.total_steps"
_BATCH = "training.local_batch_size"
_GLOBAL_BATCH = "training.global_batch_size"

Values = Mapping[str, Any]
"""Values of a launch by their full names, such as "optimizer.lr"."""
Changes = Mapping[str, ChangedField]
"""Fields that differ, by their full names."""


@dataclass(frozen=True)
class Command:
    """The command of a launch.

    Attributes:
        toml: path of the config.
        replicas: number of groups.
        ranks: number of ranks in each group.
        flags: torchtitan's flags, after the --.
        folder: working folder, from which relative paths start; None if a version of titan-ft that
            did not record it made the launch.
    """

    toml: Path
    replicas: int
    ranks: int
    flags: tuple[str, ...]
    folder: Path | None = None

    def worker_flags(self) -> list[str]:
        """Return the workers' flags that determine the values of the launch."""
        return [
            f"--job.config_file={self.toml}",
            f"--{TABLE}.enable",
            f"--{_GROUP_SIZE}={self.replicas}",
            *self.flags,
        ]

    def is_same_as(self, other: Command) -> bool:
        """True if the two launches have the same input, so that no value can differ.

        The input is the working folder (if both are known), the numbers, the flags, and the TOML
        without its headers.
        """
        are_folders_known = self.folder is not None and other.folder is not None
        if are_folders_known and self.folder != other.folder:
            # A relative path may lead to another file.
            return False
        if (self.replicas, self.ranks, self.flags) != (other.replicas, other.ranks, other.flags):
            return False
        return without_headers(self.toml) == without_headers(other.toml)


def without_headers(config: Path) -> list[str]:
    """Return the lines of a config without those at its top that record launches."""
    lines = config.read_text(encoding="utf-8").splitlines(keepends=True)
    return list(dropwhile(is_header, lines))


def is_header(line: str) -> bool:
    """True if a line of a config records a launch's command."""
    return line.startswith((_COMMAND_PREFIX, _RECORD_PREFIX))


def header_lines(words: Sequence[str], folder: Path) -> list[str]:
    """Return the two lines that record a launch's command in the run's config.

    Args:
        words: the words after "titan-ft launch".
        folder: working folder of the command.
    """
    command = printable(shlex.join(words))
    record = json.dumps({"folder": str(folder), "words": list(words)})
    return [f"{_COMMAND_PREFIX}{command}\n", f"{_RECORD_PREFIX}{record}\n"]


def read_command(config: Path) -> Command:
    """Return the latest launch of a run from its config.

    Raises:
        ConfigError: the config does not record a command.
    """
    text = ""
    # A file that is missing or not UTF-8 records no command.
    with contextlib.suppress(OSError, ValueError):
        text = config.read_text(encoding="utf-8")
    lines = [*text.splitlines(), "", ""]  # at least the two lines of a launch
    command_line = lines[0]
    record_line = lines[1]
    if not is_header(command_line):
        raise ConfigError(
            f"--resume needs the command of the earlier launch as the first line of {config}, got "
            "none; titan-ft launch writes it, and resumes its own runs only: give another "
            "--run-dir, with checkpoint.initial_load_path"
        )
    folder = None
    if record_line.startswith(_RECORD_PREFIX):
        record = json.loads(record_line.removeprefix(_RECORD_PREFIX))
        words = list(record["words"])
        folder = Path(record["folder"])
    else:
        words = shlex.split(command_line.removeprefix(_COMMAND_PREFIX))
    end = words.index("--") if "--" in words else len(words)
    launch_words = words[:end]
    worker_flags = tuple(words[end + 1 :])

    def parse() -> Launch:
        return tyro.cli(Launch, args=launch_words, config=(tyro.conf.FlagCreatePairsOff,))

    def describe_unknown(option: str) -> str:
        return f"{option} is no option of titan-ft launch; correct the first two lines of {config}"

    # Raises ConfigError where tyro would print its usage and exit.
    options = refusing(parse, launch_words, describe_unknown)
    return Command(config, options.replicas, options.ranks_per_replica, worker_flags, folder)


Resolve = Callable[[Sequence[str], Sequence[str]], tuple[Values, Values]]
"""Takes the workers' flags of an earlier launch and of this one, and returns the values of both.

Only the values of this launch are checked.
"""


def find_changes(earlier: Command, now: Command, resolve: Resolve) -> tuple[Changes, str]:
    """Return the fields of two launches that differ, and a line about the LR schedule.

    The line is empty if the schedule stays the same.

    Raises:
        ConfigError: there is a mistake in the config.
    """
    if earlier.is_same_as(now):
        # The usual case. To resolve the values would take seconds.
        return {}, ""
    resolved_before, resolved_after = resolve(earlier.worker_flags(), now.worker_flags())
    before = add_derived_values(resolved_before, earlier.ranks)
    after = add_derived_values(resolved_after, now.ranks)
    _resolve_paths(before, after, earlier.folder, now.folder)
    return compare(before, after), lr_schedule_note(before, after)


def resolve_in_child(earlier: Sequence[str], now: Sequence[str]) -> tuple[Values, Values]:
    """Resolve the flags of two launches; see `Resolve`.

    A child process does it, because it needs torchtitan, which the launcher never imports.

    Raises:
        ConfigError: there is a mistake in the config.
    """
    child = subprocess.run(
        [sys.executable, "-m", "titan_ft.resolved_config"],
        input=json.dumps([list(earlier), list(now)]),
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        answer = json.loads(child.stdout)
    except ValueError:
        errors = child.stderr.strip().splitlines() or [f"exit status {child.returncode}"]
        raise ConfigError(
            f"--resume must be able to read both configs, got: {errors[-1]}; install what is "
            "missing, or correct the name"
        ) from None
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer["earlier"], answer["now"]


def add_derived_values(values: Values, ranks: int) -> dict[str, Any]:
    """Return the values with the number of ranks, and with the FSDP degree that follows from it.

    The path of the config is left out: the run's config is a copy of the user's, so the paths of
    two launches always differ.

    Args:
        ranks: number of ranks of a group.
    """
    derived = {**values, _RANKS_PER_GROUP: ranks}
    del derived["job.config_file"]
    if derived[_SHARD] == -1:
        derived[_SHARD] = ranks // math.prod(derived[name] for name in _DEGREES_WITHOUT_FSDP)
    return derived


def _resolve_paths(
    before: dict[str, Any],
    after: dict[str, Any],
    folder_before: Path | None,
    folder_after: Path | None,
) -> None:
    """Replace each path by the absolute path of the file or folder to which it leads.

    Otherwise two spellings of one path would look like a change.

    Args:
        folder_before, folder_after: folders from which relative paths start; None if unknown.
    """
    are_folders_known = folder_before is not None and folder_after is not None
    for name in _PATH_FIELDS:
        if before[name] == after[name] and not are_folders_known:
            # Without the folders, equal texts count as equal paths.
            continue
        before[name] = _real_path(before[name], folder_before)
        after[name] = _real_path(after[name], folder_after)


def _real_path(path: str | None, folder: Path | None) -> str | None:
    """Return the absolute path of the file or folder to which a path leads.

    A text that may be no path, such as the name of a data set, is returned as it is.
    """
    if not path:
        return path
    if os.path.isabs(path):
        return os.path.realpath(path)
    if folder is None:
        return path
    absolute = str(folder / path)
    return os.path.realpath(absolute) if os.path.exists(absolute) else path


def num_shards(values: Values) -> int:
    """Return the number of shards that the data is cut into."""
    return math.prod(values[name] for name in _DATA_CUT_FIELDS)


def compare(before: Values, now: Values) -> dict[str, ChangedField]:
    """Return the fields that differ, by their full names, with the possible effect of the
    change.
    """
    method_field = f"{TABLE}.semi_sync_method"
    is_same_cut = num_shards(before) == num_shards(now)
    is_semi_sync = bool(before[method_field] or now[method_field])
    changes = {}
    for name in sorted({*before, *now}):
        if before.get(name) == now.get(name):
            continue
        old = _effective_value(name, before)
        new = _effective_value(name, now)
        if old == new:
            continue
        kind = kind_of_field(name)
        if name in _DATA_CUT_FIELDS and is_same_cut:
            # The batches stay the same, and so does the mean over all of them.
            kind = HARMLESS
            if name == _GROUP_SIZE and is_semi_sync:
                # In a semi-synchronous round each group trains by itself, so the number of groups
                # changes the arithmetic.
                kind = ARITHMETIC
        changes[name] = ChangedField(before=old, now=new, kind=kind)
    return changes


def _effective_value(name: str, values: Values) -> Any:
    """Return a field's value, or the value that follows from others if the field is not set."""
    if name == _TOTAL_STEPS and values[name] is None:
        return values[_STEPS]
    if name == _GLOBAL_BATCH and values[name] < 0:
        return values[_BATCH] * num_shards(values)
    return values.get(name)


def kind_of_field(name: str) -> ChangeKind:
    """Return the kind of a field; "arithmetic" for an unknown field."""
    if name == _RANKS_PER_GROUP:
        # The parallel degrees are compared, and the number of ranks follows from them.
        return HARMLESS
    # From the whole name to the name of the table: the longest entry counts.
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        for kind, fields in FIELDS.items():
            if prefix in fields:
                return kind
    return ARITHMETIC


def lr_schedule_note(before: Values, now: Values) -> str:
    """Return a line if another length of the run changes the LR schedule, else ""."""
    old = before[_STEPS]
    new = now[_STEPS]
    if old == new:
        return ""
    follows_steps = before[_TOTAL_STEPS] is None and now[_TOTAL_STEPS] is None
    never_decays = (
        now["lr_scheduler.min_lr_factor"] == 1.0 or now["lr_scheduler.decay_ratio"] == 0.0
    )
    if not follows_steps or never_decays:
        return ""
    remedy = f"{_TOTAL_STEPS} = {old} keeps the former schedule"
    if new > old:
        # After the end of its schedule, torchtitan's LR falls below zero: updates would increase
        # the loss.
        remedy = (
            f"the former schedule ends at step {old}; set {_TOTAL_STEPS} at the first launch of a "
            "run that may grow"
        )
    return (
        f"{_STEPS} was {old}, is {new}, and the LR schedule follows it ({_TOTAL_STEPS} is not "
        f"set): the LR is another one from here on; {remedy}"
    )


def check_allowed(changes: Changes, allowed_names: Sequence[str]) -> None:
    """Check that `--resume-with` names each change that is not harmless, and nothing else.

    Args:
        allowed_names: names from `--resume-with`: full names of fields, the last part of them, or
            options of titan-ft launch.

    Raises:
        ConfigError: a change is not named, a name is no change, or a change can never be allowed.
    """
    workers = changes.get(_LOADER_WORKERS)
    if workers is not None:
        # Every rank would refuse the state of its dataloader, after each restart again.
        raise ConfigError(
            f"--resume must keep {_LOADER_WORKERS}, got {workers.now} (was {workers.before}): the "
            "state of a loader fits no other number of workers, whatever --resume-with names; set "
            "it back, or begin a new run in another --run-dir"
        )
    allowed: set[str] = set()
    for name in allowed_names:
        allowed.update(_find_fields_of_name(name, changes))
    refused = []
    for name, change in changes.items():
        if change.kind != HARMLESS and name not in allowed:
            refused.append(name)
    if not refused:
        return
    descriptions = []
    names_to_give = list(allowed_names)
    for name in refused:
        descriptions.append(changes[name].describe(name + _OPTION_HINT.get(name, "")))
        names_to_give.append(_shortest_name(name, changes))
    got = ", ".join(descriptions)
    them = "it" if len(refused) == 1 else "them"
    remedy = ",".join(dict.fromkeys(names_to_give))  # each name once
    raise ConfigError(
        f"--resume must keep the arithmetic and the data of the earlier launch, got {got}; set "
        f"{them} back, or go on with the change by --resume-with {remedy}"
    )


def _find_fields_of_name(given: str, changes: Changes) -> list[str]:
    """Return the changed fields that a name of `--resume-with` stands for.

    Raises:
        ConfigError: no change has the name, or several tables have a changed field of that name.
    """
    name = given.removeprefix("--").replace("-", "_")
    if name in _OPTION_FIELDS:
        found = [field for field in _OPTION_FIELDS[name] if field in changes]
    elif name in changes:
        found = [name]
    else:
        found = [field for field in changes if field.rpartition(".")[2] == name]
        if len(found) > 1:
            raise ConfigError(
                f"--resume-with must name one of {', '.join(found)}, got {given!r}; give its full "
                "name"
            )
    if found:
        return found
    differing = ", ".join(changes) or "none does"
    short_names = [_shortest_name(field, changes) for field in changes]
    raise ConfigError(
        f"--resume-with must name fields that differ from the earlier launch ({differing}), got "
        f"{given!r}; {suggest_name(name, [*changes, *short_names])}leave it out"
    )


def _shortest_name(name: str, changes: Changes) -> str:
    """Return the shortest name that --resume-with takes for a changed field."""
    if name == _GROUP_SIZE:
        return "replicas"
    if name in _OPTION_FIELDS[_RANKS_PER_GROUP] and _RANKS_PER_GROUP in changes:
        return _RANKS_PER_GROUP
    short_name = name.rpartition(".")[2]
    same_named = [field for field in changes if field.rpartition(".")[2] == short_name]
    return short_name if len(same_named) == 1 else name
