# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The worker: `torchrun ... -m titan_ft.train --job.config_file F [torchtitan flags]`.

Takes torchtitan's TOML and flags. With `[fault_tolerance] enable = false` the worker is
torchtitan's own trainer. An agent may run the worker in a fork of a process that has everything
imported.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence

from titan_ft import config as ft_config
from titan_ft import versions
from titan_ft.config import ConfigError
from titan_ft.data.datasets import load_text
from titan_ft.launch import store_server
from titan_ft.launch.group.forks import ask_fork
from titan_ft.launch.restart_policy import CONFIG_ERROR_CODE, FINAL_CODE
from titan_ft.protocol.errors import JobFinished
from titan_ft.run.appender import finish_waiting
from titan_ft.run.error_file import claim_file, write_error
from titan_ft.run.marks import mark_end_in_order, mark_training
from titan_ft.run.orphan import exit_with_parent
from titan_ft.run.output import choose_native_log, protect_output
from titan_ft.system.address import is_loopback, join_address
from titan_ft.system.ownership import write_for_owner_only
from titan_ft.system.process import end_at_exit
from titan_ft.system.token import TOKEN_ENV, check_token, read_token
from titan_ft.training.divisions import check_ranks
from titan_ft.training.job_config import check_paths, digest_config, prepare_config, read_config

# What a worker imports only on its way to the first step; `preload` does so before.
IMPORTED_LATER = (
    "datasets",
    "tensorboard",
    "titan_ft.trainer",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "torchft.coordination",
)


def main() -> None:
    """Run one worker; ends the process."""
    os.environ["RUST_LOG"] = choose_native_log(os.environ)
    # torch's TCPStore looks up the name of every peer's address, also of numeric ones. A lost query
    # would cost the resolver's five seconds, in the middle of a recovery.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")
    protect_output()
    claim_file()
    write_for_owner_only()
    exit_with_parent()
    ends_in_order, pid = True, os.getpid()
    try:
        status = _run(sys.argv[1:], os.environ)
    except SystemExit as end:  # of the user's code; the interpreter would wait for all threads
        ends_in_order = False
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except ConfigError as error:
        write_error(error)
        print(f"titan_ft: {error}", file=sys.stderr)
        status = CONFIG_ERROR_CODE
    except Exception as error:  # noqa: BLE001  # process edge: what went wrong is printed, the status tells the agent
        write_error(error)  # first: of several ranks that of the earliest counts as the cause
        status = _explain(error)
    sys.stdout.flush()
    sys.stderr.flush()
    finish_waiting()  # the last event says whether the group finished or left
    if ends_in_order and os.getpid() == pid:  # an error of a user's fork comes here too
        mark_end_in_order()
    # Threads that wait for a lost peer in an RPC or a socket must not hold up the exit: heartbeats
    # would go on.
    os._exit(status)


def check(args: Sequence[str]) -> None:
    """Check all that can be wrong with a config before anything is started.

    Raises:
        ConfigError: there is a mistake in it.
    """
    with _gpus_left_alone():
        job_config = prepare_config(*args)
        check_paths(job_config)
        module = job_config.experimental.custom_import
        mistake = ask_fork(lambda: _find_mistake(args)) if module else ""
        if mistake is None:
            # A worker that ended with status 0 in its import would count as one that had finished.
            raise ConfigError(
                f"experimental.custom_import must be a module that can be imported, got {module!r}, which ends the "
                "process; correct it"
            )
        if mistake:
            raise ConfigError(mistake)
        if job_config.fault_tolerance.enable:
            from titan_ft import device

            device.require(job_config.fault_tolerance.process_group, local_rank=0)


def _find_mistake(args: Sequence[str]) -> str:
    try:
        read_config(*args)
    except ConfigError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def _gpus_left_alone() -> Iterator[None]:
    """Count the GPUs in a fork, and let torch use that count in this process.

    Torch's own count would keep this process from forking. NVML starts a thread (seen with driver
    580). If NVML cannot count, torch asks CUDA's driver, which is unusable after a fork.

    Raises:
        RuntimeError: the fork cannot count the GPUs.
    """
    import torch

    cuda = torch.cuda
    if not cuda._is_compiled():
        yield
        return
    answer = ask_fork(lambda: str(cuda.device_count()))
    if not answer:
        raise RuntimeError("torch cannot count the GPUs of this host (see above)")
    cuda._cached_device_count = int(answer)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # `is_available` looks at the count alone
    try:
        yield
    finally:
        cuda._cached_device_count = None  # the workers count those that are visible to them
        del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]


def preload(args: Sequence[str]) -> None:
    """Import what training needs, and do slow first-time work now. Uses no GPU and starts no
    thread.
    """
    with _gpus_left_alone():
        with contextlib.suppress(ConfigError):  # found again, and reported, by the workers
            job_config = prepare_config(*args)
            from titan_ft.host.titan import get_train_spec

            # Of a model that the user registers, perhaps.
            with contextlib.suppress(ValueError, ImportError):
                get_train_spec(job_config.model.name)
            with contextlib.suppress(FileNotFoundError):
                load_text(job_config.training.dataset, job_config.training.dataset_path)
        for name in IMPORTED_LATER:
            importlib.import_module(name)
        versions()


def _check_environment(args: Sequence[str], environ: Mapping[str, str]) -> None:
    """Check that torchrun, or an agent, has started this process.

    Raises:
        ConfigError: a person has.
    """
    missing = [
        name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environ
    ]
    if missing and not {"-h", "--help"} & set(args):
        raise ConfigError(
            "python -m titan_ft.train must be started by titan-ft launch, titan-ft group or torchrun, got no "
            f"{missing[0]} in the environment; for one process: torchrun --nproc-per-node 1 -m titan_ft.train ..."
        )


def _run(args: list[str], environ: Mapping[str, str]) -> int:
    _check_environment(args, environ)
    job_config = read_config(*args)
    from titan_ft import device
    from titan_ft.host import titan
    from titan_ft.training import spec

    trainer_class: type[titan.Trainer] = titan.Trainer
    if job_config.fault_tolerance.enable:
        from titan_ft.trainer import ReplicaTrainer
        from titan_ft.training.curves import wandb_environment
        from titan_ft.training.worker import WorkerSetup

        check_ranks(job_config, int(environ["WORLD_SIZE"]))
        # Before CUDA, or a communicator, reads it.
        if job_config.fault_tolerance.process_group == "nccl":
            timeout_ms = job_config.fault_tolerance.process_group_timeout_ms
            os.environ.update(device.nccl_environment(environ, timeout_ms))
        device.require(
            job_config.fault_tolerance.process_group, int(environ.get("LOCAL_RANK", "0"))
        )
        mark_training()
        titan.take_off_record()
        faulthandler.enable(2)  # as `record` does: the log of a crash in native code has the stacks
        lighthouse = ft_config.resolve_lighthouse(
            job_config.fault_tolerance, environ.get("TORCHFT_LIGHTHOUSE")
        )
        token = read_token(environ)
        # Else the route to the lighthouse.
        own_host = job_config.fault_tolerance.advertise_address or "localhost"
        check_token(
            token, is_local=is_loopback(lighthouse) and is_loopback(join_address(own_host, 0))
        )
        os.environ.pop(TOKEN_ENV, None)  # what a worker starts, such as a loader, has no use for it
        launch = WorkerSetup(
            rank=int(environ["RANK"]),
            store=(environ["MASTER_ADDR"], int(environ["MASTER_PORT"])),
            lighthouse=lighthouse,
            token=token,
            attempt=int(
                environ.get("TITAN_FT_ATTEMPT") or environ.get("TORCHELASTIC_RESTART_COUNT") or 0
            ),
            config_digest=digest_config(job_config),
            slurm=_slurm_step(environ),
            store_pid=int(environ.get(store_server.PID_ENV) or os.getppid()),
            arguments=tuple(args),
            ranks_on_host=int(
                environ.get("TITAN_FT_RANKS_ON_HOST") or environ.get("LOCAL_WORLD_SIZE") or 1
            ),
        )
        if job_config.metrics.enable_wandb:
            os.environ.update(wandb_environment(environ, job_config, launch.rank))
        trainer_class = type("Trainer", (ReplicaTrainer,), {"launch": launch})
    else:
        spec.register(
            job_config.model.name, job_config.fault_tolerance, job_config.experimental.custom_import
        )

    end_at_exit()  # last, after the handlers of all that is imported
    try:
        titan.run(trainer_class, job_config)
    except JobFinished as over:
        print(f"titan_ft: {over}", file=sys.stderr)
    return 0


def _slurm_step(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return the names of this process's job, step and node, as `scancel` and `srun --jobid` take
    them.
    """
    job, step, node = (
        environ.get(f"SLURM{name}", "") for name in ("_JOB_ID", "_STEP_ID", "D_NODENAME")
    )
    found = {"job": job, "step": step, "node": node}
    return {name: value for name, value in found.items() if value} if job and step else None


def _explain(error: Exception) -> int:
    """Print one line for a known way to end, a traceback for a bug or a lost peer of the group
    itself.
    """
    from titan_ft.protocol.errors import ReplicaError

    if not isinstance(error, ReplicaError):
        traceback.print_exception(error)
        return 1
    print(f"titan_ft: {error}", file=sys.stderr)
    return 1 if error.restart else FINAL_CODE


if __name__ == "__main__":
    main()
