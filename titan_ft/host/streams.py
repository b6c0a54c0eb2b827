# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Patches of Hugging Face `datasets`: a stream whose state is loaded continues with the very next
example.

`datasets` 4.7.0 changes the order of a stream or loses its position, without an error: when the
state is of another epoch, when workers share the epoch, with `take` or `skip` beside a shuffle,
with a shuffle buffer, with formatted tables, with tables that are cut into batches, and with an
`async` function. Each patch names the upstream code that it replaces. `tests/host/test_streams.py`
resumes randomly generated pipelines after each example. It also has one test per patch, which fails
once upstream has fixed the defect.

The patches work inside the workers of a data loader too: workers are forks of a patched process.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import datasets.iterable_dataset as upstream
import numpy as np
import torch.utils.data
from datasets import Dataset, IterableDataset

State = dict[str, Any]
_DRAW_SIZE = 1000
"""Upstream's size. Draws of another size would give other indices."""

_upstream_load_state_dict = IterableDataset.load_state_dict
_upstream_set_epoch = IterableDataset.set_epoch
_upstream_init_formatted = upstream.FormattedExamplesIterable.__init__
_upstream_rebatch = upstream.RebatchedArrowExamplesIterable._iter_arrow
_upstream_map = upstream.MappedExamplesIterable._iter


def patch() -> None:
    """Install the patches. A second call changes nothing."""
    IterableDataset.load_state_dict = _load_state_and_epoch
    IterableDataset.set_epoch = _set_own_epoch
    upstream.shift_ex_examples_rngs = _shift_generators
    shuffled = upstream.BufferShuffledExamplesIterable
    shuffled._init_state_dict = _init_shuffle_state
    # Upstream's override warns that the buffer is lost, which is no longer true.
    shuffled.load_state_dict = upstream._BaseExamplesIterable.load_state_dict
    shuffled.__iter__ = _iterate_examples
    shuffled._iter_arrow = _iterate_tables
    upstream.FormattedExamplesIterable.__init__ = _format_row_by_row
    upstream.RebatchedArrowExamplesIterable._iter_arrow = _rebatch
    upstream.MappedExamplesIterable._iter = _map


def is_known(data: Any) -> bool:
    """Return True if `data` reads by the library's own classes alone, whose states are
    tested here.
    """
    if type(data) is IterableDataset:
        return _is_known_step(data._ex_iterable)
    return type(data) is Dataset


def _is_known_step(step: Any) -> bool:
    if type(step).__module__ != upstream.__name__:
        return False
    sources = [*getattr(step, "ex_iterables", [])]
    if hasattr(step, "ex_iterable"):
        sources.append(step.ex_iterable)
    return all(map(_is_known_step, sources))


# The epoch of a stream


def _load_state_and_epoch(self: IterableDataset, state_dict: State) -> None:
    """Load a state together with its epoch; replaces `IterableDataset.load_state_dict`.

    If the state's epoch is not the stream's own, upstream ignores the state and reads the epoch
    from its beginning. torchtitan 0.2.2 (`HuggingFaceTextDataset.load_state_dict`) does not set the
    epoch. A group that was restarted in the second epoch read wrong batches.
    """
    self.set_epoch(state_dict["epoch"])
    _upstream_load_state_dict(self, state_dict)


def _set_own_epoch(self: IterableDataset, epoch: int) -> None:
    """Set the epoch of this process alone; replaces `IterableDataset.set_epoch`.

    Upstream keeps the epoch in memory that all workers share. torchtitan's dataset adds one to it
    in each worker that reaches the end of its files. With two workers every second epoch was left
    out, and their pace decided which one.
    """
    if torch.utils.data.get_worker_info() is not None:
        self._epoch = torch.tensor(int(self._epoch))
    _upstream_set_epoch(self, epoch)


def _shift_generators(ex_iterable: Any, value: int) -> Any:
    """Return a copy of the pipeline with its seeds shifted by `value`; replaces
    `shift_ex_examples_rngs`.

    `take` and `skip` return themselves from `shuffle_data_sources`, and upstream then shifts their
    seeds in place. Opening a stream changed it, and an epoch's order depended on the number of
    openings.
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
# Upstream's state has the position in the source, but not the examples in the buffer. A reopened
# stream never gave those examples. They follow from the source and the seed, so the state need not
# hold them. Instead it holds an *anchor*: a position in the source after which every slot of the
# buffer was refilled. Reading from the anchor to the present position restores the whole buffer.
# With B slots the anchor lies about B (ln B + 2) examples back (coupon collector). A reopened
# stream reads that many examples again.


def _init_shuffle_state(self: Any) -> State:
    """Return the state at an epoch's start; replaces
    `BufferShuffledExamplesIterable._init_state_dict`.

    Keys:
        anchor: state of the source at the anchor; None = its beginning, with an empty buffer.
        at_anchor: examples of this epoch given before the anchor.
        since_anchor: examples given after the anchor.
    """
    self._source_start = copy.deepcopy(self.ex_iterable._init_state_dict())
    self._state_dict = {
        "anchor": None,
        "at_anchor": 0,
        "since_anchor": 0,
        "type": type(self).__name__,
    }
    return self._state_dict


def _iterate_examples(self: Any) -> Iterator[Any]:
    """Give examples; replaces `BufferShuffledExamplesIterable.__iter__`."""
    return _shuffle(self, lambda: self.ex_iterable)


def _iterate_tables(self: Any) -> Iterator[Any]:
    """Give tables; replaces `BufferShuffledExamplesIterable._iter_arrow`."""
    return _shuffle(self, self.ex_iterable.iter_arrow)


def _shuffle(self: Any, open_source: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Give the examples of the source in upstream's order, from the position of the state on."""
    size = self.buffer_size
    generator = copy.deepcopy(self.generator)
    if self._state_dict is None:
        # This stream is never saved, but the code below counts in a state.
        self._init_state_dict()
    state: State = self._state_dict
    start = self._source_start if state["anchor"] is None else state["anchor"]
    self.ex_iterable.load_state_dict(copy.deepcopy(start))
    # From an anchor on, the replay refills every slot before the first new example is given. So the
    # slots may begin empty.
    buffer: list[Any] = [] if state["anchor"] is None else [None] * size
    num_given = state["at_anchor"]  # Examples of this epoch, with those of the replay.
    # The replay ends at this `num_given`.
    num_replayed = state["at_anchor"] + state["since_anchor"]
    indices = _draw_indices(generator, size, skip=num_given)
    # `num_given` at the last refill of each slot.
    refilled_at = [num_given] * size
    # Candidates for the anchor: `num_given` and the state of the source.
    candidates: deque[tuple[int, State]] = deque()

    for example in open_source():
        if len(buffer) < size:
            buffer.append(example)
            continue
        slot = next(indices)
        num_given += 1
        if num_given > num_replayed:
            state["since_anchor"] = num_given - state["at_anchor"]
            yield buffer[slot]
        buffer[slot] = example
        refilled_at[slot] = num_given
        # Move the anchor to the latest candidate after which every slot was refilled. Only once in
        # `size` examples, because `min` and the state of the source take time.
        if num_given % size == 0:
            oldest_refill = min(refilled_at)
            while candidates and candidates[0][0] < oldest_refill:
                state["at_anchor"], state["anchor"] = candidates.popleft()
                # During a replay, `num_given` is less than the stream had given before.
                state["since_anchor"] = max(num_given, num_replayed) - state["at_anchor"]
            candidates.append((num_given, self.ex_iterable.state_dict()))

    # At the end of the source, upstream shuffles the rest of the buffer.
    generator.shuffle(buffer)
    for example in buffer:
        num_given += 1
        if num_given > num_replayed:
            state["since_anchor"] = num_given - state["at_anchor"]
            yield example


def _draw_indices(generator: np.random.Generator, size: int, skip: int) -> Iterator[int]:
    """Draw the slots of the next examples, as upstream does, without the first `skip` draws."""
    for _ in range(skip // _DRAW_SIZE):
        generator.integers(0, size, size=_DRAW_SIZE)
    draw = upstream.BufferShuffledExamplesIterable._iter_random_indices
    indices: Iterator[int] = draw(generator, size, _DRAW_SIZE)
    return islice(indices, skip % _DRAW_SIZE, None)


# Formatted tables


def _format_row_by_row(self: Any, ex_iterable: Any, *args: Any, **kwargs: Any) -> None:
    """Format one row at a time; replaces `FormattedExamplesIterable.__init__`.

    Upstream's state counts whole Arrow tables. A stream that was reopened within a table repeated
    its first rows or skipped its last ones.
    """
    is_rebatched = isinstance(ex_iterable, upstream.RebatchedArrowExamplesIterable)
    if ex_iterable.iter_arrow and not is_rebatched:
        ex_iterable = upstream.RebatchedArrowExamplesIterable(ex_iterable, batch_size=1)
    _upstream_init_formatted(self, ex_iterable, *args, **kwargs)


def _rebatch(self: Any) -> Iterator[Any]:
    """Give tables of equal sizes; replaces `RebatchedArrowExamplesIterable._iter_arrow`.

    Upstream counts the chunks of the source since an earlier state. If a stream is opened in the
    middle of a chunk, upstream counts this chunk a second time for the first table. A stream that
    was reopened after that table skipped a chunk.
    """
    state: State | None = self._state_dict
    is_within_chunk = bool(state and state["previous_state"] and state["cropped_chunk_length"])
    for table in _upstream_rebatch(self):
        if is_within_chunk and state and state["num_chunks_since_previous_state"]:
            state["num_chunks_since_previous_state"] -= 1
        is_within_chunk = False  # After the first table, upstream resets the number.
        yield table


# Asynchronous functions


def _map(self: Any) -> Iterator[Any]:
    """Give the results of a function; replaces `MappedExamplesIterable._iter`.

    Upstream counts the results since an earlier state of the source. For an `async` function the
    count goes on from the number of results that were just skipped. A stream that was reopened a
    second time skipped these results twice.
    """
    state: State | None = self._state_dict
    num_given = 0
    if state and state["previous_state"] and inspect.iscoroutinefunction(self.function):
        num_given = state["num_examples_since_previous_state"]
        state["num_examples_since_previous_state"] = 0
    yield from islice(_upstream_map(self), num_given, None)
