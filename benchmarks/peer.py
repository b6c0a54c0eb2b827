# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Run torchtitan's own fault-tolerant trainer, `torchtitan.experiments.ft.train`, as the
benchmark's peer.

The trainer is torchtitan's, unmodified. From this project it gets only the necessary parts: the CPU
patches (without an accelerator), the packaged text, and the models that ours train. Takes
torchtitan's TOML and flags; run it under torchrun, as a module.

`--observe-every=N`, before all other flags, writes an event after each tried step, with a digest of
the weights at each N-th. It does not change the training. With DiLoCo the events are of each round
and of its steps, and a validation is made on the same text in each group.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.tries import InnerStepMade, StepTried
from titan_ft.host import cpu
from titan_ft.run.events import WorkerStarted
from titan_ft.run.log import EventLog
from titan_ft.run.orphan import exit_with_parent
from titan_ft.run.paths import RunPaths

OBSERVE_FLAG = "--observe-every="


def main() -> None:
    """Run one worker of one replica group."""
    exit_with_parent()
    digest_every = _take_observe_flag()
    cpu.prepare()
    # Only now: torchtitan reads the device, and the command line, when it is imported.
    import torchtitan.experiments.ft.train as peer
    from torchtitan.config import ConfigManager

    from titan_ft.data.datasets import register_datasets
    from titan_ft.host.titan import register_flavors
    from titan_ft.training import spec

    register_datasets()
    job_config = ConfigManager().parse_args(sys.argv[1:])
    register_flavors(job_config.model.name)
    # `enable=False` wraps nothing but the CPU seam: torchtitan's own FT config has what the peer
    # itself needs.
    spec.register(job_config.model.name, SimpleNamespace(enable=False))  # type: ignore[arg-type]
    events = _announce(Path(job_config.job.dump_folder), job_config.fault_tolerance.replica_id)
    observe = observed_rounds if job_config.fault_tolerance.semi_sync_method else observed
    peer.main(observe(peer.FTTrainer, events, digest_every) if digest_every else peer.FTTrainer)


def _take_observe_flag() -> int:
    """Remove this module's own flag from the command line; return its number, or 0."""
    if len(sys.argv) > 1 and sys.argv[1].startswith(OBSERVE_FLAG):
        return int(sys.argv.pop(1).removeprefix(OBSERVE_FLAG))
    return 0


def _announce(run_dir: Path, replica: int) -> EventLog:
    """Write a `worker_started` event, which names the process to kill; return the log for further
    events.
    """
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    path = RunPaths(run_dir).worker_events(replica, rank, attempt, os.getpid())
    events = EventLog(path, replica=replica, rank=rank, attempt=attempt)
    events.emit(WorkerStarted(config_digest="", host=socket.gethostname(), slurm=None))
    return events


def observed(trainer: Any, events: EventLog, digest_every: int) -> Any:
    """Derive a trainer that trains the same, and writes an event for each step that it tried."""

    class Observed(trainer):
        def __init__(self, job_config: Any) -> None:
            super().__init__(job_config)
            self._committed = False
            self._losses: list[Any] = []
            # torchft calls the optimizers themselves only when all have voted yes; the container in
            # any case.
            self.optimizers.optimizers[0].register_step_post_hook(self._note_commit)

        def _note_commit(self, *_: Any) -> None:
            self._committed = True

        def forward_backward_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().forward_backward_step(*args, **kwargs)
            self._losses.append(loss.detach())
            return loss

        def train_step(self, data_iterator: Any) -> None:
            self._committed, self._losses = False, []
            super().train_step(data_iterator)
            manager = self.ft_manager.manager
            step = manager.current_step() + (not self._committed)
            wants_digest = self._committed and step % digest_every == 0
            events.emit(
                StepTried(
                    step=step,
                    committed=self._committed,
                    contributed=self._committed and manager.is_participating(),
                    own_loss=sum(loss.item() for loss in self._losses),
                    digest=digest(self.model_parts) if wants_digest else None,
                )
            )

    return Observed


def observed_rounds(trainer: Any, events: EventLog, digest_every: int) -> Any:
    """Derive a trainer that trains the same with torchft's DiLoCo, and writes an event for each
    tried round.
    """

    class Observed(trainer):
        def __init__(self, job_config: Any) -> None:
            super().__init__(job_config)
            self._steps, self._committed, self._healed = 0, False, False
            manager = self.ft_manager.manager
            manager.register_state_dict_fn("benchmark", self._note_heal, dict)
            self._vote, manager.should_commit = manager.should_commit, self._note_vote
            if job_config.validation.enable:
                self._validate_alike(job_config)

        def _note_heal(self, _: Any) -> None:
            self._healed = True

        def _note_vote(self, *args: Any, **kwargs: Any) -> bool:
            self._committed = self._vote(*args, **kwargs)
            return self._committed

        def _validate_alike(self, job_config: Any) -> None:
            """torchtitan would give each group its own part of the text."""
            from torchtitan.hf_datasets.text_datasets import build_text_validation_dataloader

            mesh = self.parallel_dims.get_mesh("batch")
            self.validator.validation_dataloader = build_text_validation_dataloader(
                dp_world_size=mesh.size(),
                dp_rank=mesh.get_local_rank(),
                tokenizer=self.tokenizer,
                job_config=job_config,
                infinite=job_config.validation.steps != -1,
            )

        def train_step(self, data_iterator: Any) -> None:
            self._committed = self._healed = False
            super().train_step(data_iterator)
            events.emit(InnerStepMade())
            self._steps += 1
            if self._steps % self.job_config.fault_tolerance.sync_steps:
                return
            step = self.ft_manager.manager.current_step() + (not self._committed)
            wants_digest = self._committed and step % digest_every == 0
            events.emit(
                StepTried(
                    step=step,
                    committed=self._committed,
                    contributed=self._committed and not self._healed,
                    own_loss=None,
                    digest=digest(self.model_parts) if wants_digest else None,
                    inner_steps=self.job_config.fault_tolerance.sync_steps,
                )
            )

    return Observed


def digest(model_parts: Any) -> str:
    """Return a hash over the bytes of this rank's shards of all parameters."""
    found = hashlib.blake2b(digest_size=8)
    for part in model_parts:
        for parameter in part.parameters():
            shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            found.update(shard.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
