# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The parts of a checkpoint that torchtitan's own checkpoints lack.

The loaders' states are saved twice: in the ledger, and in the form that stock torchtitan reads.
"""

from __future__ import annotations

import pickle
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from titan_ft.engine.loader_state import load_loader
from titan_ft.host.titan import logger
from titan_ft.protocol.errors import first_line
from titan_ft.protocol.ledger import Ledger
from titan_ft.protocol.position import Position

QUORUM_STATE = "titan_ft"
"""Key of `QuorumState`, beside torchtitan's "model", "optimizer" and so on."""
JOB_TOKENS = "job_tokens"
"""Key of the job's tokens, beside torchtitan's `ntokens_seen`."""


class Shards(Stateful):
    """The ledger in a checkpoint, by shards of the whole job; each rank gives and takes its own."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def state_dict(self) -> dict[str, Any]:
        return dict(self._ledger.shards())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._ledger.load_shards(state_dict)


class QuorumState(Stateful):
    """The groups' agreement about the state, in a checkpoint."""

    def __init__(self, position: Position) -> None:
        self._position = position

    def state_dict(self) -> dict[str, Any]:
        return {"lineage": self._position.lineage}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._position.set_lineage(int(state_dict["lineage"]))


class TrainCounters(Stateful):
    """torchtitan's counters in a checkpoint, with the tokens of the job added.

    Stock torchtitan counts the tokens of its own data rank, and all ranks resume from rank 0's
    count. The trainer of a replica group counts the job's tokens. Stock would multiply that count
    by its ranks.

    Args:
        trainer: has the counters.
        num_shards: shards of the whole job, which is stock's number of data ranks.
    """

    def __init__(self, trainer: Stateful, num_shards: int) -> None:
        self._trainer, self._num_shards = trainer, num_shards

    def state_dict(self) -> dict[str, Any]:
        counters = self._trainer.state_dict()
        tokens = counters["ntokens_seen"]
        return {**counters, "ntokens_seen": tokens // self._num_shards, JOB_TOKENS: tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        counters = dict(state_dict)
        counters["ntokens_seen"] = counters.pop(JOB_TOKENS, counters["ntokens_seen"])
        self._trainer.load_state_dict(counters)


def stock_loaders(shards: dict[str, Any], num_shards: int) -> dict[str, Any]:
    """Return the states of the loaders under the names that stock torchtitan reads.

    torchtitan pickles the states (`ParallelAwareDataloader`), and needs the number of its data
    ranks. This project reads neither: its own keys hold the same states, packed without a pickle.

    Args:
        shards: this rank's part of the ledger, see `Ledger.shards`.
        num_shards: shards of the whole job.
    """
    found: dict[str, Any] = {"world_size": num_shards}
    for number, shard in shards.items():
        try:
            state = _unpack(shard["state"])
        except Exception as error:  # noqa: BLE001
            # The state of a user's loader may raise anything. The save must not fail for it.
            logger.warning(
                f"stock torchtitan will not find its place in shard {number}: {first_line(error)}"
            )
            continue
        found[f"dp_rank_{number}"] = pickle.dumps(state)
    return found


def _unpack(packed: bytes) -> Any:
    """Return the state of a loader; for a loader that has not begun, the state that lets it
    begin.
    """
    if not packed:
        return {}
    kept = _Kept()
    load_loader(kept, packed)
    return kept.state


class _Kept:
    """Keeps the state that a loader would load."""

    state: Any = None

    def load_state_dict(self, state: Any) -> None:
        self.state = state
