# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Find out at the job's start whether a data loader goes on exactly where its state was saved.

Every group that comes back opens its data at a saved state. A loader that then gives other batches
loses or repeats data without an error: for example one with a shuffle buffer outside its state, one
whose order depends on the process, or one without a state. `check_loader` rehearses two openings in a
row, because some loaders lose their place only at the second one.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from titan_ft.config import ConfigError
from titan_ft.replica.feed import checksum
from titan_ft.replica.loader_state import load_loader, name_loader, save_loader
from titan_ft.run.events import LoaderChecked

_BEFORE = 2  # batches from an opening to the save that the next loader is opened at


def check_loader(build: Callable[[], Any]) -> LoaderChecked:
    """Compare a loader that reads on with two that are opened one after the other at saved states.

    Reads three times as many batches as lie between two openings, from loaders of its own. Random number
    generators of this process are as before afterwards.

    Args:
        build: builds a loader, from the beginning of its data.

    Raises:
        ConfigError: the loader cannot save its state, or cannot load what it has saved.
    """
    with _keep_random_state():
        loader = build()
        name = name_loader(loader)
        straight = iter(loader)
        before = _read(straight, _BEFORE)
        expected: list[str] = []
        found: list[str] = []
        with _refuse(name, "save its state"):
            state = save_loader(loader)
        expected += _read(straight, 2 * _BEFORE)
        del straight, loader
        for _ in range(2):
            loader = build()
            with _refuse(name, "go on from a state that it has saved"):
                load_loader(loader, state)
                reopened = iter(loader)
                found += _read(reopened, _BEFORE)
                state = save_loader(loader)
            del reopened, loader
    number = len(expected)
    if not expected:
        reason = f"its data end with batch {len(before)}, before anything could be compared"
        return LoaderChecked(loader=name, exact=False, batches=0, reason=reason)
    differing = [place for place in range(number) if found[place : place + 1] != expected[place : place + 1]]
    reason = ""
    if differing or len(found) != number:
        first = differing[0] if differing else number
        reason = f"opened again after batch {len(before)}, it gave another batch {len(before) + first + 1}"
    return LoaderChecked(loader=name, exact=not reason, batches=number, reason=reason)


def _read(batches: Iterator[Any], number: int) -> list[str]:
    """Return the checksums of the next batches; fewer where the data end."""
    return [checksum([batch]) for batch in islice(batches, number)]


@contextlib.contextmanager
def _refuse(name: str, what: str) -> Iterator[None]:
    """Turn an error of the loader into one line: a group that comes back would end with it.

    Raises:
        ConfigError: there was an error.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"the data loader ({name}) must {what}, or no group could ever come back, got {text}; correct its "
            "state_dict and load_state_dict"
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
