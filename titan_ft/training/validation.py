# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Validation: every rank of a replica group reads equally many batches, and counts as alive."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.fsdp import FSDPModule

from titan_ft.config import ConfigError, read_flags
from titan_ft.engine.feed import Batch
from titan_ft.engine.strategy import StepStrategy
from titan_ft.engine.watchdog import Watchdog
from titan_ft.host.loader_workers import prepare_workers
from titan_ft.host.titan import (
    HostTrainer,
    Validator,
    logger,
    use_validation_loader,
    validation_batch_size,
)
from titan_ft.membership.group_collectives import GroupCollectives
from titan_ft.training.local_training import knows_loss

TO_THE_END = -1
"""Value of `validation.steps` with which torchtitan validates on all of the data."""


def check_steps(values: Mapping[str, Any], args: Sequence[str]) -> None:
    """Check `validation.steps` before torchtitan does, with its AssertionError.

    Args:
        values: values of the TOML.
        args: torchtitan's flags.

    Raises:
        ConfigError: the value is neither a number of batches nor `TO_THE_END`.
    """
    table = values.get("validation")
    given = [table["steps"]] if isinstance(table, Mapping) and "steps" in table else []
    given += [value for name, value in read_flags(args) if name == "validation.steps"]
    for steps in given:
        try:
            number = int(steps)
        except (TypeError, ValueError):
            continue  # torchtitan's parser refuses values of a wrong type.
        if number <= 0 and number != TO_THE_END:
            raise ConfigError(
                f"validation.steps must be >= 1, or {TO_THE_END} for all of the data, got "
                f"{number}; correct it, or set validation.enable = false and leave it out"
            )


class ValidationBatches:
    """Stands in for the loader of torchtitan's validator, which iterates it in each validation.

    Training thread only. After an error in an iteration the process ends.

    With `validation.steps = -1` torchtitan lets each data rank read its own share to the end. The
    shares have different lengths. The rank with the shortest share went on to the next collective
    while the others were in a forward, and Gloo aborted it (SIGABRT), at each restart again. Here
    the ranks agree before each batch, and all of them stop where the first share ends.

    Args:
        loader: torchtitan's loader of this rank.
        steps: `validation.steps`.
        gather: gathers an integer of every rank of the group; called before each batch of a
            validation to the end of the data.
        beat: called before each batch. All of the data may take longer than
            `hang_timeout_seconds`, and the watchdog would end each group at each validation.
        whole: sequences of a whole batch, if a smaller batch cannot be validated, because the
            stages of a pipeline have buffers of a fixed shape. None: smaller batches are validated
            as well.
    """

    def __init__(
        self,
        loader: Any,
        *,
        steps: int,
        gather: Callable[[int], list[int]],
        beat: Callable[[], None],
        whole: int | None = None,
    ) -> None:
        self._loader = loader
        self._steps = steps
        self._gather = gather
        self._beat = beat
        self._whole = whole
        self._first_state: Any = None
        self._has_reported_end = False
        prepare_workers(loader)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader: the user's validator may use any."""
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of one validation.

        Raises:
            ConfigError: a rank of the group has no batch at all; on all of its ranks.
        """
        if self._steps != TO_THE_END:
            yield from self._read()
            return
        self._rewind()
        batches = self._read()
        count = 0
        while True:
            batch = next(batches, None)
            has_batch = batch is not None and self._is_whole(batch)
            have_batch = self._gather(int(has_batch))
            if batch is None or not all(have_batch):
                break
            yield batch
            count += 1
        ended = [rank for rank, has_one in enumerate(have_batch) if not has_one]
        if count == 0:
            raise ConfigError(self._describe_no_batch(ended))
        if len(ended) < len(have_batch):
            self._report_end(count, ended)

    def _read(self) -> Iterator[Batch]:
        for batch in self._loader:
            self._beat()
            yield batch

    def _rewind(self) -> None:
        """Reset the loader to its first batch.

        torchtitan's dataset stays at its end. Without the reset the second validation had no batch,
        and ended every group with "stack expects a non-empty TensorList".
        """
        if not hasattr(self._loader, "load_state_dict"):
            return
        if self._first_state is None:
            self._first_state = copy.deepcopy(self._loader.state_dict())
        self._loader.load_state_dict(copy.deepcopy(self._first_state))

    def _is_whole(self, batch: Batch) -> bool:
        _, labels = batch
        return self._whole is None or len(labels) >= self._whole

    def _describe_no_batch(self, ranks: list[int]) -> str:
        least = "a sequence" if self._whole is None else f"{self._whole} sequences"
        return (
            f"validation.dataset must have {least} of validation.seq_len tokens for each rank that "
            f"reads data, got none for {_name_ranks(ranks)} of a group; take more data, "
            "lower validation.seq_len or local_batch_size, or set validation.enable = false"
        )

    def _report_end(self, count: int, ranks: list[int]) -> None:
        """Log once that other ranks had more data."""
        if self._has_reported_end:
            return
        self._has_reported_end = True
        logger.info(
            f"validation.steps = {TO_THE_END}: the loss is of the first {count} batches of each "
            f"rank, where the data of {_name_ranks(ranks)} ends"
        )


def _name_ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks))}"


def validate_together(trainer: HostTrainer, group: GroupCollectives, watchdog: Watchdog) -> None:
    """Let all ranks of the group validate equally many batches."""
    config = trainer.job_config.validation
    size = validation_batch_size(trainer.job_config)

    def share(loader: Any) -> ValidationBatches:
        return ValidationBatches(
            loader,
            steps=config.steps,
            gather=group.gather,
            beat=watchdog.beat,
            whole=size if trainer.parallel_dims.pp_enabled else None,
        )

    use_validation_loader(trainer.validator, share)


def validate_updates(trainer: HostTrainer, strategy: StepStrategy) -> None:
    """Validate the weights that all groups share, after each update with a due validation.

    After a validation FSDP must shard the weights again: without a backward, its root keeps whole
    copies. Until the next step, a digest and a donor's copy would be taken of those copies, and a
    heal would change the shards only.
    """
    validate = trainer.validator.validate
    should_validate = trainer.validator.should_validate

    def validate_and_shard(*args: Any, **kwargs: Any) -> None:
        with strategy.lend_agreed_weights():
            validate(*args, **kwargs)
            for part in trainer.model_parts:
                for module in part.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()

    def is_due(step: int) -> bool:
        first = strategy.last_step_of(strategy.update_of(step) - 1) + 1
        return any(should_validate(each) for each in range(first, step + 1))

    trainer.validator.validate = validate_and_shard
    trainer.validator.should_validate = is_due


def share_loss(trainer: HostTrainer, group: GroupCollectives) -> None:
    """Log a validation's loss on all ranks.

    torchtitan knows the loss on a pipeline's last stage only, and logs -1 / tokens elsewhere.
    """
    if type(trainer.validator).validate is not Validator.validate:
        # The user's own validator may log on some ranks only, and a gather would hang.
        return
    log = trainer.metrics_processor.log_validation

    def log_everywhere(loss: float, step: int) -> None:
        known = group.gather_losses([loss if knows_loss(trainer) else -math.inf])
        log(loss=float(known.max()), step=step)

    trainer.metrics_processor.log_validation = log_everywhere
