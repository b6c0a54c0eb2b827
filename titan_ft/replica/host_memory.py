# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Host memory for the copies of a state: taken once, and lent to one copy after the other.

A GPU copies to pinned memory at the speed of its link, and beside whatever the host does. But to pin 10 GB takes
seconds, so a thread does it early, before a joiner has come.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from titan_ft import device
from titan_ft.replica.errors import first_line

logger = logging.getLogger(__name__)


class HostMemory:
    """One flat tensor of uint8, pinned where there is a GPU. Training thread only."""

    def __init__(self) -> None:
        self._spare: torch.Tensor | None = None
        self._reserved: Future[torch.Tensor] | None = None  # becomes the spare when one is wanted
        self._is_reserved = False

    def reserve(self, count_bytes: Callable[[], int]) -> None:
        """Begin to pin so much, on a thread of its own; nothing to do on a CPU, or if that was done before."""
        if self._is_reserved or device.on_cpu():
            return
        self._is_reserved = True
        thread = ThreadPoolExecutor(1, "titan_ft_pinning", initializer=device.for_thread())
        self._reserved = thread.submit(_reserve, count_bytes())
        thread.shutdown(wait=False)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Lend memory for a copy: what is at hand, if it is as large; waits for what is being pinned."""
        self._collect()
        memory, self._spare = self._spare, None
        return memory if memory is not None and memory.numel() == num_bytes else _allocate(num_bytes)

    def give_back(self, memory: torch.Tensor) -> None:
        """Take back what was lent, and nobody reads any more."""
        self._spare = memory

    def close(self) -> None:
        """Let go of the memory; waits for the thread."""
        self._collect()
        self._spare = None

    def _collect(self) -> None:
        if self._reserved is not None:
            self._spare, self._reserved = self._reserved.result(), None


def _reserve(num_bytes: int) -> torch.Tensor:
    started = time.monotonic()
    memory = _allocate(num_bytes)
    logger.info(
        "%s of host memory are kept for copies of this rank's state, which joiners fetch (taken in %.1f s)",
        _size(num_bytes),
        time.monotonic() - started,
    )
    return memory


def _allocate(num_bytes: int) -> torch.Tensor:
    """Take pinned memory; if the host has none left say so, and take memory that is not."""
    try:
        return device.empty_host(num_bytes, torch.uint8)
    except RuntimeError as error:  # torch has no narrower one for it
        logger.warning(
            "%s of host memory cannot be pinned (%s): a copy of this rank's state takes several times as long, and its "
            "training stands still meanwhile",
            _size(num_bytes),
            first_line(error),
        )
        return torch.empty(num_bytes, dtype=torch.uint8)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
