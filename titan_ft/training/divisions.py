# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Rules of divisibility: ranks by degrees, sequences and batches by ranks, layers, heads and
experts of a model.

torchtitan asserts most of these rules in each rank, during the start, and omits some. The rules
about ranks need only numbers, so a launcher checks them before any import.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from titan_ft.config import TABLE, ConfigError, Rule

RANKS = "--ranks-per-replica, or torchrun's --nnodes x --nproc-per-node"

DEGREES = (
    "data_parallel_replicate",
    "context_parallel",
    "tensor_parallel",
    "pipeline_parallel",
    "expert_parallel",
)


def check_ranks(config: Any, num_ranks: int) -> None:
    """Check that a group of `num_ranks` ranks can be divided as the config says.

    Args:
        config: tables `parallelism` and `training`, and `fault_tolerance.group_size`. None is not
            checked.

    Raises:
        ConfigError: the first rule that does not hold.
    """
    _raise_broken(_rank_rules(config, num_ranks))


def check_model(config: Any, spec: Any) -> None:
    """Check that the model, a TrainSpec with the flavor's arguments, can be cut as the config says.

    Raises:
        ConfigError: the first rule that does not hold.
    """
    _raise_broken(_model_rules(config, spec))


def _raise_broken(rules: Iterator[Rule]) -> None:
    for holds, name, rule, value, remedy in rules:
        if not holds:
            raise ConfigError(f"{name} {rule}, got {value!r}; {remedy}")


def _rank_rules(config: Any, num_ranks: int) -> Iterator[Rule]:
    parallel, training = config.parallelism, config.training
    replicate, cp, tp, pp, ep = (getattr(parallel, f"{name}_degree") for name in DEGREES)
    yield from _number_rules(parallel)
    shard, name = parallel.data_parallel_shard_degree, "parallelism.data_parallel_shard_degree"
    yield (
        shard == -1 or shard >= 1,
        name,
        "must be >= 1, or -1 for all ranks that are left",
        shard,
        "set it to -1",
    )
    others = replicate * cp * tp * pp
    product = " x ".join(
        f"{name} ({degree})"
        for name, degree in (
            ("data_parallel_replicate_degree", replicate),
            ("data_parallel_shard_degree", shard),
            ("context_parallel_degree", cp),
            ("tensor_parallel_degree", tp),
            ("pipeline_parallel_degree", pp),
        )
        if degree > 1
    )
    remedy = f"change a degree, or the ranks ({RANKS})"
    if shard == -1:
        yield (
            num_ranks % others == 0,
            "ranks of a group",
            f"must be a multiple of {product}",
            num_ranks,
            remedy,
        )
        shard = num_ranks // others
    else:
        yield (
            num_ranks == others * shard,
            "ranks of a group",
            f"must be {product or 1}",
            num_ranks,
            remedy,
        )
    if cp * tp > 1:
        yield from _sequence_rules("training.seq_len", training.seq_len, cp, tp)
    if ep > 1:
        yield from _expert_rules(ep, parallel.expert_tensor_parallel_degree, tp, shard * cp * tp)
    yield from _batch_rules(config, pp, replicate * shard)


def _number_rules(parallel: Any) -> Iterator[Rule]:
    """Check what the other rules divide by."""
    for name in (*(f"{degree}_degree" for degree in DEGREES), "pipeline_parallel_microbatch_size"):
        value = getattr(parallel, name)
        yield value >= 1, f"parallelism.{name}", "must be >= 1", value, "1 is the default"


def _sequence_rules(name: str, seq_len: int | None, cp: int, tp: int) -> Iterator[Rule]:
    """Check the rules that torchtitan's models assert (`ParallelDims.seq_len_divisor`), also
    without CP.
    """
    if seq_len is not None:
        rule = f"must be a multiple of tensor_parallel_degree ({tp}) x 2 x context_parallel_degree ({cp})"
        yield seq_len % (tp * 2 * cp) == 0, name, rule, seq_len, "change it or a degree"


def _expert_rules(ep: int, etp: int, tp: int, ranks: int) -> Iterator[Rule]:
    name = "parallelism.expert_tensor_parallel_degree"
    yield etp in (1, tp), name, f"must be 1 or tensor_parallel_degree ({tp})", etp, "set it to 1"
    rule = f"must divide the ranks that share a batch's experts (shard x context x tensor degree = {ranks})"
    if etp > 1:
        rule = f"times expert_tensor_parallel_degree ({etp}) {rule}"
    yield ranks % (ep * etp) == 0, "parallelism.expert_parallel_degree", rule, ep, "lower it"


def _batch_rules(config: Any, pp: int, readers: int) -> Iterator[Rule]:
    """Check the batch, which `readers` ranks of a group read."""
    training, groups = config.training, config.fault_tolerance.group_size
    local, total = training.local_batch_size, training.global_batch_size
    if not local:
        return
    if pp > 1:
        micro = config.parallelism.pipeline_parallel_microbatch_size
        rule = f"must be a multiple of parallelism.pipeline_parallel_microbatch_size ({micro})"
        yield local % micro == 0, "training.local_batch_size", rule, local, "change one of them"
    if total is not None and total > 0:
        factors = f"{TABLE}.group_size ({groups}) x training.local_batch_size ({local}) x {readers} ranks that read data"
        remedy = "it counts the sequences of all groups"
        rule = f"must be a multiple of {factors}"
        yield (
            total % (groups * local * readers) == 0,
            "training.global_batch_size",
            rule,
            total,
            remedy,
        )


def _model_rules(config: Any, spec: Any) -> Iterator[Rule]:
    parallel, model = config.parallelism, config.model
    arguments, what = spec.model_args[model.flavor], f"of {model.name} {model.flavor}"
    yield from _number_rules(parallel)
    tp, ep = parallel.tensor_parallel_degree, parallel.expert_parallel_degree
    name = "parallelism.tensor_parallel_degree"
    heads = getattr(arguments, "n_heads", None)
    for count, kind in (
        (heads, "attention heads"),
        (getattr(arguments, "n_kv_heads", None), "key-value heads"),
    ):
        if count:
            yield count % tp == 0, name, f"must divide the {count} {kind} {what}", tp, "lower it"
    yield from _sequence_rules(
        "training.seq_len", config.training.seq_len, parallel.context_parallel_degree, tp
    )
    if ep > 1 and (experts := num_experts(arguments)):
        name = "parallelism.expert_parallel_degree"
        yield experts % ep == 0, name, f"must divide the {experts} experts {what}", ep, "lower it"
    if parallel.pipeline_parallel_degree > 1:
        yield from _stage_rules(parallel, arguments, spec, what)
        yield from _microbatch_rules(config)
    if config.validation.enable:
        yield from _validation_rules(config)
        # Torchtitan sets it to training.seq_len: positions end there.
        if hasattr(arguments, "max_seq_len"):
            most, rule = config.training.seq_len, "must be <= training.seq_len"
            rule = f"{rule} ({most}), up to which the positions {what} are built"
            remedy = f"set it to {most}, or raise training.seq_len"
            yield (
                config.validation.seq_len <= most,
                "validation.seq_len",
                rule,
                config.validation.seq_len,
                remedy,
            )


def num_experts(arguments: Any) -> int:
    """Return how many experts each of a model's layers has; 0 if it is dense."""
    moe = getattr(arguments, "moe_args", None)
    return (
        0
        if moe is None or getattr(arguments, "moe_enabled", True) is False
        else int(moe.num_experts)
    )


def _stage_rules(parallel: Any, arguments: Any, spec: Any, what: str) -> Iterator[Rule]:
    from torch.distributed.pipelining.schedules import (
        PipelineScheduleSingle,
        ScheduleDualPipeV,
        ScheduleZBVZeroBubble,
        get_schedule_class,
    )

    pp, name = parallel.pipeline_parallel_degree, "parallelism.pipeline_parallel_degree"
    rule = f"must be 1: torchtitan cannot cut {what.removeprefix('of ')} into stages"
    yield spec.pipelining_fn is not None, name, rule, pp, "set it to 1"
    layers = getattr(arguments, "n_layers", None)
    first, last = (
        parallel.pipeline_parallel_first_stage_less_layers,
        parallel.pipeline_parallel_last_stage_less_layers,
    )
    schedule = parallel.pipeline_parallel_schedule
    try:
        schedule_class = get_schedule_class(schedule)
    except ValueError:
        yield (
            False,
            "parallelism.pipeline_parallel_schedule",
            "must be a schedule of torch",
            schedule,
            'such as "1F1B"',
        )
        return
    if layers is None or parallel.module_fqns_per_model_part is not None:
        return  # cut as the config names it
    single = issubclass(schedule_class, PipelineScheduleSingle)
    stages, ends = pp * (1 if single else 2), f"(and {first + last} for the ends)"
    if (per_stage := parallel.pipeline_parallel_layers_per_stage) is not None:
        name = "parallelism.pipeline_parallel_layers_per_stage"
        yield per_stage >= 1, name, "must be >= 1", per_stage, "leave it out"
        stages = math.ceil((layers + first + last) / per_stage)
        wanted, fits = f"{2 * pp} stages, {3 * pp} or so on", stages % pp == 0 and stages >= 2 * pp
        if single or schedule_class in (ScheduleZBVZeroBubble, ScheduleDualPipeV):
            exact = pp if single else 2 * pp
            wanted, fits = f"{exact} stages", stages == exact
        rule = f"must cut the {layers} layers {what} {ends} into {wanted} for {schedule}"
        yield fits, name, rule, per_stage, f"it makes {stages}; change it, or leave it out"
    rule = f"must leave each of its {stages} stages a layer of the {layers} layers {what} {ends}"
    yield (layers + first + last) // stages >= max(first, last, 1), name, rule, pp, "lower it"


def _microbatch_rules(config: Any) -> Iterator[Rule]:
    """Check that the schedule can deal out a batch, which torch refuses in each rank and in
    mid-start.
    """
    from torch.distributed.pipelining.schedules import (
        Schedule1F1B,
        ScheduleDualPipeV,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
        get_schedule_class,
    )

    parallel, local, name = (
        config.parallelism,
        config.training.local_batch_size,
        "training.local_batch_size",
    )
    if parallel.pipeline_parallel_schedule_csv:
        return  # dealt out as that file says
    pp, size, schedule = (
        parallel.pipeline_parallel_degree,
        parallel.pipeline_parallel_microbatch_size,
        parallel.pipeline_parallel_schedule,
    )
    schedule_class, count = get_schedule_class(schedule), local // size
    least = {Schedule1F1B: pp, ScheduleDualPipeV: 2 * pp}.get(schedule_class, 1)
    rule = (
        f"must make {least} or more microbatches (of {size}) for the {least} stages of {schedule}"
    )
    yield count >= least, name, rule, local, f"raise it to {least * size}"
    if schedule_class in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
        rounds = max(1, count // pp)
        rule = f"must make microbatches (of {size}) that {schedule} can deal out to {pp} ranks in {rounds} equal rounds"
        yield count % rounds == 0, name, rule, local, f"a multiple of {pp * size} always does"


def _validation_rules(config: Any) -> Iterator[Rule]:
    """Check the batches of a validation. A wrong one would end a run in the middle."""
    parallel, training, validation = config.parallelism, config.training, config.validation
    cp, tp = parallel.context_parallel_degree, parallel.tensor_parallel_degree
    if cp > 1:
        yield from _sequence_rules("validation.seq_len", validation.seq_len, cp, tp)
    if parallel.pipeline_parallel_degree > 1:
        count = training.local_batch_size // parallel.pipeline_parallel_microbatch_size
        name, size = "validation.local_batch_size", validation.local_batch_size
        rule = f"must be a multiple of the {count} microbatches that the pipeline makes of a batch"
        remedy = f"set it to training.local_batch_size ({training.local_batch_size})"
        yield size % max(count, 1) == 0, name, rule, size, remedy
