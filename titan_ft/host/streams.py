# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Patches of Hugging Face `datasets`: a stream whose state is loaded goes on with the very next example.

`datasets` 4.7.0 loses the place of a stream in three cases, each without an error. Every patch names
the upstream code that it replaces. `tests/host/test_streams.py` resumes drawn pipelines after each of
their examples, and has a test for each patch that fails when upstream no longer needs it.

The patches work inside the workers of a data loader too: workers are forks of a patched process.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import datasets.iterable_dataset as upstream
import numpy as np
import torch.utils.data
from datasets import IterableDataset

State = dict[str, Any]
_INDICES_AT_A_TIME = 1000  # upstream's, which decides what its generator draws

_load_state_dict = IterableDataset.load_state_dict
_set_epoch = IterableDataset.set_epoch
_format = upstream.FormattedExamplesIterable.__init__


def patch() -> None:
    """Install the patches. A second call changes nothing."""
    IterableDataset.load_state_dict = _load_state_and_epoch
    IterableDataset.set_epoch = _set_own_epoch
    upstream.shift_ex_examples_rngs = _shift_generators
    shuffled = upstream.BufferShuffledExamplesIterable
    shuffled._init_state_dict = _init_shuffle_state
    shuffled.load_state_dict = upstream._BaseExamplesIterable.load_state_dict
    shuffled.__iter__ = _iterate_examples
    shuffled._iter_arrow = _iterate_tables
    upstream.FormattedExamplesIterable.__init__ = _format_row_by_row


# The epoch of a stream


def _load_state_and_epoch(self: IterableDataset, state_dict: State) -> None:
    """Load a state together with its epoch; replaces `IterableDataset.load_state_dict`.

    Upstream ignores a state whose epoch is not the stream's own, and reads the epoch from its beginning.
    torchtitan 0.2.2 (`HuggingFaceTextDataset.load_state_dict`) does not set the epoch. A group that was
    restarted in the second epoch read other batches than it was to read.
    """
    self.set_epoch(state_dict["epoch"])
    _load_state_dict(self, state_dict)


def _set_own_epoch(self: IterableDataset, epoch: int) -> None:
    """Set the epoch; in a worker of a data loader, that of this worker alone.

    Upstream keeps the epoch in memory that all workers share. torchtitan's dataset adds one to it in
    each worker that reaches the end of its files: with two workers every second epoch was left out, and
    which one depended on their pace.
    """
    if torch.utils.data.get_worker_info() is not None:
        self._epoch = torch.tensor(int(self._epoch))
    _set_epoch(self, epoch)


def _shift_generators(ex_iterable: Any, value: int) -> Any:
    """Return the pipeline with the seeds of an epoch or a worker; replaces `shift_ex_examples_rngs`.

    Upstream changes the given pipeline where `take` or `skip` hands on its own object: each epoch's
    seeds then depended on how often the stream had been opened before.
    """
    shifted = copy.copy(ex_iterable)
    if hasattr(shifted, "shift_rngs"):
        shifted = shifted.shift_rngs(value)
    if hasattr(shifted, "ex_iterable"):
        shifted.ex_iterable = _shift_generators(shifted.ex_iterable, value)
    if hasattr(shifted, "ex_iterables"):
        shifted.ex_iterables = [_shift_generators(each, value) for each in shifted.ex_iterables]
    return shifted


# The shuffle buffer
#
# Upstream's state has the place in the source but not the examples in the buffer: a stream that was opened
# again never gave those. They follow from the source and the seed, so the state need not hold them. It
# holds an *anchor*: a place in the source from which the buffer can be made again, because every slot of
# the buffer has been refilled since. With B slots the anchor lies about B (ln B + 2) examples back, however
# far the epoch has come, and whoever opens the stream reads that many examples again.


def _init_shuffle_state(self: Any) -> State:
    """Begin a state; replaces `BufferShuffledExamplesIterable._init_state_dict`.

    Returns:
        anchor: state of the source at the anchor; None = its beginning, with an empty buffer.
        picked: examples that the buffer had given in this epoch at the anchor.
        given: examples that it has given since.
    """
    self._source_start = copy.deepcopy(self.ex_iterable._init_state_dict())
    self._state_dict = {"anchor": None, "picked": 0, "given": 0, "type": type(self).__name__}
    return self._state_dict


def _iterate_examples(self: Any) -> Iterator[Any]:
    """Give examples; replaces `BufferShuffledExamplesIterable.__iter__`."""
    return _shuffle(self, lambda: self.ex_iterable)


def _iterate_tables(self: Any) -> Iterator[Any]:
    """Give tables; replaces `BufferShuffledExamplesIterable._iter_arrow`."""
    return _shuffle(self, self.ex_iterable.iter_arrow)


def _shuffle(self: Any, open_source: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Give the examples of the source in upstream's order, from the place of the state on."""
    size, generator = self.buffer_size, copy.deepcopy(self.generator)
    if self._state_dict is None:
        self._init_state_dict()  # nobody asks for the state of this stream
    state: State = self._state_dict
    start = self._source_start if state["anchor"] is None else state["anchor"]
    self.ex_iterable.load_state_dict(copy.deepcopy(start))
    buffer: list[Any] = [] if state["anchor"] is None else [None] * size
    number = state["picked"]  # of the example that the buffer gives next, from 0
    given_before = state["picked"] + state["given"]
    indices = _draw_indices(generator, size, skip=number)
    refilled = [number] * size  # by slot: examples that had been given when it was refilled last
    candidates: deque[tuple[int, State]] = deque()  # for the anchor, with the examples given by then

    for example in open_source():
        if len(buffer) < size:
            buffer.append(example)
            continue
        slot = next(indices)
        number += 1
        if number > given_before:
            state["given"] = number - state["picked"]
            yield buffer[slot]
        buffer[slot], refilled[slot] = example, number
        if number % size == 0:
            oldest = min(refilled)
            while candidates and candidates[0][0] < oldest:
                state["picked"], state["anchor"] = candidates.popleft()
                state["given"] = max(number, given_before) - state["picked"]
            candidates.append((number, self.ex_iterable.state_dict()))

    generator.shuffle(buffer)
    for example in buffer:
        number += 1
        if number > given_before:
            state["given"] = number - state["picked"]
            yield example


def _draw_indices(generator: np.random.Generator, size: int, skip: int) -> Iterator[int]:
    """Draw the slots that the buffer is emptied from, as upstream does, without the first `skip` ones."""
    for _ in range(skip // _INDICES_AT_A_TIME):
        generator.integers(0, size, size=_INDICES_AT_A_TIME)
    draw = upstream.BufferShuffledExamplesIterable._iter_random_indices
    indices: Iterator[int] = draw(generator, size, _INDICES_AT_A_TIME)
    return islice(indices, skip % _INDICES_AT_A_TIME, None)


def _format_row_by_row(self: Any, ex_iterable: Any, *args: Any, **kwargs: Any) -> None:
    if ex_iterable.iter_arrow and not isinstance(ex_iterable, upstream.RebatchedArrowExamplesIterable):
        ex_iterable = upstream.RebatchedArrowExamplesIterable(ex_iterable, batch_size=1)
    _format(self, ex_iterable, *args, **kwargs)
