# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Long rounds of local steps, with one exchange each: LocalSGD, DiLoCo and Streaming DiLoCo.

One round of a group, as the trainer makes it:

1. `start_update`. The model's weights are the *anchors*, the weights on which all groups agree.
2. `train` makes `sync_steps` *local steps* with torchtitan's own optimizer. Then it gives the
   group's *change* to the exchange: the anchors minus the weights.
3. The exchange sums the changes of all groups. `apply` lets the *outer optimizer* update the
   anchors by the mean change, and the model continues from the anchors. This is the round's update.
4. `meet_after_update`: the groups meet in opening rounds, for groups that missed the update.

With Streaming DiLoCo, the model is cut into *fragments*. A round exchanges one fragment, and the
other fragments keep the local steps in their weights. With `fragment_sync_delay`, the group makes
local steps *ahead*, for the next round, while the exchange is under way.

A broken exchange is made again with the same change, and no local step is lost. A group that loads
a donor's state loses the local steps since its last update, and trains their batches again.

torchtitan's `step` counts the local steps of a group, as its LR schedule, logs and checkpoints do.
`Position.step` counts rounds.

See docs/semi_sync.md.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from titan_ft.config import TABLE, ConfigError, FaultTolerance
from titan_ft.engine import fragments
from titan_ft.engine.drain import STEPS_SHARE, WAITING_SHARE
from titan_ft.engine.feed import Reading, merge
from titan_ft.engine.outer import (
    OuterModel,
    OuterState,
    norm_over_ranks,
    set_lr,
    trained_parameters,
)
from titan_ft.engine.round import Sign
from titan_ft.engine.step import AfterOpening
from titan_ft.engine.strategy import Departure, StepStrategy
from titan_ft.engine.work import Work
from titan_ft.protocol.errors import Leaving
from titan_ft.protocol.report import NOTHING, Contribution
from titan_ft.protocol.round import Update
from titan_ft.protocol.strategy import strategy_of
from titan_ft.round_settings import num_fragments, outer_optimizer, quantizes

logger = logging.getLogger(__name__)


class _StepsEnd(enum.Enum):
    """Why a group makes no more local steps before the exchange of a round."""

    ALL_MADE = enum.auto()
    # `sync_deadline_seconds` passed. The round counts as finished, even if steps are left.
    OVERDUE = enum.auto()
    # The data is finite and at its end. The round counts as finished.
    DATA_ENDED = enum.auto()
    # The others are ready, or this group leaves, and steps are left. If no other group has finished
    # its steps either, this group makes the remaining ones after the exchange.
    BROKEN_OFF = enum.auto()


@dataclass
class RoundWork(Work):
    """This rank's work on one round.

    Attributes:
        contribution: of the local steps so far.
        overdue: `sync_deadline_seconds` have passed in this round on a rank of the group.
        previous: the work on the round before, until that round is committed. Its batches come
            first.
    """

    contribution: Contribution = NOTHING
    overdue: bool = False
    previous: Work | None = None

    def count_batches(self, slot: int) -> int:
        """Return how many batches of `slot` this rank has read after the committed ones."""
        number = super().count_batches(slot)
        if self.previous is not None:
            number += self.previous.count_batches(slot)
        return number


class RoundStrategy(StepStrategy):
    """Makes one update from a round of local steps: the mean change of the groups' weights.

    The trainer calls all methods on the training thread. Only `find_uncommitted` may run on any
    thread. The arguments are those of `StepStrategy`.

    Attributes:
        outer: the anchors and their optimizer.
        state: the state that this group serves to joiners, and loads when it heals.
        work: this rank's work on the round under way.

    Raises:
        ConfigError: the model cannot be trained this way. The message names the field to change.
    """

    outer: OuterModel
    state: OuterState
    work: RoundWork

    def __init__(self, config: FaultTolerance, *args: Any, **kwargs: Any) -> None:
        self._steps_per_round = strategy_of(config).steps
        # For each fragment, the tokens that this group has trained since the fragment's last
        # exchange. They are the weight of its change.
        self._trained_tokens = [0] * num_fragments(config)
        # For each fragment in the exchange under way, the tokens of its change.
        self._given_tokens: dict[int, int] = {}
        # The others have made the local steps of a round that this group has not begun. So it makes
        # no steps before the exchange.
        self._exchanges_at_once = False
        # The work on a round whose local steps are in this group's weights, and in no update yet.
        self._uncommitted_work: RoundWork | None = None
        # The local steps that were made ahead, for the next round.
        self._work_ahead: RoundWork | None = None
        self._break_off_reason = ""  # why this group leaves during its round
        super().__init__(config, *args, **kwargs)
        self.work = RoundWork(0, lr=0.0)  # until the first `start_update`
        _warn_if_quantizing_sends_more(config)

    # The groups' common state

    def _build_state(self, num_ranks: int) -> OuterState:
        training = self._training
        self._check_dtypes()
        self.fragments = self._assign_fragments()
        settings = outer_optimizer(self._config)
        self.outer = OuterModel(training.model_parts, settings, self.fragments)
        return OuterState(
            training.model_parts,
            training.optimizers,
            training.lr_schedulers,
            self._counters,
            outer=self.outer,
            on_load=self._adopt_state,
            num_ranks=num_ranks,
        )

    def _assign_fragments(self) -> list[int]:
        """Return the fragment of each trained parameter of this rank. A collective of the group.

        Raises:
            ConfigError: the config names modules that the model lacks, leaves parameters out, or
                asks for more fragments than the model has blocks.
        """
        named = trained_parameters(self._training.model_parts)
        if self._config.module_fqns_per_model_fragment:
            return self._find_configured_fragments([name for name, _ in named])
        number = num_fragments(self._config)
        # By whole sizes, not by those of this rank's shards: another rank may have larger shards,
        # and a parameter must be in the same fragment on all ranks.
        sizes = {name: parameter.numel() for name, parameter in named}
        found = fragments.assign(sizes, number)
        # A stage of a pipeline may have fewer blocks than the model.
        largest = max(self._group.gather(max(found, default=0)))
        if largest + 1 < number:
            raise ConfigError(
                f"{TABLE}.num_fragments must be at most the number of blocks of the model "
                f"({largest + 1}), got {number}; lower it",
            )
        return found

    def _find_configured_fragments(self, names: Sequence[str]) -> list[int]:
        modules = self._config.module_fqns_per_model_fragment
        unknown = fragments.find_unknown(names, modules)
        configured = set[str]().union(*modules)
        for module in sorted(configured):
            # In a pipeline, another rank may have the module.
            if all(self._group.gather(module in unknown)):
                blocks = dict.fromkeys(map(fragments.block_of, names))
                raise ConfigError(
                    f"{TABLE}.module_fqns_per_model_fragment must name modules of the model, got "
                    f"{module!r}; its blocks are {', '.join(blocks)}",
                )
        found = fragments.find(names, modules)
        placed = []
        left_out = []
        for name, fragment in zip(names, found, strict=True):
            if fragment is None:
                left_out.append(name)
            else:
                placed.append(fragment)
        if left_out:
            shown = ", ".join(left_out[:5])
            if len(left_out) > 5:
                shown += " and others"
            raise ConfigError(
                f"{TABLE}.module_fqns_per_model_fragment must have each trained parameter in a "
                f"fragment, got none for {shown}; add their modules",
            )
        return placed

    def _check_dtypes(self) -> None:
        """Refuse weights that are not fp32.

        The anchors are fp32, and a checkpoint saves them as the model's weights. Weights of another
        dtype would round them.

        Raises:
            ConfigError: names the field.
        """
        for name, parameter in trained_parameters(self._training.model_parts):
            if parameter.dtype != torch.float32:
                dtype = str(parameter.dtype).removeprefix("torch.")
                raise ConfigError(
                    f'training.dtype must be "float32" with {TABLE}.semi_sync_method, got '
                    f'"{dtype}" for {name}; training.mixed_precision_param lets the steps compute '
                    "in another one",
                )

    def _adopt_state(self) -> None:
        """Go on from a donor's state, which was just loaded."""
        self._drop_nonfinite_moments()
        self.outer.restore_model()
        self._forget_work()
        # Converters keep values that depend on the weights, such as the scales of float8.
        self._training.refresh_converters()

    def _drop_nonfinite_moments(self) -> None:
        """Reset the moments on all ranks if those of one rank are not finite. A collective.

        The moments are those of torchtitan's own optimizer. A step with such moments would make the
        weights not finite. All ranks reset theirs, because the moments of one group must come from
        the same steps.
        """
        if any(self._group.gather(self.state.has_nonfinite_moments)):
            self.state.drop_moments()

    def adopt_checkpoint(self) -> None:
        """Make the checkpoint's weights the anchors."""
        self.outer.adopt_model()
        self._forget_work()
        super().adopt_checkpoint()

    def _forget_work(self) -> None:
        """Forget the local steps: the weights that they were made on are gone."""
        self._trained_tokens = [0] * len(self._trained_tokens)
        self._given_tokens = {}
        self._uncommitted_work = None
        self._work_ahead = None

    def agreed_parameters(self) -> dict[str, torch.Tensor]:
        """Return the anchors, by the names of their parameters."""
        return dict(self.outer.named_anchors())

    def agreed_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the outer optimizer. The moments of the inner ones are each group's own."""
        return [self.outer.optimizer]

    @contextlib.contextmanager
    def lend_agreed_weights(self) -> Iterator[None]:
        """Give the model the anchors inside the context, if its own weights differ from them."""
        config = self._config
        has_one_fragment = len(self._trained_tokens) == 1
        keeps_own_weights = config.fragment_sync_delay or config.fragment_update_alpha
        if has_one_fragment and not keeps_own_weights:
            yield  # between two rounds, the model has the anchors' weights
            return
        with self.outer.lend_to_model():
            self._training.refresh_converters()
            yield
            # A background save may still copy the weights, which change after this context.
            self._training.await_staging()
        self._training.refresh_converters()

    # The exchange

    def exchanged_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the anchors, whose gradients are the changes."""
        yield from self.outer.anchors

    @property
    def gradient_scale(self) -> float:
        """1: the anchors' gradients need no factor."""
        return 1.0

    # Numbers

    def last_step_of(self, update: int) -> int:
        """Return the last step of a round. The job's last round may be shorter."""
        return min(update * self._steps_per_round, self._training.num_steps)

    def update_of(self, step: int) -> int:
        """Return the round of a step."""
        return math.ceil(step / self._steps_per_round)

    def pauses_after(self, update: int) -> bool:
        """Return True: the groups are at the same point only at the end of a round."""
        return True

    def _fragments_of(self, update: int) -> list[int]:
        """Return the fragments that are exchanged at the end of round `update`.

        One fragment after the other in turn, and all of them after the last round.
        """
        number = len(self._trained_tokens)
        if self.last_step_of(update) == self._training.num_steps:
            return list(range(number))
        return [(update - 1) % number]

    # A round

    def start_update(self) -> RoundWork:
        """Start a round, or continue a round of which some local steps were made ahead."""
        if self._work_ahead is not None:
            self.work = self._work_ahead
            self._work_ahead = None
        else:
            self.work = RoundWork(self._training.step, lr=self._training.lr)
        self._uncommitted_work = self.work
        return self.work

    def train(
        self,
        slots: Sequence[int],
        arm: Callable[[], None] = lambda: None,
    ) -> Contribution:
        """Make the remaining local steps of a round, and give their change to the exchange.

        The group stops before the last step if it has requested the quorum already, and the others
        are ready.

        Args:
            arm: not called: the exchange begins after the last local step, and not in a backward.
        """
        update, work = self._position.step + 1, self.work
        if self._exchanges_at_once:
            self._exchanges_at_once = False
            self._give_changes(update)
            # The change includes the steps that were made ahead, and their tokens are in its
            # weight. So the contribution has their batches. Otherwise they would be trained twice.
            return replace(
                self._build_contribution(),
                unfinished=True,
                has_earlier_changes=any(self._trained_tokens),
            )
        end = self._make_steps(update, slots)
        self._give_changes(update)
        # Fragments that were not exchanged in earlier rounds have a change from those rounds.
        has_only_earlier_changes = work.inner_steps == 0 and any(self._trained_tokens)
        contribution = replace(
            self._build_contribution(),
            unfinished=end is _StepsEnd.BROKEN_OFF,
            has_earlier_changes=has_only_earlier_changes,
        )
        if end in (_StepsEnd.ALL_MADE, _StepsEnd.OVERDUE):
            self._make_steps_ahead(update, contribution, slots)
        return contribution

    def _make_steps(self, update: int, slots: Sequence[int]) -> _StepsEnd:
        """Make the local steps of the round, until it is finished or must be broken off."""
        work = self.work
        last = self.last_step_of(update)
        first = work.first_step + work.inner_steps
        has_requested_quorum = self._replica.quorum_requested
        # After a heal, the LR schedule may be at the end of the donor's round.
        set_lr(self._training.lr_schedulers, first - 1)
        for step in range(first, last + 1):
            signs = self._replica.gather_signs(overdue=self._is_overdue)
            if has_requested_quorum and Sign.OTHERS_WAIT in signs:
                break
            if Sign.STATE_WANTED in signs:
                self._replica.serve_joiner()
            if Sign.OVERDUE in signs:
                work.overdue = True
                has_requested_quorum = True
                self._replica.request_quorum()
            # Leave only after a first step: its duration shows how many more there is time for.
            if Sign.LEAVE_REQUESTED in signs and work.inner_steps:
                steps_until_request = last + 1 - step
                if has_requested_quorum:
                    steps_until_request = 0
                if self._must_exchange_before_leaving(steps_until_request):
                    break
            if work.inner_steps:
                # Before the first step, torchtitan's own loop collects.
                self._training.collect_garbage(step)
            if step == last and not has_requested_quorum:
                # Now, so that the others need not wait for the quorum after the step.
                self._replica.request_quorum()
            try:
                self._make_step(step, slots)
            except self._training.data_ended:
                if not work.inner_steps:
                    raise
                # The next round finds no data at its first step. The error then ends training.
                return _StepsEnd.DATA_ENDED
        if work.overdue:
            return _StepsEnd.OVERDUE
        if work.first_step + work.inner_steps > last:
            return _StepsEnd.ALL_MADE
        return _StepsEnd.BROKEN_OFF

    def _build_contribution(self) -> Contribution:
        """Return the contribution of the local steps of the round under way."""
        work = self.work
        return replace(
            work.contribution,
            entries=tuple(reading.entry for reading in work.readings),
            # Seconds for one step: a group that has made fewer steps is not the faster one.
            seconds=work.contribution.seconds / max(work.inner_steps, 1),
        )

    def _give_changes(self, update: int) -> None:
        """Give the changes of this update's fragments to the exchange."""
        self._given_tokens = {}
        weights = {}
        for fragment in self._fragments_of(update):
            tokens = self._trained_tokens[fragment]
            self._given_tokens[fragment] = tokens
            weights[fragment] = tokens / self._training.nominal_tokens
        self.outer.compute_changes(weights)
        self._exchange.set_fragment_weights(weights)

    @property
    def _is_overdue(self) -> bool:
        """True if `sync_deadline_seconds` have passed on this rank."""
        limit = self._config.sync_deadline_seconds
        if not limit or not self.work.inner_steps:
            return False
        return self.work.compute_seconds >= limit

    def _make_steps_ahead(
        self,
        update: int,
        contribution: Contribution,
        slots: Sequence[int],
    ) -> None:
        """Make `fragment_sync_delay` steps of the next round while the exchange is under way.

        Args:
            update: the round that is exchanged.
            contribution: this group's contribution to it.
        """
        delay = self._config.fragment_sync_delay
        first = self.last_step_of(update) + 1
        last = min(first + delay - 1, self.last_step_of(update + 1))
        if not delay or last < first:
            return
        self._replica.launch_with(contribution)
        work = self.work
        ahead = RoundWork(first, lr=self._training.lr, previous=work)
        self._work_ahead = ahead
        self.work = ahead
        # At the end of the data, stop here. The next round gets the same error again.
        with contextlib.suppress(self._training.data_ended):
            for step in range(first, last + 1):
                signs = self._replica.gather_signs()
                if Sign.LEAVE_REQUESTED in signs:
                    # The group leaves after this update. Further steps would be void, and would
                    # take some of its time.
                    break
                if Sign.STATE_WANTED in signs:
                    self._replica.serve_joiner()
                self._training.collect_garbage(step)
                self._make_step(step, slots)
        self.work = work
        work.overlapped_seconds = ahead.compute_seconds

    def _make_step(self, step: int, slots: Sequence[int]) -> None:
        """Make one step of this group by itself, as torchtitan would."""
        training, work = self._training, self.work
        training.step = step
        # `compute` overwrites these two by the values of its one step. They are to be sums over the
        # round.
        num_steps_before = work.inner_steps
        seconds_before = work.compute_seconds
        started = time.monotonic()
        training.clear_gradients()
        contribution = training.compute(work, slots, lambda: None)
        # Local losses are divided by the tokens of all groups. This step has only those of its
        # group.
        own_tokens = max(contribution.valid_tokens, 1)
        scale = training.gradient_scale * training.nominal_tokens / own_tokens
        if scale != 1.0:
            self._scale_gradients(scale)
        training.clip_gradients()
        training.await_staging()
        training.optimizers.step()
        training.lr_schedulers.step()
        self._trained_tokens = [
            tokens + contribution.valid_tokens for tokens in self._trained_tokens
        ]
        work.contribution = work.contribution.plus(contribution)
        work.inner_steps = num_steps_before + 1
        work.readings = merge(work.readings)
        work.compute_seconds = seconds_before + time.monotonic() - started

    def _scale_gradients(self, scale: float) -> None:
        for part in self._training.model_parts:
            for parameter in part.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)

    def _apply_sums(self, update: Update) -> Callable[[], float]:
        """Make the outer update; return a function for the norm of the mean change."""
        training = self._training
        update.sums.write()
        training.await_staging()
        is_last = self.last_step_of(update.step) == training.num_steps
        # `alpha` is the share of the group's own weights that the model keeps. Without local steps
        # in this update, as in a replay, the model has the weights of the former anchors, and must
        # keep none of them. After the job's last update, all groups must have the same weights.
        has_own_steps = any(self._given_tokens.values())
        alpha = 0.0
        if has_own_steps and not is_last:
            alpha = self._config.fragment_update_alpha
        squares = self.outer.step(alpha)
        self._uncommitted_work = None
        for fragment, tokens in self._given_tokens.items():
            self._trained_tokens[fragment] -= tokens
        self._given_tokens = {}
        if self._work_ahead is not None:
            self._work_ahead.previous = None
        training.refresh_converters()
        training.step = self.last_step_of(update.step)
        # The LR of the round's last step is logged, even if this group has made fewer steps.
        set_lr(training.lr_schedulers, training.step - 1)
        is_replay = update.sums.is_copy
        if not is_replay:
            self.work.lr = training.lr
        set_lr(training.lr_schedulers, training.step)
        norm = norm_over_ranks(squares, self._group.gather)
        return lambda: norm

    def meet_after_update(self) -> bool:
        """Meet the others in opening rounds; return True if this group must heal first.

        A group whose change was not finite must heal: the moments of its optimizer are not finite
        either.
        """
        if self._job_is_over:
            return False
        if self._position.exclusions:
            logger.warning(
                "this group's change was not finite: it begins the next round with a peer's state",
            )
            # If every peer is gone during the heal, this group goes on from its own anchors.
            self.state.restore()
            return True
        return self._meet_in_opening_rounds()

    def resume_after_heal(self) -> bool:
        """Take up the local steps after a heal; return True if this group must heal once more.

        If the heal has loaded a donor's state, the local steps are forgotten already. After a
        roll-back, the group has its own state, and the update that it missed is lost with its
        holders. So the local steps of its round are in no update, and the group gives their change
        again in the next exchange. If the group has made steps ahead on top of them, it drops the
        steps of both rounds, and trains both again.
        """
        is_rolled_back = self._uncommitted_work is not None
        if is_rolled_back:
            if self._work_ahead is None:
                # `start_update` takes this work up.
                self._work_ahead = self._uncommitted_work
            else:
                self.state.restore()
        if not self._replica.others_make_opening_rounds or self._job_is_over:
            return False
        return self._meet_in_opening_rounds()

    @property
    def _job_is_over(self) -> bool:
        """True if the last update has the job's last step."""
        return self._training.step >= self._training.num_steps

    def _meet_in_opening_rounds(self) -> bool:
        """Make the opening rounds; return True if this group must heal."""
        action = self._replica.make_opening_rounds()
        self._exchanges_at_once = action is AfterOpening.EXCHANGE_AT_ONCE
        return action is AfterOpening.HEAL

    # Leaving during a round

    def _must_exchange_before_leaving(self, steps_until_request: int) -> bool:
        """Return True if this group, which leaves, must exchange its unfinished round now.

        A collective. The group does so if it has no time for the remaining steps, and if its state
        is not saved. If all groups leave during their rounds, they must know of each other, so that
        one of them saves the state. So they meet in an exchange, and each group gives the steps
        that it has made by then.

        Args:
            steps_until_request: steps until this group requests the quorum; 0 = it has requested
                the quorum.

        Raises:
            Leaving: the others do not come, or the state is saved. The batches of the round are
                void, and are trained when the group is back.
        """
        step_seconds = self.work.compute_seconds / self.work.inner_steps
        if steps_until_request:
            seconds = step_seconds * steps_until_request
            lacks_time = self._replica.lacks_time(seconds, STEPS_SHARE)
        else:
            # The group makes one step after the other until the others are ready.
            lacks_time = self._replica.lacks_time(step_seconds, WAITING_SHARE)
        if not lacks_time:
            return False
        if steps_until_request:
            left = f"{steps_until_request} steps of the round were left"
            self._break_off_reason = f"{left}, too many for drain_timeout_seconds"
            # Make no more steps: the remaining time is for the others, and for the save.
            is_too_late = partial(self._replica.lacks_time, 0.0, STEPS_SHARE)
            if self._training.lacks_state() and self._replica.await_others(is_too_late):
                return True
        self._position.mark_leaving()
        raise Leaving

    def go_back_to_update(self) -> None:
        """Restore the model of the last update. The local steps since then are void."""
        self._drop_nonfinite_moments()
        self.outer.restore_model()
        super().go_back_to_update()
        set_lr(self._training.lr_schedulers, self._training.step)

    def describe_departure(self) -> Departure:
        """Return how this group leaves, with the batches that are in no update."""
        ahead: list[Reading] = []
        if self._work_ahead is not None:
            ahead = merge(self._work_ahead.readings)
        is_round_committed = self.work.seconds > 0
        if is_round_committed:
            return Departure("SIGTERM", in_order=True, void=ahead)
        void = merge([*self.work.readings, *ahead])
        if not void:
            return Departure("SIGTERM", in_order=True, void=ahead)
        reason = self._break_off_reason
        if not reason:
            reason = "the others were not there in time to exchange the round"
        return Departure(f"SIGTERM: {reason}", in_order=False, void=void)

    def find_uncommitted(self) -> list[Reading]:
        """Return the batches of local steps that are in no update; any thread.

        The training thread goes on meanwhile, and may have just committed a round.
        """
        readings: list[Reading] = []
        for work in (self._uncommitted_work, self._work_ahead):
            if work is not None and self.update_of(work.first_step) > self._position.step:
                readings += work.readings
        return merge(readings)


def _warn_if_quantizing_sends_more(config: FaultTolerance) -> None:
    """Warn if changes in 8 bits take more bytes than in fp32: each group gets those of all."""
    if quantizes(config) and config.group_size >= 8:
        logger.warning(
            f"{TABLE}.should_quantize should be false with {TABLE}.group_size >= 8, got "
            f"{config.group_size}: each group sends {config.group_size / 8:.3g} times the bytes "
            "that it would send in fp32; leave it out",
        )
