# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Hooks that tests put into a worker, through torchtitan's
`--experimental.custom_import=harness.hooks`.

The product has no code for tests. On import, this module wraps methods of the engine, as the JSON
in the environment variable TITAN_FT_TEST_HOOKS says. It also registers the model converter
`--model.converters=scales`.

    replica, rank, attempt, markers: identity of this worker, and a folder where workers leave marks
        for each other
    faults: [{"replica", "rank", "attempt", "point", "step", "forwards", "after", "unless"}]: the
        worker kills itself with SIGKILL at the first passage of `point` in a step >= `step`
        (default: any) that has begun at least `forwards` forwards, once all marks of `after` exist
        and no mark of `unless` does
    fan_out: children of a rank in the control tree of its group (default: the product's)
    reset_every: number of frames to neighbours in the control tree after which this worker resets
        the connection, before the last frame leaves
    hold: number of steps that a group makes before it waits for the return of a killed group, and
        then for a joiner's transfer; so heals happen during training on a machine of any speed
        (None: never wait)
    hold_fetching: the same for transfers only, in place of `hold`
    pauses: [{"replica", "rank", "attempt", "queued", "after"}]: after the first pieces, a joiner
        continues its transfer only when it has queued that many updates and all marks of `after`
        exist
    breaks: [{"replica", "rank", "attempt", "answer"}]: a donor's connection breaks in the middle of
        that piece of the state (from 1)
    delays: [{"replica", "rank", "attempt", "step", "seconds", "gil"}]: sleep in the forward of that
        step (default: of each step); with `gil` no other Python thread of the worker runs during
        the sleep
    pin: whether each group has a core of its own, as far as there are cores
    gates: [{"name", "replica", "rank", "attempt", "point", "step"}]: at `point` ("forward") in a
        step >= `step`, leave the mark reached-NAME-REPLICA-ATTEMPT-RANK and wait until the mark
        NAME exists. The mark "awaited" appears once the quorum arrived that a group at a gate of
        this name requested; the mark "wanted", once a joiner waits for the state that the group
        offers
    chaos: [{"replica", "rank", "attempt", "fault", "steps"}]: inject a fault of `titan_ft.chaos` in
        these steps: nan_gradient, or flip_parameter after the optimizer's step
    mask: whether a pattern of labels is masked, different for each data shard and batch
    record: folder that gets, in full precision, the values that torchtitan logs
    dump: whether parameters are written to that folder before and after training (begin-...,
        end-...) and, with a semi-synchronous method, after each round (round-1-...)
    experts: whether models with experts are registered (see `harness.experts`); each rank then
        writes its experts' biases at the end, and their number of tokens in each update
    stream: .jsonl files that `--training.dataset=stream` streams, and `--training.dataset=shuffled`
        with a shuffle buffer of three texts
    begin: file with the initial parameters: torchtitan draws different ones for another number of
        shards
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import torch
import torchtitan.train
from torch.distributed.checkpoint.filesystem import _FileSystemWriter
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

from harness import flavor
from harness.events import Computed
from harness.mask import mask_labels
from titan_ft.chaos.inside.target_worker import TargetWorker
from titan_ft.chaos.inside.task import Task
from titan_ft.chaos.orders import Order
from titan_ft.device import local_shard
from titan_ft.engine import heal
from titan_ft.engine.catch_up import CatchUp
from titan_ft.engine.drain import Drain
from titan_ft.engine.round_strategy import RoundStrategy
from titan_ft.engine.step import ReplicaDimension
from titan_ft.engine.strategy import StepStrategy
from titan_ft.faults.catalogue import make_fault
from titan_ft.gradients.bucket import CountBuffer
from titan_ft.gradients.flight import Flight
from titan_ft.gradients.operations import Operations
from titan_ft.gradients.sums import Sums
from titan_ft.host.release import series
from titan_ft.host.titan import batches_per_call
from titan_ft.membership import control_connection, control_sockets
from titan_ft.membership.control_tree import ControlTree
from titan_ft.membership.membership import Membership
from titan_ft.membership.rendezvous import Rendezvous
from titan_ft.protocol.round import Update
from titan_ft.run.events import FaultInjected, Target
from titan_ft.trainer import ReplicaTrainer
from titan_ft.training.local_training import LocalTraining
from titan_ft.training.step_log import StepLog
from titan_ft.transfer import state_fetch
from titan_ft.transfer.pace import Pace
from titan_ft.transfer.snapshot import TrainState
from titan_ft.transfer.state_server import StateServer
from titan_ft.transfer.wire import TransferError

SETTINGS: dict[str, Any] = json.loads(os.environ["TITAN_FT_TEST_HOOKS"])
_HOLD_SECONDS = 60.0

flavor.register()
# With small slices, a tiny state takes several requests, too.
CONSTANTS = {"titan_ft.transfer.state_fetch._SLICE_BYTES": 1 << 18, **SETTINGS.get("constants", {})}
for constant, value in CONSTANTS.items():
    module, _, name = constant.rpartition(".")
    getattr(sys.modules[module], name)  # fails after a rename, which a mere assignment would hide
    setattr(sys.modules[module], name, value)


class Worker:
    """Progress of this worker, as the hooks see it."""

    def __init__(self) -> None:
        self.step = 0  # the step under way, torchtitan's
        self.forwards = 0  # calls of the model since the last commit
        self.held_seconds = (
            0.0  # spent waiting for other groups since the last commit, by order of a test
        )
        self.samples = 0  # texts that this process has tokenized
        self.rate: float | None = None  # LR of the last update
        self.scales: list[float] | None = None  # see Scales
        self.handed_over = 0  # buckets of this exchange
        self.reductions = 0  # buckets summed, and facts gathered, in this exchange
        self.all_reductions = 0  # the same since the last commit
        self.queued = 0  # updates queued in the heal under way
        self.answers = 0  # pieces of the state that this donor sent
        self.passed: dict[str, int] = {}  # steps begun since a mark was first seen
        self.trainer: Any = None
        self.events: Any = None
        self.watchdog: Any = None
        self.is_awaited: Callable[[], bool] = lambda: False
        self.is_wanted: Callable[[], bool] = lambda: False
        self.markers = Path(SETTINGS["markers"])
        # There as long as this rank fetches a donor's state.
        self.fetching = self.markers / "fetching-{replica}-{attempt}-{rank}".format(**SETTINGS)

    def is_target(self, what: dict[str, Any]) -> bool:
        me = all(what.get(key, 0) == SETTINGS[key] for key in ("replica", "rank"))
        return me and what.get("attempt", 0) in (SETTINGS["attempt"], "any")

    def mark(self, text: str) -> None:
        """Leave a mark of this group's attempt."""
        (self.markers / f"{text}-{SETTINGS['replica']}-{SETTINGS['attempt']}").touch()

    def at(self, point: str) -> None:
        """Pass `point`; does not return if a fault waits there, nor before a gate there is open."""
        for reset in SETTINGS.get("resets", ()):
            if reset["point"] == point and self.is_target(reset):
                self.break_control()
        for gate in SETTINGS.get("gates", ()):
            if (
                gate.get("point", "forward") == point
                and self.is_target(gate)
                and self.step >= gate.get("step", 0)
            ):
                self.wait_at(gate["name"])
        for fault in SETTINGS.get("faults", ()):
            due = (
                fault["point"] == point
                and self.is_target(fault)
                and self.step >= fault.get("step", 0)
            )
            due = due and self.forwards >= fault.get("forwards", 0)
            due = due and all((self.markers / mark).exists() for mark in fault.get("after", ()))
            if due and not any((self.markers / mark).exists() for mark in fault.get("unless", ())):
                self.mark("down")
                self.fetching.unlink(missing_ok=True)
                target = Target(SETTINGS["replica"], SETTINGS["rank"])
                told = FaultInjected(
                    fault=f"sigkill:{point}", target=target, seed=None, step=self.step
                )
                self.events.emit(told)
                os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()  # the signal may come to another thread

    def break_control(self) -> None:
        """Close this rank's connections to the other ranks of its group."""
        for sockets in list(control_sockets._open):
            for connection in list(sockets._neighbours.values()):
                with contextlib.suppress(OSError):  # it has ended just now
                    connection.socket.shutdown(socket.SHUT_RDWR)
                    self.mark("broken-control")

    def wait_at(self, gate: str) -> None:
        started = time.monotonic()
        (self.markers / "reached-{0}-{replica}-{attempt}-{rank}".format(gate, **SETTINGS)).touch()
        while not (self.markers / gate).exists():
            if {"awaited": self.is_awaited, "wanted": self.is_wanted}.get(gate, lambda: False)():
                (self.markers / gate).touch()
            time.sleep(0.005)
        self.held_seconds += time.monotonic() - started

    def hold(self) -> None:
        """Wait for killed groups and for running transfers that `hold` steps have passed by."""
        hold = SETTINGS.get("hold")
        limits = {"down": hold, "fetching": SETTINGS.get("hold_fetching", hold)}
        started = time.monotonic()
        waited_for = []
        for mark in [*self.markers.glob("down-*"), *self.markers.glob("fetching-*")]:
            kind, _, who = mark.name.partition("-")
            self.passed[mark.name] = self.passed.get(mark.name, -1) + 1
            if (limit := limits[kind]) is not None and self.passed[mark.name] >= limit:
                waited_for.append(mark)
                if kind == "down":
                    (self.markers / f"waiting-{who}-{SETTINGS['replica']}").touch()
        while not all(map(self._is_over, waited_for)):
            if time.monotonic() > started + _HOLD_SECONDS:
                raise TimeoutError(f"held for {waited_for}")
            time.sleep(0.005)
        self.held_seconds += time.monotonic() - started

    def pause_transfer(self) -> None:
        """Delay a transfer until the conditions of the test's `pauses` hold."""
        deadline = time.monotonic() + _HOLD_SECONDS
        for pause in filter(self.is_target, SETTINGS.get("pauses", ())):
            marks = [self.markers / mark for mark in pause.get("after", ())]
            while self.queued < pause.get("queued", 0) or not all(mark.exists() for mark in marks):
                if time.monotonic() > deadline:
                    raise TransferError(f"paused for {pause}, {self.queued} queued")
                time.sleep(0.005)

    def _is_over(self, mark: Path) -> bool:
        kind, replica, attempt = mark.name.split("-")[:3]
        if kind == "down":
            return (self.markers / f"ready-{replica}-{int(attempt) + 1}").exists()
        died = (
            self.markers / f"down-{replica}-{attempt}"
        ).exists()  # the rest of its group is ended without a word
        return died or not mark.exists()


WORKER = Worker()


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace `owner.name` by `wrapper(original, *args, **kwargs)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(
        owner,
        name,
        staticmethod(wrapped) if isinstance(vars(owner)[name], staticmethod) else wrapped,
    )


def before(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Call `action` with the arguments of `owner.name`, then the original."""

    def wrapper(original: Any, *args: Any, **kwargs: Any) -> Any:
        action(*args, **kwargs)
        return original(*args, **kwargs)

    wrap(owner, name, wrapper)


def set_fan_out(original: Any, *args: Any, **kwargs: Any) -> None:
    """Build a control tree with another number of children."""
    original(*args, **kwargs, fan_out=SETTINGS["fan_out"])


class FrameCount:
    """Resets connections of the control tree again and again."""

    def __init__(self) -> None:
        self._num_frames = 0

    def reset(self, original: Any, connection: Any, frame: bytes) -> None:
        """Write a frame, and reset the connection if it is the frame's turn."""
        original(connection, frame)
        self._num_frames += 1
        if self._num_frames % SETTINGS["reset_every"] == 0:
            # Closing sends a RST then.
            connection.socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            with contextlib.suppress(OSError):  # it has ended just now
                connection.socket.shutdown(socket.SHUT_RDWR)
                WORKER.mark("broken-control")


if "fan_out" in SETTINGS:
    wrap(ControlTree, "__init__", set_fan_out)
if "reset_every" in SETTINGS:
    wrap(control_connection.ControlConnection, "write_frame", FrameCount().reset)


def after(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Call `owner.name`, then `action` with the same arguments."""

    def wrapper(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        action(*args, **kwargs)
        return result

    wrap(owner, name, wrapper)


def install_progress() -> None:
    """Follow the steps, count the forwards, leave marks."""

    def build(trainer: ReplicaTrainer) -> None:
        WORKER.trainer, WORKER.events, WORKER.watchdog = trainer, trainer._events, trainer._watchdog
        model = trainer.model_parts[0]
        # Which calls each of its models for every part of a batch.
        if trainer.parallel_dims.pp_enabled:
            schedule: Any = trainer.pp_schedule
            step = schedule.step

            def count_step(*args: Any, **kwargs: Any) -> Any:
                count_forward()
                WORKER.forwards += batches_per_call(WORKER.trainer) - 1
                return step(*args, **kwargs)

            schedule.step = count_step
        else:
            model.register_forward_pre_hook(count_forward)
        list(model.layers.values())[:2][-1].register_forward_pre_hook(
            lambda *_: WORKER.at("forward")
        )

    def count_forward(*_: Any) -> None:
        WORKER.forwards += 1
        with WORKER.watchdog.paused():
            WORKER.hold()
        for delay in SETTINGS.get("delays", ()):
            if WORKER.is_target(delay) and delay.get("step") in (None, WORKER.step):
                if delay.get("gil"):
                    ctypes.PyDLL(None).usleep(int(delay["seconds"] * 1e6))
                else:
                    time.sleep(delay["seconds"])

    def step(trainer: ReplicaTrainer, *_: Any) -> None:
        WORKER.step, WORKER.forwards, WORKER.held_seconds, WORKER.all_reductions = (
            trainer.step,
            0,
            0.0,
            0,
        )

    def inner_step(_: RoundStrategy, step: int, *__: Any) -> None:
        WORKER.step = step

    def report(_: StepLog, committed: Any, *__: Any) -> None:
        told = Computed(
            step=committed.update.step,
            forwards=WORKER.forwards,
            reductions=WORKER.all_reductions,
            samples=WORKER.samples,
            rate=WORKER.rate,
            held_seconds=round(WORKER.held_seconds, 3),
        )
        WORKER.events.emit(told)

    def encode(*_: Any, **__: Any) -> None:
        WORKER.samples += 1

    def optimize(optimizers: OptimizersContainer, *_: Any) -> None:
        (WORKER.rate,) = {
            group["lr"] for optimizer in optimizers for group in optimizer.param_groups
        }

    def apply(original: Any, *args: Any) -> Any:
        # The first optimizer step of DTensors takes seconds on a busy machine.
        with WORKER.watchdog.paused():
            return original(*args)

    def fetch(original: Any, *args: Any, **kwargs: Any) -> Any:
        WORKER.fetching.touch()
        try:
            snapshot = original(*args, **kwargs)
            WORKER.mark("whole")
            return snapshot
        finally:
            WORKER.fetching.unlink(missing_ok=True)

    def queue(catch_up: CatchUp, *_: Any, **__: Any) -> None:
        WORKER.queued = len(catch_up._updates)

    def await_quorum(trainer: ReplicaTrainer) -> None:
        WORKER.is_awaited = lambda: trainer._links.membership.quorum_ready
        WORKER.is_wanted = lambda: trainer._links.server.wanted_part

    after(ReplicaTrainer, "_build_replica", lambda trainer: build(trainer))
    after(ReplicaTrainer, "_build_replica", await_quorum)
    wrap(heal, "fetch", fetch)
    wrap(StepStrategy, "apply", apply)
    after(CatchUp, "queue_update", queue)
    after(ReplicaDimension, "_wait", lambda *_: WORKER.mark("awaits"))
    before(HuggingFaceTokenizer, "encode", encode)
    before(OptimizersContainer, "step", optimize)
    before(ReplicaTrainer, "train_step", step)
    before(RoundStrategy, "_make_step", inner_step)
    before(StepLog, "emit", report)
    after(StepLog, "log", lambda *_: WORKER.mark("trained"))
    after(Drain, "request", lambda *_: WORKER.mark("told"))
    before(ReplicaDimension, "finish", lambda *_: WORKER.mark("finishing"))
    before(ReplicaDimension, "join", lambda *_: WORKER.mark("ready"))
    after(ReplicaDimension, "heal", lambda *_: WORKER.mark("healed"))
    # The pause of two seconds at the end of torchtitan's train().
    trainer_module: Any = sys.modules[torchtitan.train.Trainer.__module__]
    trainer_module.time = SimpleNamespace(
        perf_counter=time.perf_counter, sleep=lambda seconds: None
    )


def install_faults() -> None:
    """Let the worker die at a named point."""

    def hand_over(*_: Any) -> None:
        WORKER.handed_over += 1
        if WORKER.handed_over == 2:
            WORKER.at("backward")

    under_way: list[Flight] = []  # the exchange's, or the last one's

    def launch(flight: Flight, *_: Any, **__: Any) -> None:
        WORKER.handed_over = WORKER.reductions = 0
        under_way[:] = [flight]

    def sum_up(*_: Any) -> None:
        flight = under_way[0]
        WORKER.reductions += 1
        WORKER.all_reductions += 1
        if WORKER.reductions == 2:  # the first bucket, after the count of those that give gradients
            WORKER.at("exchange_first")
        elif (
            WORKER.reductions
            == sum(b.fragment in flight.summed_fragments for b in flight._buckets) + 3
        ):  # rows, messages
            WORKER.at("exchange_last")

    def request(_: Any, request: dict[str, Any], *__: Any) -> None:
        if "offset" in request:
            WORKER.at("fetch")
            WORKER.mark("fetched")
            WORKER.pause_transfer()

    def answer(_: Any, request: dict[str, Any], *__: Any) -> None:
        if "offset" in request:
            WORKER.mark("serving")
            WORKER.at("serve")

    before(Flight, "__init__", launch)
    after(Flight, "hand_over", hand_over)
    after(Operations, "gather", sum_up)
    after(Flight, "_sum", sum_up)
    before(Rendezvous, "configure", lambda *_: WORKER.at("configure"))
    after(Rendezvous, "_exchange_texts", lambda *_: WORKER.at("rendezvous"))
    before(Membership, "vote", lambda *_: WORKER.at("vote_before"))
    after(Membership, "vote", lambda *_: WORKER.at("vote_after"))
    before(
        StepStrategy,
        "apply",
        lambda _, update: WORKER.at("replay" if update.sums.is_copy else "commit"),
    )
    after(
        StepStrategy,
        "apply",
        lambda _, update: None if update.sums.is_copy else WORKER.at("optimizer"),
    )
    after(state_fetch._DonorConnection, "request", request)
    after(StateServer, "_answer", answer)
    # The data is there, the metadata is not.
    after(_FileSystemWriter, "write_data", lambda *_: WORKER.at("save"))


def install_breaks() -> None:
    """Break a donor's connection in the middle of a piece of the state, once."""

    def send(original: Any, pace: Any, connection: socket.socket, data: memoryview) -> None:
        if data.nbytes == state_fetch._SLICE_BYTES:
            WORKER.answers += 1
            if any(
                WORKER.is_target(what) and what["answer"] == WORKER.answers
                for what in SETTINGS["breaks"]
            ):
                connection.sendall(data[: data.nbytes // 2])
                connection.shutdown(socket.SHUT_RDWR)
                raise ConnectionAbortedError("by order of a test")
        original(pace, connection, data)

    wrap(Pace, "send", send)


def install_chaos() -> None:
    """Let faults of `titan_ft.chaos` strike in set steps, which no order can name."""
    due = [what for what in SETTINGS["chaos"] if WORKER.is_target(what)]

    def strike(trainer: ReplicaTrainer, step: int, *names: str) -> None:
        for what in due:
            if what["fault"] in names and step in what["steps"]:
                worker = TargetWorker(
                    model_parts=trainer.model_parts,
                    parameters=trainer._strategy.agreed_parameters(),
                    optimizers=trainer._strategy.agreed_optimizers(),
                    process_group=None,
                    server=trainer._links.server,
                    group_pids=(),
                    store=trainer.setup.store,
                    hang_timeout_seconds=0.0,
                    folder=WORKER.markers,
                    step=step,
                )
                order = Order(fault=what["fault"], params={}, seed=step, shot=0)
                task = Task(order, WORKER.events, (SETTINGS["replica"], SETTINGS["rank"]), None)
                make_fault(order.fault, {}).start(task, worker)
                worker.between_steps.popleft()()

    before(
        ReplicaTrainer,
        "train_step",
        lambda trainer, *_: strike(trainer, trainer.step, "nan_gradient"),
    )
    # Between the optimizer and the digest: a faulty memory of which no step of the others is to be
    # made.
    after(
        StepStrategy,
        "apply",
        lambda _, update: strike(WORKER.trainer, update.step, "flip_parameter"),
    )


def install_mask() -> None:
    """Mask labels, a different number in each batch of each data shard."""

    def batch_generator(original: Any, trainer: Any, data_iterable: Any) -> Iterator[Any]:
        dims = trainer.parallel_dims
        degree = dims.dp_replicate * dims.dp_shard
        shard = SETTINGS["replica"] * degree
        if dims.dp_enabled:
            shard += dims.get_mesh("batch").get_local_rank()
        for number, (inputs, labels) in enumerate(original(trainer, data_iterable)):
            yield inputs, mask_labels(labels, shard, number)

    wrap(torchtitan.train.Trainer, "batch_generator", batch_generator)


def install_records(folder: Path) -> None:
    """Write the logged values in full precision and, at the end, the digest of the state (and the
    parameters).
    """
    name = f"{SETTINGS['replica']}-{SETTINGS['rank']}"

    def write(record: dict[str, Any]) -> None:
        with (folder / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def log(
        _: Any, step: int, loss: Any, max_loss: Any, grad_norm: Any, extra_metrics: Any = None
    ) -> None:
        values = {"loss": float(loss), "max_loss": float(max_loss), "grad_norm": float(grad_norm)}
        write(
            {
                "step": step,
                **values,
                "lr": rate_of(extra_metrics),
                "tokens": int(extra_metrics["n_tokens_seen"]),
            }
        )

    def rate_of(metrics: dict[str, Any]) -> float:
        return float(next(value for name, value in metrics.items() if name in ("lr", "lr/AdamW")))

    def end(trainer: Any) -> None:
        for module in (module for part in trainer.model_parts for module in part.modules()):
            # Stock torchtitan leaves whole weights behind a validation.
            if isinstance(module, FSDPModule):
                module.reshard()
        state = TrainState(trainer.model_parts, trainer.optimizers, trainer.lr_schedulers, None)  # type: ignore[arg-type]
        write({"digest": state.digest()})
        dump(trainer, "end")

    def dump(trainer: Any, moment: str) -> None:
        if SETTINGS.get("dump"):
            parameters = {
                key: whole(value.detach())
                for part in trainer.model_parts
                for key, value in part.named_parameters()
            }
            torch.save(parameters, folder / f"{moment}-{name}.pt")

    def dump_anchors(strategy: RoundStrategy, update: Update) -> None:
        with strategy.outer.lend_to_model():
            dump(strategy._training, f"round-{update.step}")

    def whole(value: torch.Tensor) -> torch.Tensor:
        return (
            value.full_tensor() if isinstance(value, DTensor) else value
        ).cpu()  # the oracle has no GPU

    before(MetricsProcessor, "log", log)
    before(torchtitan.train.Trainer, "train", lambda trainer: dump(trainer, "begin"))
    after(RoundStrategy, "_apply_sums", dump_anchors)
    before(torchtitan.train.Trainer, "close", end)


def install_experts() -> None:
    """Register mixtures of experts, and write the files that `harness.biases` reads."""
    from harness import experts  # here, for few tests need it

    experts.register()
    name = "{replica}-{rank}".format(**SETTINGS)

    def count(sums: Sums, *_: Any) -> None:
        parts = [
            part
            for bucket in sums._buckets
            for part in bucket.parts
            if isinstance(part, CountBuffer)
        ]
        with (WORKER.markers / f"counts-{name}.jsonl").open("a") as file:
            file.write(json.dumps([part.buffer.sum().item() for part in parts]) + "\n")

    def end(trainer: Any) -> None:
        named = [item for part in trainer.model_parts for item in part.named_buffers()]
        biases = {name: buffer.tolist() for name, buffer in named if name.endswith("expert_bias")}
        (WORKER.markers / f"biases-{name}.json").write_text(json.dumps(biases))

    after(Sums, "write", count)
    before(torchtitan.train.Trainer, "close", end)


def install_stream(files: list[str]) -> None:
    """Register a streaming Hugging Face dataset, as torchtitan's own "c4" is."""

    def load(_: str) -> Any:
        return datasets.load_dataset("json", data_files=files, split="train", streaming=True)

    def shuffle(path: str) -> Any:
        return load(path).shuffle(seed=1, buffer_size=3)

    for name, loader in (("stream", load), ("shuffled", shuffle)):
        DATASETS[name] = DatasetConfig(
            path="", loader=loader, sample_processor=lambda sample: sample["text"]
        )


def install_begin(path: Path) -> None:
    """Load the initial parameters from a file, sharded as this run shards them."""

    def load(trainer: Any) -> None:
        values = torch.load(path)
        parameters = [named for part in trainer.model_parts for named in part.named_parameters()]
        for name, parameter in parameters:
            value = values[name].to(parameter.device)
            if isinstance(parameter, DTensor):
                value = distribute_tensor(
                    value, parameter.device_mesh, parameter.placements
                ).to_local()
            local_shard(parameter.detach()).copy_(value)

    before(torchtitan.train.Trainer, "train", load)


class Scales:
    """A model converter like torchtitan's float8: after each optimizer step it computes scales from
    the weights.
    """

    def __init__(self, *_: Any) -> None: ...

    def convert(self, model: torch.nn.Module) -> None: ...

    def post_optimizer_hook(self, parts: list[torch.nn.Module]) -> None:
        WORKER.scales = self.of(parts)

    @staticmethod
    @torch.no_grad()
    def of(parts: list[torch.nn.Module]) -> list[float]:
        return [
            local_shard(parameter).float().abs().sum().item()
            for part in parts
            for parameter in part.parameters()
        ]

    @classmethod
    def compare(cls, training: LocalTraining, *_: Any) -> None:
        """Fail before a forward if the scales belong to other weights. The first step of a job may
        have none.
        """
        trainer: Any = training._trainer
        if WORKER.scales is not None or (
            trainer.step > 1 and "scales" in trainer.job_config.model.converters
        ):
            assert cls.of(trainer.model_parts) == WORKER.scales, (
                f"step {trainer.step}: scales of other weights"
            )


def install_scales() -> None:
    if series() != "0.2":
        return  # 0.3 converts no built model
    from torchtitan.protocols.model_converter import register_model_converter

    register_model_converter(Scales, "scales")
    before(LocalTraining, "_forward_backward", Scales.compare)


def pin() -> None:
    """Pin this group to a core, so that the load of other groups does not change the length of its
    steps.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[SETTINGS["replica"] % len(cores)]})


def install() -> None:
    if SETTINGS.get("pin"):
        pin()
    install_progress()
    install_faults()
    install_scales()
    if SETTINGS.get("breaks"):
        install_breaks()
    if SETTINGS.get("chaos"):
        install_chaos()
    if SETTINGS.get("mask"):
        install_mask()
    if SETTINGS.get("record"):
        install_records(Path(SETTINGS["record"]))
    if SETTINGS.get("experts"):
        install_experts()
    if SETTINGS.get("stream"):
        install_stream(SETTINGS["stream"])
    if SETTINGS.get("begin"):
        install_begin(Path(SETTINGS["begin"]))


install()
