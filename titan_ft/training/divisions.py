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

from titan_ft.config import TABLE, check_rules
from titan_ft.setting_rule import SettingRule

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
        config: tables `parallelism` and `training`, and `fault_tolerance.group_size`. A sequence
            length or batch of None is not checked.

    Raises:
        ConfigError: the first rule that does not hold.
    """
    check_rules(_rank_rules(config, num_ranks))


def check_model(config: Any, spec: Any) -> None:
    """Check that the model can be cut as the config says.

    Args:
        spec: TrainSpec of the model, with the flavor's arguments.

    Raises:
        ConfigError: the first rule that does not hold.
    """
    check_rules(_model_rules(config, spec))


def _rank_rules(config: Any, num_ranks: int) -> Iterator[SettingRule]:
    parallel = config.parallelism
    yield from _number_rules(parallel)
    replicate = parallel.data_parallel_replicate_degree
    shard = parallel.data_parallel_shard_degree
    cp = parallel.context_parallel_degree
    tp = parallel.tensor_parallel_degree
    pp = parallel.pipeline_parallel_degree
    ep = parallel.expert_parallel_degree
    yield SettingRule(
        holds=shard == -1 or shard >= 1,
        field="parallelism.data_parallel_shard_degree",
        rule="must be >= 1, or -1 for all ranks that are left",
        value=shard,
        remedy="set it to -1",
    )
    degrees = {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": shard,
        "context_parallel_degree": cp,
        "tensor_parallel_degree": tp,
        "pipeline_parallel_degree": pp,
    }
    factors = [f"{name} ({degree})" for name, degree in degrees.items() if degree > 1]
    product = " x ".join(factors)
    remedy = f"change a degree, or the ranks ({RANKS})"
    others = replicate * cp * tp * pp
    if shard == -1:
        yield SettingRule(
            holds=num_ranks % others == 0,
            field="ranks of a group",
            rule=f"must be a multiple of {product}",
            value=num_ranks,
            remedy=remedy,
        )
        shard = num_ranks // others
    else:
        yield SettingRule(
            holds=num_ranks == others * shard,
            field="ranks of a group",
            rule=f"must be {product or 1}",
            value=num_ranks,
            remedy=remedy,
        )
    if cp * tp > 1:
        yield from _sequence_rules("training.seq_len", config.training.seq_len, cp, tp)
    if ep > 1:
        yield from _expert_rules(ep, parallel.expert_tensor_parallel_degree, tp, shard * cp * tp)
    yield from _batch_rules(config, pp, replicate * shard)


def _number_rules(parallel: Any) -> Iterator[SettingRule]:
    """Check the numbers by which the other rules divide."""
    names = [f"{degree}_degree" for degree in DEGREES]
    for name in (*names, "pipeline_parallel_microbatch_size"):
        value = getattr(parallel, name)
        yield SettingRule(
            holds=value >= 1,
            field=f"parallelism.{name}",
            rule="must be >= 1",
            value=value,
            remedy="1 is the default",
        )


def _sequence_rules(name: str, seq_len: int | None, cp: int, tp: int) -> Iterator[SettingRule]:
    """Check the length of a sequence.

    torchtitan's models assert this rule (`ParallelDims.seq_len_divisor`), even without CP.
    """
    if seq_len is None:
        return
    yield SettingRule(
        holds=seq_len % (tp * 2 * cp) == 0,
        field=name,
        rule=(
            f"must be a multiple of tensor_parallel_degree ({tp}) x 2 x context_parallel_degree "
            f"({cp})"
        ),
        value=seq_len,
        remedy="change it or a degree",
    )


def _expert_rules(ep: int, etp: int, tp: int, ranks: int) -> Iterator[SettingRule]:
    """Check the degrees of the experts.

    Args:
        etp: expert tensor parallel degree.
        ranks: ranks that share the experts of one batch.
    """
    yield SettingRule(
        holds=etp in (1, tp),
        field="parallelism.expert_tensor_parallel_degree",
        rule=f"must be 1 or tensor_parallel_degree ({tp})",
        value=etp,
        remedy="set it to 1",
    )
    rule = (
        "must divide the ranks that share a batch's experts (shard x context x tensor degree = "
        f"{ranks})"
    )
    if etp > 1:
        rule = f"times expert_tensor_parallel_degree ({etp}) {rule}"
    yield SettingRule(
        holds=ranks % (ep * etp) == 0,
        field="parallelism.expert_parallel_degree",
        rule=rule,
        value=ep,
        remedy="lower it",
    )


def _batch_rules(config: Any, pp: int, readers: int) -> Iterator[SettingRule]:
    """Check the batch, which `readers` ranks of a group read."""
    training = config.training
    groups = config.fault_tolerance.group_size
    local = training.local_batch_size
    total = training.global_batch_size
    if not local:
        return
    if pp > 1:
        size = config.parallelism.pipeline_parallel_microbatch_size
        yield SettingRule(
            holds=local % size == 0,
            field="training.local_batch_size",
            rule=f"must be a multiple of parallelism.pipeline_parallel_microbatch_size ({size})",
            value=local,
            remedy="change one of them",
        )
    if total is not None and total > 0:
        yield SettingRule(
            holds=total % (groups * local * readers) == 0,
            field="training.global_batch_size",
            rule=(
                f"must be a multiple of {TABLE}.group_size ({groups}) x "
                f"training.local_batch_size ({local}) x {readers} ranks that read data"
            ),
            value=total,
            remedy="it counts the sequences of all groups",
        )


def _model_rules(config: Any, spec: Any) -> Iterator[SettingRule]:
    parallel = config.parallelism
    model = config.model
    arguments = spec.model_args[model.flavor]
    of_model = f"of {model.name} {model.flavor}"
    yield from _number_rules(parallel)
    tp = parallel.tensor_parallel_degree
    ep = parallel.expert_parallel_degree
    heads = {
        "attention heads": getattr(arguments, "n_heads", None),
        "key-value heads": getattr(arguments, "n_kv_heads", None),
    }
    for kind, count in heads.items():
        if not count:
            continue
        yield SettingRule(
            holds=count % tp == 0,
            field="parallelism.tensor_parallel_degree",
            rule=f"must divide the {count} {kind} {of_model}",
            value=tp,
            remedy="lower it",
        )
    cp = parallel.context_parallel_degree
    yield from _sequence_rules("training.seq_len", config.training.seq_len, cp, tp)
    # A user's own model may have no number of experts. Without expert parallelism it needs none.
    experts = num_experts(arguments) if ep > 1 else 0
    if experts:
        yield SettingRule(
            holds=experts % ep == 0,
            field="parallelism.expert_parallel_degree",
            rule=f"must divide the {experts} experts {of_model}",
            value=ep,
            remedy="lower it",
        )
    if parallel.pipeline_parallel_degree > 1:
        yield from _stage_rules(parallel, arguments, spec, of_model)
        yield from _microbatch_rules(config)
    if config.validation.enable:
        yield from _validation_rules(config)
        # torchtitan sets max_seq_len to training.seq_len. The model has no positions after that.
        if hasattr(arguments, "max_seq_len"):
            most = config.training.seq_len
            yield SettingRule(
                holds=config.validation.seq_len <= most,
                field="validation.seq_len",
                rule=(
                    f"must be <= training.seq_len ({most}), up to which the positions {of_model} "
                    "are built"
                ),
                value=config.validation.seq_len,
                remedy=f"set it to {most}, or raise training.seq_len",
            )


def num_experts(arguments: Any) -> int:
    """Return the number of experts of each of a model's layers; 0 if the model is dense."""
    moe = getattr(arguments, "moe_args", None)
    if moe is None or getattr(arguments, "moe_enabled", True) is False:
        return 0
    return int(moe.num_experts)


def _stage_rules(parallel: Any, arguments: Any, spec: Any, of_model: str) -> Iterator[SettingRule]:
    """Check that the layers can be cut into the stages of the schedule."""
    from torch.distributed.pipelining.schedules import (
        PipelineScheduleSingle,
        ScheduleDualPipeV,
        ScheduleZBVZeroBubble,
        get_schedule_class,
    )

    pp = parallel.pipeline_parallel_degree
    yield SettingRule(
        holds=spec.pipelining_fn is not None,
        field="parallelism.pipeline_parallel_degree",
        rule=f"must be 1: torchtitan cannot cut {of_model.removeprefix('of ')} into stages",
        value=pp,
        remedy="set it to 1",
    )
    schedule = parallel.pipeline_parallel_schedule
    try:
        schedule_class = get_schedule_class(schedule)
    except ValueError:
        yield SettingRule(
            holds=False,
            field="parallelism.pipeline_parallel_schedule",
            rule="must be a schedule of torch",
            value=schedule,
            remedy='such as "1F1B"',
        )
        return
    layers = getattr(arguments, "n_layers", None)
    if layers is None or parallel.module_fqns_per_model_part is not None:
        return  # The config itself names the modules of each stage.
    first = parallel.pipeline_parallel_first_stage_less_layers
    last = parallel.pipeline_parallel_last_stage_less_layers
    ends = f"(and {first + last} for the ends)"
    is_single = issubclass(schedule_class, PipelineScheduleSingle)
    stages = pp if is_single else 2 * pp
    field = "parallelism.pipeline_parallel_degree"
    per_stage = parallel.pipeline_parallel_layers_per_stage
    if per_stage is not None:
        field = "parallelism.pipeline_parallel_layers_per_stage"
        yield SettingRule(
            holds=per_stage >= 1,
            field=field,
            rule="must be >= 1",
            value=per_stage,
            remedy="leave it out",
        )
        stages = math.ceil((layers + first + last) / per_stage)
        if is_single or schedule_class in (ScheduleZBVZeroBubble, ScheduleDualPipeV):
            exact = pp if is_single else 2 * pp
            wanted = f"{exact} stages"
            fits = stages == exact
        else:
            wanted = f"{2 * pp} stages, {3 * pp} or so on"
            fits = stages % pp == 0 and stages >= 2 * pp
        yield SettingRule(
            holds=fits,
            field=field,
            rule=f"must cut the {layers} layers {of_model} {ends} into {wanted} for {schedule}",
            value=per_stage,
            remedy=f"it makes {stages}; change it, or leave it out",
        )
    yield SettingRule(
        holds=(layers + first + last) // stages >= max(first, last, 1),
        field=field,
        rule=(
            f"must leave each of its {stages} stages a layer of the {layers} layers {of_model} "
            f"{ends}"
        ),
        value=pp,
        remedy="lower it",
    )


def _microbatch_rules(config: Any) -> Iterator[SettingRule]:
    """Check that the schedule can deal out a batch. torch checks it only during training's start,
    in each rank.
    """
    from torch.distributed.pipelining.schedules import (
        Schedule1F1B,
        ScheduleDualPipeV,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
        get_schedule_class,
    )

    parallel = config.parallelism
    local = config.training.local_batch_size
    if parallel.pipeline_parallel_schedule_csv:
        return  # That file says how the batch is dealt out.
    pp = parallel.pipeline_parallel_degree
    size = parallel.pipeline_parallel_microbatch_size
    schedule = parallel.pipeline_parallel_schedule
    schedule_class = get_schedule_class(schedule)
    count = local // size
    least = {Schedule1F1B: pp, ScheduleDualPipeV: 2 * pp}.get(schedule_class, 1)
    yield SettingRule(
        holds=count >= least,
        field="training.local_batch_size",
        rule=(
            f"must make {least} or more microbatches (of {size}) for the {least} stages of "
            f"{schedule}"
        ),
        value=local,
        remedy=f"raise it to {least * size}",
    )
    if schedule_class in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
        rounds = max(1, count // pp)
        yield SettingRule(
            holds=count % rounds == 0,
            field="training.local_batch_size",
            rule=(
                f"must make microbatches (of {size}) that {schedule} can deal out to {pp} ranks "
                f"in {rounds} equal rounds"
            ),
            value=local,
            remedy=f"a multiple of {pp * size} always does",
        )


def _validation_rules(config: Any) -> Iterator[SettingRule]:
    """Check the batches of a validation. A wrong batch would end a run in the middle."""
    parallel, training, validation = config.parallelism, config.training, config.validation
    cp = parallel.context_parallel_degree
    tp = parallel.tensor_parallel_degree
    if cp > 1:
        yield from _sequence_rules("validation.seq_len", validation.seq_len, cp, tp)
    if parallel.pipeline_parallel_degree > 1:
        count = training.local_batch_size // parallel.pipeline_parallel_microbatch_size
        size = validation.local_batch_size
        yield SettingRule(
            holds=size % max(count, 1) == 0,
            field="validation.local_batch_size",
            rule=(
                f"must be a multiple of the {count} microbatches that the pipeline makes of a batch"
            ),
            value=size,
            remedy=f"set it to training.local_batch_size ({training.local_batch_size})",
        )
