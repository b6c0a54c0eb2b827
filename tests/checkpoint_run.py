# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A replica group of one rank with its checkpoints and no other group: the subject of the
checkpoint tests.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist

from tests.event_builder import untyped
from titan_ft.host import cpu
from titan_ft.run.events import Event

cpu.prepare()

from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageReader  # noqa: E402
from torchtitan.components.lr_scheduler import LRSchedulersContainer  # noqa: E402
from torchtitan.components.optimizer import OptimizersContainer  # noqa: E402
from torchtitan.config import Checkpoint  # noqa: E402

from titan_ft.config import FaultTolerance  # noqa: E402
from titan_ft.engine.feed import save_loader  # noqa: E402
from titan_ft.protocol.ledger import Entry, Ledger  # noqa: E402
from titan_ft.protocol.position import Position  # noqa: E402
from titan_ft.training.checkpoint import choice as checkpoint_choice  # noqa: E402
from titan_ft.training.checkpoint.folder import MANIFEST, is_complete  # noqa: E402
from titan_ft.training.checkpoint.load import Load  # noqa: E402
from titan_ft.training.checkpoint.manager import ReplicaCheckpoints  # noqa: E402

LINEAGE = 0xABCDEF


def loader_state(place: int) -> bytes:
    """Pack the state of a loader at `place`, as the feed does."""
    return save_loader(SimpleNamespace(state_dict=lambda: {"place": place}))


class Progress:
    """The part of torchtitan's Trainer that a checkpoint saves (a Stateful)."""

    def __init__(self) -> None:
        self.step = self.ntokens_seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state_dict["step"], state_dict["ntokens_seen"]


class Events:
    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []

    def emit(self, event: Event) -> None:
        fields = untyped(event)
        self.told.append((fields.pop("event"), fields))

    def named(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.told if event == name]


class Run:
    """A replica group of one rank: its state, its checkpoints and the object that hosts them."""

    def __init__(
        self,
        base: Path,
        *,
        slots: int = 2,
        slot: int = 0,
        flavor: str = "tiny",
        dataset: str = "austen",
        adapter: Any = None,
        model: torch.nn.Module | None = None,
        method: dict[str, Any] = {},  # noqa: B006  # read only
        job_id: str = "",
        load_step: int = -1,
        **more: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = torch.nn.Linear(4, 3) if model is None else model
        optimizers = OptimizersContainer([self.model], torch.optim.AdamW, {"lr": 0.1})
        schedulers = LRSchedulersContainer(optimizers, lambda step: 1 / (step + 1))
        self.optimizers, self.schedulers = optimizers, schedulers
        self.progress = Progress()
        self.ledger, self.events = Ledger(slots), Events()
        self.position = Position()
        self.is_writer, self.heals = True, False
        self.strategy, self.outer, self.per_round = self, None, 1
        self.lend_agreed_weights: Callable[[], contextlib.AbstractContextManager[None]] = (
            contextlib.nullcontext
        )
        self.gathered: list[int] = []
        self.claimed = -1  # step that this group said it can load
        self.loaded: list[int] = []  # steps, as the state is when `on_load` is called
        self.config = SimpleNamespace(
            model=SimpleNamespace(name="llama3", flavor=flavor),
            training=SimpleNamespace(dataset=dataset, seq_len=32),
            checkpoint=SimpleNamespace(load_step=load_step),
            fault_tolerance=FaultTolerance(
                replica_id=slot, job_id=job_id, drain_timeout_seconds=10.0, **method
            ),
        )
        self.checkpoints = ReplicaCheckpoints(
            dataloader=object(),
            model_parts=[self.model],
            optimizers=optimizers,
            lr_schedulers=schedulers,
            states={"train_state": self.progress},
            checkpoint_config=Checkpoint(
                **{"enable": True, "interval": 5, "last_save_model_only": False, **more}
            ),
            sd_adapter=adapter,
            base_folder=str(base),
        )
        self.folder = (
            Path(self.checkpoints.folder) if more.get("enable", True) else base / "checkpoint"
        )
        self.checkpoints.attach(self)  # type: ignore[arg-type]

    # The host

    def join_before_load(self, step: int) -> bool:
        self.claimed = step
        return self.heals

    def on_load(self) -> None:
        self.loaded.append(self.progress.step)

    def update_of(self, step: int) -> int:
        return -(-step // self.per_round)

    def last_step_of(self, update: int) -> int:
        return update * self.per_round

    def gather(self, value: int) -> list[int]:
        self.gathered.append(value)
        return [value]

    # What a test does with it

    def load(self) -> bool:
        """Load as the trainer does: by `checkpoint.load_step`."""
        return self.checkpoints.load(self.config.checkpoint.load_step)

    def train(self, until: int) -> Self:
        """Make steps and offer each for saving; returns the run."""
        while self.progress.step < until:
            self.step()
            self.checkpoints.save(self.progress.step)
        return self

    def step(self) -> None:
        self.model(torch.ones(2, 4)).square().sum().backward()
        self.optimizers.step()
        self.optimizers.zero_grad()
        self.schedulers.step()
        self.progress.step += self.per_round
        self.progress.ntokens_seen += 64
        self.position.set_step(self.update_of(self.progress.step))
        self.position.set_lineage(LINEAGE + self.progress.step)
        slots = range(self.ledger.num_slots)
        state = loader_state(self.progress.step)
        entries = [Entry(slot, self.ledger.count_committed(slot), 1, state) for slot in slots]
        self.ledger.advance(entries, slots)

    def settle(self) -> None:
        """Wait for the running save. On a slow machine it may be over, and settled, when `save`
        returns.
        """
        save = self.checkpoints._running_save
        if save is not None:
            concurrent.futures.wait([save.done], timeout=60)

    def wait_for_purge(self) -> None:
        """Wait until all checkpoints marked for deletion are deleted."""
        deadline = time.monotonic() + 30
        while any("purged" in name for name in self.names()):
            assert time.monotonic() < deadline, self.names()
            time.sleep(0.01)

    def names(self) -> list[str]:
        """List the entries of the checkpoint folder."""
        return sorted(path.name for path in self.folder.iterdir())

    def values(self) -> dict[str, Any]:
        """The state by value."""
        optimizer = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in self.optimizers.state_dict().items()
        }
        return {
            "weight": self.model.weight.detach().clone(),
            "optimizer": optimizer,
            "scheduler": self.schedulers.state_dict()["last_epoch"],
            "progress": self.progress.state_dict(),
            "ledger": repr(self.ledger.shards()).encode(),
            "lineage": self.position.lineage,
        }


def write_as_earlier(folder: Path, **fields: Any) -> None:
    """Rewrite a manifest with other values in an earlier version's form: without the tables'
    digests.
    """
    path = folder / MANIFEST
    values = json.loads(path.read_text()) | fields
    del values["sha256"], values["table"]
    path.write_text(json.dumps(values))


def assert_equal(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def fail(*_: Any, **__: Any) -> None:
    raise OSError("No space left on device")


class Gate:
    """Holds back the writing of data until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, write = threading.Event(), FileSystemWriter.write_data

        def wait(*args: Any) -> Any:
            assert self.open.wait(60)
            return write(*args)

        monkeypatch.setattr(FileSystemWriter, "write_data", wait)


class Ranks:
    """The ranks of one group, which load at the same time. They do not read the data itself."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, make_run: Callable[..., Run], number: int = 2
    ) -> None:
        self.runs = [make_run() for _ in range(number)]
        self.loaded: list[str | None] = [None] * number  # name of the folder
        self._rank = threading.local()
        self._barrier = threading.Barrier(number, timeout=20)
        self._told = [0] * number
        for run in self.runs:
            run.gather = self._gather  # type: ignore[method-assign]
        monkeypatch.setattr(dist, "get_rank", lambda *_: self.rank)
        monkeypatch.setattr("titan_ft.training.checkpoint.manager.load_checkpoint", self._load)
        monkeypatch.setattr(Load, "check_loaded", lambda *_: None)

    @property
    def rank(self) -> int:
        """Return the rank whose thread asks; 0 for the test's own."""
        return getattr(self._rank, "number", 0)

    def load(self, step: int = -1) -> list[BaseException | None]:
        """Load on all ranks; return each rank's exception, or None."""

        def load(rank: int) -> BaseException | None:
            self._rank.number = rank
            try:
                self.runs[rank].checkpoints.load(step)
            except Exception as error:  # noqa: BLE001  # the test's to judge
                return error
            return None

        with concurrent.futures.ThreadPoolExecutor(len(self.runs)) as threads:
            return list(threads.map(load, range(len(self.runs))))

    def _gather(self, value: int) -> list[int]:
        self._told[self.rank] = value
        self._barrier.wait()
        told = [*self._told]
        self._barrier.wait()
        return told

    def _load(self, state_dict: dict[str, Any], checkpoint_id: str, *_: Any) -> None:
        self.loaded[self.rank] = Path(checkpoint_id).name

    def see(self, monkeypatch: pytest.MonkeyPatch, when: Callable[[Path], bool]) -> None:
        """Let rank 1 see a folder only if `when` says so."""

        def is_complete_here(folder: Path) -> bool:
            return is_complete(folder) and (self.rank == 0 or when(folder))

        monkeypatch.setattr(checkpoint_choice, "is_complete", is_complete_here)


class Exporter:
    """An adapter to Hugging Face's format, for any model."""

    fqn_to_index_mapping: dict[Any, int] | None = None

    def __init__(self, refuses: bool = False) -> None:
        self.refuses, self.calls = refuses, 0

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        self.calls += 1
        if self.refuses:
            raise KeyError("layers.7.router.weight")
        return {f"model.{name}": value for name, value in state.items()}

    def from_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("model."): value for name, value in state.items()}

    def get_hf_storage_reader(
        self, path: str, from_quantized: bool = False
    ) -> HuggingFaceStorageReader:
        return HuggingFaceStorageReader(path)


EXPORT: dict[str, Any] = {"last_save_in_hf": True, "last_save_model_only": True}
