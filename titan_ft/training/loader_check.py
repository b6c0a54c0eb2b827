# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Check at the job's start that a data loader goes on exactly where its state was saved.

Every group that comes back opens its data at a saved state. A loader that then gives other batches
loses or repeats data without an error. Examples are a loader with a shuffle buffer outside its
state, with an order that depends on the process, or without a state. `check_loader` rehearses
several openings in a row, because some loaders lose their place only at the second one.

A loader may also lose its place late, for example when it shuffles its next epoch. No rehearsal at
the start excludes that. So `check_loader` also reports whether the loader is *transparent*: only
code that this project knows and tests decides where it goes on.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

from titan_ft.config import ConfigError
from titan_ft.engine.feed import checksum
from titan_ft.engine.loader_state import load_loader, name_loader, save_loader
from titan_ft.host import streams
from titan_ft.host.titan import LOADERS, HuggingFaceTextDataset
from titan_ft.run.events import LoaderChecked

_BEFORE = 2
"""Batches before the first opening, and between the first and the second opening."""
_MOST = 64
"""Most batches that are compared after each opening."""
_SECONDS = 0.4
"""Time for the loader that reads on. The reopened loaders read one and a half times as much."""


def check_loader(build: Callable[[], Any]) -> LoaderChecked:
    """Compare a loader that reads on with loaders that are opened at its saved states.

    1. Read `_BEFORE` batches from a first loader, and save its state.
    2. Read on with the same loader: these are the expected batches.
    3. Open a new loader at the saved state, compare its batches with the expected ones, and save
       its state on the way. Repeat this from that state (see `_openings`).

    Reads at most five times `_MOST` batches, for about a second, from loaders of its own; from slow
    loaders ten batches. The random number generators of this process are restored afterwards.

    Args:
        build: builds a loader, from the beginning of its data.

    Raises:
        ConfigError: the loader cannot save its state, or cannot load its own saved state.
    """
    with _keep_random_state():
        loader = build()
        name = name_loader(loader)
        transparent = is_transparent(loader)
        straight = iter(loader)
        deadline = time.monotonic() + _SECONDS
        before = _read(straight, _BEFORE)
        with _refuse(name, "save its state"):
            state = save_loader(loader)
        expected = _read(straight, 2 * _BEFORE)
        has_ended = len(expected) < 2 * _BEFORE
        while not has_ended and len(expected) < 2 * (_BEFORE + _MOST):
            if time.monotonic() >= deadline:
                break
            further = _read(straight, 1)
            expected += further
            has_ended = not further
        # The workers of a loader end with it.
        del straight, loader
        reason = ""
        number = 0
        for place, length, next_save in _openings(len(expected)):
            with _refuse(name, "go on from a state that it has saved"):
                loader = build()
                load_loader(loader, state)
                reopened = iter(loader)
                found = _read(reopened, next_save)
                state = save_loader(loader)
                found += _read(reopened, length - next_save)
            del reopened, loader
            number = max(number, min(place + length, len(expected)))
            reason = _describe_difference(
                expected[place : place + length], found, len(before) + place
            )
            if reason:
                break
    if not expected:
        reason = f"its data end with batch {len(before)}, before anything could be compared"
    return LoaderChecked(
        loader=name, exact=not reason, batches=number, reason=reason, transparent=transparent
    )


def is_transparent(loader: Any) -> bool:
    """Return True if only known code decides where a loader goes on.

    The known code is torchtitan's text data over `datasets`. The user's own functions in such a
    pipeline are assumed to depend on their example only.
    """
    if type(loader) not in (*LOADERS, StatefulDataLoader):
        return False
    dataset = loader.dataset
    if type(dataset) is not HuggingFaceTextDataset or loader.collate_fn is not default_collate:
        return False
    return streams.is_known(dataset._data)


def _openings(num_expected: int) -> Iterator[tuple[int, int, int]]:
    """Yield the openings: batches before it, batches to compare, batches to the next opening."""
    depth = max(_BEFORE, num_expected // 2 - _BEFORE)
    yield 0, depth, _BEFORE
    yield _BEFORE, depth, depth
    if depth > _BEFORE:
        # An opening far from the start: the states of a later epoch may be wrong, although those
        # of the first epoch are right.
        yield _BEFORE + depth, depth, depth


def _describe_difference(expected: list[str], found: list[str], opened_after: int) -> str:
    """Return a text that names the first batch that differs; empty if none does."""
    if found == expected:
        return ""
    num_same = 0
    for one, other in zip(expected, found, strict=False):
        if one != other:
            break
        num_same += 1
    number = opened_after + num_same + 1
    return f"opened again after batch {opened_after}, it gave another batch {number}"


def _read(batches: Iterator[Any], number: int) -> list[str]:
    """Return the checksums of the next batches; fewer where the data end."""
    return [checksum([batch]) for batch in islice(batches, number)]


@contextlib.contextmanager
def _refuse(name: str, what: str) -> Iterator[None]:
    """Turn an error of the loader into one line.

    Without this check at the start, a returning group would end with that error.

    Raises:
        ConfigError: the loader raised an error.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"the data loader ({name}) must {what}, or no group could ever come back, got {text}; "
            "correct its state_dict and load_state_dict"
        ) from error


@contextlib.contextmanager
def _keep_random_state() -> Iterator[None]:
    """Leave the generators as they were: stock torchtitan's run draws the same numbers."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
