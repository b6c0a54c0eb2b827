# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Describe the processes, memory and traffic of a launch without starting it: `titan-ft launch
--dry-run`.

The sizes are measured on the model itself, built without memory. That takes the imports of a
worker.
"""

from __future__ import annotations

import logging
import resource
import shlex
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from titan_ft.config import TABLE, ConfigError, FaultTolerance, load_toml, read_flags
from titan_ft.data.assets import SCHEME
from titan_ft.launch.going_on import CHECKPOINTS_OFF
from titan_ft.launch.launch_plan import LaunchPlan
from titan_ft.launch.lighthouse_keeper import HOST
from titan_ft.protocol.strategy import strategy_of
from titan_ft.round_settings import num_fragments, quantizes, steps_per_round
from titan_ft.training.custom_import import working_folder_first
from titan_ft.training.job_config import read_config
from titan_ft.training.traffic import HOST_LINK_GBPS, LINK_GBPS, Traffic, served_gbps

if TYPE_CHECKING:
    from titan_ft.training.sizes import JobSizes, RankSizes

TOKENIZER = "--model.hf_assets_path"


def describe(plan: LaunchPlan) -> str:
    """Describe the run, its memory and traffic, then each process with its command, as text.

    Raises:
        ConfigError: there is a mistake in the config.
    """
    # Torch, which counts the GPUs, takes seconds to import.
    from titan_ft.launch.group.worker_group import worker_env

    options, paths = plan.options, plan.paths
    with working_folder_first():
        job = _job_lines(plan)
    port = str(options.lighthouse_port or "PORT")
    chosen = "" if options.lighthouse_port else " (the system chooses PORT)"
    faults = "none"
    if plan.chaos is not None:
        faults = f"{options.chaos}, seed {plan.chaos.seed}"
    end = "with the last step"
    if options.minutes:
        end = f"after {options.minutes:g} minutes"
    lines = [
        f"run folder   {paths.root}",
        f"config       {plan.config}, copied to {paths.config}",
        *(f"changed      {change.describe(name)}" for name, change in plan.changes.items()),
        f"groups       {plan.num_replicas} x {plan.num_ranks} ranks, {options.spares} spares",
        f"job id       {plan.job_id}",
        f"restarts     {options.max_restarts} of each group at most",
        f"lighthouse   http://{HOST}:{port}{chosen}",
        f"metrics      {options.metrics_port or 'none'}",
        f"faults       {faults}",
        f"checkpoints  {'on' if plan.saves else CHECKPOINTS_OFF.removeprefix('checkpoints are ')}",
        f"ends         {end}",
        "",
        *job,
        "",
        "lighthouse:",
        f"  {shlex.join(plan.lighthouse_command(options.lighthouse_port))}",
    ]
    for replica in range(plan.num_replicas):
        attempt = paths.next_attempt(replica)
        env = {
            **worker_env(replica, plan.num_ranks, f"http://{HOST}:{port}"),
            "TITAN_FT_TOKEN": "(a new secret)",
        }
        variables = " ".join(f"{name}={value}" for name, value in sorted(env.items()))
        worker = [
            sys.executable,
            "-m",
            plan.module,
            *plan.worker_flags([f"--{TABLE}.replica_id={replica}"]),
        ]
        lines += [
            f"group {replica}, {plan.num_ranks} x:",
            f"  {shlex.join(worker)}",
            f"  environment: {variables}, and torchrun's usual",
            f"  logs: {paths.logs(replica, attempt, 0).parent}/rank-*.log; events: {paths.events}",
        ]
    return "\n".join([*lines, "", "dry run: nothing was started, and no file was made"])


def describe_sizes(plan: LaunchPlan) -> dict[str, Any]:
    """Return the numbers of `--dry-run --json`: the job's shape, memory and traffic; bytes are of
    one rank.

    Raises:
        ConfigError: there is a mistake in the config.
    """
    with working_folder_first():
        job = _read_job(plan)
    rank, ft = job.sizes.largest, job.config.fault_tolerance
    traffic = _traffic(plan, ft, rank)
    return {
        "groups": plan.num_replicas,
        "ranks_per_group": plan.num_ranks,
        "parameters": job.sizes.num_parameters,
        "tokens_per_step": plan.num_replicas
        * _own_batch(job.config, job.sizes)
        * job.config.training.seq_len,
        "steps_per_round": steps_per_round(ft),
        "gpu_bytes": sum(_memory(plan, ft, rank, job.imported)[0].values()),
        "host_bytes": sum(_memory(plan, ft, rank, job.imported)[1].values()),
        "exchange": {
            "bytes": traffic.moved,
            "sent_bytes": traffic.sent,
            "seconds": traffic.exchange_seconds,
        },
        "heal": {
            "bytes": traffic.state,
            "group_bytes": job.sizes.group_state,
            "copy_seconds": traffic.copy_seconds,
            "fetch_seconds": traffic.fetch_seconds,
        },
    }


class _Job(NamedTuple):
    missing_tokenizer: str
    config: Any
    sizes: JobSizes
    imported: int
    """Bytes that this process takes after its imports; a worker takes about as much."""


def _read_job(plan: LaunchPlan) -> _Job:
    flags = plan.check_flags()
    missing = _find_missing_tokenizer(plan.config, flags)
    config = read_config(*flags, *([f"{TOKENIZER}={SCHEME}tokenizer"] if missing else []))
    imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return _Job(missing, config, _measure(config, plan.num_ranks), imported)


def _job_lines(plan: LaunchPlan) -> list[str]:
    """Return the lines on the job's batch, memory and traffic."""
    missing, config, sizes, imported = _read_job(plan)
    return [
        *(
            [f"tokenizer    {missing}, which this host does not have and the job's must"]
            if missing
            else []
        ),
        *_batch_lines(plan, config, sizes),
        *_memory_lines(plan, config, sizes, imported),
        *_move_lines(plan, config, sizes),
    ]


def _find_missing_tokenizer(config: Path, flags: list[str]) -> str:
    """Return the folder of the job's tokenizer if this host lacks it, else "". No size depends on
    the tokenizer.

    A job of many hosts may be planned on another host.
    """
    table = load_toml(config).get("model", {})
    path = str(table.get("hf_assets_path", "")) if isinstance(table, dict) else ""
    for name, value in read_flags(flags):
        path = value if name == "model.hf_assets_path" else path
    return "" if not path or path.startswith(SCHEME) or Path(path).is_dir() else path


def _measure(config: Any, num_ranks: int) -> JobSizes:
    """Measure the job's model.

    Raises:
        ConfigError: torchtitan cannot build or shard the model.
    """
    from titan_ft.training.sizes import measure

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchtitan's, about a run that is not this one
        logging.disable(logging.WARNING)
        try:
            return measure(config, num_ranks)
        except (AssertionError, ImportError, NotImplementedError, ValueError) as error:
            model = f"{config.model.name} {config.model.flavor}"
            rule = (
                f"must be something that torchtitan can build, cut for {num_ranks} ranks as "
                "[parallelism] says"
            )
            reason = " ".join(str(error).split()).rstrip(".")
            raise ConfigError(f"model {rule}, got {model}: {reason}; change either") from error
        finally:
            logging.disable(logging.NOTSET)


def _batch_lines(plan: LaunchPlan, config: Any, sizes: JobSizes) -> list[str]:
    dims, training = sizes.dims, config.training
    degrees = (
        ("replicate", dims.dp_replicate),
        ("FSDP", dims.dp_shard),
        ("CP", dims.cp),
        ("TP", dims.tp),
        ("PP", dims.pp),
        ("EP", dims.ep),
    )
    cut = " x ".join(f"{name} {degree}" for name, degree in degrees if degree > 1) or "one rank"
    own = _own_batch(config, sizes)
    total = own * plan.num_replicas
    lines = [
        f"model        {config.model.name} {config.model.flavor}, {sizes.num_parameters:,} "
        "parameters",
        f"ranks        {plan.num_replicas * plan.num_ranks} in all; a group is {cut}",
        f"batch        {own} sequences of a group ({training.local_batch_size} x "
        f"{dims.dp_replicate * dims.dp_shard} ranks that read data x {sizes.accumulation} "
        f"microbatches), {total} in all",
        f"tokens       {total * training.seq_len:,} per step ({total} x {training.seq_len}), "
        f"{total * training.seq_len * training.steps:,} in {training.steps} steps",
    ]
    if config.fault_tolerance.semi_sync_method:
        length = steps_per_round(config.fault_tolerance)
        rounds, rest = -(-training.steps // length), training.steps % length
        lines.append(
            f"rounds       {rounds} of {length} steps" + (f", the last of {rest}" if rest else "")
        )
    return lines


def _own_batch(config: Any, sizes: JobSizes) -> int:
    """Return the sequences that a group reads for a step."""
    dims = sizes.dims
    return int(
        config.training.local_batch_size * dims.dp_replicate * dims.dp_shard * sizes.accumulation
    )


def _memory(
    plan: LaunchPlan, ft: FaultTolerance, rank: RankSizes, imported: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of a rank on its GPU, and in its host's memory, by their use."""
    on_gpu = {
        "parameters": rank.parameters,
        "gradients": rank.gradients,
        "optimizer": rank.optimizer,
    }
    on_host = {"copy of the state": rank.state}
    if ft.semi_sync_method:
        on_host["anchors and changes"] = 2 * rank.anchors
        on_host["outer momentum"] = rank.momentum
    where = on_host if ft.process_group == "gloo" else on_gpu
    where["buckets of the exchange"] = rank.exchange
    if quantizes(ft):
        # Of the exchange under way, and of those before it.
        where["what rounding leaves"] = 2 * rank.exchange
    if ft.catch_up_max_gb:
        on_host["queue of updates while it heals"] = int(ft.catch_up_max_gb * 2**30)
    if plan.options.no_zygote:
        on_host["what it imports about"] = imported
    return on_gpu, on_host


def _memory_lines(plan: LaunchPlan, config: Any, sizes: JobSizes, imported: int) -> list[str]:
    rank, ft = sizes.largest, config.fault_tolerance
    on_gpu, on_host = _memory(plan, ft, rank, imported)
    lines = [
        f"GPU memory   {_sum(on_gpu)}",
        "             and what activations and torchtitan's own buffers take",
        f"host memory  {_sum(on_host)}",
    ]
    if not plan.options.no_zygote:
        lines.append(
            f"             and, once for all ranks of a host, about {_size(imported)} of imports"
        )
    if not ft.catch_up_max_gb:
        lines.append(
            f"             and {_size(rank.exchange)} for each update that it queues while it "
            "heals, in half of what is free then, shared out among the host's ranks, at most"
        )
    return lines


def _traffic(plan: LaunchPlan, ft: FaultTolerance, rank: RankSizes) -> Traffic:
    groups, parts, gloo = plan.num_replicas, num_fragments(ft), ft.process_group == "gloo"
    link = plan.options.link_gbps or LINK_GBPS
    moved = rank.exchange // parts
    if ft.semi_sync_method is None:
        staged = 2 * rank.exchange if gloo else 0  # to host memory and back
    else:
        # Weights to the host and back; its changes as well.
        staged = 2 * rank.anchors // parts + (0 if gloo else 2 * moved)
    donors = strategy_of(ft).limit_donors(max(1, groups - 1))
    return Traffic(
        moved=moved,
        sent=rank.sent // parts,
        staged=staged,
        state=rank.state,
        link_gbps=link,
        host_link_gbps=plan.options.host_link_gbps or HOST_LINK_GBPS,
        served_gbps=served_gbps(link, donors, ft.transfer_max_mbps),
    )


def _move_lines(plan: LaunchPlan, config: Any, sizes: JobSizes) -> list[str]:
    rank, ft = sizes.largest, config.fault_tolerance
    traffic = _traffic(plan, ft, rank)
    return [
        *_exchange_lines(traffic, ft, plan.num_replicas),
        f"a heal moves {_size(rank.state)} for each rank, {_size(sizes.group_state)} for the group",
        f"             {traffic.copy_seconds:.2g} s of copying, in which the donors stand still; "
        f"{traffic.fetch_seconds:.2g} s of transfer, beside training; {traffic.copy_seconds:.2g} "
        "s to load",
        f"links        {traffic.link_gbps:g} Gbit/s from rank to rank between groups, "
        f"{traffic.host_link_gbps:g} between GPU and host (--link-gbps, --host-link-gbps)",
    ]


def _exchange_lines(traffic: Traffic, ft: FaultTolerance, groups: int) -> list[str]:
    moved, sent, seconds = traffic.moved, traffic.sent, traffic.exchange_seconds
    ring = f"{_size(sent)} out and in (a ring of {groups}{', in 8 bits' if quantizes(ft) else ''})"
    if ft.semi_sync_method is None:
        return [
            f"a step moves {_size(moved)} of each rank's gradients: {ring}",
            f"             {seconds:.2g} s, beside the backward pass as far as that lasts",
        ]
    length, delay = steps_per_round(ft), ft.fragment_sync_delay
    return [
        f"a round moves {_size(moved)} of each rank's changes: {ring}, {_size(sent // length)} "
        f"for each of its {length} steps",
        f"             {seconds:.2g} s and the outer optimizer on the host, in "
        "which training stands "
        f"still{f', but for the transfer, beside {delay} steps' if delay else ''}",
    ]


def _sum(parts: dict[str, int]) -> str:
    return f"{_size(sum(parts.values()))} for each rank: " + ", ".join(
        f"{name} {_size(size)}" for name, size in parts.items()
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"
