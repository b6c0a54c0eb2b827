# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Decide which fields may differ between a run's launch and the launch that continues from its
checkpoint.

The effective values of both launches are compared: TOML, flags and defaults together. A field that
only affects how a run is carried out may change. A change of the arithmetic or of the data makes
another run, and is allowed only if `--resume-with` names it.
"""

from __future__ import annotations

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
from typing import Any

import tyro

from titan_ft.config import TABLE, ConfigError, closest
from titan_ft.options import Launch
from titan_ft.run.events import ChangedField
from titan_ft.system.text import printable
from titan_ft.usage import refusing

HEADER = "# titan-ft launch "
"""Begins the lines of a run's config that show the commands of its launches to people, above the
TOML.
"""
_RECORD = "# titan-ft launched: "
"""Begins the line after each of them: the same command, and the folder it was given in, as JSON.

A flag that holds a line break ended the comment, and the config was no TOML any more. Runs of
earlier versions lack the line.
"""

HARMLESS, ARITHMETIC, DATA = "harmless", "arithmetic", "data"
"""What a change of a field may do: `ChangedField.kind`."""

_ROUNDING = "another order of the same sums: only rounding differs"
_SPEED = "how fast, and in how much memory"
_WAITS = "how long somebody waits"
_WATCHING = "what is told of a run"
_SAVING = "when and how checkpoints are written"
_NETWORK = "how groups reach each other"
_NOT_READ = "not read where there is a checkpoint of the run"
_ROUNDS = "what a round of a semi-synchronous method makes of the groups' steps"

# Each field of the config by its table and name, or a whole table, with the reason. The longest
# name that fits counts. A field that nothing here names, such as one of a user's config module,
# counts as arithmetic: nobody here knows what it does.
FIELDS: Mapping[str, Mapping[str, str]] = {
    HARMLESS: {
        "job": _WATCHING,
        "profiling": _WATCHING,
        "metrics": _WATCHING,
        "memory_estimation": "torchtitan's trainer does not use it",
        "comm": f"{_WAITS}, and traces of that",
        "compile": _ROUNDING,
        "validation": "no weight follows from it",
        "model.print_after_conversion": _WATCHING,
        "optimizer.implementation": _ROUNDING,
        "training.steps": "to go on for longer is what a resume is for; see `lr_schedule_note`",
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
        "checkpoint.enable": "a resume demands it",
        "checkpoint.enable_ft_dataloader_checkpoints": "of torchft's manager, which is not used",
        "checkpoint.folder": "it must hold a checkpoint, which says of which run it is",
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
        "checkpoint.load_step": "where to go on from is what a resume is asked",
        "checkpoint.enable_first_step_checkpoint": _SAVING,
        "checkpoint.create_seed_checkpoint": "refused in a fault-tolerant run",
        "checkpoint.load_only": _SAVING,
        # Recomputed activations are those of the forward: the same kernels on the same inputs.
        "activation_checkpoint": _SPEED,
        "debug.deterministic": _ROUNDING,
        "debug.deterministic_warn_only": _WATCHING,
        f"{TABLE}.enable": "titan-ft launch demands it",
        f"{TABLE}.process_group": _ROUNDING,
        f"{TABLE}.process_group_timeout_ms": _WAITS,
        f"{TABLE}.replica_id": "given to each group by titan-ft launch",
        f"{TABLE}.min_replica_size": "whom a step waits for; it is the mean of those who took part",
        f"{TABLE}.job_id": "each launch has a name of its own",
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
        "model.converters": "float8 and the like round each product otherwise",
        "quantize": "how float8 and the like round",
        "optimizer": "what an update makes of a gradient",
        "lr_scheduler": "the LR of each step",
        "training.max_norm": "how gradients are clipped",
        "training.dtype": "what weights and optimizer are rounded to",
        "training.mixed_precision_param": "what a forward is rounded to",
        "training.mixed_precision_reduce": "what gradients are rounded to",
        "checkpoint.exclude_from_loading": "what is not loaded begins anew, such as the moments",
        "activation_checkpoint.preserve_rng_state": "a recomputed dropout would draw anew",
        "debug.seed": "what is random from here on, such as dropout",
        "debug.moe_force_load_balance": "which expert a token goes to",
        "experimental": "code of the user's, which may change anything",
        f"{TABLE}.exchange_dtype": "what gradients are rounded to on their way",
        f"{TABLE}.batch_policy": "what an update lacks while a group is away",
        f"{TABLE}.lr_policy": "the LR of an update that lacks a group",
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
        "training.dataset": "what is read",
        "training.dataset_path": "what is read",
        "training.seq_len": "how text is cut into sequences",
        "training.local_batch_size": "how sequences are cut into batches, which are counted",
        "training.global_batch_size": "how many sequences an update is made from",
        "training.dataloader.num_workers": "each worker has a place of its own in the data",
        # These three only where their product differs, see `compare`.
        f"{TABLE}.group_size": "how the data is cut",
        "parallelism.data_parallel_replicate_degree": "how the data is cut",
        "parallelism.data_parallel_shard_degree": "how the data is cut",
    },
}

_REPLICAS = f"{TABLE}.group_size"
_RANKS = "ranks_per_replica"
_REPLICATE, _SHARD = (f"parallelism.data_parallel_{name}_degree" for name in ("replicate", "shard"))
_CUT = (_REPLICAS, _REPLICATE, _SHARD)
"""Fields whose product is the number of shards that the data is cut into."""
_NOT_FSDP = (
    _REPLICATE,
    *(f"parallelism.{name}_parallel_degree" for name in ("context", "tensor", "pipeline")),
)
"""Degrees that take ranks of a group before FSDP gets the rest."""
_OPTIONS = {"replicas": (_REPLICAS,), _RANKS: (_RANKS, _REPLICATE, _SHARD)}
"""Options of titan-ft launch, with the fields that follow from each."""
_OPTION_HINT = {_REPLICAS: " (--replicas)"}
_PATHS = ("model.hf_assets_path", "model.tokenizer_path", "training.dataset_path")
"""Fields that hold a path, which may be written in several ways."""
_WORKERS = "training.dataloader.num_workers"
_STEPS, _TOTAL_STEPS = "training.steps", "lr_scheduler.total_steps"
_BATCH, _GLOBAL_BATCH = "training.local_batch_size", "training.global_batch_size"

Values = Mapping[str, Any]
"""Values of a launch by their full names, such as "optimizer.lr"."""
Changes = Mapping[str, ChangedField]
"""Fields that differ, by their full names."""


@dataclass(frozen=True)
class Command:
    """The command of a launch.

    Attributes:
        toml: path of its TOML.
        replicas, ranks: numbers of groups, and of ranks in each.
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
        """Return the flags that determine its values."""
        own = [f"--job.config_file={self.toml}", f"--{TABLE}.enable"]
        return [*own, f"--{_REPLICAS}={self.replicas}", *self.flags]

    def is_same_as(self, other: Command) -> bool:
        """True if nothing can differ: TOML (without its headers), numbers, flags and folder are
        equal.
        """
        if None not in (self.folder, other.folder) and self.folder != other.folder:
            return False  # a relative path may be another one there
        mine = (self.replicas, self.ranks, self.flags, without_headers(self.toml))
        return mine == (other.replicas, other.ranks, other.flags, without_headers(other.toml))


def without_headers(config: Path) -> list[str]:
    """Return the lines of a TOML, with their ends, below the commands of a run's launches."""
    lines = config.read_text(encoding="utf-8").splitlines(keepends=True)
    return list(dropwhile(is_header, lines))


def is_header(line: str) -> bool:
    """True if a line of a config names a launch's command."""
    return line.startswith((HEADER, _RECORD))


def header_lines(words: Sequence[str], folder: Path) -> list[str]:
    """Return the lines, with their ends, that name a launch's command in the config of its run.

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
        ConfigError: the config does not name the command.
    """
    try:
        header, *rest = config.read_text(encoding="utf-8").splitlines()[:2]
    except (OSError, ValueError):  # no file, none in UTF-8, or an empty one
        header, rest = "", []
    if not is_header(header):
        raise ConfigError(
            f"--resume needs the command of the earlier launch as the first line of {config}, got "
            "none; titan-ft launch writes it, and resumes its own runs only: give another "
            "--run-dir, with checkpoint.initial_load_path"
        )
    folder = None
    if rest and rest[0].startswith(_RECORD):
        record = json.loads(rest[0].removeprefix(_RECORD))
        words, folder = list(record["words"]), Path(record["folder"])
    else:
        words = shlex.split(header.removeprefix(HEADER))
    end = words.index("--") if "--" in words else len(words)
    flag_pairs = (tyro.conf.FlagCreatePairsOff,)
    options = refusing(
        lambda: tyro.cli(Launch, args=words[:end], config=flag_pairs),
        words[:end],
        lambda option: (
            f"{option} is no option of titan-ft launch; correct the first two lines of {config}"
        ),
    )
    return Command(
        config, options.replicas, options.ranks_per_replica, tuple(words[end + 1 :]), folder
    )


Resolve = Callable[[Sequence[str], Sequence[str]], tuple[Values, Values]]
"""Takes the flags of an earlier launch and of this one; returns the values of both, these
checked.
"""


def find_changes(earlier: Command, now: Command, resolve: Resolve) -> tuple[Changes, str]:
    """Return the fields of two launches that differ, and a line about the LR schedule or nothing.

    Raises:
        ConfigError: there is a mistake in the config.
    """
    if earlier.is_same_as(now):
        return {}, ""  # mostly so, and seconds are saved
    before, after = resolve(earlier.worker_flags(), now.worker_flags())
    before, after = complete(before, earlier.ranks), complete(after, now.ranks)
    _find_paths(before, after, earlier.folder, now.folder)
    return compare(before, after), lr_schedule_note(before, after)


def resolve_in_child(earlier: Sequence[str], now: Sequence[str]) -> tuple[Values, Values]:
    """Resolve the flags of two launches in another process: the launcher never imports torchtitan.

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
        said = child.stderr.strip().splitlines() or [f"exit status {child.returncode}"]
        raise ConfigError(
            f"--resume must be able to read both configs, got: {said[-1]}; install what is "
            "missing, or correct the name"
        ) from None
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer["earlier"], answer["now"]


def complete(values: Values, ranks: int) -> dict[str, Any]:
    """Add the values that a launch determines.

    Args:
        ranks: of a group.
    """
    found = {**values, _RANKS: ranks}
    del found["job.config_file"]  # a copy of it is compared with it
    if found[_SHARD] == -1:
        found[_SHARD] = ranks // math.prod(found[name] for name in _NOT_FSDP)
    return found


def _find_paths(
    before: dict[str, Any], after: dict[str, Any], earlier: Path | None, now: Path | None
) -> None:
    """Replace paths by the files and folders that they lead to, because one place has several
    spellings.

    Args:
        earlier, now: folders from which relative paths start.
    """
    for name in _PATHS:
        old, new = before[name], after[name]
        if old == new and (earlier is None or now is None):
            continue  # an earlier version recorded no folder: the text counts
        before[name], after[name] = _real_path(old, earlier), _real_path(new, now)


def _real_path(path: str | None, folder: Path | None) -> str | None:
    """Return the file or folder of a path, or the text itself if it is none, such as a data set's
    name.
    """
    if not path or (folder is None and not os.path.isabs(path)):
        return path
    place = path if folder is None else str(folder / path)
    return os.path.realpath(place) if os.path.isabs(path) or os.path.exists(place) else path


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
            # The batches are those of before, and so is the mean of all. With a semi-synchronous
            # method each group trains by itself for a while: their number is arithmetic.
            kind = ARITHMETIC if name == _REPLICAS and in_rounds else HARMLESS
        changes[name] = ChangedField(before=old, now=new, kind=kind)
    return changes


def _meaning(name: str, values: Values) -> Any:
    """Return a field's effective value, also if it is not set."""
    if name == _TOTAL_STEPS and values[name] is None:
        return values[_STEPS]
    if name == _GLOBAL_BATCH and values[name] < 0:
        return values[_BATCH] * num_shards(values)
    return values.get(name)


def kind_of_field(name: str) -> str:
    """Return the possible effect of a field's change; "arithmetic" for an unknown field."""
    if name == _RANKS:
        return HARMLESS  # the degrees that follow from it are compared
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        for kind, fields in FIELDS.items():
            if prefix in fields:
                return kind
    return ARITHMETIC


def lr_schedule_note(before: Values, now: Values) -> str:
    """Return a line if the LR schedule becomes another one because the run's length does."""
    old, new = before[_STEPS], now[_STEPS]
    follows = before[_TOTAL_STEPS] is None and now[_TOTAL_STEPS] is None
    is_constant = now["lr_scheduler.min_lr_factor"] == 1.0 or now["lr_scheduler.decay_ratio"] == 0.0
    if old == new or not follows or is_constant:
        return ""
    remedy = f"{_TOTAL_STEPS} = {old} keeps the former schedule"
    if new > old:
        # Past its end torchtitan's LR goes on below zero: updates would climb the loss.
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
    if workers is not None:  # every rank would refuse its loader's state, at each start again
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
    got = ", ".join(changes[name].describe(name + _OPTION_HINT.get(name, "")) for name in refused)
    names = ",".join(dict.fromkeys([*named, *(_short(name, changes) for name in refused)]))
    them = "it" if len(refused) == 1 else "them"
    raise ConfigError(
        f"--resume must keep the arithmetic and the data of the earlier launch, got {got}; set "
        f"{them} back, or go on with the change by --resume-with {names}"
    )


def _find_named(given: str, changes: Changes) -> list[str]:
    """Return the changes that a name of `--resume-with` stands for.

    Raises:
        ConfigError: there is none, or there are several.
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
    shorts = [_short(field, changes) for field in changes]
    raise ConfigError(
        f"--resume-with must name fields that differ from the earlier launch ({differing}), got "
        f"{given!r}; {closest(name, [*changes, *shorts])}leave it out"
    )


def _short(name: str, changes: Changes) -> str:
    """Return the shortest name of a change that --resume-with takes."""
    if name == _REPLICAS:
        return "replicas"
    if name in _OPTIONS[_RANKS] and _RANKS in changes:
        return _RANKS
    short = name.rpartition(".")[2]
    return short if sum(field.rpartition(".")[2] == short for field in changes) == 1 else name
