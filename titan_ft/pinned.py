# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Large blocks of pinned host memory, owned by this package, for CUDA and ROCm.

torch pins host memory as well. But `torch.accelerator.empty_host_cache` holds Python's lock while
the driver unpins: for seconds no thread of the process ran, and the other groups waited in the
exchange. torch's allocator holds its own lock meanwhile, which every asynchronous copy needs. It
also rounds each block up to a power of two. (tests/cuda/test_host_memory.py)
"""

from __future__ import annotations

import logging
import mmap
import queue
import threading
import weakref
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Block:
    """Pinned memory of one tensor.

    Attributes:
        keep: keep the memory for the next tensor of this size.
    """

    memory: mmap.mmap
    keep: bool

    @property
    def address(self) -> int:
        return torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()


class PinnedMemory:
    """Allocates pinned tensors for one GPU, and unpins a tensor's memory after the tensor is freed.

    `titan_ft.device` has the one instance. `take` and `release_kept` may be called on any thread. A
    thread of its own unpins the memory. All callers must use the same current device, because that
    thread uses it as well. A failed `take` changes nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._kept: defaultdict[int, list[_Block]] = defaultdict(list)  # by size
        # Blocks whose tensor has been freed. None stands for a call of `release_kept`.
        self._freed: queue.SimpleQueue[_Block | None] = queue.SimpleQueue()

    def take(self, num_bytes: int, *, keep: bool) -> torch.Tensor:
        """Return a flat tensor of uint8; nothing is written into it.

        Args:
            keep: after the tensor is freed, keep its memory for the next tensor of this size, until
                `release_kept`.

        Raises:
            RuntimeError: CUDA cannot pin the memory.
            OSError: the host cannot map the memory.
        """
        device = torch.cuda.current_device()
        block = None
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, args=(device,), name="titan_ft_unpin", daemon=True
                )
                self._thread.start()
            if keep and self._kept[num_bytes]:
                block = self._kept[num_bytes].pop()
        if block is None:
            block = _pin(num_bytes, device, keep)
        view = memoryview(block.memory)
        # A tensor may be freed on any thread, even by a garbage collection while this thread holds
        # `_lock`. So the finalizer only calls `SimpleQueue.put`, which is reentrant.
        # In a forked child no thread serves the queue, so the child unpins and unmaps nothing.
        # At the end of the process the kernel frees the memory: no finalizer runs.
        weakref.finalize(view, self._freed.put, block).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def release_kept(self) -> None:
        """Let the thread unpin the kept blocks; return at once.

        A block in use with `keep` is kept again when its tensor is freed.
        """
        if self._thread is not None:
            self._freed.put(None)

    def _serve(self, device: int) -> None:
        # A new thread starts on GPU 0. Without this, each rank would open a context of 0.3 to 0.5
        # GB there.
        torch.cuda.set_device(device)
        while True:
            block = self._freed.get()
            # Some stream may still copy from the block or to it. So wait for all streams. A kernel
            # that waits for a lost peer delays this thread only.
            torch.cuda.synchronize()
            unwanted: list[_Block] = []
            with self._lock:
                if block is None:
                    for blocks in self._kept.values():
                        unwanted += blocks
                    self._kept.clear()
                elif block.keep:
                    self._kept[len(block.memory)].append(block)
                else:
                    unwanted.append(block)
            for each in unwanted:
                _unpin(each)


def _pin(num_bytes: int, device: int, keep: bool) -> _Block:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Keep the memory out of forks, such as the workers of a data loader. Linux copies all pinned
    # pages at a fork. Before 5.12 it shared them: the next write of this process went to a new
    # page, while the GPU kept using the old one.
    memory.madvise(mmap.MADV_DONTFORK)
    block = _Block(memory, keep)

    def register() -> int:
        torch.cuda.set_device(device)
        return int(torch.cuda.cudart().cudaHostRegister(block.address, num_bytes, 0))

    # After a refused call, CUDA raises the same error at the next kernel launch of that thread. So
    # another thread registers the memory, which launches no kernel.
    with ThreadPoolExecutor(1) as thread:
        torch.cuda.check_error(thread.submit(register).result())
    return block


def _unpin(block: _Block) -> None:
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(block.address))
    except RuntimeError as error:
        # The GPU may still use the block, so its addresses must not be given to anything else.
        _lost.append(block)
        size = len(block.memory) / 1e9
        logger.warning("%.3g GB of pinned memory cannot be given back to the host: %s", size, error)
    else:
        # `close` unmaps the memory without Python's lock. Dropping the last reference would unmap
        # it with the lock held.
        block.memory.close()


_lost: list[_Block] = []
