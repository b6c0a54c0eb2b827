# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Rounds of several steps: LocalSGD, DiLoCo and Streaming DiLoCo.

A group makes `sync_steps` steps by itself, and the groups then exchange how far each has moved. torchtitan's `step`
counts the steps of a group, as its LR schedule, logs and checkpoints do. `Position.step` counts rounds: the updates of
the outer model.

See docs/semi_sync.md.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from titan_ft.config import TABLE, ConfigError, FaultTolerance
from titan_ft.engine import fragments
from titan_ft.engine.drain import OWN_SHARE, WAITING_SHARE
from titan_ft.engine.feed import Reading, merge
from titan_ft.engine.outer import OuterModel, OuterState, join_norm, set_lr, trained_parameters
from titan_ft.engine.round import Sign
from titan_ft.engine.step import Opening
from titan_ft.engine.strategy import Departure, StepStrategy
from titan_ft.engine.work import Work
from titan_ft.protocol.errors import Leaving
from titan_ft.protocol.report import NOTHING, Contribution
from titan_ft.protocol.round import Update
from titan_ft.protocol.strategy import strategy_of
from titan_ft.round_settings import num_fragments, outer_optimizer, quantizes

logger = logging.getLogger(__name__)


@dataclass
class RoundWork(Work):
    """This rank's work on one round.

    Attributes:
        made: the contribution of its steps.
        overdue: `sync_deadline_seconds` passed: the round is exchanged unfinished.
        behind: the work on the round before, while that is not committed yet: its batches come first.
    """

    made: Contribution = NOTHING
    overdue: bool = False
    behind: Work | None = None

    def read(self, slot: int) -> int:
        """Return how many batches of `slot` this rank has read after those that are committed."""
        return super().read(slot) + (self.behind.read(slot) if self.behind else 0)


class RoundStrategy(StepStrategy):
    """Each round of steps is an update: the change of the group's weights is exchanged, and moves the outer model.

    Raises:
        ConfigError: the model cannot be trained so; says which field to change.
    """

    outer: OuterModel
    state: OuterState
    work: RoundWork

    def __init__(self, config: FaultTolerance, *args: Any, **kwargs: Any) -> None:
        self._steps_per_round = strategy_of(config).steps
        # Tokens that this group has trained, for each fragment since its last exchange: the weight of its change.
        self._trained = [0] * num_fragments(config)
        self._sent: dict[int, int] = {}  # those of them that are in the exchange under way, by fragment
        self._late = False  # whether the others wait at the end of a round that this group has not begun
        self._under_way: RoundWork | None = None  # on a round that is in no update yet, on top of this group's weights
        self._ahead: RoundWork | None = None  # on the next round, made while the exchange is under way
        self._broken_off = ""  # why this group leaves in the midst of its steps
        super().__init__(config, *args, **kwargs)
        self.work = RoundWork(0, lr=0.0)
        _warn_of_useless_bits(config)

    # The groups' common state

    def _build_state(self, num_ranks: int) -> OuterState:
        training = self._training
        self._check_dtypes()
        self.fragments = self._cut_fragments()
        self.outer = OuterModel(training.model_parts, outer_optimizer(self._config), self.fragments)
        return OuterState(
            training.model_parts,
            training.optimizers,
            training.lr_schedulers,
            self._counters,
            outer=self.outer,
            on_load=self._take_state,
            num_ranks=num_ranks,
        )

    def _cut_fragments(self) -> list[int]:
        """Return the fragment of each trained parameter of this rank. A collective of the group.

        Raises:
            ConfigError: the model has no such modules, or others that are in no fragment, or too few blocks.
        """
        number, modules = num_fragments(self._config), self._config.module_fqns_per_model_fragment
        named = trained_parameters(self._training.model_parts)
        names = [name for name, _ in named]
        if not modules:
            # Not by this rank's shards, which may be larger than its siblings': what they hold alike must be in one.
            found = fragments.cut({name: parameter.numel() for name, parameter in named}, number)
            most = max(self._group.gather(max(found, default=0))) + 1  # a stage of a pipeline may have fewer
            if most < number:
                raise ConfigError(
                    f"{TABLE}.num_fragments must be at most the number of blocks of the model ({most}), got {number}; "
                    "lower it"
                )
            return found
        missing = fragments.unknown(names, modules)
        for module in sorted({module for fragment in modules for module in fragment}):
            if all(self._group.gather(module in missing)):
                raise ConfigError(
                    f"{TABLE}.module_fqns_per_model_fragment must name modules of the model, got {module!r}; its "
                    f"blocks are {', '.join(dict.fromkeys(map(fragments.block_of, names)))}"
                )
        placed = fragments.find(names, modules)
        left = [name for name, fragment in zip(names, placed, strict=True) if fragment is None]
        if left:
            raise ConfigError(
                f"{TABLE}.module_fqns_per_model_fragment must have each trained parameter in a fragment, got none for "
                f"{', '.join(left[:5])}{' and others' if left[5:] else ''}; add their modules"
            )
        return [fragment for fragment in placed if fragment is not None]

    def _check_dtypes(self) -> None:
        """Refuse weights that could not hold what the groups agree on: a checkpoint has the model's, no anchors.

        Raises:
            ConfigError: says which field.
        """
        for part in self._training.model_parts:
            for name, parameter in part.named_parameters():
                if parameter.requires_grad and parameter.dtype != torch.float32:
                    dtype = str(parameter.dtype).removeprefix("torch.")
                    raise ConfigError(
                        f'training.dtype must be "float32" with {TABLE}.semi_sync_method, got "{dtype}" for {name}; '
                        "training.mixed_precision_param lets the steps compute in another one"
                    )

    def _take_state(self) -> None:
        self._drop_spoiled_moments()
        self.outer.restore_model()
        self._begin_anew()
        self._training.refresh_converters()

    def _drop_spoiled_moments(self) -> None:
        """Begin the moments anew if those of a rank are not finite: the job could not go on with them. A collective."""
        if any(self._group.gather(self.state.spoiled)):
            self.state.drop_moments()  # all of them: they fit together

    def take_checkpoint(self) -> None:
        """Make the checkpoint's weights the anchors."""
        self.outer.take_model()
        self._begin_anew()
        super().take_checkpoint()

    def _begin_anew(self) -> None:
        """Forget what this group has made of weights that it does not have any more."""
        self._trained, self._sent = [0] * len(self._trained), {}
        self._under_way = self._ahead = None

    def agreed_parameters(self) -> dict[str, torch.Tensor]:
        """Return the anchors."""
        return dict(self.outer.named_anchors())

    def agreed_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the outer optimizer; the moments of the inner ones are each group's own."""
        return [self.outer.optimizer]

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Lend the model the anchors, where this group's own weights differ from them between two rounds."""
        config, training = self._config, self._training
        if len(self._trained) == 1 and not config.fragment_sync_delay and not config.fragment_update_alpha:
            yield
            return
        with self.outer.lent():
            training.refresh_converters()
            yield
            training.await_staging()
        training.refresh_converters()

    # The exchange

    def exchanged(self) -> Iterator[nn.Parameter]:
        """Yield the anchors, whose gradients are the changes."""
        yield from self.outer.anchors

    @property
    def gradient_scale(self) -> float:
        """Return 1: the anchors' gradients are made to measure."""
        return 1.0

    # Numbers

    def steps_of(self, updates: int) -> int:
        """Return the last step of a round; the job's last round may be shorter."""
        return min(updates * self._steps_per_round, self._training.num_steps)

    def updates_of(self, step: int) -> int:
        """Return the round that a step is part of."""
        return -(-step // self._steps_per_round)

    def pauses_after(self, update: int) -> bool:
        """Return True: the groups are at the same point only at the end of a round."""
        return True

    def _fragments_of(self, update: int) -> list[int]:
        """Return which fragments are exchanged at the end of round `update`: one in turn, and all after the last."""
        number = len(self._trained)
        if self.steps_of(update) == self._training.num_steps:
            return list(range(number))
        return [(update - 1) % number]

    # A round

    def begin_work(self) -> RoundWork:
        """Begin a round, or go on with the steps of it that are made already."""
        ahead, self._ahead = self._ahead, None
        self.work = self._under_way = ahead or RoundWork(self._training.step, lr=self._training.lr)
        return self.work

    def train(self, slots: Sequence[int], arm: Callable[[], None] = lambda: None) -> Contribution:
        """Make the steps of a round, or those that are left of it, and give the change of all of them to the exchange.

        A group that has asked for the exchange already makes as many as it can until the others are there.
        """
        update, work = self._position.step + 1, self.work
        if self._late:
            self._late = False
            self._take_changes(update)
            # With what was made ahead of it: its tokens weigh in the change, so its batches are in the update.
            return replace(self._describe_work(), early=True, changed=any(self._trained))
        early, ended, last = self._replica.early, False, self.steps_of(update)
        first = work.first_step + work.inner_steps
        set_lr(self._training.lr_schedulers, first - 1)  # a donor's may be of the end of a round
        for step in range(first, last + 1):
            signs = self._replica.look(overdue=self._is_overdue)
            if early and Sign.AWAITED in signs:
                break
            if Sign.WANTED in signs:
                self._replica.serve()
            if Sign.OVERDUE in signs:
                work.overdue = early = True
                self._replica.ask()
            if work.inner_steps:
                if Sign.TOLD in signs and self._meets_to_leave(0 if early else last + 1 - step):
                    early = True
                    break
                self._training.collect_garbage(step)
            if step == last and not early:
                self._replica.ask()  # the others need not wait for the quorum after the step
            try:
                self._make_step(step, slots)
            except self._training.data_ended:
                if not work.inner_steps:
                    raise
                ended = True  # the round ends here; the next one finds no data, and training ends
                break
        self._take_changes(update)
        is_whole = ended or work.overdue or work.first_step + work.inner_steps > last
        changed = not work.inner_steps and any(self._trained)  # of former rounds
        made = replace(self._describe_work(), early=not is_whole, changed=changed)
        if is_whole and not ended:
            self._make_steps_ahead(update, made, slots)
        return made

    def _describe_work(self) -> Contribution:
        """Return what the steps that are made of the round under way contribute."""
        work = self.work
        return replace(
            work.made,
            entries=tuple(reading.entry for reading in work.readings),
            # The groups are compared by what a step takes: one that has made fewer is not the faster for it.
            seconds=work.made.seconds / max(work.inner_steps, 1),
        )

    def _take_changes(self, update: int) -> None:
        """Let the exchange of this update have how far this group has come with its fragments."""
        self._sent = {fragment: self._trained[fragment] for fragment in self._fragments_of(update)}
        weights = {fragment: tokens / self._training.nominal_tokens for fragment, tokens in self._sent.items()}
        self.outer.take_changes(weights)
        self._exchange.give(weights)

    @property
    def _is_overdue(self) -> bool:
        """Say whether `sync_deadline_seconds` are over, as this rank sees it."""
        limit = self._config.sync_deadline_seconds
        return bool(limit and self.work.inner_steps and self.work.compute_seconds >= limit)

    def _make_steps_ahead(self, update: int, made: Contribution, slots: Sequence[int]) -> None:
        """Make steps of the next round while the exchange is under way: `fragment_sync_delay` of them."""
        delay = self._config.fragment_sync_delay
        first, last = self.steps_of(update) + 1, self.steps_of(update + 1)
        if not delay or last < first:
            return
        self._replica.send(made)
        work, ahead = self.work, RoundWork(first, lr=self._training.lr, behind=self.work)
        self.work = self._ahead = ahead
        with contextlib.suppress(self._training.data_ended):  # the next round will find it out again
            for step in range(first, min(first + delay, last + 1)):
                signs = self._replica.look()
                if Sign.TOLD in signs:
                    break  # it leaves after this update: the steps would be void, and take of its time
                if Sign.WANTED in signs:
                    self._replica.serve()
                self._training.collect_garbage(step)
                self._make_step(step, slots)
        self.work, work.overlapped_seconds = work, ahead.compute_seconds

    def _make_step(self, step: int, slots: Sequence[int]) -> None:
        """Make one step of this group by itself, as torchtitan would."""
        training, work = self._training, self.work
        training.step = step
        num_steps, seconds, began = work.inner_steps, work.compute_seconds, time.monotonic()
        training.clear_gradients()
        contribution = training.compute(work, slots, lambda: None)
        # Local losses are divided by the tokens of all groups; this step has only those of its own.
        share = training.gradient_scale * training.nominal_tokens / max(contribution.valid_tokens, 1)
        if share != 1.0:
            for part in training.model_parts:
                for parameter in part.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(share)
        training.clip_gradients()
        training.await_staging()
        training.optimizers.step()
        training.lr_schedulers.step()
        self._trained = [tokens + contribution.valid_tokens for tokens in self._trained]
        work.made = work.made.plus(contribution)
        work.inner_steps, work.readings = num_steps + 1, merge(work.readings)
        work.compute_seconds = seconds + time.monotonic() - began

    def _apply_sums(self, update: Update) -> Callable[[], float]:
        """Make the outer update; the norm that is returned is the mean change's, alike in all groups."""
        training = self._training
        update.sums.write()
        training.await_staging()
        is_last = self.steps_of(update.step) == training.num_steps
        # A group that has trained nothing of it, as in a replay, would keep a share of the anchors of before.
        mixes = any(self._sent.values()) and not is_last
        squares = self.outer.step(self._config.fragment_update_alpha if mixes else 0.0)
        self._under_way = None
        while self._sent:
            fragment, tokens = self._sent.popitem()
            self._trained[fragment] -= tokens
        if self._ahead is not None:
            self._ahead.behind = None
        training.refresh_converters()
        training.step = self.steps_of(update.step)
        set_lr(training.lr_schedulers, training.step - 1)
        if not update.sums.is_kept:
            self.work.lr = training.lr  # of the round's last step, also where this group has made fewer
        set_lr(training.lr_schedulers, training.step)
        return partial(float, join_norm(squares, self._group.gather))

    def meet_after_update(self) -> bool:
        """Open the next round with the others; a group whose moments are spoiled gets a peer's state instead."""
        if self._is_over:
            return False
        if self._position.exclusions:
            logger.warning("this group's change was not finite: it begins the next round with a peer's state")
            self.state.restore()  # should every peer be gone by then
            return True
        return self._open()

    def resume_after_heal(self) -> bool:
        """Keep the steps of the round under way if the weights below them are kept, and open the round with the others.

        They are where this group has gone back to its own state, for the update that it had missed is lost with its
        holders: it gives what it has made of the round once more. Where steps of the next one are on top of that, both
        are trained again.
        """
        if self._under_way is not None:
            if self._ahead is None:
                self._ahead = self._under_way
            else:
                self.state.restore()
        return self._replica.opens and not self._is_over and self._open()

    @property
    def _is_over(self) -> bool:
        """Say whether the last update has the job's last step."""
        return self._training.step >= self._training.num_steps

    def _open(self) -> bool:
        """Meet the others before the first step of a round; returns whether this group must heal."""
        opening = self._replica.open()
        self._late = opening is Opening.EXCHANGE
        return opening is Opening.HEAL

    # Leaving in the midst of it

    def _meets_to_leave(self, remaining: int) -> bool:
        """Say whether a group that was told to leave breaks off its round and meets the others now. A collective.

        It does if it has no time for the round. If all groups leave in the midst of their rounds, the state
        of the last update leaves with them: they meet, so that each knows of the others, and one of them
        saves it. A group that meets others at the end of their round gives what it has made by then.

        Args:
            remaining: steps until it asks for the exchange; none if it has: it gives what it has made by then.

        Raises:
            Leaving: the others do not come; the round's batches are void, and are trained when it is back.
        """
        step = self.work.compute_seconds / self.work.inner_steps
        # A group that has asked makes another step only while it waits for the others.
        needed, share = (step * remaining, OWN_SHARE) if remaining else (step, WAITING_SHARE)
        if not self._replica.lacks_time(needed, share):
            return False
        if remaining:
            self._broken_off = f"{remaining} steps of the round were left, too many for drain_timeout_seconds"
            # No further steps meanwhile: the time is for the others, and for the save.
            is_over = partial(self._replica.lacks_time, 0.0, OWN_SHARE)
            if self._training.lacks_state() and self._replica.await_others(is_over):
                return True
        self._position.leave()
        raise Leaving

    def go_back_to_update(self) -> None:
        """Let the model be that of the last update: the steps that this group has made since are void."""
        self._drop_spoiled_moments()
        self.outer.restore_model()
        super().go_back_to_update()
        set_lr(self._training.lr_schedulers, self._training.step)

    def describe_departure(self) -> Departure:
        """Name the batches of a round that is in no update, and those of steps made ahead of the last one."""
        ahead = merge(self._ahead.readings) if self._ahead else []
        void = [] if self.work.seconds else merge([*self.work.readings, *ahead])
        if not void:
            return Departure("SIGTERM", in_order=True, void=ahead)
        reason = self._broken_off or "the others were not there in time to exchange the round"
        return Departure(f"SIGTERM: {reason}", in_order=False, void=void)

    def find_uncommitted(self) -> list[Reading]:
        """Leave out a round that the training thread, which goes on meanwhile, has just committed."""
        works = [work for work in (self._under_way, self._ahead) if work is not None]
        left = [work for work in works if self.updates_of(work.first_step) > self._position.step]
        return merge(reading for work in left for reading in list(work.readings))


def _warn_of_useless_bits(config: FaultTolerance) -> None:
    if quantizes(config) and config.group_size >= 8:
        logger.warning(
            f"{TABLE}.should_quantize should be false with {TABLE}.group_size >= 8, got {config.group_size}: each "
            f"group sends {config.group_size / 8:.3g} times the bytes that it would send in fp32; leave it out"
        )
