# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The trainer of a semi-synchronous method: `train_step` makes a round, `sync_steps` steps and an update of all groups.

torchtitan's `step` counts the steps of a group, as its LR schedule, logs and checkpoints do. What the groups count,
`Position.step`, are rounds: the updates of the outer model.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from titan_ft.config import TABLE, ConfigError, FaultTolerance
from titan_ft.engine import fragments
from titan_ft.engine.drain import OWN_SHARE, WAITING_SHARE, print_line
from titan_ft.engine.feed import Reading, merge
from titan_ft.engine.outer import OuterModel, OuterState, join_norm, set_lr, trained_parameters
from titan_ft.engine.round import Sign
from titan_ft.engine.step import Opening, ReplicaDimension
from titan_ft.host.titan_0_2 import DataloaderExhaustedError, JobConfig, logger, set_pg_timeouts
from titan_ft.protocol.decision import Update
from titan_ft.protocol.errors import Leaving
from titan_ft.protocol.report import NOTHING, Contribution
from titan_ft.round_settings import num_fragments, outer_optimizer, quantizes, steps_per_round
from titan_ft.run.events import Batches, Drained
from titan_ft.run.marks import announce_left
from titan_ft.trainer import ReplicaTrainer
from titan_ft.training import spec
from titan_ft.training.step_log import Work
from titan_ft.transfer.snapshot import Counters, TrainState


@dataclass
class RoundWork(Work):
    """This rank's work on one round.

    Attributes:
        made: what its steps contribute.
        overdue: whether it is offered as it is, for `sync_deadline_seconds` are over.
        behind: the work on the round before, while that is not committed yet: its batches come first.
    """

    made: Contribution = NOTHING
    overdue: bool = False
    behind: Work | None = None

    def read(self, slot: int) -> int:
        """Return how many batches of `slot` this rank has read behind those that are committed."""
        return super().read(slot) + (self.behind.read(slot) if self.behind else 0)


class SemiSyncTrainer(ReplicaTrainer):
    """One rank of a replica group that trains `sync_steps` steps by itself before it meets the others."""

    _outer: OuterModel
    _state: OuterState
    _work: RoundWork

    def __init__(self, job_config: JobConfig) -> None:
        config = job_config.fault_tolerance
        self._steps_per_round = steps_per_round(config)
        # Tokens that this group has trained, for each fragment since its last exchange: the weight of its change.
        self._trained = [0] * num_fragments(config)
        self._sent: dict[int, int] = {}  # those of them that are in the exchange under way, by fragment
        self._late = False  # whether the others wait at the end of a round that this group has not begun
        self._under_way: RoundWork | None = None  # on a round that is in no update yet, on top of this group's weights
        self._ahead: RoundWork | None = None  # on the next round, made while the exchange is under way
        self._broken_off = ""  # why this group leaves in the midst of its steps
        _warn_of_useless_bits(config)
        super().__init__(job_config)
        if self.job_config.validation.enable:
            self._validate_behind_rounds()
        if num_fragments(config) > 1 or config.fragment_sync_delay or config.fragment_update_alpha:
            self._lend_anchors()

    # What the groups agree on

    def _build_state(self, counters: Counters) -> TrainState:
        if spec.token_counts(self.model_parts):
            raise ConfigError(
                f"{TABLE}.semi_sync_method must be left out for a model that balances the load of its experts, got "
                f"{self.job_config.fault_tolerance.semi_sync_method!r}; it is {self.job_config.model.name!r}"
            )
        self._check_dtypes()
        config = self.job_config.fault_tolerance
        self._outer = OuterModel(self.model_parts, outer_optimizer(config), self._cut_fragments())
        return OuterState(
            self.model_parts,
            self.optimizers,
            self.lr_schedulers,
            counters,
            outer=self._outer,
            on_load=self._take_state,
            num_ranks=self.launch.ranks_on_host,
        )

    def _cut_fragments(self) -> list[int]:
        """Return the fragment of each trained parameter of this rank. A collective of the group.

        Raises:
            ConfigError: the model has no such modules, or others that are in no fragment, or too few blocks.
        """
        config = self.job_config.fault_tolerance
        number, modules = num_fragments(config), config.module_fqns_per_model_fragment
        named = trained_parameters(self.model_parts)
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
        for part in self.model_parts:
            for name, parameter in part.named_parameters():
                if parameter.requires_grad and parameter.dtype != torch.float32:
                    dtype = str(parameter.dtype).removeprefix("torch.")
                    raise ConfigError(
                        f'training.dtype must be "float32" with {TABLE}.semi_sync_method, got "{dtype}" for {name}; '
                        "training.mixed_precision_param lets the steps compute in another one"
                    )

    def _take_state(self) -> None:
        self._drop_spoiled_moments()
        self._outer.restore_model()
        self._begin_anew()
        self._refresh_converters()

    def _drop_spoiled_moments(self) -> None:
        """Begin the moments anew if those of a rank are not finite: the job could not go on with them. A collective."""
        if any(self._group.gather(self._state.spoiled)):
            self._state.drop_moments()  # all of them: they fit together

    def _take_checkpoint(self) -> None:
        self._outer.take_model()
        self._begin_anew()
        super()._take_checkpoint()

    def _begin_anew(self) -> None:
        """Forget what this group has made of weights that it does not have any more."""
        self._trained, self._sent = [0] * len(self._trained), {}
        self._under_way = self._ahead = None

    def _agreed_parameters(self) -> dict[str, torch.Tensor]:
        return dict(self._outer.named_anchors())

    def _agreed_optimizers(self) -> list[torch.optim.Optimizer]:
        return [self._outer.optimizer]

    def _exchanged(self) -> Iterator[torch.nn.Parameter]:
        yield from self._outer.anchors

    @property
    def _gradient_scale(self) -> float:
        return 1.0  # the anchors' gradients are made to measure

    def _steps_of(self, updates: int) -> int:
        return min(updates * self._steps_per_round, int(self.job_config.training.steps))

    def _updates_of(self, step: int) -> int:
        return -(-step // self._steps_per_round)

    def _fragments_of(self, update: int) -> list[int]:
        """Return which fragments are exchanged at the end of round `update`: one in turn, and all behind the last."""
        number = len(self._trained)
        if self._steps_of(update) == self.job_config.training.steps:
            return list(range(number))
        return [(update - 1) % number]

    # A round

    def _begin_work(self) -> RoundWork:
        ahead, self._ahead = self._ahead, None
        self._under_way = ahead or RoundWork(self.step, lr=self._lr)
        return self._under_way

    def _train(self, slots: Sequence[int], arm: Callable[[], None] = lambda: None) -> Contribution:
        """Make the steps of a round, or those that are left of it, and let the exchange have what came of all of them.

        A group that has asked for the exchange already makes as many as it can until the others are there.
        """
        assert self._replica is not None
        update, work = self._position.step + 1, self._work
        if self._late:
            self._late = False
            self._take_changes(update)
            # With what was made ahead of it: its tokens weigh in the change, so its batches are in the update.
            return replace(self._describe_work(), early=True, changed=any(self._trained))
        early, ended, last = self._replica.early, False, self._steps_of(update)
        set_lr(self.lr_schedulers, work.first_step + work.inner_steps - 1)  # a donor's may be of the end of a round
        for step in range(work.first_step + work.inner_steps, last + 1):
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
                self.gc_handler.run(step)
            if step == last and not early:
                self._replica.ask()  # the others need not wait for the quorum behind the step
            try:
                self._make_step(step, slots)
            except DataloaderExhaustedError:
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
        work = self._work
        return replace(
            work.made,
            entries=tuple(reading.entry for reading in work.readings),
            # The groups are compared by what a step takes: one that has made fewer is not the faster for it.
            seconds=work.made.seconds / max(work.inner_steps, 1),
        )

    def _take_changes(self, update: int) -> None:
        """Let the exchange of this update have how far this group has come with its fragments."""
        assert self._replica is not None
        self._sent = {fragment: self._trained[fragment] for fragment in self._fragments_of(update)}
        weights = {fragment: tokens / self._nominal_tokens for fragment, tokens in self._sent.items()}
        self._outer.take_changes(weights)
        self._links.exchange.give(weights)

    @property
    def _is_overdue(self) -> bool:
        """Say whether `sync_deadline_seconds` are over, as this rank sees it."""
        limit = self.job_config.fault_tolerance.sync_deadline_seconds
        return bool(limit and self._work.inner_steps and self._work.compute_seconds >= limit)

    def _make_steps_ahead(self, update: int, made: Contribution, slots: Sequence[int]) -> None:
        """Make steps of the next round while the exchange is under way: `fragment_sync_delay` of them."""
        assert self._replica is not None
        delay = self.job_config.fault_tolerance.fragment_sync_delay
        first, last = self._steps_of(update) + 1, self._steps_of(update + 1)
        if not delay or last < first:
            return
        self._replica.send(made)
        work, ahead = self._work, RoundWork(first, lr=self._lr, behind=self._work)
        self._work = self._ahead = ahead
        with contextlib.suppress(DataloaderExhaustedError):  # the next round will find it out again
            for step in range(first, min(first + delay, last + 1)):
                signs = self._replica.look()
                if Sign.TOLD in signs:
                    break  # it leaves behind this update: the steps would be void, and take of its time
                if Sign.WANTED in signs:
                    self._replica.serve()
                self.gc_handler.run(step)
                self._make_step(step, slots)
        self._work, work.overlapped_seconds = work, ahead.compute_seconds

    def _make_step(self, step: int, slots: Sequence[int]) -> None:
        """Make one step of this group by itself, as torchtitan would."""
        self.step = step
        work, num_steps = self._work, self._work.inner_steps
        began, seconds = time.monotonic(), work.compute_seconds
        self._zero_gradients()
        contribution = super()._train(slots)
        # Local losses are divided by the tokens of all groups; this step has only those of its own.
        share = super()._gradient_scale * self._nominal_tokens / max(contribution.valid_tokens, 1)
        if share != 1.0:
            for part in self.model_parts:
                for parameter in part.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(share)
        self._clip_gradients()
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        self._trained = [tokens + contribution.valid_tokens for tokens in self._trained]
        work.made = work.made.plus(contribution)
        work.inner_steps, work.readings = num_steps + 1, merge(work.readings)
        work.compute_seconds = seconds + time.monotonic() - began

    def _apply(self, update: Update) -> Callable[[], float]:
        """Apply a round's update, live or replayed; returns what tells the mean change's norm, alike in all groups."""
        self._watchdog.beat()
        update.sums.write()
        self.checkpointer.maybe_wait_for_staging()
        is_last = self._steps_of(update.step) == self.job_config.training.steps
        # One that has trained nothing of it, as in a replay, would keep a share of the anchors of before.
        mixes = any(self._sent.values()) and not is_last
        squares = self._outer.step(self.job_config.fault_tolerance.fragment_update_alpha if mixes else 0.0)
        self._under_way = None
        while self._sent:
            fragment, tokens = self._sent.popitem()
            self._trained[fragment] -= tokens
        if self._ahead is not None:
            self._ahead.behind = None
        self._refresh_converters()
        self.step = self._steps_of(update.step)
        set_lr(self.lr_schedulers, self.step - 1)
        if not update.sums.is_kept:
            self._work.lr = self._lr  # of the round's last step, also where this group has made fewer
        set_lr(self.lr_schedulers, self.step)
        self.ntokens_seen += update.tokens
        self._ledger.advance(update.entries, update.readers)
        return partial(float, join_norm(squares, self._group.gather))

    def _go_on(self, replica: ReplicaDimension) -> None:
        """Meet the others once more behind a round, and get another state if this group's moments are spoiled."""
        if self._position.step == 1:  # torchtitan does so after its step 1, which is in the midst of a round
            set_pg_timeouts(timedelta(seconds=self.job_config.comm.train_timeout_seconds), self.parallel_dims)
        if self.step >= self.job_config.training.steps:
            return
        if self._position.exclusions:
            logger.warning("this group's change was not finite: it begins the next round with a peer's state")
            self._state.restore()  # should every peer be gone by then
            self._heal(replica)
        else:
            self._open(replica)

    def _open(self, replica: ReplicaDimension) -> None:
        match replica.open():
            case Opening.HEAL:
                self._heal(replica)
            case Opening.EXCHANGE:
                self._late = True

    def _heal(self, replica: ReplicaDimension) -> None:
        super()._heal(replica)
        if self._under_way is not None:
            # It has gone back to its own state, for the others' is lost with them: it gives what it has made of the
            # round once more. Where steps of the next one are on top of that, both are trained again.
            if self._ahead is None:
                self._ahead = self._under_way
            else:
                self._state.restore()
        if replica.opens and self.step < self.job_config.training.steps:
            self._open(replica)

    def _pauses_after(self, step: int) -> bool:
        return True  # no quorum is asked for ahead: the groups are at the same point only at the end of a round

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
        step = self._work.compute_seconds / self._work.inner_steps
        # Who has asked makes another step only while it waits for the others.
        needed, share = (step * remaining, OWN_SHARE) if remaining else (step, WAITING_SHARE)
        if not self._exceeds(needed, share):
            return False
        if remaining:
            self._broken_off = f"{remaining} steps of the round were left, too many for drain_timeout_seconds"
            assert self._replica is not None
            # No further steps meanwhile: the time is for the others, and for the save.
            if self.checkpointer.lacks_state() and self._replica.await_others(lambda: self._exceeds(0.0, OWN_SHARE)):
                return True
        self._position.leave()
        raise Leaving

    def _exceeds(self, seconds: float, share: float) -> bool:
        """Say whether so many more seconds are beyond a share of the time to leave, on any rank. A collective."""
        timeout = self.job_config.fault_tolerance.drain_timeout_seconds
        return any(self._group.gather(self._drain.spent + seconds / timeout > share))

    def _go_back_to_update(self) -> None:
        """Let the model be that of the last update: the steps that this group has made since are void."""
        self._drop_spoiled_moments()
        self._outer.restore_model()
        super()._go_back_to_update()
        set_lr(self.lr_schedulers, self.step)

    def _emit_drained(self) -> None:
        work: Work | None = vars(self).get("_work")
        readings = [] if work is None or work.seconds else merge([*work.readings, *self._readings_ahead()])
        if not readings:  # no round is under way
            super()._emit_drained()
            return
        reason = f"SIGTERM: {self._broken_off or 'the others were not there in time to exchange the round'}"
        logger.warning(f"{reason}; {_name_void(readings)}")
        batches = [reading.describe() for reading in readings]
        announce_left(self._events, Drained(step=self._num_committed, reason=reason, in_order=False, void=batches))

    def _abandon(self, reason: str, void: list[Batches] | None = None) -> None:
        # The training thread goes on meanwhile: what may just have come into an update is not told, as by the others.
        works = [work for work in (self._under_way, self._ahead) if work is not None]
        left = [work for work in works if self._updates_of(work.first_step) > self._num_committed]
        readings = merge(reading for work in left for reading in list(work.readings))
        super()._abandon(reason, [reading.describe() for reading in readings] or void)
        if readings:
            print_line(f"SIGTERM: {_name_void(readings)}")

    def _void_batches(self) -> list[Batches] | None:
        return [reading.describe() for reading in self._readings_ahead()] or None

    def _readings_ahead(self) -> list[Reading]:
        return merge(self._ahead.readings) if self._ahead else []

    def _lend_anchors(self) -> None:
        """Let torchtitan save and validate the anchors: between rounds this group's own weights are others."""

        @contextlib.contextmanager
        def lent() -> Iterator[None]:
            with self._outer.lent():
                yield
                self.checkpointer.maybe_wait_for_staging()

        self._checkpoint_host.lent = lent
        if not self.job_config.validation.enable:
            return
        validate = self.validator.validate

        def validate_anchors(*args: Any) -> None:
            with self._outer.lent():
                self._refresh_converters()
                validate(*args)
            self._refresh_converters()

        self.validator.validate = validate_anchors

    def _validate_behind_rounds(self) -> None:
        """Let torchtitan validate the outer model behind each round in which a validation falls due."""
        should_validate = self.validator.should_validate

        def is_due(step: int) -> bool:
            first = self._steps_of(self._updates_of(step) - 1) + 1
            return any(map(should_validate, range(first, step + 1)))

        self.validator.should_validate = is_due


def _name_void(readings: Sequence[Reading]) -> str:
    entries = [reading.entry for reading in readings]
    void = (f"{entry.num_batches} from batch {entry.first_batch} of slot {entry.slot}" for entry in entries)
    return f"void: {', '.join(void)}"


def _warn_of_useless_bits(config: FaultTolerance) -> None:
    if quantizes(config) and config.group_size >= 8:
        logger.warning(
            f"{TABLE}.should_quantize should be false with {TABLE}.group_size >= 8, got {config.group_size}: each "
            f"group sends {config.group_size / 8:.3g} times the bytes that it would send in fp32; leave it out"
        )
