# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Compare the launch of a run with the launch that continues from a checkpoint of the run.

The effective values of both launches are compared: TOML, flags and defaults together. A field that
only affects how a run is carried out may change. A change of the arithmetic or of the data makes
another run, and is allowed only if `--resume-with` names it. See docs/operations.md.

`LaunchPlan` calls this module for --resume.
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

from titan_ft.config import TABLE, ConfigError, closest
from titan_ft.options import Launch
from titan_ft.run.events import ChangedField
from titan_ft.system.text import printable
from titan_ft.usage import refusing

HEADER = "# titan-ft launch "
"""Prefix of the lines with the commands of a run's launches, for people.

These lines stand above the TOML in the run's config.
"""
_RECORD = "# titan-ft launched: "
"""Prefix of the line after each such line: the same command and its working folder, as JSON.

The line for people cannot be read back: a flag may contain a line break. Runs of earlier versions
lack this line.
"""

ChangeKind = Literal["harmless", "arithmetic", "data"]
"""Possible effect of a field's change, see `ChangedField.kind`."""
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
        "training.steps": "a resume may train longer; see `lr_schedule_note`",
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
        "checkpoint.folder": "the checkpoint in the folder names its run",
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
        # These three change the data only if their product changes, see `compare`.
        f"{TABLE}.group_size": "how the data is cut",
        "parallelism.data_parallel_replicate_degree": "how the data is cut",
        "parallelism.data_parallel_shard_degree": "how the data is cut",
    },
}
"""All fields of the config by the effect of a change, each with the reason.

A name is a field with its table, or a whole table; the longest name that fits a field counts. A
field without an entry, such as a field of a user's config module, counts as arithmetic, because its
effect is unknown here.
"""

_REPLICAS = f"{TABLE}.group_size"
_RANKS = "ranks_per_replica"
_REPLICATE = "parallelism.data_parallel_replicate_degree"
_SHARD = "parallelism.data_parallel_shard_degree"
_CUT = (_REPLICAS, _REPLICATE, _SHARD)
"""Fields whose product is the number of shards that the data is cut into."""
_NOT_FSDP = (
    _REPLICATE,
    "parallelism.context_parallel_degree",
    "parallelism.tensor_parallel_degree",
    "parallelism.pipeline_parallel_degree",
)
"""Degrees that divide a group's ranks before FSDP; FSDP gets the remaining factor."""
_OPTIONS = {"replicas": (_REPLICAS,), _RANKS: (_RANKS, _REPLICATE, _SHARD)}
"""Options of titan-ft launch, with the fields that follow from each."""
_OPTION_HINT = {_REPLICAS: " (--replicas)"}
_PATHS = ("model.hf_assets_path", "model.tokenizer_path", "training.dataset_path")
"""Fields that hold a path. Several paths may lead to the same file."""
_WORKERS = "training.dataloader.num_workers"
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
        folder: working folder, from which relative paths start; None for a launch of an earlier
            version.
    """

    toml: Path
    replicas: int
    ranks: int
    flags: tuple[str, ...]
    folder: Path | None = None

    def worker_flags(self) -> list[str]:
        """Return the workers' flags that determine the values of the launch."""
        own = [f"--job.config_file={self.toml}", f"--{TABLE}.enable"]
        return [*own, f"--{_REPLICAS}={self.replicas}", *self.flags]

    def is_same_as(self, other: Command) -> bool:
        """True if no value can differ between the two launches.

        Folder, numbers, flags and TOML (without its headers) are equal then.
        """
        has_folders = self.folder is not None and other.folder is not None
        if has_folders and self.folder != other.folder:
            # A relative path may lead to another file.
            return False
        if (self.replicas, self.ranks, self.flags) != (other.replicas, other.ranks, other.flags):
            return False
        return without_headers(self.toml) == without_headers(other.toml)


def without_headers(config: Path) -> list[str]:
    """Return the lines of a TOML, with their ends, below the commands of a run's launches."""
    lines = config.read_text(encoding="utf-8").splitlines(keepends=True)
    return list(dropwhile(is_header, lines))


def is_header(line: str) -> bool:
    """True if a line of a config records a launch's command."""
    return line.startswith((HEADER, _RECORD))


def header_lines(words: Sequence[str], folder: Path) -> list[str]:
    """Return the lines, with their ends, that record a launch's command in the run's config.

    Args:
        words: the words after "titan-ft launch".
        folder: working folder of the command.
    """
    shown = printable(shlex.join(words))
    record = json.dumps({"folder": str(folder), "words": list(words)})
    return [f"{HEADER}{shown}\n", f"{_RECORD}{record}\n"]


def read_command(config: Path) -> Command:
    """Return the latest launch of a run from its config.

    Raises:
        ConfigError: the config does not record a command.
    """
    lines: list[str] = []
    # A file that is missing or not UTF-8 records no command.
    with contextlib.suppress(OSError, ValueError):
        lines = config.read_text(encoding="utf-8").splitlines()
    header = lines[0] if lines else ""
    record_line = lines[1] if len(lines) > 1 else ""
    if not is_header(header):
        raise ConfigError(
            f"--resume needs the command of the earlier launch as the first line of {config}, got "
            "none; titan-ft launch writes it, and resumes its own runs only: give another "
            "--run-dir, with checkpoint.initial_load_path"
        )
    folder = None
    if record_line.startswith(_RECORD):
        record = json.loads(record_line.removeprefix(_RECORD))
        words = list(record["words"])
        folder = Path(record["folder"])
    else:
        words = shlex.split(header.removeprefix(HEADER))
    end = words.index("--") if "--" in words else len(words)
    own_words = words[:end]
    worker_flags = tuple(words[end + 1 :])

    def parse() -> Launch:
        return tyro.cli(Launch, args=own_words, config=(tyro.conf.FlagCreatePairsOff,))

    def describe_unknown(option: str) -> str:
        return f"{option} is no option of titan-ft launch; correct the first two lines of {config}"

    options = refusing(parse, own_words, describe_unknown)
    return Command(config, options.replicas, options.ranks_per_replica, worker_flags, folder)


Resolve = Callable[[Sequence[str], Sequence[str]], tuple[Values, Values]]
"""Takes the workers' flags of an earlier launch and of this one, and returns the values of both.

Only the values of this launch are checked.
"""


def find_changes(earlier: Command, now: Command, resolve: Resolve) -> tuple[Changes, str]:
    """Return the fields of two launches that differ, and a line about the LR schedule or "".

    Raises:
        ConfigError: there is a mistake in the config.
    """
    if earlier.is_same_as(now):
        # The usual case. To resolve the values would take seconds.
        return {}, ""
    resolved_before, resolved_now = resolve(earlier.worker_flags(), now.worker_flags())
    before = complete(resolved_before, earlier.ranks)
    after = complete(resolved_now, now.ranks)
    _resolve_paths(before, after, earlier.folder, now.folder)
    return compare(before, after), lr_schedule_note(before, after)


def resolve_in_child(earlier: Sequence[str], now: Sequence[str]) -> tuple[Values, Values]:
    """Resolve the flags of two launches in another process, see `Resolve`.

    The launcher itself never imports torchtitan.

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


def complete(values: Values, ranks: int) -> dict[str, Any]:
    """Add the values that a launch determines.

    Args:
        ranks: number of ranks of a group.
    """
    completed = {**values, _RANKS: ranks}
    # The run's config is a copy of the user's, so the two paths differ.
    del completed["job.config_file"]
    if completed[_SHARD] == -1:
        completed[_SHARD] = ranks // math.prod(completed[name] for name in _NOT_FSDP)
    return completed


def _resolve_paths(
    before: dict[str, Any],
    after: dict[str, Any],
    folder_before: Path | None,
    folder_after: Path | None,
) -> None:
    """Replace each path by the file or folder to which it leads: one place has several spellings.

    Args:
        folder_before, folder_after: folders from which relative paths start; None if unknown.
    """
    for name in _PATHS:
        has_folders = folder_before is not None and folder_after is not None
        if before[name] == after[name] and not has_folders:
            # An earlier version recorded no folder. Equal texts count as equal paths.
            continue
        before[name] = _real_path(before[name], folder_before)
        after[name] = _real_path(after[name], folder_after)


def _real_path(path: str | None, folder: Path | None) -> str | None:
    """Return the file or folder to which a path leads.

    A text that is no path, such as the name of a data set, is returned as it is.
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
    return math.prod(values[name] for name in _CUT)


def compare(before: Values, now: Values) -> dict[str, ChangedField]:
    """Return the fields that differ, by their full names, with the possible effect of the
    change.
    """
    same_cut = num_shards(before) == num_shards(now)
    method = f"{TABLE}.semi_sync_method"
    in_rounds = bool(before[method] or now[method])
    changes = {}
    for name in sorted({*before, *now}):
        if before.get(name) == now.get(name):
            continue
        old, new = _meaning(name, before), _meaning(name, now)
        if old == new:
            continue
        kind = kind_of_field(name)
        if name in _CUT and same_cut:
            # The batches stay the same, and so does the mean over all of them.
            kind = HARMLESS
            if name == _REPLICAS and in_rounds:
                # In a semi-synchronous round each group trains by itself, so the number of groups
                # changes the arithmetic.
                kind = ARITHMETIC
        changes[name] = ChangedField(before=old, now=new, kind=kind)
    return changes


def _meaning(name: str, values: Values) -> Any:
    """Return a field's effective value, also if the field is not set."""
    if name == _TOTAL_STEPS and values[name] is None:
        return values[_STEPS]
    if name == _GLOBAL_BATCH and values[name] < 0:
        return values[_BATCH] * num_shards(values)
    return values.get(name)


def kind_of_field(name: str) -> ChangeKind:
    """Return the possible effect of a field's change; "arithmetic" for an unknown field."""
    if name == _RANKS:
        # The parallel degrees are compared, and the number of ranks follows from them.
        return HARMLESS
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        for kind, fields in FIELDS.items():
            if prefix in fields:
                return kind
    return ARITHMETIC


def lr_schedule_note(before: Values, now: Values) -> str:
    """Return a line if another length of the run changes the LR schedule, else ""."""
    old, new = before[_STEPS], now[_STEPS]
    follows_steps = before[_TOTAL_STEPS] is None and now[_TOTAL_STEPS] is None
    is_constant = now["lr_scheduler.min_lr_factor"] == 1.0 or now["lr_scheduler.decay_ratio"] == 0.0
    if old == new or not follows_steps or is_constant:
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


def check_allowed(changes: Changes, named: Sequence[str]) -> None:
    """Check that `--resume-with` names each change that is not harmless, and only changes.

    Args:
        named: full names of fields, or the last part of them.

    Raises:
        ConfigError: a change is not named, a name is no change, or a change can never be allowed.
    """
    workers = changes.get(_WORKERS)
    if workers is not None:
        # Every rank would refuse the state of its loader, at each start again.
        raise ConfigError(
            f"--resume must keep {_WORKERS}, got {workers.now} (was {workers.before}): the state "
            "of a loader fits no other number of workers, whatever --resume-with names; set it "
            "back, or begin a new run in another --run-dir"
        )
    allowed: set[str] = set()
    for name in named:
        allowed.update(_find_named(name, changes))
    refused = [
        name for name, change in changes.items() if change.kind != HARMLESS and name not in allowed
    ]
    if not refused:
        return
    descriptions = []
    names = list(named)
    for name in refused:
        descriptions.append(changes[name].describe(name + _OPTION_HINT.get(name, "")))
        names.append(_shorten(name, changes))
    got = ", ".join(descriptions)
    them = "it" if len(refused) == 1 else "them"
    raise ConfigError(
        f"--resume must keep the arithmetic and the data of the earlier launch, got {got}; set "
        f"{them} back, or go on with the change by --resume-with {','.join(dict.fromkeys(names))}"
    )


def _find_named(given: str, changes: Changes) -> list[str]:
    """Return the changes that a name of `--resume-with` stands for.

    Raises:
        ConfigError: no change has the name, or several tables have a changed field of that name.
    """
    name = given.removeprefix("--").replace("-", "_")
    if name in _OPTIONS:
        found = [field for field in _OPTIONS[name] if field in changes]
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
    short_names = [_shorten(field, changes) for field in changes]
    raise ConfigError(
        f"--resume-with must name fields that differ from the earlier launch ({differing}), got "
        f"{given!r}; {closest(name, [*changes, *short_names])}leave it out"
    )


def _shorten(name: str, changes: Changes) -> str:
    """Return the shortest name of a change that --resume-with takes."""
    if name == _REPLICAS:
        return "replicas"
    if name in _OPTIONS[_RANKS] and _RANKS in changes:
        return _RANKS
    short_name = name.rpartition(".")[2]
    same_named = [field for field in changes if field.rpartition(".")[2] == short_name]
    return short_name if len(same_named) == 1 else name
