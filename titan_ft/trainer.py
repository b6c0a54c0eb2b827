# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan's Trainer with a replica dimension: `train_step` returns with a committed step, and only then."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torchtitan.train
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer

from titan_ft import device, spec
from titan_ft.checkpoint import ReplicaCheckpoints
from titan_ft.history.events import EventLog
from titan_ft.launch.run_paths import RunPaths
from titan_ft.replica.catch_up import Update
from titan_ft.replica.dimension import Committed, ReplicaDimension
from titan_ft.replica.drain import Drain
from titan_ft.replica.exchange import GradientExchange
from titan_ft.replica.feed import Feed, Reading
from titan_ft.replica.group import Group
from titan_ft.replica.heal import Heal
from titan_ft.replica.ledger import Entry, Ledger
from titan_ft.replica.lr_policy import lr_factor, scaled_lr
from titan_ft.replica.membership import Membership
from titan_ft.replica.round import NOTHING, Contribution, Leaving, Rounds
from titan_ft.replica.snapshot import Snapshot, TrainState
from titan_ft.replica.transport import StateServer
from titan_ft.replica.watchdog import Watchdog
from titan_ft.sabotage.agent import ChaosAgent
from titan_ft.sabotage.victim import Victim

# Fields of [fault_tolerance] that a reader of the history needs.
_TOLD = (
    "group_size",
    "min_replica_size",
    "digest_every",
    "batch_policy",
    "lr_policy",
    "catch_up",
    "hang_timeout_seconds",
    "chaos",
)


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
        slurm: Slurm's ids of the job and the step that this worker belongs to; None = not under Slurm.
    """

    rank: int
    store: tuple[str, int]
    lighthouse: str
    token: str
    attempt: int
    config_digest: str
    slurm: dict[str, str] | None = None


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
        self._events.emit(
            "worker_started",
            config_digest=self.launch.config_digest,
            host=socket.gethostname(),
            slurm=self.launch.slurm,
            config={
                **{name: getattr(config, name) for name in _TOLD},
                "steps": job_config.training.steps,
                "checkpoint": job_config.checkpoint.enable,
            },
        )
        loaders = spec.register(job_config.model.name, config)
        if job_config.debug.seed is None:
            # All groups must begin with the same weights, whenever they come; torchtitan would roll dice in each.
            job_config.debug.seed = int(self.launch.config_digest[:8], 16)
            logger.info(f"debug.seed is not set: using {job_config.debug.seed}, the same in all groups of this config")
        if job_config.training.global_batch_size > 0:  # counts all groups; torchtitan's Trainer sees only this one
            job_config.training.global_batch_size //= config.group_size
        torchtitan.train.CheckpointManager = ReplicaCheckpoints  # what torchtitan's Trainer builds
        super().__init__(job_config)
        self._nominal_tokens = self._count_nominal_tokens()
        self._ledger = Ledger(config.group_size, loaders.shard, loaders.num_shards)
        self._state = TrainState(self.model_parts, self.optimizers, self.lr_schedulers, _Counters(self, self._ledger))
        self._feed = Feed(self._ledger, loaders.open, self.batch_generator)
        self._readings: list[Reading] = []  # of the step under way
        self._compute_seconds = 0.0  # of it, for forward and backward
        self._participants: list[int] = []  # slots that contributed to the last step
        loss_mesh = self.parallel_dims.get_optional_mesh("loss") if self.parallel_dims.dp_cp_enabled else None
        # Never while torchtitan builds the model: what that takes is not known here.
        self._watchdog = Watchdog(
            config.hang_timeout_seconds, lambda: self._events.emit("hung", step=self._num_committed)
        )
        self._group = Group(self.device, None if loss_mesh is None else loss_mesh.get_group())
        self._replica: ReplicaDimension | None = None  # joined when the group is ready to train, see _join_job
        self._behind = self._begun = False
        self._chaos: ChaosAgent | None = None
        self.checkpointer.attach(_CheckpointHost(self))

    def init_distributed(self) -> ParallelDims:
        """Set up the group as torchtitan does; from then on SIGTERM lets the group leave in order."""
        dims = super().init_distributed()
        num_ranks = torch.distributed.get_world_size()
        host, port = self.launch.store
        self._drain = Drain(
            (lambda: TCPStore(host, port, is_master=False, wait_for_workers=False)) if num_ranks > 1 else None,
            key=f"titan_ft/drain/{self.launch.attempt}",
            rank=self.launch.rank,
            num_ranks=num_ranks,
            timeout_seconds=self.job_config.fault_tolerance.drain_timeout_seconds,
            on_abandon=lambda reason: self._events.emit(
                "drained", step=self._num_committed, reason=reason, in_order=False
            ),
        )
        self._drain.install()
        return dims

    @property
    def _num_committed(self) -> int:
        """Return the number of committed steps; torchtitan's `step` is that of the step under way."""
        replica: ReplicaDimension | None = getattr(self, "_replica", None)  # a signal may come before it is there
        return 0 if replica is None else replica.step

    def train(self) -> None:
        """Train as torchtitan does, and leave the other groups however it ends."""
        try:
            try:
                super().train()
            except Leaving:
                self._tell_drained()
                logger.info(f"SIGTERM: this group leaves after step {self._num_committed}")
            self._drain.leave()
        finally:
            self._watchdog.close()
            if self._chaos is not None:
                self._chaos.close()
            if self._replica is not None:
                self._membership.close()
                self._server.close()

    def _tell_drained(self) -> None:
        assert self._replica is not None
        self._events.emit(
            "drained",
            step=self._num_committed,
            reason="SIGTERM",
            in_order=True,
            digest=self._state.digest(),
            lineage=f"{self._replica.position.lineage:012x}",
        )

    def should_continue_training(self) -> bool:
        """Say whether a step is left; after the last one stay until every group holds the final state."""
        if super().should_continue_training():
            return True
        if self._replica is not None:
            digest = self._replica.finish()
            self.step = self._replica.step
            self.checkpointer.finish(self.step)
            self._events.emit(
                "training_finished",
                step=self.step,
                tokens=self.ntokens_seen,
                digest=digest,
                lineage=f"{self._replica.position.lineage:012x}",
            )
        return False

    def train_step(self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        """Make one committed step, whatever happens to the other groups; or heal, which ends on one too."""
        started = time.monotonic()
        replica = self._join_job()
        if not self._begun and not self._begin(replica):
            self._heal(replica)
            return
        if self._chaos is not None:
            self._chaos.at_step(self.step)
        self.optimizers.zero_grad()
        lr = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        self._readings = []
        self._compute_seconds = 0.0
        committed = replica.commit(self._train(replica.slots_to_read(), replica.arm), self._train)
        if committed is None:
            self._heal(replica)
            return
        exchanged = time.monotonic()
        grad_norm = self._apply(committed.update)
        self._participants = committed.participants
        ended = time.monotonic()
        self._report(
            committed,
            replica,
            grad_norm=grad_norm,
            lr=lr * self._lr_factor(committed.update),
            seconds=ended - started,
            exchange_seconds=exchanged - started - self._compute_seconds,
        )
        if replica.leaving:
            raise Leaving
        self._feed.drop({self.job_config.fault_tolerance.replica_id, *(r.entry.slot for r in self._readings)})

    def _join_job(self, step: int = 0) -> ReplicaDimension:
        """Meet the other groups, now that this one is ready to train, or to load the state after `step`."""
        if self._replica is None:
            if self.launch.attempt > 0:
                self._warm_up()
            self._replica = self._build_replica()
            if self.job_config.fault_tolerance.chaos:
                self._chaos = self._build_chaos_agent()
            self._behind = self._replica.join(step)
        return self._replica

    def _warm_up(self) -> None:
        """Make a step and take it back, before the others wait for this group.

        A process's first step takes several times as long as its second: compilation, sharding propagation, memory.
        Only for models of text, whose batches can be made up; real ones would be read for nothing.
        """
        if not isinstance(getattr(self.dataloader, "dataset", None), HuggingFaceTextDataset):
            return
        before = self._state.copy(0, 0)
        training = self.job_config.training
        tokens = torch.zeros((training.local_batch_size, training.seq_len), dtype=torch.long)
        with torch.random.fork_rng():
            self._forward_backward({"input": tokens}, tokens)
            self._clip_gradients()
            self.optimizers.step()
        self.optimizers.zero_grad()
        self._state.load(before)  # the counters too

    def _begin(self, replica: ReplicaDimension) -> bool:
        """Begin with the job's first step, or go on behind a checkpoint; False if this group must heal."""
        self._begun = True
        if self._behind or not replica.start(self.step - 1):
            return False
        if self.launch.attempt > 0 and self.step == 1:
            # Without checkpoints there is nothing to come back to when every group is lost; but not silently.
            logger.warning("no group holds the state of the earlier attempt: training starts anew from step 0")
            self._events.emit("started_anew", step=0)
        return True

    def _heal(self, replica: ReplicaDimension) -> None:
        first = self.step == 1
        self._participants = []
        self.optimizers.zero_grad()
        self.checkpointer.maybe_wait_for_staging()
        self.step = replica.heal()
        self.metrics_processor.ntokens_since_last_log = 0
        if first:  # torchtitan shortens the timeouts after step 1, which this group never makes
            dist_utils.set_pg_timeouts(
                timedelta(seconds=self.job_config.comm.train_timeout_seconds), self.parallel_dims
            )

    def _train(self, slots: Sequence[int], arm: Callable[[], None] = lambda: None) -> Contribution:
        """Add the gradients of a step's share of each slot to the local ones; calls `arm` before the last backward."""
        if not slots:
            return NOTHING
        started, seen = time.monotonic(), self.ntokens_seen
        readings = [self._feed.read(slot, self.gradient_accumulation_steps) for slot in slots]
        self.ntokens_seen = seen  # torchtitan counts what was read; here a commit counts, see _apply
        microbatches = [batch for reading in readings for batch in reading.batches]
        valid_tokens = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in microbatches)
        tokens = sum(labels.numel() for _, labels in microbatches)
        losses = []
        for number, (inputs, labels) in enumerate(microbatches, start=1):
            self._watchdog.beat()
            if number == len(microbatches):
                arm()
            losses.append(self._forward_backward(inputs, labels).detach())
        self._readings += readings
        loss_sum = torch.sum(torch.stack(losses)).item()
        entries = tuple(reading.entry for reading in readings)
        contribution = self._gather_contribution(valid_tokens, tokens, loss_sum, time.monotonic() - started, entries)
        self._compute_seconds += time.monotonic() - started
        return contribution

    def _forward_backward(self, inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        inputs = {
            key: value.to(self.device) if isinstance(value, torch.Tensor) else value for key, value in inputs.items()
        }
        return self.forward_backward_step(
            input_dict=inputs,
            labels=labels.to(self.device),
            global_valid_tokens=self._nominal_tokens,  # only ever a divisor
        )

    def _clip_gradients(self) -> torch.Tensor:
        return dist_utils.clip_grad_norm_(
            [parameter for part in self.model_parts for parameter in part.parameters()],
            self.job_config.training.max_norm,
            foreach=True,
            pp_mesh=self.parallel_dims.get_optional_mesh("pp"),
            ep_enabled=self.parallel_dims.ep_enabled,
        )

    def _gather_contribution(
        self, valid_tokens: int, tokens: int, loss: float, seconds: float, entries: tuple[Entry, ...]
    ) -> Contribution:
        """Add up this group's facts, as torchtitan does for its logs, in one collective."""
        local_mean = loss * self._nominal_tokens / max(valid_tokens, 1)
        facts = self._group.gather_losses([valid_tokens, tokens, loss, local_mean, seconds])
        return Contribution(
            # Ranks of one context-parallel group hold the same tokens but different parts of the loss.
            valid_tokens=int(facts[:, 0].sum()) // self.parallel_dims.cp,
            tokens=int(facts[:, 1].sum()) // self.parallel_dims.cp,
            loss=float(facts[:, 2].sum()),
            max_loss=float(facts[:, 3].max()),
            seconds=float(facts[:, 4].max()),
            entries=entries,
        )

    def _apply(self, update: Update) -> float:
        """Apply a committed update, live or replayed, and advance what counts commits; returns the gradient norm."""
        self._watchdog.beat()
        self._exchange.write_gradients(update.gradients)
        grad_norm = self._clip_gradients()
        self.checkpointer.maybe_wait_for_staging()
        with scaled_lr(self.optimizers, self._lr_factor(update)):
            self.optimizers.step()
        self.lr_schedulers.step()
        self.ntokens_seen += update.tokens
        self._ledger.advance(update.entries, update.readers)
        return grad_norm.item()

    def _lr_factor(self, update: Update) -> float:
        """Return what `lr_policy` multiplies the LR of an update with, by its share of the global batch."""
        config = self.job_config.fault_tolerance
        return lr_factor(config.lr_policy, len(update.slots) / config.group_size)

    def _report(
        self,
        committed: Committed,
        replica: ReplicaDimension,
        *,
        grad_norm: float,
        lr: float,
        seconds: float,
        exchange_seconds: float,
    ) -> None:
        digest = replica.applied()
        update = committed.update
        has_loss = not self.parallel_dims.pp_enabled or self.pp_has_last_stage
        read = {reading.entry.slot: reading.describe() for reading in self._readings}
        self._events.emit(
            "step_committed",
            step=update.step,
            lineage=f"{update.lineage:012x}",
            parent=f"{committed.parent:012x}",
            participants=committed.participants,
            tokens=committed.valid_tokens,
            loss=committed.loss if has_loss else None,
            own_tokens=committed.own_tokens,
            own_loss=committed.own_loss if has_loss else None,
            grad_norm=grad_norm,
            lr=lr,
            seconds=seconds,
            exchanges=committed.exchanges,
            exchange_seconds=exchange_seconds,
            compute_seconds=self._compute_seconds,
            apply_seconds=seconds - exchange_seconds - self._compute_seconds,
            forward_passes=sum(len(reading.batches) for reading in self._readings),
            data=read.pop(self.job_config.fault_tolerance.replica_id, None),
            extra_data=list(read.values()),
            batches={entry.slot: [entry.first_batch, entry.num_batches] for entry in update.entries},
            **({} if digest is None else {"digest": digest}),
        )
        if self.metrics_processor.should_log(self.step):
            if not self.metrics_processor.data_loading_times:  # another group has read this one's slot once more
                self.metrics_processor.data_loading_times.append(0.0)  # torchtitan takes their mean
            self.metrics_processor.log(
                self.step,
                committed.loss,
                committed.max_loss,
                grad_norm,
                extra_metrics={
                    "n_tokens_seen": self.ntokens_seen,
                    "lr": lr,
                    "ft/participants": len(committed.participants),
                    "ft/exchange(s)": exchange_seconds,
                    "ft/retries": committed.exchanges - 1,
                    "ft/heal(s)": replica.heal_seconds,
                    "ft/slowest": committed.slowest,
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
            config.bind_address or host,
            self.launch.token,
            config.process_group_timeout_ms / 1000,
            self._on_served,
            config.transfer_max_mbps,
        )
        self._membership = self._join(host)
        self._exchange = self._build_exchange()
        rounds = Rounds(
            config,
            self._membership,
            self._exchange,
            self._state,
            self._server,
            self._events,
            self._nominal_tokens,
            self._drain,
            self._watchdog,
        )
        return ReplicaDimension(
            config,
            rounds=rounds,
            heal=Heal(
                config, rounds, self._state, self._ledger, self._group, self._events, self.launch.token, self._apply
            ),
            state=self._state,
            ledger=self._ledger,
            group=self._group,
            events=self._events,
            nominal_tokens=self._nominal_tokens,
            pauses_after=self._pauses_after,
        )

    def _build_chaos_agent(self) -> ChaosAgent:
        config, launch = self.job_config.fault_tolerance, self.launch
        victim = Victim(
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            process_group=self._membership.process_group,
            server=self._server,
            friends={os.getppid(), *self._group.gather(os.getpid())},
            store=launch.store,
            hang_timeout_seconds=config.hang_timeout_seconds,
        )
        orders = RunPaths(self.job_config.job.dump_folder).chaos_orders
        logger.warning(f"fault_tolerance.chaos is true: this worker breaks as {orders} orders")
        return ChaosAgent(
            orders, victim, self._events, replica=config.replica_id, rank=launch.rank, attempt=launch.attempt
        )

    def _pauses_after(self, step: int) -> bool:
        """Say whether torchtitan ends, saves or validates after `step`.

        Who asks for a quorum before that is waited for in the exchange, for `process_group_timeout_ms`, instead of at
        the lighthouse.
        """
        config = self.job_config
        saves = self.checkpointer.pauses_after(step)
        validates = config.validation.enable and step % config.validation.freq == 0
        return step >= config.training.steps or saves or validates

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


class _CheckpointHost:
    """What `ReplicaCheckpoints` asks of the trainer."""

    def __init__(self, trainer: ReplicaTrainer) -> None:
        self._trainer = trainer
        self.ledger, self.events, self.config = trainer._ledger, trainer._events, trainer.job_config

    def heals_instead(self, step: int) -> bool:
        """Join the job as a group that can load `step`; says whether other groups are further."""
        self._trainer._join_job(step)
        return self._trainer._behind

    def gather(self, value: int) -> list[int]:
        """Gather an integer of every rank of this group."""
        return self._trainer._group.gather(value)

    @property
    def is_writer(self) -> bool:
        """Say whether this group is the first of those that made the last step."""
        participants = self._trainer._participants
        return bool(participants) and min(participants) == self.config.fault_tolerance.replica_id

    @property
    def saved(self) -> int:
        """Return the step of the latest complete checkpoint that any group told of."""
        return self._trainer._join_job().position.saved

    @saved.setter
    def saved(self, step: int) -> None:
        self._trainer._join_job().position.saved = step

    @property
    def lineage(self) -> int:
        """Return the lineage of the state."""
        return self._trainer._join_job().position.lineage

    @lineage.setter
    def lineage(self, lineage: int) -> None:
        self._trainer._join_job().position.lineage = lineage


class _Counters:
    """The trainer's count of committed tokens and the ledger, as part of the state that heals."""

    def __init__(self, trainer: Trainer, ledger: Ledger) -> None:
        self._trainer, self._ledger = trainer, ledger

    def state_dict(self) -> dict[str, Any]:
        return {"ntokens_seen": self._trainer.ntokens_seen, "ledger": self._ledger.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._trainer.ntokens_seen = state_dict["ntokens_seen"]
        self._ledger.load_state_dict(state_dict["ledger"])


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
