# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The worker: `torchrun ... -m titan_ft.train --job.config_file F [torchtitan flags]`.

The worker takes torchtitan's TOML and flags. With `[fault_tolerance] enable = true` it is one rank
of a replica group (`titan_ft.trainer`), else torchtitan's own trainer. A replica group is a
torchtitan job that trains one replica of the model. torchrun or an *agent* starts the worker. An
agent is titan_ft's own launcher of the ranks on one host (`titan_ft/launch/group`). It forks the
workers from a process that has called `check` and `preload`.

A worker that trains has a *mark*, a file for the agent. Exit status 0 counts as an end in order
only if the worker has removed the mark, because other code may call `os._exit(0)` in the middle of
training.

All functions run on the main thread. The exit status tells the agent what to do next: 0 is the end
in order, 1 asks for a restart, `CONFIG_ERROR_CODE` and `NO_RESTART_CODE` forbid one.

See docs/design.md, "One step" and "The rooms".
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from titan_ft import config as ft_config
from titan_ft import versions
from titan_ft.config import ConfigError
from titan_ft.data.datasets import load_text
from titan_ft.launch import store_server
from titan_ft.launch.group.forks import call_in_fork
from titan_ft.launch.restart_policy import CONFIG_ERROR_CODE, NO_RESTART_CODE
from titan_ft.protocol.errors import JobFinished, ReplicaError
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

if TYPE_CHECKING:
    from titan_ft.host.titan import JobConfig, Trainer
    from titan_ft.training.worker import WorkerSetup

IMPORTED_LATER = (
    "datasets",
    "tensorboard",
    "titan_ft.trainer",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "torchft.coordination",
)
"""Modules that a worker imports only on its way to the first step. `preload` imports them."""
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main() -> None:
    """Run one worker, and end the process."""
    os.environ["RUST_LOG"] = choose_native_log(os.environ)
    # torch's TCPStore looks up the name of every peer's address, even of a numeric one. A lost
    # query would cost the resolver's default of five seconds, in the middle of a recovery.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")
    protect_output()  # a full disk must not end the training
    claim_file()  # the error file, which tells the agent the cause of a failure
    write_for_owner_only()  # the group and others cannot change events and checkpoints
    exit_with_parent()  # an orphan would train on beside the worker that replaces it
    ends_in_order = True
    worker_pid = os.getpid()
    try:
        status = _run(sys.argv[1:], os.environ)
    except SystemExit as end:
        # The user's code called sys.exit. The interpreter would wait for all threads, which may
        # hang. So this process takes the status, and ends by `os._exit` below.
        ends_in_order = False
        status = _status_of(end)
    except ConfigError as error:
        write_error(error)
        print(f"titan_ft: {error}", file=sys.stderr)
        status = CONFIG_ERROR_CODE
    except Exception as error:  # noqa: BLE001
        # Write the error before anything slow: of a group's ranks, the one with the earliest error
        # is named as the cause.
        write_error(error)
        status = _print_error(error)
    sys.stdout.flush()
    sys.stderr.flush()
    # Wait for records that are not written yet. The last event says whether the group finished or
    # left.
    finish_waiting()
    # If the user's code forks, an error in the child arrives here as well. Only the worker itself
    # may remove its mark.
    if ends_in_order and os.getpid() == worker_pid:
        mark_end_in_order()
    # A thread may wait for a lost peer in an RPC or a socket. A normal exit would wait for that
    # thread, and the group would keep sending heartbeats meanwhile.
    os._exit(status)


def _status_of(end: SystemExit) -> int:
    """Return the exit status of a `sys.exit`; print its message, if it has one."""
    if isinstance(end.code, int):
        return end.code
    if isinstance(end.code, str):
        print(end.code, file=sys.stderr)
    if end.code is None:
        return 0
    return 1


def check(args: Sequence[str]) -> None:
    """Check a run's config before any worker starts. An agent calls this function.

    Raises:
        ConfigError: the config has a mistake.
    """
    with _gpus_counted_in_fork():
        job_config = prepare_config(*args)
        check_paths(job_config)
        module = job_config.experimental.custom_import
        mistake: str | None = ""  # None = the process that imports the module has ended
        if module:
            # Import the user's module in a fork only: it may start threads or use a GPU, and the
            # workers could not be forked from this process afterwards.
            mistake = call_in_fork(lambda: _find_mistake(args))
        if mistake is None:
            # A worker whose import ends the process with status 0 would count as finished.
            raise ConfigError(
                "experimental.custom_import must be a module that can be imported, got "
                f"{module!r}, which ends the process; correct it"
            )
        if mistake:
            raise ConfigError(mistake)
        if job_config.fault_tolerance.enable:
            from titan_ft import device

            device.check_machine(job_config.fault_tolerance.process_group, local_rank=0)


def _find_mistake(args: Sequence[str]) -> str:
    """Read the config as a worker does; return the mistake, or an empty text."""
    try:
        read_config(*args)
    except ConfigError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def _gpus_counted_in_fork() -> Iterator[None]:
    """Count the GPUs in a fork, and let torch use that count in this process.

    torch's own count would keep this process from forking. NVML starts a thread (seen with driver
    580). If NVML cannot count, torch asks CUDA's driver, which is unusable after a fork.

    Raises:
        RuntimeError: the fork cannot count the GPUs.
    """
    import torch

    cuda = torch.cuda
    if not cuda._is_compiled():
        yield
        return
    answer = call_in_fork(lambda: str(cuda.device_count()))
    if not answer:
        raise RuntimeError("torch cannot count the GPUs of this host (see above)")
    cuda._cached_device_count = int(answer)
    # With this variable, `torch.cuda.is_available` only looks at the count.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        yield
    finally:
        # Each worker counts the GPUs that are visible to it.
        cuda._cached_device_count = None
        del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]


def preload(args: Sequence[str]) -> None:
    """Import the modules that training needs, and do slow first-time work, before the fork.

    Uses no GPU and starts no thread: a forked worker could use neither.
    """
    with _gpus_counted_in_fork():
        # The workers find a mistake in the config again, and report it.
        with contextlib.suppress(ConfigError):
            job_config = prepare_config(*args)
            from titan_ft.host.titan import get_train_spec

            # The user's own module may register the model. It is not imported yet.
            with contextlib.suppress(ValueError, ImportError):
                get_train_spec(job_config.model.name)
            with contextlib.suppress(FileNotFoundError):
                load_text(job_config.training.dataset, job_config.training.dataset_path)
        for name in IMPORTED_LATER:
            importlib.import_module(name)
        versions()


def _check_environment(args: Sequence[str], environ: Mapping[str, str]) -> None:
    """Check that torchrun or an agent has started this process.

    Raises:
        ConfigError: a person has started it.
    """
    if "-h" in args or "--help" in args:
        return
    missing = [name for name in _LAUNCHER_VARIABLES if name not in environ]
    if missing:
        raise ConfigError(
            "python -m titan_ft.train must be started by titan-ft launch, titan-ft group or "
            f"torchrun, got no {missing[0]} in the environment; for one process: torchrun "
            "--nproc-per-node 1 -m titan_ft.train ..."
        )


def _run(args: list[str], environ: Mapping[str, str]) -> int:
    """Train as the config says; return the exit status."""
    _check_environment(args, environ)
    job_config = read_config(*args)
    from titan_ft.host import titan
    from titan_ft.training import spec

    trainer_class: type[Trainer]
    if job_config.fault_tolerance.enable:
        trainer_class = _prepare_replica_trainer(job_config, args, environ)
    else:
        trainer_class = titan.Trainer
        spec.register(
            job_config.model.name, job_config.fault_tolerance, job_config.experimental.custom_import
        )

    # Let exit() of the C library end this process at once: the exit handlers of other libraries may
    # hang. Exit handlers run in reverse order, so this one is set after all imports.
    end_at_exit()
    try:
        titan.run(trainer_class, job_config)
    except JobFinished as over:
        print(f"titan_ft: {over}", file=sys.stderr)
    return 0


def _prepare_replica_trainer(
    job_config: JobConfig, args: Sequence[str], environ: Mapping[str, str]
) -> type[Trainer]:
    """Prepare this process for fault tolerance; return the trainer class with its settings.

    torchtitan makes the trainer from the config alone. So the settings from the environment are a
    class attribute.

    Raises:
        ConfigError: the config, the environment and the host do not fit together.
    """
    from titan_ft import device
    from titan_ft.host import titan
    from titan_ft.trainer import ReplicaTrainer
    from titan_ft.training.curves import wandb_environment

    config = job_config.fault_tolerance
    check_ranks(job_config, int(environ["WORLD_SIZE"]))
    if config.process_group == "nccl":
        # CUDA and the first communicator read these variables once.
        os.environ.update(device.nccl_environment(environ, config.process_group_timeout_ms))
    device.check_machine(config.process_group, int(environ.get("LOCAL_RANK", "0")))
    mark_training()
    # torch elastic's `record` would report the end of a group that leaves as an error.
    titan.unwrap_elastic_record()
    # A crash in native code prints the stacks to the log (2 = stderr). `record` does so, too.
    faulthandler.enable(2)
    setup = _read_setup(job_config, args, environ)
    # A process that a worker starts, such as a data loader, must not inherit the token.
    os.environ.pop(TOKEN_ENV, None)
    if job_config.metrics.enable_wandb:
        os.environ.update(wandb_environment(environ, job_config, setup.rank))
    return type("Trainer", (ReplicaTrainer,), {"setup": setup})


def _read_setup(
    job_config: JobConfig, args: Sequence[str], environ: Mapping[str, str]
) -> WorkerSetup:
    """Return the settings of this worker.

    Raises:
        ConfigError: no lighthouse is named, or other hosts reach this one and the token is missing
            or short.
    """
    from titan_ft.training.worker import WorkerSetup

    config = job_config.fault_tolerance
    lighthouse = ft_config.resolve_lighthouse(config, environ.get("TORCHFT_LIGHTHOUSE"))
    token = read_token(environ)
    # Without advertise_address, the route to the lighthouse determines this host's address. A
    # loopback lighthouse is then reached from a loopback address.
    own_host = config.advertise_address or "localhost"
    is_local = is_loopback(lighthouse) and is_loopback(join_address(own_host, 0))
    check_token(token, is_local=is_local)
    attempt = environ.get("TITAN_FT_ATTEMPT") or environ.get("TORCHELASTIC_RESTART_COUNT") or 0
    ranks_on_host = environ.get("TITAN_FT_RANKS_ON_HOST") or environ.get("LOCAL_WORLD_SIZE") or 1
    return WorkerSetup(
        rank=int(environ["RANK"]),
        store=(environ["MASTER_ADDR"], int(environ["MASTER_PORT"])),
        lighthouse=lighthouse,
        token=token,
        attempt=int(attempt),
        config_digest=digest_config(job_config),
        slurm=_find_slurm_step(environ),
        store_pid=int(environ.get(store_server.PID_ENV) or os.getppid()),
        arguments=tuple(args),
        ranks_on_host=int(ranks_on_host),
    )


def _find_slurm_step(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return the job, step and node of this process, as `scancel` and `srun --jobid` take them.

    None if the process runs in no step of Slurm.
    """
    job = environ.get("SLURM_JOB_ID", "")
    step = environ.get("SLURM_STEP_ID", "")
    node = environ.get("SLURMD_NODENAME", "")
    if not job or not step:
        return None
    found = {"job": job, "step": step}
    if node:
        found["node"] = node
    return found


def _print_error(error: Exception) -> int:
    """Print an error that ends this worker; return the exit status.

    A known end gets one line. A bug, or a lost rank of this group, gets a traceback.
    """
    if not isinstance(error, ReplicaError):
        traceback.print_exception(error)
        return 1
    print(f"titan_ft: {error}", file=sys.stderr)
    if error.restart:
        return 1
    return NO_RESTART_CODE


if __name__ == "__main__":
    main()
