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
from torchft.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL, create_store_client

from titan_ft import device
from titan_ft.replica.collectives import all_reduce
from titan_ft.replica.reach import within
from titan_ft.run.process import borrowed_socket, own_sockets

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


class BreakableGloo(ProcessGroupGloo):
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
            threading.Thread(target=dropped.clear, name="titan_ft_gloo_drop", daemon=True).start()

    def _wrap_work(self, work: Any, opts: object) -> Any:
        return _Operation(work, self._aborted, self._links)


class _Communicator:
    """A communicator of torch's that is launched on, or aborted, but not both at once.

    torch takes NCCL's pointer under a lock, and launches without it: an abort in between frees what the launch uses.
    """

    def __init__(self, pg: Any) -> None:
        self.pg = pg
        self.last: Any = None  # torch's work of the last operation
        self.over = False
        self._launch = threading.Lock()

    def allreduce(self, *arguments: Any) -> Any:
        return self._begin(self.pg.allreduce, arguments)

    def allgather(self, *arguments: Any) -> Any:
        return self._begin(self.pg.allgather, arguments)

    def alltoall_base(self, *arguments: Any) -> Any:
        return self._begin(self.pg.alltoall_base, arguments)

    def _begin(self, operation: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        with self._launch:
            if self.over:
                raise RuntimeError("the communicator is aborted")
            self.last = operation(*arguments)
            return self.last

    def abort(self, *, errored: bool, aborted: threading.Event | None = None) -> None:
        """Abort it, again if need be: NCCL may have made it only after the first abort.

        The caller drops it on a thread that nobody waits for: its end waits for torch's threads.

        Args:
            errored: False if no operation is expected to be under way.
            aborted: set when the communicator is aborted. Not when it is dropped: torch's watchdog may first import
                torch._inductor, for the stack of a failed operation, which takes longer than a set-up waits.
        """
        self.over = True
        # A launch that takes longer waits for a peer, in torch's poll: NCCL's pointer is in use no more.
        launched = self._launch.acquire(timeout=_LAUNCH_SECONDS)
        last, self.last = self.last, None
        try:
            # torch's watchdog takes the abort for an error of an operation that it still has in its list: it logs
            # stacks, and has every rank dump its flight record.
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


class AbortableNccl(ProcessGroupNCCL):
    """A reconfigurable NCCL process group: every wait for a lost peer ends in time.

    `deadline` bounds all operations together. A single operation has no time of its own, neither here nor in torch.

    `device.nccl_environment` must be in force: otherwise torch ends the process itself when a peer is lost.

    Attributes:
        rehearse: makes each collective that will be in use once, as large as it will be; part of every set-up. It gets
            what to call for collectives and the number of members.
    """

    def __init__(self, timeout: timedelta) -> None:
        super().__init__(timeout=timeout)
        # Read whenever a communicator is made. torchtitan has set it to 3 for those of the group: whoever loses a peer
        # there ends, as its group must. A lost group must end nobody, and nobody may take what is left for a sum.
        os.environ[device.ASYNC_ERROR_HANDLING] = "0"
        os.environ.update(device.NO_DUMPS)
        self.rehearse: Callable[[Any, int], None] = lambda group, num_members: None
        self._pg: Any
        self._longest = timeout.total_seconds()  # that the set-up of a communicator may ever take
        self._patience = 0.0  # seconds that it may take, as far as this was found out
        self._swap = threading.Lock()  # held to put `_pg` in force, or to take it away
        self._attempt: object | None = None  # the set-up that may put one in force; None = over, or aborted
        self._failure: Exception | None = None  # see `errored`; torchft's own is also written by a set-up that is over
        self._works = False  # whether the communicator in force has been connected
        self._aborted = threading.Event()  # set when the last communicator that worked has been aborted
        self._aborted.set()
        self._allowed, self._due = 0.0, math.inf  # seconds of the `deadline` in force, and when they are over

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

        The set-up may take the timeout that is set, or twice what the last one took. A set-up that ran out of time may
        take twice that the next time: a job so large that it needs longer finds this out by itself.

        Raises:
            RuntimeError: the one before cannot be aborted, NCCL has an error, or this one was aborted meanwhile.
            TimeoutError: it took too long.
        """
        self.abort(errored=False)
        # CUDA frees the memory of the one before after all that runs on this GPU, kernels of the new one included.
        if not self._aborted.wait(_ABORT_SECONDS):
            raise RuntimeError("the communicator of the quorum before is still being aborted")
        # As torchft's does, whose set-up reads these. But that one puts in force whatever it has made, whenever it has.
        self._replica_id, self._quorum_id, self._rank = replica_id, quorum_id, rank
        self._group_rank, self._group_world_size, self._global_ranks = group_rank, group_world_size, global_ranks
        limit, began, attempt = max(self._timeout.total_seconds(), self._patience), time.monotonic(), object()
        connect = partial(create_store_client, store_addr, timeout=self._timeout)
        use_device, where = device.for_thread(), device.exchange_device("nccl")

        def set_up() -> None:
            use_device()
            made: list[_Communicator] = []
            problem: str | None = None
            try:
                self._connect(attempt, made, connect, rank, world_size, where)
            except Exception as error:  # noqa: BLE001  # NCCL, torch and its store have many kinds
                problem = str(error).split("\n", 1)[0]
            if problem is not None:
                # On every path, by the thread that made it: an abort from elsewhere may have come before NCCL had
                # anything to abort. Raised outside of the handler, without the frames of the failed calls: they hold
                # the communicator, and only gc would free such a cycle, for seconds, on the training thread.
                if made:
                    made.pop().abort(errored=True)
                raise RuntimeError(problem)

        self._attempt = attempt
        try:
            within(limit, set_up)
        except TimeoutError:
            self._patience = min(2 * limit, self._longest)
            self._give_up("not connected in time")
            raise TimeoutError(f"NCCL has not connected the members within {limit:g} s") from None
        except Exception:
            self._give_up("not connected")
            raise
        self._patience = min(2 * (time.monotonic() - began), self._longest)

    def abort(self, errored: bool = True) -> None:
        """End all operations and drop the communicator; waits for nothing, which `configure` does.

        A communicator that is being set up is aborted as soon as torch's lock is free, at the latest after
        TORCH_NCCL_NONBLOCKING_TIMEOUT (`NCCLComm::waitReady`).

        Args:
            errored: False if no operation is expected to be under way.
        """
        with self._swap:
            self._attempt, pg = None, self._pg
        self._break_off(pg, "aborted", errored=errored)

    @contextlib.contextmanager
    def deadline(self, timeout: timedelta) -> Iterator[None]:
        """Break off the communicator in force if what follows, on this thread, takes longer.

        Looked at by the thread that watches it anyway. torchft sets three timers for each operation, one of them with
        an event on the GPU, and kept until its time is over: 480 a step at 8B.
        """
        self._allowed = timeout.total_seconds()
        self._due = time.monotonic() + self._allowed
        try:
            yield
        finally:
            self._due = math.inf

    def errored(self) -> Exception | None:
        """Return why the communicator was aborted; None if it was not, and what the host has read of it is sound.

        torchft waits for the whole GPU first: backward would be over before the first bucket is sent. The error is
        there before any operation ends by it.
        """
        return self._failure

    def _run_context(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # see `deadline`

    def _wrap_work(self, work: Any, opts: object) -> Any:
        return work

    def _connect(
        self,
        attempt: object,
        made: list[_Communicator],
        connect: Callable[[], Any],
        rank: int,
        world_size: int,
        where: torch.device,
    ) -> None:
        """Make a communicator, put it in force and use it; on a thread whose set-up may be over before it is done.

        In force before it connects: `abort` and the watch end a set-up as they end an exchange.

        Args:
            made: gets the communicator as soon as there is one.

        Raises:
            RuntimeError: the set-up is over.
        """
        over = RuntimeError("aborted while it was being set up")
        store = connect()
        if self._attempt is not attempt:
            raise over
        made.append(_Communicator(self._create_pg(store, rank, world_size)))
        with self._swap:
            if self._attempt is not attempt:
                raise over
            self._pg, self._failure, self._works = made[0], None, False
        if world_size > 1:
            threading.Thread(target=self._watch, args=(made[0],), name="titan_ft_nccl_watch", daemon=True).start()
        # Waits with torch's lock (NCCLComm::waitReady), so that an abort comes after it. If it were left to the first
        # collective, that one would be launched on the communicator that the abort has freed meanwhile.
        self._connect_pg(made[0].pg)
        with device.side_stream(where):
            # Not by this object's methods: a set-up that is over must not send on the communicator of another one.
            self.rehearse(made[0], world_size)
            ones = torch.ones(1, device=where)
            all_reduce(made[0], ones, self._timeout).wait()
            total = int(ones.item())  # the host waits for all of it; an abort leaves anything
        with self._swap:
            if self._pg is not made[0]:
                raise over
            if total == world_size:
                self._works = True
                return
        raise RuntimeError(f"NCCL has connected {total} of {world_size} members")

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        """Make what torchft makes, not connected yet, with a stream of high priority, a bound of SMs and no timeout.

        Each communicator takes a stream of torch's pool, 32 for a priority, in turn: after so many quorums that of the
        sums would be one that FSDP or a copy of the state has, and a collective of the group would wait behind a sum.
        Nobody else takes those of the highest priority (see `device.nccl_environment`).
        """
        from torch.distributed import ProcessGroupNCCL as Backend  # not there on a CPU

        options: Any = Backend.Options(is_high_priority_stream=True)
        options.config.blocking = False
        options.config.max_ctas = _MAX_CTAS
        options._timeout = _NO_TIMEOUT
        if self._global_ranks:
            options.global_ranks_in_group = self._global_ranks
        if self._group_rank and self._group_world_size:
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
        """End the set-up under way: what it has made is aborted, and what it will make too."""
        with self._swap:
            self._attempt, pg = None, self._pg
            self._failure = RuntimeError(reason)
        self._break_off(pg, reason)

    def _break_off(self, pg: _Communicator | None, reason: str, *, errored: bool = True) -> None:
        """Abort `pg` if it is the one in force, on a thread of its own: torch's locks may keep it waiting."""
        with self._swap:
            if pg is None or self._pg is not pg:
                return
            self._failure = RuntimeError(reason)
            self._pg = None
            pg.over = True  # before the thread runs
            aborted = threading.Event()
            if self._works:
                self._aborted = aborted
            self._works = False
        abort = partial(pg.abort, errored=errored, aborted=aborted)
        threading.Thread(target=abort, name="titan_ft_nccl_abort", daemon=True).start()

    def _watch(self, pg: _Communicator) -> None:
        """Abort `pg` when its kernel would go on waiting.

        That is when torch has an error of it, as where a connection of NCCL's was closed, or when a `deadline` is over.
        """
        backend = pg.pg._get_backend(torch.device("cuda"))
        while self._pg is pg:
            reason = ""
            error = backend.get_error()
            if error == ErrorType.COMM_ERROR:
                reason = "NCCL has lost a member"
            elif error != ErrorType.SUCCESS:  # torch keeps the first error, and hides every later one
                reason = f"torch reports {error.name}"
            elif time.monotonic() > self._due:
                reason = f"the exchange is not complete after {self._allowed:g} s"
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
