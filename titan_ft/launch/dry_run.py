# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Describe the processes, memory and traffic of a launch: `titan-ft launch --dry-run`.

Nothing is started. The model is built without memory (torch's meta device), and its sizes are
measured. So this process imports torch and torchtitan, as a worker does. `cli.launch` calls
`describe` for the text and `describe_sizes` for the JSON, on the main thread.
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
from titan_ft.launch.launch_plan import LaunchPlan
from titan_ft.launch.lighthouse_keeper import HOST
from titan_ft.launch.stopped_run import CHECKPOINTS_OFF
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
    # Imported here: torch, which counts the GPUs, takes seconds to import.
    from titan_ft.launch.group.worker_group import worker_env

    options = plan.options
    paths = plan.paths
    with working_folder_first():
        job = _job_lines(plan)
    port = str(options.lighthouse_port)
    lighthouse_address = f"http://{HOST}:{port}"
    if not options.lighthouse_port:
        port = "PORT"
        lighthouse_address = f"http://{HOST}:{port} (the system chooses PORT)"
    checkpoints = (
        "on" if plan.saves_checkpoints else CHECKPOINTS_OFF.removeprefix("checkpoints are ")
    )
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
        f"lighthouse   {lighthouse_address}",
        f"metrics      {options.metrics_port or 'none'}",
        f"faults       {faults}",
        f"checkpoints  {checkpoints}",
        f"ends         {end}",
        "",
        *job,
        "",
        "lighthouse:",
        f"  {shlex.join(plan.lighthouse_command(options.lighthouse_port))}",
    ]
    for slot in range(plan.num_replicas):
        attempt = paths.next_attempt(slot)
        env = worker_env(slot, plan.num_ranks, f"http://{HOST}:{port}")
        env["TITAN_FT_TOKEN"] = "(a new secret)"
        variables = " ".join(f"{name}={value}" for name, value in sorted(env.items()))
        flags = plan.worker_flags([f"--{TABLE}.replica_id={slot}"])
        worker = [sys.executable, "-m", plan.module, *flags]
        lines += [
            f"group {slot}, {plan.num_ranks} x:",
            f"  {shlex.join(worker)}",
            f"  environment: {variables}, and torchrun's usual",
            f"  logs: {paths.logs(slot, attempt, 0).parent}/rank-*.log; events: {paths.events}",
        ]
    return "\n".join([*lines, "", "dry run: nothing was started, and no file was made"])


def describe_sizes(plan: LaunchPlan) -> dict[str, Any]:
    """Return the numbers of `--dry-run --json`: the job's shape, memory and traffic.

    Bytes are of one rank, except `group_bytes`.

    Raises:
        ConfigError: there is a mistake in the config.
    """
    with working_folder_first():
        job = _read_job(plan)
    largest_rank = job.sizes.largest
    ft = job.config.fault_tolerance
    traffic = _estimate_traffic(plan, ft, largest_rank)
    memory = _estimate_memory(plan, ft, largest_rank, job.import_bytes)
    num_sequences = plan.num_replicas * _sequences_per_group(job.config, job.sizes)
    return {
        "groups": plan.num_replicas,
        "ranks_per_group": plan.num_ranks,
        "parameters": job.sizes.num_parameters,
        "tokens_per_step": num_sequences * job.config.training.seq_len,
        "steps_per_round": steps_per_round(ft),
        "gpu_bytes": sum(memory.on_gpu.values()),
        "host_bytes": sum(memory.on_host.values()),
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
    """The job as a worker would see it, and the sizes of its model."""

    missing_tokenizer: str
    """Folder of the tokenizer if this host lacks the folder, else empty."""
    config: Any
    """Resolved config of torchtitan."""
    sizes: JobSizes
    import_bytes: int
    """Memory of this process after its imports, which are about those of a worker."""


class _Memory(NamedTuple):
    """Bytes of one rank by their use."""

    on_gpu: dict[str, int]
    on_host: dict[str, int]


def _read_job(plan: LaunchPlan) -> _Job:
    flags = plan.flags_for_check()
    missing = _find_missing_tokenizer(plan.config, flags)
    if missing:
        config = read_config(*flags, f"{TOKENIZER}={SCHEME}tokenizer")
    else:
        config = read_config(*flags)
    # Read before the model is measured, which takes memory as well.
    import_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return _Job(missing, config, _measure(config, plan.num_ranks), import_bytes)


def _job_lines(plan: LaunchPlan) -> list[str]:
    """Return the lines on the job's batch, memory and traffic."""
    job = _read_job(plan)
    lines = []
    if job.missing_tokenizer:
        lines.append(
            f"tokenizer    {job.missing_tokenizer}, which this host does not have and the job's "
            "must"
        )
    lines += _batch_lines(plan, job.config, job.sizes)
    lines += _memory_lines(plan, job)
    lines += _traffic_lines(plan, job.config, job.sizes)
    return lines


def _find_missing_tokenizer(config: Path, flags: list[str]) -> str:
    """Return the folder of the job's tokenizer if this host lacks the folder, else "".

    A job may be planned on a host that will not run it. No size depends on the tokenizer.
    """
    table = load_toml(config).get("model", {})
    path = str(table.get("hf_assets_path", "")) if isinstance(table, dict) else ""
    for name, value in read_flags(flags):
        if name == "model.hf_assets_path":
            path = value  # the last flag wins
    if not path or path.startswith(SCHEME) or Path(path).is_dir():
        return ""
    return path


def _measure(config: Any, num_ranks: int) -> JobSizes:
    """Measure the job's model.

    Raises:
        ConfigError: torchtitan cannot build or shard the model.
    """
    from titan_ft.training.sizes import measure

    with warnings.catch_warnings():
        # torchtitan warns about a run with these settings, and here none runs.
        warnings.simplefilter("ignore")
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
    dims = sizes.dims
    training = config.training
    degrees = (
        ("replicate", dims.dp_replicate),
        ("FSDP", dims.dp_shard),
        ("CP", dims.cp),
        ("TP", dims.tp),
        ("PP", dims.pp),
        ("EP", dims.ep),
    )
    used_degrees = [f"{name} {degree}" for name, degree in degrees if degree > 1]
    shape = " x ".join(used_degrees) or "one rank"
    per_group = _sequences_per_group(config, sizes)
    total = per_group * plan.num_replicas
    lines = [
        f"model        {config.model.name} {config.model.flavor}, {sizes.num_parameters:,} "
        "parameters",
        f"ranks        {plan.num_replicas * plan.num_ranks} in all; a group is {shape}",
        f"batch        {per_group} sequences of a group ({training.local_batch_size} x "
        f"{dims.dp_replicate * dims.dp_shard} ranks that read data x {sizes.accumulation} "
        f"microbatches), {total} in all",
        f"tokens       {total * training.seq_len:,} per step ({total} x {training.seq_len}), "
        f"{total * training.seq_len * training.steps:,} in {training.steps} steps",
    ]
    if config.fault_tolerance.semi_sync_method:
        length = steps_per_round(config.fault_tolerance)
        num_rounds, num_last_steps = divmod(training.steps, length)
        line = f"rounds       {num_rounds} of {length} steps"
        if num_last_steps:
            line = f"rounds       {num_rounds + 1} of {length} steps, the last of {num_last_steps}"
        lines.append(line)
    return lines


def _sequences_per_group(config: Any, sizes: JobSizes) -> int:
    """Return the number of sequences that a group reads for a step."""
    dims = sizes.dims
    return int(
        config.training.local_batch_size * dims.dp_replicate * dims.dp_shard * sizes.accumulation
    )


def _estimate_memory(
    plan: LaunchPlan, ft: FaultTolerance, rank: RankSizes, import_bytes: int
) -> _Memory:
    """Return the bytes of a rank on its GPU, and in its host's memory."""
    on_gpu = {
        "parameters": rank.parameters,
        "gradients": rank.gradients,
        "optimizer": rank.optimizer,
    }
    on_host = {"copy of the state": rank.state}
    if ft.semi_sync_method:
        on_host["anchors and changes"] = 2 * rank.anchors
        on_host["outer momentum"] = rank.momentum
    exchange_memory = on_host if ft.process_group == "gloo" else on_gpu
    exchange_memory["buckets of the exchange"] = rank.exchange
    if quantizes(ft):
        # Two buffers of rounding errors: of the exchange under way, and of those before it.
        exchange_memory["what rounding leaves"] = 2 * rank.exchange
    if ft.catch_up_max_gb:
        on_host["queue of updates while it heals"] = int(ft.catch_up_max_gb * 2**30)
    if plan.options.no_zygote:
        on_host["what it imports about"] = import_bytes
    return _Memory(on_gpu, on_host)


def _memory_lines(plan: LaunchPlan, job: _Job) -> list[str]:
    rank = job.sizes.largest
    ft = job.config.fault_tolerance
    memory = _estimate_memory(plan, ft, rank, job.import_bytes)
    lines = [
        f"GPU memory   {_describe_sum(memory.on_gpu)}",
        "             and what activations and torchtitan's own buffers take",
        f"host memory  {_describe_sum(memory.on_host)}",
    ]
    if not plan.options.no_zygote:
        lines.append(
            "             and, once for all ranks of a host, about "
            f"{_describe_bytes(job.import_bytes)} of imports"
        )
    if not ft.catch_up_max_gb:
        lines.append(
            f"             and {_describe_bytes(rank.exchange)} for each update that it queues "
            "while it heals, in half of what is free then, shared out among the host's ranks, at "
            "most"
        )
    return lines


def _estimate_traffic(plan: LaunchPlan, ft: FaultTolerance, rank: RankSizes) -> Traffic:
    # With fragments (Streaming DiLoCo), an exchange moves one fragment of the model.
    num_parts = num_fragments(ft)
    is_gloo = ft.process_group == "gloo"
    link_gbps = plan.options.link_gbps or LINK_GBPS
    moved = rank.exchange // num_parts
    if ft.semi_sync_method is not None:
        # `staged` counts bytes between GPU and host. Here weights go to the host, which computes
        # their changes, and back.
        staged = 2 * rank.anchors // num_parts
        if not is_gloo:
            # The exchange is on the GPU, so the changes go there and back.
            staged += 2 * moved
    elif is_gloo:
        # Gradients go to the host, where the exchange is, and back.
        staged = 2 * rank.exchange
    else:
        staged = 0
    num_donors = strategy_of(ft).limit_donors(max(1, plan.num_replicas - 1))
    return Traffic(
        moved=moved,
        sent=rank.sent // num_parts,
        staged=staged,
        state=rank.state,
        link_gbps=link_gbps,
        host_link_gbps=plan.options.host_link_gbps or HOST_LINK_GBPS,
        served_gbps=served_gbps(link_gbps, num_donors, ft.transfer_max_mbps),
    )


def _traffic_lines(plan: LaunchPlan, config: Any, sizes: JobSizes) -> list[str]:
    rank = sizes.largest
    ft = config.fault_tolerance
    traffic = _estimate_traffic(plan, ft, rank)
    return [
        *_exchange_lines(traffic, ft, plan.num_replicas),
        f"a heal moves {_describe_bytes(rank.state)} for each rank, "
        f"{_describe_bytes(sizes.group_state)} for the group",
        f"             {traffic.copy_seconds:.2g} s of copying, in which the donors stand still; "
        f"{traffic.fetch_seconds:.2g} s of transfer, beside training; {traffic.copy_seconds:.2g} "
        "s to load",
        f"links        {traffic.link_gbps:g} Gbit/s from rank to rank between groups, "
        f"{traffic.host_link_gbps:g} between GPU and host (--link-gbps, --host-link-gbps)",
    ]


def _exchange_lines(traffic: Traffic, ft: FaultTolerance, num_groups: int) -> list[str]:
    moved = _describe_bytes(traffic.moved)
    seconds = traffic.exchange_seconds
    precision = ", in 8 bits" if quantizes(ft) else ""
    ring = f"{_describe_bytes(traffic.sent)} out and in (a ring of {num_groups}{precision})"
    if ft.semi_sync_method is None:
        return [
            f"a step moves {moved} of each rank's gradients: {ring}",
            f"             {seconds:.2g} s, beside the backward pass as far as that lasts",
        ]
    length = steps_per_round(ft)
    delay = ft.fragment_sync_delay
    overlap = f", but for the transfer, beside {delay} steps" if delay else ""
    return [
        f"a round moves {moved} of each rank's changes: {ring}, "
        f"{_describe_bytes(traffic.sent // length)} for each of its {length} steps",
        f"             {seconds:.2g} s and the outer optimizer on the host, in which training "
        f"stands still{overlap}",
    ]


def _describe_sum(parts: dict[str, int]) -> str:
    listed = ", ".join(f"{name} {_describe_bytes(size)}" for name, size in parts.items())
    return f"{_describe_bytes(sum(parts.values()))} for each rank: {listed}"


def _describe_bytes(num_bytes: int) -> str:
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.2f} MiB"
