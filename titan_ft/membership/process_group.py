# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The process group between the replica groups, over Gloo or NCCL.

torch's process groups may wait for a lost peer without an end, and their members never change. The
two classes here solve both problems. `BreakableGloo` and `AbortableNccl` build one of torch's
process groups for each quorum (`configure`), and end all waits for a lost peer (`abort`).

Callers and threads: `Rendezvous` calls `configure` on the quorum thread. The exchange's thread
(`Flight`) starts collectives. Any thread may call `abort`. After an abort, each collective raises a
RuntimeError until the next `configure`.

**Gloo** has no abort. If a peer is stopped or cannot be reached, an operation waits for its whole
timeout. But Gloo's connections are ordinary sockets of this process, so this module can shut them
down. Then the operations under way end with an error, on this host and on the peers.

There is one exception: Gloo does not report a closed connection to an operation that is sending.
Even if the peer has died, this operation waits for its whole timeout. So `_GlooOperation.wait`
gives the operation up in two cases: after an abort, and if a connection is closed and the others
carry no more bytes. The operation itself continues inside Gloo until its timeout, and may touch its
tensors until then.

**NCCL** has an abort, but reports no lost peer to the host: its kernel waits on the GPU until the
abort. The abort may hang, and so may the set-up of a communicator. Both run on threads of their
own, with a time limit.

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
"""Pause between two checks whether to give a wait up: because of an abort, a closed connection, an
error of NCCL, or a deadline."""

_IDLE_CHECKS = 3
"""After a closed connection, a wait ends when so many checks in a row find no traffic on the other
connections. The last bytes of the lost member may still arrive during these checks. Other members
pass some of them on."""

_TIMEVAL_BYTES = 16  # size of struct timeval on 64-bit systems
# Offset of the counts of acknowledged and received bytes in struct tcp_info (linux/tcp.h).
_TCP_INFO_BYTES_OFFSET = 120
_MAX_ABORT_WAIT_SECONDS = 2.0  # how long a set-up waits for the abort of the former communicator
_MAX_LAUNCH_WAIT_SECONDS = 0.2  # how long an abort waits for the end of a launch

_NO_TIMEOUT = timedelta(days=365)
"""Timeout of NCCL operations, in effect none. torch ignores the timeout in an operation's options,
and its default is 10 minutes. An operation that takes longer has three bad effects: torch's
watchdog reports corrupted data, every rank of member 0's group dumps its flight record, and the
watchdog never reports a lost member again."""

_MAX_CTAS = 8
"""Limit of the multiprocessors that a kernel of the exchange may hold. The kernel has the highest
priority, and holds them while it waits for the slowest group. NCCL itself takes up to 32, a quarter
of an H100, which the backward pass could not use meanwhile. The variable NCCL_MAX_CTAS overrides
this value."""


class _GlooConnection(NamedTuple):
    """One of Gloo's connections: a socket of this process. Gloo owns it, and may close it any time.

    Attributes:
        descriptor: number of the socket's file descriptor. After Gloo has closed the socket,
            another file may get this number.
        inode: identifies the socket. If the descriptor has another inode now, the socket is closed.
    """

    descriptor: int
    inode: int


def build_process_group(
    backend: str,
    timeout: timedelta,
    host: str = "",
) -> ReconfigurableProcessGroup:
    """Build the process group of a backend, "gloo" or "nccl". It has no members until `configure`.

    Args:
        timeout: limit of a collective.
        host: numeric address at which the other groups reach this host; empty = Gloo chooses.
    """
    if backend == "gloo":
        return BreakableGloo(timeout, host)
    return AbortableNccl(timeout=timeout)


class _GlooOperation:
    """An operation of Gloo whose `wait` ends after an abort or after the loss of a peer.

    Args:
        work: torch's object for the operation.
        aborted: set by `BreakableGloo.abort`.
        connections: Gloo's connections to the other members.
    """

    def __init__(
        self,
        work: Any,
        aborted: threading.Event,
        connections: list[_GlooConnection],
    ) -> None:
        self._work = work
        self._aborted = aborted
        self._connections = connections

    def wait(self) -> bool:
        """Wait for the operation.

        Raises:
            RuntimeError: the operation failed, or the wait for it was given up.
        """
        num_idle_checks = 0  # checks in a row without traffic, after a closed connection
        num_bytes = 0  # number of bytes that the connections had carried at the last check
        while True:
            try:
                return bool(self._work.wait(timedelta(seconds=_CHECK_SECONDS)))
            except RuntimeError:
                # torch raises this error if the time is over, and also if the operation failed.
                if self._work.is_completed():
                    # The operation has ended: this raises its error. It returns if the operation
                    # has succeeded right after the wait above.
                    return bool(self._work.wait())
            if self._aborted.is_set():
                raise RuntimeError("broken off")
            if all(_is_open(connection) for connection in self._connections):
                continue
            # A peer has closed its connection, or has died. The operation may still succeed with
            # bytes that are on their way.
            num_bytes_before = num_bytes
            num_bytes = _count_bytes(self._connections)
            num_idle_checks += 1
            if num_bytes > num_bytes_before:
                num_idle_checks = 0
            if num_idle_checks >= _IDLE_CHECKS:
                raise RuntimeError(
                    "a connection to another member is closed, and nothing comes by others",
                )


class ReconfigurableProcessGroup:
    """Holds one of torch's process groups, and builds a new one for each quorum.

    Subclasses implement `_create_pg` and `abort`. See this module's docstring for the threads. The
    collectives have the names and arguments of torch's ProcessGroup.

    Args:
        timeout: limit of a set-up.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._pg: Any = None  # None = not built yet, or aborted
        # Name in torch's log and in NCCL's flight records; empty = torch chooses a name.
        self._name = ""
        self._global_ranks: list[int] = []

    @property
    def current_group(self) -> Any:
        """The process group of the current quorum.

        Raises:
            RuntimeError: it is not built yet, or was aborted.
        """
        if self._pg is None:
            # No AssertionError, which would end the worker: after an abort the exchange is
            # repeated.
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
            store_addr: host:port/prefix of the store in which the members publish their addresses.
                No other quorum has this prefix.
            rank: this member's number in the quorum.
            world_size: number of members in the quorum.
            quorum_id, group_rank, group_world_size: for the name in torch's log.
            global_ranks: ranks of the members in the whole job, for NCCL's flight records.
        """
        self.abort(errored=False)
        self._set_names(quorum_id, group_rank, group_world_size, global_ranks)
        self._pg = self._create_pg(self._connect_to_store(store_addr), rank, world_size)

    def abort(self, errored: bool = True) -> None:
        """End the operations under way, and drop the process group.

        Args:
            errored: False if the caller only replaces the process group, and expects no operation
                to be under way.
        """
        raise NotImplementedError

    def errored(self) -> Exception | None:
        """Return why the results of the exchange are invalid; None = they are valid.

        With Gloo it is always None, because each operation raises its own error.
        """
        return None

    def allreduce(self, *arguments: Any) -> Any:
        return self._wrap_work(self.current_group.allreduce(*arguments))

    def allgather(self, *arguments: Any) -> Any:
        return self._wrap_work(self.current_group.allgather(*arguments))

    def alltoall_base(self, *arguments: Any) -> Any:
        return self._wrap_work(self.current_group.alltoall_base(*arguments))

    def _wrap_work(self, work: Any) -> Any:
        return work

    def _set_names(
        self,
        quorum_id: int | None,
        group_rank: int | None,
        group_world_size: int | None,
        global_ranks: list[int] | None,
    ) -> None:
        """Set the names by which torch reports this process group."""
        self._global_ranks = global_ranks or []
        self._name = ""
        if group_rank and group_world_size:  # Rank 0 keeps the name that torch chooses.
            self._name = f"quorum_{quorum_id}_rank_{group_rank % group_world_size}"

    def _connect_to_store(self, store_addr: str) -> Any:
        server, _, prefix = store_addr.partition("/")
        host, port = split_address(server)
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=self._timeout)
        return PrefixStore(prefix, store)

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        raise NotImplementedError


class BreakableGloo(ReconfigurableProcessGroup):
    """A Gloo process group whose `abort` ends the operations under way at once.

    `abort` does not wait for their end.

    Args:
        timeout: limit of an operation.
        host: see `build_process_group`. The variable GLOO_SOCKET_IFNAME overrides it.
    """

    def __init__(self, timeout: timedelta, host: str = "") -> None:
        super().__init__(timeout)
        self._host = host
        if os.environ.get("GLOO_SOCKET_IFNAME"):
            self._host = ""
        self._connections: list[_GlooConnection] = []  # connections to the other members
        self._aborted = threading.Event()  # the current process group was aborted

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        # Gloo does not tell which sockets are its own. So look for sockets that appear while Gloo
        # connects the members.
        before = _list_sockets()
        self._aborted = threading.Event()
        try:
            return self._connect(store, rank, world_size)
        finally:
            # Also after an error: an abort must find the connections that exist already.
            new_sockets = [found for found in _list_sockets() if found not in before]
            self._connections = [found for found in new_sockets if _is_gloo(found)]

    def _connect(self, store: Any, rank: int, world_size: int) -> Any:
        backend: Any
        if self._host:
            # Without this option, Gloo listens at the address to which this host's own name
            # resolves. The name may be unknown, or /etc/hosts may map it to a loopback address, as
            # on Debian. Then no group on another host could reach Gloo.
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
        """End all operations, and drop the process group.

        Args:
            errored: False if no operation is under way. Then the process group is only dropped.
        """
        connections = self._connections
        self._connections = []
        last_reference = [self._pg]
        self._pg = None
        if not errored:
            return
        self._aborted.set()
        for connection in connections:
            _shut_down(connection)
        # The destructor of torch's process group waits until its operations have ended. So drop the
        # last reference on a daemon thread.
        call_aside(last_reference.clear, "titan_ft_gloo_drop")

    def _wrap_work(self, work: Any) -> Any:
        return _GlooOperation(work, self._aborted, self._connections)


class _Communicator:
    """One of torch's NCCL process groups. Prevents an abort while another thread launches on it.

    To launch a collective, torch reads the pointer to NCCL's communicator under a lock, releases
    the lock, and uses the pointer. An abort in between would free the communicator in use.
    """

    def __init__(self, pg: Any) -> None:
        self.pg = pg
        self.last_work: Any = None  # torch's object for the last operation
        self.is_aborted = False
        self._launch = threading.Lock()  # held during a launch, and during an abort

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
        """Abort the communicator.

        If NCCL has not created the communicator yet, this has no effect, and the thread of the
        set-up must call it again later. The caller must drop the last reference on a daemon thread,
        because the destructor joins torch's threads.

        Args:
            errored: False if no operation is expected to be under way.
            aborted: set when NCCL's abort has ended. The next set-up waits for this, and not for
                the destructor, which may take longer: torch's watchdog may import torch._inductor
                for the stack trace of a failed operation.
        """
        self.is_aborted = True
        # If a launch takes longer than this time, abort anyway. Such a launch polls for a peer
        # inside torch, and does not use the pointer any more.
        has_lock = self._launch.acquire(timeout=_MAX_LAUNCH_WAIT_SECONDS)
        last_work = self.last_work
        self.last_work = None
        try:
            # torch's watchdog keeps a list of operations, and removes completed ones only now and
            # then. It reports all operations that are in the list at an abort as failures: it logs
            # stacks, and has every rank dump its flight record. So let it empty the list first.
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


class AbortableNccl(ReconfigurableProcessGroup):
    """An NCCL process group in which every wait for a lost peer ends.

    A single operation has no timeout, neither here nor in torch. Instead, the exchange's thread
    runs the whole exchange within `deadline`. A watch thread for each communicator aborts it after
    an error or after the deadline.

    The caller must have set the environment of `device.nccl_environment`. Otherwise torch ends the
    process when a peer is lost.

    Attributes:
        rehearse: runs each collective of an exchange once, at full size. Every set-up calls it with
            the communicator and the number of members.
    """

    def __init__(self, timeout: timedelta) -> None:
        super().__init__(timeout)
        # torch reads this variable for each new communicator. torchtitan sets it to 3, which ends a
        # process that loses a peer. Inside a group that is right, but the loss of another group
        # must not end this process. With 0, torch does not react to a lost peer. A communicator
        # that is created inside the group later gets 0 as well (docs/gpu.md, "NCCL between the
        # groups").
        os.environ[device.ASYNC_ERROR_HANDLING] = "0"
        os.environ.update(device.NO_DUMPS)
        self.rehearse: Callable[[Any, int], None] = lambda group, num_members: None
        self._max_setup_seconds = timeout.total_seconds()
        # Twice the duration of the last set-up; 0 before the first one.
        self._expected_setup_seconds = 0.0
        self._pg_lock = threading.Lock()  # held to set or clear `_pg`
        # Identifies the set-up that may set `_pg`; None = it has been given up or aborted. A thread
        # of an earlier set-up may still run, and compares this field with its own object.
        self._current_setup: object | None = None
        self._abort_reason: Exception | None = None  # see `errored`
        self._is_connected = False  # True if the communicator `_pg` is connected
        # Set when the abort of the last connected communicator has ended.
        self._last_abort_ended = threading.Event()
        self._last_abort_ended.set()  # There is no abort yet.
        # Duration and end of the `deadline` that is in force now, by `time.monotonic`.
        self._deadline_seconds = 0.0
        self._deadline_at = math.inf

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

        NCCL connects the members in the first collective, and connects again in the first
        collective that uses another of its algorithms. The rehearsal prevents that this happens
        inside an exchange. If an abort came at such a moment, torch would continue to wait for a
        lost peer until TORCH_NCCL_NONBLOCKING_TIMEOUT (NCCLUtils.hpp,
        C10D_NCCL_CHECK_TIMEOUT_BASE).

        A set-up has a time limit: the value of `set_timeout`, or twice the duration of the last
        set-up if that is more. After a set-up that ran out of time the limit is doubled, so that a
        large job finds out how long it needs. The limit of all of this is the constructor's
        timeout.

        Raises:
            RuntimeError: the previous communicator is still being aborted, NCCL reports an error,
                or this set-up was aborted.
            TimeoutError: the set-up took too long.
        """
        self.abort(errored=False)
        # Wait until the old communicator is aborted. The abort frees GPU memory, and for this CUDA
        # waits for all kernels on the GPU. If kernels of the new communicator ran already, they
        # could wait for a peer, and the abort would wait for them.
        if not self._last_abort_ended.wait(_MAX_ABORT_WAIT_SECONDS):
            raise RuntimeError("the communicator of the quorum before is still being aborted")
        # Do not call the base class's `configure`: it would set `_pg` even if the set-up has been
        # given up meanwhile.
        self._set_names(quorum_id, group_rank, group_world_size, global_ranks)
        limit = max(self._timeout.total_seconds(), self._expected_setup_seconds)
        started = time.monotonic()
        setup = object()
        connect_to_store = partial(self._connect_to_store, store_addr)
        use_device = device.thread_initializer()
        where = device.exchange_device("nccl")

        def set_up() -> None:
            use_device()
            # A list that is emptied below, so that no stack frame keeps the communicator alive.
            created: list[_Communicator] = []
            problem: str | None = None
            try:
                self._connect(setup, created, connect_to_store, rank, world_size, where)
            except Exception as error:  # noqa: BLE001  # NCCL, torch and its store have many kinds
                problem = str(error).split("\n", 1)[0]
            if problem is not None:
                # Abort the communicator on the thread that created it, even if another thread has
                # aborted it before: NCCL may not have created it at that time. Raise the error
                # outside of the `except` block, without the frames of the failed calls. Those
                # frames refer to the communicator in a cycle. Only the garbage collector would free
                # it, and would block the training thread for seconds.
                if created:
                    created.pop().abort(errored=True)
                raise RuntimeError(problem)

        self._current_setup = setup
        try:
            # If the time is over, the thread continues, and discards its communicator later (see
            # `_give_up`).
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
        """End all operations and drop the communicator, without waiting for the end of the abort.

        The next `configure` waits for that end. If the communicator is being set up, torch holds a
        lock, and the abort begins when the lock is free: at the latest after
        TORCH_NCCL_NONBLOCKING_TIMEOUT (`NCCLComm::waitReady`).

        Args:
            errored: False if no operation is expected to be under way.
        """
        with self._pg_lock:
            self._current_setup = None
            pg = self._pg
        self._abort_if_current(pg, "aborted", errored=errored)

    @contextlib.contextmanager
    def deadline(self, timeout: timedelta) -> Iterator[None]:
        """Abort the communicator if the block takes longer than `timeout`.

        One deadline for the whole exchange replaces timeouts of the single operations. Each of
        those would need a timer and an event on the GPU: 160 of them in a step of an 8B model. The
        watch's thread checks the deadline.
        """
        self._deadline_seconds = timeout.total_seconds()
        self._deadline_at = time.monotonic() + self._deadline_seconds
        try:
            yield
        finally:
            self._deadline_at = math.inf

    def errored(self) -> Exception | None:
        """Return why the communicator was aborted; None = it was not, so all results are valid.

        No synchronization with the GPU is necessary, because the error is set before the abort ends
        any operation. A synchronization would delay the first bucket until backward ends.
        """
        return self._abort_reason

    def _connect(
        self,
        setup: object,
        created: list[_Communicator],
        connect_to_store: Callable[[], Any],
        rank: int,
        world_size: int,
        where: torch.device,
    ) -> None:
        """Create a communicator, set `_pg`, and connect the members.

        Runs on the thread of the set-up. This thread may still run when the set-up has been given
        up. So each step tests whether the set-up is still the current one.

        `_pg` is set before the members are connected. So `abort` and the watch can end a set-up in
        the same way as an exchange.

        Args:
            setup: identifies this set-up (see `_current_setup`).
            created: gets the communicator as soon as it exists.

        Raises:
            RuntimeError: the set-up was aborted, or has been given up.
        """
        setup_ended = RuntimeError("aborted while it was being set up")
        store = connect_to_store()
        if self._current_setup is not setup:
            raise setup_ended
        created.append(_Communicator(self._create_pg(store, rank, world_size)))
        with self._pg_lock:
            if self._current_setup is not setup:
                raise setup_ended
            self._pg = created[0]
            self._abort_reason = None
            self._is_connected = False
        if world_size > 1:
            watch = partial(self._watch, created[0])
            threading.Thread(target=watch, name="titan_ft_nccl_watch", daemon=True).start()
        # Connect explicitly, and not by the first collective: torch holds its lock meanwhile
        # (NCCLComm::waitReady), so an abort waits. Otherwise an abort could free the communicator
        # during the launch of the first collective.
        self._connect_pg(created[0].pg)
        with device.side_stream(where):
            # Use `created[0]`, and not `self`: if this set-up has been given up, `self._pg` may
            # already be the communicator of the next set-up.
            self.rehearse(created[0], world_size)
            ones = torch.ones(1, device=where)
            all_reduce(created[0], ones, self._timeout).wait()
            # `item` waits for the sum. After an abort the value is arbitrary, which the test of
            # `_pg` below detects.
            total = int(ones.item())
        with self._pg_lock:
            if self._pg is not created[0]:
                raise setup_ended
            if total == world_size:
                self._is_connected = True
                return
        raise RuntimeError(f"NCCL has connected {total} of {world_size} members")

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        """Create torch's process group, which is not connected yet.

        It has few multiprocessors (`_MAX_CTAS`), no timeout (`_NO_TIMEOUT`), and a stream of the
        highest priority. torch has 32 streams of each priority, and gives them to communicators in
        turn. At normal priority, after some quorums the exchange would share a stream with FSDP or
        with the copy of a state, and a collective of FSDP would wait for the exchange's sum. Only
        the exchange uses the highest priority (see `device.nccl_environment`).
        """
        # Imported here, because torch does not have this class without CUDA.
        from torch.distributed import ProcessGroupNCCL as Backend

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
        """Give the current set-up up.

        If its communicator exists, abort it. Otherwise the set-up's thread finds out later that the
        set-up is not the current one, and discards the communicator.
        """
        with self._pg_lock:
            self._current_setup = None
            pg = self._pg
            self._abort_reason = RuntimeError(reason)
        self._abort_if_current(pg, reason)

    def _abort_if_current(
        self, pg: _Communicator | None, reason: str, *, errored: bool = True
    ) -> None:
        """Abort `pg` if it is still the current communicator.

        The abort runs on a thread of its own, because it may wait for torch's locks.
        """
        with self._pg_lock:
            if pg is None or self._pg is not pg:
                return
            self._abort_reason = RuntimeError(reason)
            self._pg = None
            pg.is_aborted = True  # Now, because the thread may begin later.
            aborted = threading.Event()
            if self._is_connected:
                self._last_abort_ended = aborted
            self._is_connected = False
        abort = partial(pg.abort, errored=errored, aborted=aborted)
        threading.Thread(target=abort, name="titan_ft_nccl_abort", daemon=True).start()

    def _watch(self, pg: _Communicator) -> None:
        """Abort `pg` when torch reports an error or the deadline has passed.

        Runs on a thread of its own, until `pg` is not the current communicator any more. An error
        is, for example, that a peer has closed its connection. Without an abort the kernels of `pg`
        would wait for the lost peer for ever.
        """
        backend = pg.pg._get_backend(torch.device("cuda"))
        while self._pg is pg:
            reason = ""
            error = backend.get_error()
            if error == ErrorType.COMM_ERROR:
                reason = "NCCL has lost a member"
            elif error != ErrorType.SUCCESS:
                # torch keeps the first error only. A later loss of a member would go unnoticed.
                reason = f"torch reports {error.name}"
            elif time.monotonic() > self._deadline_at:
                reason = f"the exchange is not complete after {self._deadline_seconds:g} s"
            if reason:
                logger.warning("the exchange is broken off: %s", reason)
                self._abort_if_current(pg, reason)
                return
            time.sleep(_CHECK_SECONDS)


def _list_sockets() -> list[_GlooConnection]:
    return [_GlooConnection(*found) for found in own_sockets()]


def _is_gloo(candidate: _GlooConnection) -> bool:
    """True if a socket of this process is a connection of Gloo.

    Gloo sets a receive timeout on its connections. Other sockets that threads of this process may
    open meanwhile, such as that of a state's fetch, have no such timeout. Gloo's listening socket
    has none either, and must not be shut down: Gloo would end the process.
    """
    with contextlib.suppress(OSError), borrowed_socket(*candidate) as borrowed:
        if borrowed is None or borrowed.proto != socket.IPPROTO_TCP:
            return False
        timeval = borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL_BYTES)
        return any(timeval)  # all zero = no timeout
    return False  # The socket was closed meanwhile.


def _is_open(connection: _GlooConnection) -> bool:
    """True if the socket is open. Gloo closes a socket whose peer has closed the connection."""
    try:
        return os.fstat(connection.descriptor).st_ino == connection.inode
    except OSError:
        return False


def _count_bytes(connections: list[_GlooConnection]) -> int:
    """Return the number of bytes that the open connections have carried, in both directions."""
    num_bytes = 0
    for connection in connections:
        with (
            contextlib.suppress(OSError),  # The socket was closed meanwhile.
            borrowed_socket(*connection) as borrowed,
        ):
            if borrowed is not None:
                size = _TCP_INFO_BYTES_OFFSET + 16
                info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
                counts = struct.unpack_from("QQ", info, _TCP_INFO_BYTES_OFFSET)
                num_acknowledged, num_received = counts
                num_bytes += num_acknowledged + num_received
    return num_bytes


def _shut_down(connection: _GlooConnection) -> None:
    """Shut a connection down in both directions. Gloo notices this, and closes the socket."""
    with contextlib.suppress(OSError), borrowed_socket(*connection) as borrowed:
        if borrowed is not None:
            borrowed.shutdown(socket.SHUT_RDWR)
