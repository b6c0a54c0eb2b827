# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The process group between the replica groups, over Gloo or NCCL.

torch's process groups may wait for a lost peer without an end. Here every such wait ends. Each of
the two classes builds one of torch's process groups for each quorum. `Rendezvous` configures and
aborts them. The exchange runs its collectives on them.

**Gloo** has no abort. If a peer is stopped or cannot be reached, an operation waits for its whole
timeout. But Gloo's connections are ordinary sockets of this process. If this module shuts them
down, the operation ends, and the peers that wait for this process notice.

Gloo does not report a lost connection to an operation that is sending. Even if the peer has died,
this operation waits for its whole timeout. So `_Operation.wait` gives up earlier: after an abort,
or after a lost connection if nothing more arrives. The operation itself goes on until it ends, and
may touch its tensors until then.

**NCCL** has an abort and nothing else. Its kernel waits on the GPU for a lost peer until the abort.
The abort may hang, and so may the set-up of a communicator. Both run on threads of their own, with
a time limit.

See docs/gpu.md, "NCCL between the groups", and docs/failures.md.
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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported at run time

from titan_ft import device
from titan_ft.membership.collectives import all_reduce
from titan_ft.system.address import split_address
from titan_ft.system.process import borrowed_socket, own_sockets
from titan_ft.system.threads import call_aside, call_within

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 0.1
"""Pause between two checks for an abort, a lost connection, an error of NCCL or a passed
deadline."""

_IDLE_CHECKS = 3
"""Checks in a row without traffic after a lost connection. During these checks, the last bytes of
the lost member arrive, also those that other members pass on."""

_TIMEVAL_BYTES = 16  # size of struct timeval on 64-bit systems
_TCP_INFO_CARRIED = 120  # offset of the bytes acknowledged and received in tcp_info (linux/tcp.h)
_ABORT_SECONDS = 2.0  # limit of a set-up's wait for the abort of the former communicator
_LAUNCH_SECONDS = 0.2  # limit of an abort's wait for the end of a launch

_NO_TIMEOUT = timedelta(days=365)
"""Limit of an operation in torch. Its default is 10 minutes, whatever the operation's options say.
After that, torch's watchdog reports corrupted data, lets every rank of member 0's group dump its
flight record, and never reports a lost member again."""

_MAX_CTAS = 8
"""Multiprocessors that a kernel of the exchange may hold. The kernel has the highest priority, and
holds them while it waits for the slowest group. NCCL's own number is up to 32: backward would lose
a quarter of an H100. If the variable NCCL_MAX_CTAS is set, its value counts."""


class _Link(NamedTuple):
    """One of Gloo's connections: a socket of this process that this module does not own.

    Attributes:
        descriptor: number of the socket. After Gloo has closed the socket, another file may get
            this number.
        inode: identifies the socket, so such a file is noticed.
    """

    descriptor: int
    inode: int


def build_process_group(backend: str, timeout: timedelta, host: str = "") -> Reconfigurable:
    """Build the process group of a backend, "gloo" or "nccl". It has no members until `configure`.

    Args:
        timeout: limit of a collective.
        host: numeric address at which the other groups reach this host; empty = Gloo chooses.
    """
    if backend == "gloo":
        return BreakableGloo(timeout, host)
    return AbortableNccl(timeout=timeout)


class _Operation:
    """An operation of Gloo, for which `wait` waits no longer than until an abort or a lost peer."""

    def __init__(self, work: Any, aborted: threading.Event, links: list[_Link]) -> None:
        self._work = work
        self._aborted = aborted
        self._links = links

    def wait(self) -> bool:
        """Wait for the operation.

        Raises:
            RuntimeError: the operation failed, or was broken off.
        """
        num_idle_checks = 0  # in a row, since a connection was lost
        num_carried = 0  # bytes at the last check
        while True:
            try:
                return bool(self._work.wait(timedelta(seconds=_CHECK_SECONDS)))
            except RuntimeError:
                if self._work.is_completed():
                    return bool(self._work.wait())  # raises, unless it has just succeeded
            if self._aborted.is_set():
                raise RuntimeError("broken off")
            if all(_is_open(link) for link in self._links):
                continue
            num_carried_before = num_carried
            num_carried = _count_carried_bytes(self._links)
            num_idle_checks += 1
            if num_carried > num_carried_before:
                num_idle_checks = 0
            if num_idle_checks >= _IDLE_CHECKS:
                raise RuntimeError(
                    "a connection to another member is closed, and nothing comes by others",
                )


class Reconfigurable:
    """Holds one of torch's process groups, and builds another one for each quorum.

    Subclasses implement `_create_pg` and `abort`. The quorum thread calls `configure`, the
    exchange's thread starts operations, and any thread may call `abort`. Without a process group,
    each operation raises a RuntimeError.

    Args:
        timeout: limit of a set-up.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._pg: Any = None  # None = not built yet, or aborted
        self._name = ""  # name in torch's log and NCCL's flight records; empty = torch chooses
        self._global_ranks: list[int] = []

    @property
    def parent(self) -> Any:
        """The process group of torch.

        Raises:
            RuntimeError: it is not built yet, or was aborted. After an abort the exchange is
                repeated. So this is no AssertionError, which would end the worker.
        """
        if self._pg is None:
            raise RuntimeError("aborted: another rank of this group lost a peer")
        return self._pg

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of later set-ups."""
        self._timeout = timeout

    def configure(
        self,
        store_addr: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Build the process group of a quorum.

        Args:
            store_addr: host:port/prefix of the store at which the members meet. No other quorum has
                this prefix.
        """
        self.abort(errored=False)
        self._describe(quorum_id, group_rank, group_world_size, global_ranks)
        self._pg = self._create_pg(self._connect_to_store(store_addr), rank, world_size)

    def abort(self, errored: bool = True) -> None:
        """End the operations under way, and drop the process group.

        Args:
            errored: False if no operation is expected to be under way.
        """
        raise NotImplementedError

    def errored(self) -> Exception | None:
        """Return why results are invalid; None = each operation raises its own error."""
        return None

    def allreduce(self, *arguments: Any) -> Any:
        return self._wrap_work(self.parent.allreduce(*arguments))

    def allgather(self, *arguments: Any) -> Any:
        return self._wrap_work(self.parent.allgather(*arguments))

    def alltoall_base(self, *arguments: Any) -> Any:
        return self._wrap_work(self.parent.alltoall_base(*arguments))

    def _wrap_work(self, work: Any) -> Any:
        return work

    def _describe(
        self,
        quorum_id: int | None,
        group_rank: int | None,
        group_world_size: int | None,
        global_ranks: list[int] | None,
    ) -> None:
        """Set the names by which torch reports this process group."""
        self._global_ranks = global_ranks or []
        self._name = ""
        if group_rank and group_world_size:  # rank 0 keeps torch's name
            self._name = f"quorum_{quorum_id}_rank_{group_rank % group_world_size}"

    def _connect_to_store(self, store_addr: str) -> Any:
        server, _, prefix = store_addr.partition("/")
        host, port = split_address(server)
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=self._timeout)
        return PrefixStore(prefix, store)

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        raise NotImplementedError


class BreakableGloo(Reconfigurable):
    """A reconfigurable Gloo process group whose `abort` ends the operations under way at once.

    The quorum thread configures it. The exchange's thread starts operations. Any thread may call
    `abort`, which waits for nothing.

    Args:
        timeout: limit of an operation.
        host: see `build_process_group`. If the variable GLOO_SOCKET_IFNAME names interfaces, these
            count instead.
    """

    def __init__(self, timeout: timedelta, host: str = "") -> None:
        super().__init__(timeout)
        self._host = "" if os.environ.get("GLOO_SOCKET_IFNAME") else host
        self._links: list[_Link] = []  # connections to the other members
        self._aborted = threading.Event()  # of the current process group

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        before = _list_sockets()
        self._aborted = threading.Event()
        try:
            return self._connect(store, rank, world_size)
        finally:
            # Even after an error: an abort must find the connections that were made.
            added = [link for link in _list_sockets() if link not in before]
            self._links = [link for link in added if _is_gloo(link)]

    def _connect(self, store: Any, rank: int, world_size: int) -> Any:
        backend: Any
        if self._host:
            # Without this option, Gloo listens at the address of this host's own name. If the name
            # is unknown, or if /etc/hosts maps it to a loopback address as on Debian, no group on
            # another host could reach Gloo.
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in the stub
            options._timeout = self._timeout
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
            backend = dist.ProcessGroupGloo(store, rank, world_size, options)
        else:
            backend = dist.ProcessGroupGloo(store, rank, world_size, self._timeout)
        backend._set_sequence_number_for_group()
        kind = dist.ProcessGroup.BackendType.GLOO
        group = dist.ProcessGroup(store, rank, world_size)
        group._set_default_backend(kind)
        device_types = ["cpu"]
        if torch.cuda.is_available():
            device_types.append("cuda")
        for name in device_types:
            group._register_backend(torch.device(name), kind, backend)
        return group

    def abort(self, errored: bool = True) -> None:
        """Break off all operations, and drop the process group.

        Args:
            errored: False if no operation is under way; then the process group is only dropped.
        """
        links, self._links = self._links, []
        last_reference = [self._pg]
        self._pg = None
        if not errored:
            return
        self._aborted.set()
        for link in links:
            _shut_down(link)
        # The last reference blocks until its operations end, so a daemon thread drops it.
        call_aside(last_reference.clear, "titan_ft_gloo_drop")

    def _wrap_work(self, work: Any) -> Any:
        return _Operation(work, self._aborted, self._links)


class _Communicator:
    """One of torch's communicators. No thread aborts it while another thread launches on it.

    torch reads NCCL's pointer under a lock, and launches after releasing the lock. An abort in
    between would free the communicator in use.
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
        """Abort the communicator. A second call may be needed.

        At the first call, NCCL may not have created the communicator yet. The last reference must
        be dropped on a daemon thread, because the destructor joins torch's threads.

        Args:
            errored: False if no operation is expected to be under way.
            aborted: set after the abort, before the destructor. The destructor may take longer than
                a set-up waits, while torch's watchdog imports torch._inductor for the stack of a
                failed operation.
        """
        self.is_aborted = True
        # After this time, abort anyway: a launch that takes longer polls for a peer inside torch,
        # and no longer uses NCCL's pointer.
        has_lock = self._launch.acquire(timeout=_LAUNCH_SECONDS)
        last_work, self.last_work = self.last_work, None
        try:
            # torch's watchdog reports each aborted operation in its list as a failure: it logs
            # stacks, and has every rank dump its flight record. So let it remove the completed
            # operations first.
            is_idle = not errored and last_work is not None and last_work.is_completed()
            if is_idle:
                self.pg._wait_for_pending_works()
            self.pg.abort()
        except RuntimeError:
            logger.exception("a communicator of NCCL cannot be aborted")
        finally:
            if has_lock:
                self._launch.release()
        if aborted is not None:
            aborted.set()


class AbortableNccl(Reconfigurable):
    """A reconfigurable NCCL process group. Every wait for a lost peer ends in time.

    The quorum thread calls `configure`. The exchange's thread starts operations within `deadline`,
    which limits the whole exchange. A single operation has no timeout, neither here nor in torch.
    Any thread may call `abort`.

    `device.nccl_environment` must be in force. Otherwise torch ends the process when a peer is
    lost.

    Attributes:
        rehearse: runs each collective of an exchange once, at full size. Every set-up calls it with
            the communicator and the number of members.
    """

    def __init__(self, timeout: timedelta) -> None:
        super().__init__(timeout)
        # torch reads this variable for each new communicator. torchtitan's value 3 ends a process
        # that loses a peer, which is right inside a group. The loss of another group must end no
        # process, and no partial data may pass as a sum. A communicator that the group makes later
        # gets 0 as well (docs/gpu.md, "NCCL between the groups").
        os.environ[device.ASYNC_ERROR_HANDLING] = "0"
        os.environ.update(device.NO_DUMPS)
        self.rehearse: Callable[[Any, int], None] = lambda group, num_members: None
        self._max_setup_seconds = timeout.total_seconds()  # limit of every set-up
        self._expected_setup_seconds = 0.0  # twice the last set-up; 0 before the first one
        self._pg_lock = threading.Lock()  # held to set or clear `_pg`
        self._setup: object | None = None  # the set-up that may set `_pg`; None = ended or aborted
        self._failure: Exception | None = None  # see `errored`
        self._is_connected = False  # whether `_pg` is connected
        self._last_abort_done = threading.Event()  # of the last connected communicator
        self._last_abort_done.set()  # no abort is pending
        self._deadline_seconds = 0.0  # of the `deadline` in force
        self._deadline_at = math.inf  # by `time.monotonic`

    def configure(
        self,
        store_addr: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Build the communicator of a new quorum, and rehearse the exchange with it.

        NCCL connects the members in the first collective, and each of its algorithms in the first
        collective that uses the algorithm. Without the rehearsal an exchange would wait for that.
        An abort during that time leaves torch waiting for the end of TORCH_NCCL_NONBLOCKING_TIMEOUT
        (NCCLUtils.hpp, C10D_NCCL_CHECK_TIMEOUT_BASE).

        The limit of a set-up is the larger of `set_timeout`'s value and twice the last set-up, at
        most the constructor's timeout. After a set-up that ran out of time the limit is doubled, so
        that a large job finds the time that it needs.

        Raises:
            RuntimeError: the previous communicator is still being aborted, NCCL reports an error,
                or this set-up was aborted.
            TimeoutError: the set-up took too long.
        """
        self.abort(errored=False)
        # Wait for the old abort. It frees GPU memory, for which CUDA waits for all kernels on this
        # GPU. If kernels of the new communicator ran already, the abort could wait for a peer.
        if not self._last_abort_done.wait(_ABORT_SECONDS):
            raise RuntimeError("the communicator of the quorum before is still being aborted")
        # The base's `configure` is not called: its communicator would be installed even after the
        # set-up was given up.
        self._describe(quorum_id, group_rank, group_world_size, global_ranks)
        limit = max(self._timeout.total_seconds(), self._expected_setup_seconds)
        started = time.monotonic()
        setup = object()
        connect_to_store = partial(self._connect_to_store, store_addr)
        use_device = device.thread_initializer()
        where = device.exchange_device("nccl")

        def set_up() -> None:
            use_device()
            # A list, emptied below, so that no frame keeps the communicator alive.
            made: list[_Communicator] = []
            problem: str | None = None
            try:
                self._connect(setup, made, connect_to_store, rank, world_size, where)
            except Exception as error:  # noqa: BLE001  # NCCL, torch and its store have many kinds
                problem = str(error).split("\n", 1)[0]
            if problem is not None:
                # The thread that created the communicator always aborts it: an earlier abort may
                # have found nothing in NCCL yet. The error is raised outside the handler, without
                # the frames of the failed calls. Those frames hold the communicator in a cycle,
                # which only gc would free: for seconds, on the training thread.
                if made:
                    made.pop().abort(errored=True)
                raise RuntimeError(problem)

        self._setup = setup
        try:
            # After the limit the thread goes on, and discards its communicator (see `_give_up`).
            call_within(limit, set_up)
        except TimeoutError:
            self._expected_setup_seconds = min(2 * limit, self._max_setup_seconds)
            self._give_up("not connected in time")
            raise TimeoutError(f"NCCL has not connected the members within {limit:g} s") from None
        except Exception:
            self._give_up("not connected")
            raise
        self._expected_setup_seconds = min(
            2 * (time.monotonic() - started),
            self._max_setup_seconds,
        )

    def abort(self, errored: bool = True) -> None:
        """End all operations and drop the communicator, without blocking.

        The next `configure` waits for the abort. A communicator that is being set up is aborted as
        soon as torch's lock is free, at the latest after TORCH_NCCL_NONBLOCKING_TIMEOUT
        (`NCCLComm::waitReady`).

        Args:
            errored: False if no operation is expected to be under way.
        """
        with self._pg_lock:
            self._setup, pg = None, self._pg
        self._break_off(pg, "aborted", errored=errored)

    @contextlib.contextmanager
    def deadline(self, timeout: timedelta) -> Iterator[None]:
        """Abort the communicator if the block takes longer than `timeout`.

        Operations of other threads end as well. The watch's thread checks the time. With a timer
        and an event on the GPU for each operation, there would be 160 of them in a step at 8B.
        """
        self._deadline_seconds = timeout.total_seconds()
        self._deadline_at = time.monotonic() + self._deadline_seconds
        try:
            yield
        finally:
            self._deadline_at = math.inf

    def errored(self) -> Exception | None:
        """Return why the communicator was aborted; None = it was not, so all results are valid.

        The GPU is not synchronized for this, because that would delay the first bucket until
        backward ends. The error is set before the abort ends any operation.
        """
        return self._failure

    def _connect(
        self,
        setup: object,
        made: list[_Communicator],
        connect_to_store: Callable[[], Any],
        rank: int,
        world_size: int,
        where: torch.device,
    ) -> None:
        """Create a communicator, set `_pg`, and connect it.

        It runs on a thread that may outlive its set-up.

        `_pg` is set before the communicator connects, so that `abort` and the watch end a set-up in
        the same way as an exchange.

        Args:
            made: receives the communicator as soon as it exists.

        Raises:
            RuntimeError: the set-up was aborted, or ran out of time.
        """
        setup_ended = RuntimeError("aborted while it was being set up")
        store = connect_to_store()
        if self._setup is not setup:
            raise setup_ended
        made.append(_Communicator(self._create_pg(store, rank, world_size)))
        with self._pg_lock:
            if self._setup is not setup:
                raise setup_ended
            self._pg = made[0]
            self._failure = None
            self._is_connected = False
        if world_size > 1:
            watch = partial(self._watch, made[0])
            threading.Thread(target=watch, name="titan_ft_nccl_watch", daemon=True).start()
        # Connect here: torch holds its lock meanwhile (NCCLComm::waitReady), so an abort waits.
        # Otherwise an abort could free the communicator on which the first collective is launched.
        self._connect_pg(made[0].pg)
        with device.side_stream(where):
            # On the communicator, not on `self`: if this set-up was given up, `self._pg` may
            # already be the communicator of the next one.
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
        """Create torch's process group, which is not connected yet.

        It has a stream of the highest priority, few multiprocessors and no timeout. Each
        communicator takes the next of torch's 32 streams of its priority. At normal priority, that
        would be a stream of FSDP or of a state's copy after 32 quorums, and a collective of the
        group would queue after a sum. Only the exchange uses the highest priority (see
        `device.nccl_environment`).
        """
        from torch.distributed import ProcessGroupNCCL as Backend  # not there on a CPU

        options: Any = Backend.Options(is_high_priority_stream=True)
        options.config.blocking = False
        options.config.max_ctas = _MAX_CTAS
        options._timeout = _NO_TIMEOUT
        if self._global_ranks:
            options.global_ranks_in_group = self._global_ranks
        if self._name:
            options.group_name = self._name
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
        """End the set-up: abort its communicator, or let its thread discard a later one."""
        with self._pg_lock:
            self._setup, pg = None, self._pg
            self._failure = RuntimeError(reason)
        self._break_off(pg, reason)

    def _break_off(self, pg: _Communicator | None, reason: str, *, errored: bool = True) -> None:
        """Abort `pg` if it is still `_pg`.

        On a thread of its own, because torch's locks may keep the abort waiting.
        """
        with self._pg_lock:
            if pg is None or self._pg is not pg:
                return
            self._failure = RuntimeError(reason)
            self._pg = None
            pg.is_aborted = True  # at once: the thread may run later
            aborted = threading.Event()
            if self._is_connected:
                self._last_abort_done = aborted
            self._is_connected = False
        abort = partial(pg.abort, errored=errored, aborted=aborted)
        threading.Thread(target=abort, name="titan_ft_nccl_abort", daemon=True).start()

    def _watch(self, pg: _Communicator) -> None:
        """Abort `pg` when torch reports an error or the deadline has passed; on its own thread.

        torch reports a peer's closed connection, for example. Without an abort the kernels of `pg`
        would wait for the lost peer for ever.
        """
        backend = pg.pg._get_backend(torch.device("cuda"))
        while self._pg is pg:
            reason = ""
            error = backend.get_error()
            if error == ErrorType.COMM_ERROR:
                reason = "NCCL has lost a member"
            elif error != ErrorType.SUCCESS:  # torch keeps the first error, and hides later ones
                reason = f"torch reports {error.name}"
            elif time.monotonic() > self._deadline_at:
                reason = f"the exchange is not complete after {self._deadline_seconds:g} s"
            if reason:
                logger.warning("the exchange is broken off: %s", reason)
                self._break_off(pg, reason)
                return
            time.sleep(_CHECK_SECONDS)


def _list_sockets() -> list[_Link]:
    return [_Link(*found) for found in own_sockets()]


def _is_gloo(link: _Link) -> bool:
    """True if a socket of this process is a connection of Gloo.

    Only Gloo's connections have a receive timeout. Sockets that another thread opens meanwhile have
    none: a fetch of state, a request. Gloo's listening socket has none either, and must be spared:
    Gloo ends the process if it fails.
    """
    with contextlib.suppress(OSError), borrowed_socket(*link) as connection:
        if connection is None or connection.proto != socket.IPPROTO_TCP:
            return False
        timeval = connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL_BYTES)
        return any(timeval)
    return False  # closed meanwhile


def _is_open(link: _Link) -> bool:
    """True if the socket is open. Gloo closes a socket whose peer has closed the connection."""
    try:
        return os.fstat(link.descriptor).st_ino == link.inode
    except OSError:
        return False


def _count_carried_bytes(links: list[_Link]) -> int:
    """Return the bytes that the open connections have carried, in both directions."""
    num_bytes = 0
    for link in links:
        with (
            contextlib.suppress(OSError),  # closed meanwhile
            borrowed_socket(*link) as connection,
        ):
            if connection is not None:
                size = _TCP_INFO_CARRIED + 16
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
                num_acknowledged, num_received = struct.unpack_from("QQ", info, _TCP_INFO_CARRIED)
                num_bytes += num_acknowledged + num_received
    return num_bytes


def _shut_down(link: _Link) -> None:
    """End a connection in both directions. Gloo still has to close its socket."""
    with contextlib.suppress(OSError), borrowed_socket(*link) as connection:
        if connection is not None:
            connection.shutdown(socket.SHUT_RDWR)
