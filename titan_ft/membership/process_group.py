# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The process group between the replica groups: torchft's reconfigurable ones, with a Gloo that breaks off.

Gloo has no abort: an operation that waits for a peer which lives, but is stopped or cannot be reached, waits for its
whole timeout. Its connections are ordinary sockets of this process, though: shutting them down under it ends it, and
shows it to the peers that wait for this process.

Gloo does not tell an operation whose send is on its way that the connection is gone, not even when the peer has died:
that one waits for its whole timeout all the same. So nobody here waits for an operation once the process group is
aborted, or has lost a connection and carries nothing any more; it is left to itself, and may touch its tensors until it
ends.

NCCL has an abort, and nothing else: its kernel waits on the GPU for a peer that is gone until somebody aborts it. An
abort may itself hang, and so may the set-up of a communicator: both have threads of their own, and a time.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torchft.process_group import (
    ProcessGroup,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    ProcessGroupWrapper,
    create_store_client,
)

from titan_ft import device
from titan_ft.membership.collectives import all_reduce
from titan_ft.system.process import borrowed_socket, own_sockets
from titan_ft.system.threads import call_aside
from titan_ft.transfer.reach import within

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1  # between two looks whether an operation that takes long was broken off, or NCCL has an error
_IDLE_LOOKS = 3  # in a row: what a member sent before it closed its connections is not on its way by others any more
_TIMEVAL_BYTES = 16  # of struct timeval, as 64-bit systems have it
_TCP_INFO_CARRIED = 120  # offset in struct tcp_info, of linux/tcp.h: bytes acknowledged, bytes received
_ABORT_SECONDS = 2.0  # that a new communicator waits for the abort of the one before
# torch's own time of an operation is 10 minutes, whatever the operation's options say. After that its watchdog reports
# corrupted data, has every rank of member 0's group dump its flight record, and never reports a lost member again.
_NO_TIMEOUT = timedelta(days=365)
_LAUNCH_SECONDS = 0.2  # that an abort waits for the end of a launch
# Multiprocessors that a kernel of the exchange may hold. The kernel has the highest priority and waits for the slowest
# group: with NCCL's own number, up to 32, backward would lose a quarter of an H100 meanwhile. NCCL_MAX_CTAS wins.
_MAX_CTAS = 8


def build_process_group(backend: str, timeout: timedelta, host: str = "") -> ProcessGroup:
    """Build the process group of a backend, "gloo" or "nccl"; it has no members until it is configured.

    Args:
        host: numeric address of this host at which the other groups reach it; empty leaves that to Gloo.
    """
    logging.getLogger("torchft_errors").setLevel(logging.WARNING)  # an empty line at every abort, for telemetry only
    return BreakableGloo(timeout, host) if backend == "gloo" else AbortableNccl(timeout=timeout)


class _Operation:
    """An operation under way: `wait` ends with it, or soon after its process group was aborted or lost a connection."""

    def __init__(self, work: Any, aborted: threading.Event, links: list[tuple[int, int]]) -> None:
        self._work, self._aborted, self._links = work, aborted, links

    def wait(self) -> bool:
        """Wait for the operation.

        Raises:
            RuntimeError: it failed, or was broken off.
        """
        idle_looks = carried = 0  # since a connection was lost
        while True:
            try:
                return bool(self._work.wait(timedelta(seconds=_LOOK_SECONDS)))
            except RuntimeError:
                if self._work.is_completed():
                    return bool(self._work.wait())  # it has failed, or worked just now
            if self._aborted.is_set():
                raise RuntimeError("broken off")
            if not all(_is_open(*link) for link in self._links):
                before, carried = carried, _count_carried(self._links)
                idle_looks = 0 if carried > before else idle_looks + 1
                if idle_looks >= _IDLE_LOOKS:
                    raise RuntimeError("a connection to another member is closed, and nothing comes by others")


class _Abortable(ProcessGroupWrapper):
    @property
    def parent(self) -> dist.ProcessGroup:
        """Return torch's process group.

        Raises:
            RuntimeError: it was aborted. torchft's own property asserts instead: the exchange could not distinguish an
                abort, after which it is repeated, from a defect, which must end the worker.
        """
        if self._pg is None:
            raise RuntimeError("aborted: another rank of this group lost a peer")
        return self._pg


class BreakableGloo(_Abortable, ProcessGroupGloo):
    """A reconfigurable Gloo process group whose `abort` ends operations that wait for a peer, and waits for none.

    Args:
        timeout: of its operations.
        host: see `build_process_group`. The variable GLOO_SOCKET_IFNAME, which names interfaces, wins.
    """

    def __init__(self, timeout: timedelta, host: str = "") -> None:
        super().__init__(timeout=timeout)
        self._host = "" if os.environ.get("GLOO_SOCKET_IFNAME") else host
        self._links: list[tuple[int, int]] = []  # descriptor and inode of the connections to the other members
        self._aborted = threading.Event()  # of the process group in force

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        before, self._aborted = set(own_sockets()), threading.Event()
        try:
            return self._connect(store, rank, world_size)
        finally:
            self._links = [link for link in own_sockets() if link not in before and _is_gloo(*link)]

    def _connect(self, store: Any, rank: int, world_size: int) -> Any:
        if not self._host:
            return super()._create_pg(store, rank, world_size)
        # As torchft builds it, but at an address of our choice. By itself Gloo listens at what this host's own name is
        # resolved to: a loopback address where /etc/hosts says so, as Debian's does, or where nothing does. No group
        # on another host reaches that.
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in the stub
        options._timeout = self._timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        backend = dist.ProcessGroupGloo(store, rank, world_size, options)
        backend._set_sequence_number_for_group()
        kind = dist.ProcessGroup.BackendType.GLOO
        group = dist.ProcessGroup(store, rank, world_size)
        group._set_default_backend(kind)
        for name in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            group._register_backend(torch.device(name), kind, backend)
        return group

    def abort(self, errored: bool = True) -> None:
        """Break off all operations and drop the process group; not `errored`: drop it, nothing is under way."""
        links, self._links = self._links, []
        dropped = [self._pg]
        if errored:
            self._aborted.set()
            for link in links:
                _shut_down(*link)
        super().abort(errored)
        if errored:  # whoever drops it last waits for its operations: a thread that nobody waits for
            call_aside(dropped.clear, "titan_ft_gloo_drop")

    def _wrap_work(self, work: Any, opts: object) -> Any:
        return _Operation(work, self._aborted, self._links)


class _Communicator:
    """A communicator of torch's, which no thread aborts while another thread launches on it.

    torch reads NCCL's pointer under a lock, and launches after releasing the lock. An abort in between would free the
    communicator in use.
    """

    def __init__(self, pg: Any) -> None:
        self.pg = pg
        self.last_work: Any = None  # torch's work of the last operation
        self.is_aborted = False
        self._launch = threading.Lock()

    def allreduce(self, *arguments: Any) -> Any:
        return self._launch_collective(self.pg.allreduce, arguments)

    def allgather(self, *arguments: Any) -> Any:
        return self._launch_collective(self.pg.allgather, arguments)

    def alltoall_base(self, *arguments: Any) -> Any:
        return self._launch_collective(self.pg.alltoall_base, arguments)

    def _launch_collective(self, operation: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        with self._launch:
            if self.is_aborted:
                raise RuntimeError("the communicator is aborted")
            self.last_work = operation(*arguments)
            return self.last_work

    def abort(self, *, errored: bool, aborted: threading.Event | None = None) -> None:
        """Abort the communicator. May be called twice: at the first call NCCL may not have created it yet.

        The last reference must be dropped on a daemon thread: the destructor joins torch's threads.

        Args:
            errored: False if no operation is expected to be under way.
            aborted: set after the abort, before the destructor. The destructor may take longer than a set-up waits,
                while torch's watchdog imports torch._inductor for the stack of a failed operation.
        """
        self.is_aborted = True
        # After this time, abort anyway: such a launch polls for a peer inside torch, and no longer uses NCCL's pointer.
        launched = self._launch.acquire(timeout=_LAUNCH_SECONDS)
        last, self.last_work = self.last_work, None
        try:
            # torch's watchdog reports an aborted operation in its list as a failure: it logs stacks, and has every
            # rank dump its flight record. So let it remove the completed ones first.
            if not errored and last is not None and last.is_completed():
                self.pg._wait_for_pending_works()
            self.pg.abort()
        except RuntimeError:  # NCCL has refused
            logger.exception("a communicator of NCCL cannot be aborted")
        finally:
            if launched:
                self._launch.release()
        if aborted is not None:
            aborted.set()


class AbortableNccl(_Abortable, ProcessGroupNCCL):
    """A reconfigurable NCCL process group: every wait for a lost peer ends in time.

    `deadline` limits a whole exchange. A single operation has no timeout, neither here nor in torch.

    `device.nccl_environment` must be in force: otherwise torch ends the process itself when a peer is lost.

    Attributes:
        rehearse: runs each collective of an exchange once, at full size; called with the communicator and the number
            of members in every set-up.
    """

    def __init__(self, timeout: timedelta) -> None:
        super().__init__(timeout=timeout)
        # torch reads this for each new communicator. torchtitan's 3 ends a process that loses a peer, which is right
        # inside a group. The loss of another group must end no process, and no partial data may pass as a sum.
        # A communicator that the group makes later gets 0 as well (docs/gpu.md, "NCCL between the groups").
        os.environ[device.ASYNC_ERROR_HANDLING] = "0"
        os.environ.update(device.NO_DUMPS)
        self.rehearse: Callable[[Any, int], None] = lambda group, num_members: None
        self._pg: Any
        self._max_setup_seconds = timeout.total_seconds()  # limit of every set-up
        self._expected_setup_seconds = 0.0  # twice the last set-up; 0 before the first one
        self._pg_lock = threading.Lock()  # held to set or clear `_pg`
        self._setup: object | None = None  # the set-up that may set `_pg`; None: ended or aborted
        # See `errored`. Not torchft's `_errored`: a set-up that was given up may still write that one.
        self._failure: Exception | None = None
        self._is_connected = False  # whether `_pg` is connected
        self._last_abort_done = threading.Event()  # of the last connected communicator
        self._last_abort_done.set()  # no abort is pending
        self._deadline_seconds = 0.0  # of the `deadline` in force
        self._deadline_at = math.inf  # by `time.monotonic`

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Build the communicator of a new quorum, and rehearse the exchange with it.

        NCCL connects the members in the first collective, and each of its algorithms in the first collective that uses
        it. An exchange would wait for that, and an abort in the middle of it leaves torch waiting for the end of
        TORCH_NCCL_NONBLOCKING_TIMEOUT (NCCLUtils.hpp, C10D_NCCL_CHECK_TIMEOUT_BASE).

        The limit of a set-up is the larger of `set_timeout`'s value and twice the last set-up, at most the
        constructor's timeout. After a set-up that ran out of time the limit is doubled: a large job finds out what it
        needs.

        Raises:
            RuntimeError: the previous communicator is still being aborted, NCCL reports an error, or this set-up was
                aborted.
            TimeoutError: the set-up took too long.
        """
        self.abort(errored=False)
        # Wait for the old abort. It frees GPU memory, for which CUDA waits for all kernels that run on this GPU: with
        # kernels of the new communicator among them, the abort could wait for a peer.
        if not self._last_abort_done.wait(_ABORT_SECONDS):
            raise RuntimeError("the communicator of the quorum before is still being aborted")
        # Set the fields that `_create_pg` reads. torchft's own `configure` is not called: it installs its communicator
        # even after the set-up was given up.
        self._replica_id, self._quorum_id, self._rank = replica_id, quorum_id, rank
        self._group_rank, self._group_world_size, self._global_ranks = group_rank, group_world_size, global_ranks
        limit = max(self._timeout.total_seconds(), self._expected_setup_seconds)
        began = time.monotonic()
        setup = object()
        connect = partial(create_store_client, store_addr, timeout=self._timeout)
        use_device, where = device.for_thread(), device.exchange_device("nccl")

        def set_up() -> None:
            use_device()
            made: list[_Communicator] = []  # emptied below, so that no frame keeps the communicator alive
            problem: str | None = None
            try:
                self._connect(setup, made, connect, rank, world_size, where)
            except Exception as error:  # noqa: BLE001  # NCCL, torch and its store have many kinds
                problem = str(error).split("\n", 1)[0]
            if problem is not None:
                # The thread that created the communicator always aborts it: an earlier abort may have found nothing in
                # NCCL yet. The error is raised outside of the handler, without the frames of the failed calls. Those
                # hold the communicator, and only gc would free such a cycle: for seconds, on the training thread.
                if made:
                    made.pop().abort(errored=True)
                raise RuntimeError(problem)

        self._setup = setup
        try:
            within(limit, set_up)  # after the limit its thread goes on, and discards its communicator (`_give_up`)
        except TimeoutError:
            self._expected_setup_seconds = min(2 * limit, self._max_setup_seconds)
            self._give_up("not connected in time")
            raise TimeoutError(f"NCCL has not connected the members within {limit:g} s") from None
        except Exception:
            self._give_up("not connected")
            raise
        self._expected_setup_seconds = min(2 * (time.monotonic() - began), self._max_setup_seconds)

    def abort(self, errored: bool = True) -> None:
        """End all operations and drop the communicator. Does not block; the next `configure` waits for the abort.

        A communicator that is being set up is aborted as soon as torch's lock is free, at the latest after
        TORCH_NCCL_NONBLOCKING_TIMEOUT (`NCCLComm::waitReady`).

        Args:
            errored: False if no operation is expected to be under way.
        """
        with self._pg_lock:
            self._setup, pg = None, self._pg
        self._break_off(pg, "aborted", errored=errored)

    @contextlib.contextmanager
    def deadline(self, timeout: timedelta) -> Iterator[None]:
        """Abort the communicator if the block takes longer than `timeout`; operations of other threads end too.

        The watch's thread checks the time. torchft would create three timers for each operation, one of them with an
        event on the GPU, and keep each until it expires: 480 a step at 8B.
        """
        self._deadline_seconds = timeout.total_seconds()
        self._deadline_at = time.monotonic() + self._deadline_seconds
        try:
            yield
        finally:
            self._deadline_at = math.inf

    def errored(self) -> Exception | None:
        """Return why the communicator was aborted. None: it was not, so the results that were read so far are valid.

        Unlike torchft's, this does not synchronize the GPU, which would delay the first bucket until backward ends. The
        error is set before the abort ends any operation.
        """
        return self._failure

    def _run_context(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # see `deadline`

    def _wrap_work(self, work: Any, opts: object) -> Any:
        return work  # torchft's wrapper adds the timers that `deadline` replaces

    def _connect(
        self,
        setup: object,
        made: list[_Communicator],
        connect: Callable[[], Any],
        rank: int,
        world_size: int,
        where: torch.device,
    ) -> None:
        """Create a communicator, set `_pg`, and connect it. Runs on a thread that may outlive its set-up.

        `_pg` is set before the communicator connects, so that `abort` and the watch end a set-up as they end an
        exchange.

        Args:
            made: gets the communicator as soon as there is one.

        Raises:
            RuntimeError: the set-up was aborted, or ran out of time.
        """
        setup_ended = RuntimeError("aborted while it was being set up")
        store = connect()
        if self._setup is not setup:
            raise setup_ended
        made.append(_Communicator(self._create_pg(store, rank, world_size)))
        with self._pg_lock:
            if self._setup is not setup:
                raise setup_ended
            self._pg, self._failure, self._is_connected = made[0], None, False
        if world_size > 1:
            threading.Thread(target=self._watch, args=(made[0],), name="titan_ft_nccl_watch", daemon=True).start()
        # Connect here: torch holds its lock meanwhile (NCCLComm::waitReady), so an abort waits. The first collective
        # would otherwise be launched on a communicator that an abort has freed.
        self._connect_pg(made[0].pg)
        with device.side_stream(where):
            # On the communicator, not on `self`: after a set-up was given up, `self._pg` may be the next one.
            self.rehearse(made[0], world_size)
            ones = torch.ones(1, device=where)
            all_reduce(made[0], ones, self._timeout).wait()
            total = int(ones.item())  # waits for the sum; after an abort the value is arbitrary
        with self._pg_lock:
            if self._pg is not made[0]:
                raise setup_ended
            if total == world_size:
                self._is_connected = True
                return
        raise RuntimeError(f"NCCL has connected {total} of {world_size} members")

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        """Create torchft's process group, not connected yet, with a high-priority stream, few SMs and no timeout.

        Each communicator takes the next of torch's 32 streams of its priority. After 32 quorums that would be a stream
        of FSDP or of a state's copy, and a collective of the group would queue after a sum. Only the exchange uses the
        highest priority (see `device.nccl_environment`).
        """
        from torch.distributed import ProcessGroupNCCL as Backend  # not there on a CPU

        options: Any = Backend.Options(is_high_priority_stream=True)
        options.config.blocking = False
        options.config.max_ctas = _MAX_CTAS
        options._timeout = _NO_TIMEOUT
        if self._global_ranks:
            options.global_ranks_in_group = self._global_ranks
        if self._group_rank and self._group_world_size:  # as in torchft: rank 0 keeps the default name
            number = self._group_rank % self._group_world_size
            options.group_name = f"torchft_quorum_{self._quorum_id}_rank_{number}"
        pg: Any = dist.ProcessGroup(store, rank, world_size)
        pg._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        backend: Any = Backend(store, rank, world_size, options)
        backend._set_sequence_number_for_group()
        pg._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
        return pg

    @staticmethod
    def _connect_pg(pg: Any) -> None:
        where = torch.device("cuda", torch.accelerator.current_device_index())
        pg._get_backend(torch.device("cuda")).eager_connect_single_device(where)

    def _give_up(self, reason: str) -> None:
        """End the set-up: abort its communicator, or have its thread abort one that it creates later."""
        with self._pg_lock:
            self._setup, pg = None, self._pg
            self._failure = RuntimeError(reason)
        self._break_off(pg, reason)

    def _break_off(self, pg: _Communicator | None, reason: str, *, errored: bool = True) -> None:
        """Abort `pg` if it is still `_pg`, on a thread of its own: torch's locks may keep the abort waiting."""
        with self._pg_lock:
            if pg is None or self._pg is not pg:
                return
            self._failure = RuntimeError(reason)
            self._pg = None
            pg.is_aborted = True  # before the thread runs
            aborted = threading.Event()
            if self._is_connected:
                self._last_abort_done = aborted
            self._is_connected = False
        abort = partial(pg.abort, errored=errored, aborted=aborted)
        threading.Thread(target=abort, name="titan_ft_nccl_abort", daemon=True).start()

    def _watch(self, pg: _Communicator) -> None:
        """Abort `pg` when torch reports an error, such as a peer's closed connection, or when the deadline has passed.

        Without an abort the kernels of `pg` would wait for the lost peer for ever.
        """
        backend = pg.pg._get_backend(torch.device("cuda"))
        while self._pg is pg:
            reason = ""
            error = backend.get_error()
            if error == ErrorType.COMM_ERROR:
                reason = "NCCL has lost a member"
            elif error != ErrorType.SUCCESS:  # torch keeps the first error, and hides every later one
                reason = f"torch reports {error.name}"
            elif time.monotonic() > self._deadline_at:
                reason = f"the exchange is not complete after {self._deadline_seconds:g} s"
            if reason:
                logger.warning("the exchange is broken off: %s", reason)
                self._break_off(pg, reason)
                return
            time.sleep(_LOOK_SECONDS)


def _is_gloo(descriptor: int, inode: int) -> bool:
    """Say whether a socket of this process is a connection of Gloo's: those alone have a timeout of their own.

    What another thread opened while the process group was built has none: a fetch of state, a request. Nor has the
    socket on which Gloo listens, which must be spared: Gloo ends the process when that fails.
    """
    with contextlib.suppress(OSError), borrowed_socket(descriptor, inode) as connection:  # gone already
        if connection is not None and connection.proto == socket.IPPROTO_TCP:
            return any(connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL_BYTES))
    return False


def _is_open(descriptor: int, inode: int) -> bool:
    """Say whether a socket of this process is open; Gloo closes those that its peer has closed."""
    try:
        return os.fstat(descriptor).st_ino == inode
    except OSError:
        return False


def _count_carried(links: list[tuple[int, int]]) -> int:
    """Return how many bytes those of these connections that are open have carried, both ways."""
    carried = 0
    for link in links:
        with contextlib.suppress(OSError), borrowed_socket(*link) as connection:
            if connection is not None:
                facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_CARRIED + 16)
                carried += sum(struct.unpack_from("QQ", facts, _TCP_INFO_CARRIED))
    return carried


def _shut_down(descriptor: int, inode: int) -> None:
    """End a connection in both directions; its owner still has to close it."""
    with contextlib.suppress(OSError), borrowed_socket(descriptor, inode) as connection:  # gone already
        if connection is not None:
            connection.shutdown(socket.SHUT_RDWR)
