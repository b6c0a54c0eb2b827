# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan's Trainer with a replica dimension: `train_step` returns with a committed step, and only then."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import JobConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer

from titan_ft import device, spec
from titan_ft.history.events import EventLog
from titan_ft.launch.run_paths import RunPaths
from titan_ft.replica.catch_up import Update
from titan_ft.replica.dimension import Committed, ReplicaDimension
from titan_ft.replica.exchange import GradientExchange
from titan_ft.replica.group import Group
from titan_ft.replica.heal import Heal
from titan_ft.replica.membership import Membership
from titan_ft.replica.round import Contribution, Rounds
from titan_ft.replica.snapshot import Snapshot, TrainState
from titan_ft.replica.transport import StateServer


@dataclass(frozen=True)
class Launch:
    """What the environment says of this worker.

    Attributes:
        rank: in the replica group.
        store: host and port of the group's TCPStore.
        lighthouse: its address, http://host:port.
        token: the run's shared secret.
        attempt: how often this group was started before.
        config_digest: hex hash of what must be equal in all groups.
    """

    rank: int
    store: tuple[str, int]
    lighthouse: str
    token: str
    attempt: int
    config_digest: str


class ReplicaTrainer(Trainer):
    """One rank of a replica group.

    Raises:
        ReplicaError: a known end of this group's part in the run; the message says what to do.
    """

    launch: Launch  # set by titan_ft.train on the subclass that it runs
    ntokens_seen: int

    def __init__(self, job_config: JobConfig) -> None:
        config = job_config.fault_tolerance
        self._events = _open_events(job_config, self.launch)
        self._events.emit("worker_started", config_digest=self.launch.config_digest)
        spec.register(job_config.model.name, config)
        if job_config.debug.seed is None:
            # All groups must begin with the same weights, whenever they come; torchtitan would roll dice in each.
            job_config.debug.seed = int(self.launch.config_digest[:8], 16)
            logger.info(f"debug.seed is not set: using {job_config.debug.seed}, the same in all groups of this config")
        if job_config.training.global_batch_size > 0:  # counts all groups; torchtitan's Trainer sees only this one
            job_config.training.global_batch_size //= config.group_size
        super().__init__(job_config)
        self._num_batches = 0
        self._nominal_tokens = self._count_nominal_tokens()
        loss_mesh = self.parallel_dims.get_optional_mesh("loss") if self.parallel_dims.dp_cp_enabled else None
        self._group = Group(self.device, None if loss_mesh is None else loss_mesh.get_group())
        self._replica: ReplicaDimension | None = None  # entered at the first step, see _enter

    def train(self) -> None:
        """Train as torchtitan does, and leave the other groups however it ends."""
        try:
            super().train()
        finally:
            if self._replica is not None:
                self._membership.close()
                self._server.close()

    def should_continue_training(self) -> bool:
        """Say whether a step is left; after the last one stay until every group holds the final state."""
        if super().should_continue_training():
            return True
        if self._replica is not None:
            digest = self._replica.finish()
            self.step = self._replica.step
            self._events.emit("training_finished", step=self.step, tokens=self.ntokens_seen, digest=digest)
        return False

    def train_step(self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        """Make one committed step, whatever happens to the other groups; or heal, which ends on one too."""
        started = time.monotonic()
        replica, behind = (self._replica, False) if self._replica is not None else self._enter()
        if behind:
            self._heal(replica)
            return
        self.optimizers.zero_grad()
        lr = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        committed = replica.commit(self._forward_backward(data_iterator, replica.arm))
        if committed is None:
            self._heal(replica)
            return
        grad_norm = self._apply(committed.update)
        self._report(committed, grad_norm, lr, time.monotonic() - started, replica)

    def _enter(self) -> tuple[ReplicaDimension, bool]:
        """Join the job, now that this group is ready to train; says whether it must heal first."""
        self._replica = replica = self._build_replica()
        behind = replica.start(self.step - 1)
        if self.launch.attempt > 0 and not behind and self.step == 1:
            # Without checkpoints there is nothing to come back to when every group is lost; but not silently.
            logger.warning("no group holds the state of the earlier attempt: training starts anew from step 0")
            self._events.emit("started_anew", step=0)
        return replica, behind

    def _heal(self, replica: ReplicaDimension) -> None:
        first = self.step == 1
        self.optimizers.zero_grad()
        self.step = replica.heal()
        self.metrics_processor.ntokens_since_last_log = 0
        if first:  # torchtitan shortens the timeouts after step 1, which this group never makes
            dist_utils.set_pg_timeouts(
                timedelta(seconds=self.job_config.comm.train_timeout_seconds), self.parallel_dims
            )

    def _forward_backward(
        self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]], arm: Callable[[], None]
    ) -> Contribution:
        """Compute the local gradients of all microbatches; the last backward, after `arm`, launches the exchange."""
        seen = self.ntokens_seen
        microbatches = [next(data_iterator) for _ in range(self.gradient_accumulation_steps)]
        self.ntokens_seen = seen  # torchtitan counts what was read; here a commit counts, see _apply
        valid_tokens = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in microbatches)
        tokens = sum(labels.numel() for _, labels in microbatches)
        losses = []
        for number, (inputs, labels) in enumerate(microbatches, start=1):
            if number == len(microbatches):
                arm()
            inputs = {
                key: value.to(self.device) if isinstance(value, torch.Tensor) else value
                for key, value in inputs.items()
            }
            loss = self.forward_backward_step(
                input_dict=inputs,
                labels=labels.to(self.device),
                global_valid_tokens=self._nominal_tokens,  # only ever a divisor
            )
            losses.append(loss.detach())
        return self._gather_contribution(valid_tokens, tokens, torch.sum(torch.stack(losses)).item())

    def _gather_contribution(self, valid_tokens: int, tokens: int, loss: float) -> Contribution:
        """Add up this group's facts, as torchtitan does for its logs, in one collective."""
        local_mean = loss * self._nominal_tokens / max(valid_tokens, 1)
        facts = self._group.gather_losses([valid_tokens, tokens, loss, local_mean])
        return Contribution(
            # Ranks of one context-parallel group hold the same tokens but different parts of the loss.
            valid_tokens=int(facts[:, 0].sum()) // self.parallel_dims.cp,
            tokens=int(facts[:, 1].sum()) // self.parallel_dims.cp,
            loss=float(facts[:, 2].sum()),
            max_loss=float(facts[:, 3].max()),
        )

    def _apply(self, update: Update) -> float:
        """Apply a committed update, live or replayed, and advance what counts commits; returns the gradient norm."""
        self._exchange.write_gradients(update.gradients)
        grad_norm = dist_utils.clip_grad_norm_(
            [parameter for part in self.model_parts for parameter in part.parameters()],
            self.job_config.training.max_norm,
            foreach=True,
            pp_mesh=self.parallel_dims.get_optional_mesh("pp"),
            ep_enabled=self.parallel_dims.ep_enabled,
        )
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        self.ntokens_seen += update.tokens
        return grad_norm.item()

    def _report(
        self, committed: Committed, grad_norm: float, lr: float, seconds: float, replica: ReplicaDimension
    ) -> None:
        digest = replica.applied()
        has_loss = not self.parallel_dims.pp_enabled or self.pp_has_last_stage
        batches = self.gradient_accumulation_steps
        self._events.emit(
            "step_committed",
            step=committed.update.step,
            participants=committed.participants,
            tokens=committed.valid_tokens,
            loss=committed.loss if has_loss else None,
            grad_norm=grad_norm,
            lr=lr,
            seconds=seconds,
            exchanges=committed.exchanges,
            exchange_seconds=committed.seconds,
            forward_passes=batches,
            data={
                "slot": self.job_config.fault_tolerance.replica_id,
                "first_batch": self._num_batches,
                "num_batches": batches,
            },
            **({} if digest is None else {"digest": digest}),
        )
        self._num_batches += batches
        if self.metrics_processor.should_log(self.step):
            self.metrics_processor.log(
                self.step,
                committed.loss,
                committed.max_loss,
                grad_norm,
                extra_metrics={
                    "n_tokens_seen": self.ntokens_seen,
                    "lr": lr,
                    "ft/participants": len(committed.participants),
                    "ft/exchange(s)": committed.seconds,
                    "ft/retries": committed.exchanges - 1,
                    "ft/heal(s)": replica.heal_seconds,
                },
            )

    def _count_nominal_tokens(self) -> int:
        """Count the tokens of a step with all groups present and every label valid."""
        training = self.job_config.training
        degree = self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard
        batch = training.local_batch_size * degree * self.gradient_accumulation_steps
        return batch * training.seq_len * self.job_config.fault_tolerance.group_size

    def _build_replica(self) -> ReplicaDimension:
        config = self.job_config.fault_tolerance
        host = config.advertise_address or _resolve_address(self.launch.lighthouse)
        self._server = StateServer(
            config.bind_address or host, self.launch.token, config.process_group_timeout_ms / 1000, self._on_served
        )
        self._membership = self._join(host)
        self._exchange = self._build_exchange()
        state = TrainState(self.model_parts, self.optimizers, self.lr_schedulers, _TokensSeen(self))
        rounds = Rounds(
            config, self._membership, self._exchange, state, self._server, self._events, self._nominal_tokens
        )
        return ReplicaDimension(
            config,
            rounds=rounds,
            heal=Heal(config, rounds, state, self._group, self._events, self.launch.token, self._apply),
            state=state,
            group=self._group,
            events=self._events,
            nominal_tokens=self._nominal_tokens,
            total_steps=self.job_config.training.steps,
        )

    def _join(self, host: str) -> Membership:
        config = self.job_config.fault_tolerance
        timeout = timedelta(milliseconds=config.process_group_timeout_ms)
        port = self._server.port
        return Membership(
            config,
            process_group=device.build_process_group(config.process_group, timeout),
            lighthouse=self.launch.lighthouse,
            host=host,
            group_rank=self.launch.rank,
            group_world_size=torch.distributed.get_world_size(),
            store=self.launch.store,
            attempt=self.launch.attempt,
            config_digest=self.launch.config_digest,
            address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            events=self._events,
        )

    def _build_exchange(self) -> GradientExchange:
        config, dims = self.job_config.fault_tolerance, self.parallel_dims
        return GradientExchange(
            (parameter for part in self.model_parts for parameter in part.parameters()),
            self._membership,
            bucket_bytes=int(config.bucket_size_mb * 2**20),
            where=device.exchange_device(config.process_group),
            # Gradients must be final when autograd's hook runs: pipeline schedules call it for every microbatch, and
            # DDP inside the group reduces after it.
            overlap=not dims.pp_enabled and (dims.fsdp_enabled or not dims.dp_replicate_enabled),
        )

    def _on_served(self, joiner: str, snapshot: Snapshot, copy_seconds: float, serve_seconds: float) -> None:
        self._events.emit(
            "state_served",
            joiner=int(joiner),
            step=snapshot.step,
            bytes=snapshot.payload.numel(),
            copy_seconds=copy_seconds,
            serve_seconds=serve_seconds,
        )


class _TokensSeen:
    """The trainer's count of committed tokens, as part of the state that heals."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return {"ntokens_seen": self._trainer.ntokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._trainer.ntokens_seen = state_dict["ntokens_seen"]


def _open_events(job_config: JobConfig, launch: Launch) -> EventLog:
    config = job_config.fault_tolerance
    path = None
    if config.events_folder:
        paths = RunPaths(job_config.job.dump_folder, events=config.events_folder)
        path = paths.worker_events(config.replica_id, launch.rank, launch.attempt, os.getpid())
    return EventLog(path, replica=config.replica_id, rank=launch.rank, attempt=launch.attempt)


def _resolve_address(lighthouse: str) -> str:
    """Return the numeric address of the interface that leads to the lighthouse; no name lookup of this host."""
    host, _, port = lighthouse.split("//", 1)[-1].rstrip("/").rpartition(":")
    family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # a datagram socket: chooses the route, sends nothing
        return str(probe.getsockname()[0])
