# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Watch over the ranks of one group: a group of several hosts must not look alive while one of them is frozen.

The job's lighthouse hears of rank 0 only. When another rank's host freezes or is cut off, nothing closes its
connections: the other groups would wait for it as long as for a slow step. So all ranks of a group beat, and rank 0
looks whether they do.

The beats are torchft's own, sent by threads that need no Python: a thread of ours would be silent while a long call
keeps the GIL, and a healthy group would end. Rank 0 runs a lighthouse for its group only, and each rank a server that
does nothing but heartbeat there. A beat costs both ends together 0.3 ms of a core. So a rank sends only as many beats
as rank 0 needs to find a silent rank.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

from titan_ft.config import FaultTolerance
from titan_ft.membership.pulse import SILENT_BEATS, StatusPage
from titan_ft.membership.seat import CONNECT_SECONDS
from titan_ft.protocol.errors import LighthouseError
from titan_ft.system.address import bracketed, join_address, split_address

_MAX_BEATS = 400.0  # a second, of all ranks together: in large groups each of them beats more seldom
_MISSED_BEATS = 5  # after which a rank counts as silent
_LOOKS = 4  # of rank 0 in that time
_LATE = 1 / 3
"""Share of that time. A look that is later than this shows that rank 0 did not run.

A shorter freeze of the whole group goes unnoticed, and no healthy rank may count as silent after it. The oldest beat
is then as old as this delay, the time between two looks and the time between two beats: 1/3 + 1/4 + 1/5 of the time
after which a rank counts as silent."""


class RankWatch:
    """One rank's part: it beats, and on rank 0 it looks.

    Args:
        host: numeric address that the group's ranks reach each other at.
        hostname: what people call this rank's host.
        store: of the group.
        key: prefix of the keys in the store, unique to this attempt of the group.
        on_silence: called on rank 0, once and on another thread, with the silent ranks' host names and the seconds.

    Raises:
        LighthouseError: rank 0 cannot be reached.
    """

    def __init__(
        self,
        config: FaultTolerance,
        *,
        rank: int,
        num_ranks: int,
        host: str,
        hostname: str,
        store: TCPStore,
        key: str,
        on_silence: Callable[[dict[int, str], float], None],
    ) -> None:
        from torchft.coordination import LighthouseServer, ManagerServer

        usual_seconds = SILENT_BEATS * config.heartbeat_timeout_ms / 1000 / _MISSED_BEATS
        interval = max(usual_seconds, num_ranks / _MAX_BEATS)
        self._patience = _MISSED_BEATS * interval
        self._rank, self._num_ranks, self._store, self._key = rank, num_ranks, store, key
        self._on_silence = on_silence
        self._closed = threading.Event()
        self._lighthouse: Any = None
        if rank == 0:
            # It is asked for no quorum, so that nothing of its own timing matters.
            self._lighthouse = LighthouseServer(bind=f"{bracketed(host)}:0", min_replicas=1, quorum_tick_ms=1000)
            _, port = split_address(self._lighthouse.address())
            store.set(f"{key}/lighthouse", f"http://{join_address(host, port)}")
        address = store.get(f"{key}/lighthouse").decode()
        store.set(f"{key}/host/{rank}", hostname)
        try:
            self._server = ManagerServer(
                replica_id=_name(rank),
                lighthouse_addr=address,
                hostname="127.0.0.1",
                bind="127.0.0.1:0",  # nobody calls it
                store_addr="",
                world_size=1,
                heartbeat_interval=timedelta(seconds=interval),
                connect_timeout=timedelta(seconds=CONNECT_SECONDS),
                quorum_retries=0,
            )
        except Exception as error:
            raise LighthouseError(
                f"rank {rank} of this group ({hostname}) cannot reach rank 0 at {address} within "
                f"{CONNECT_SECONDS:g} s: {error}; check that "
                "the hosts of a group reach each other at any port, and fault_tolerance.advertise_address"
            ) from error
        if rank == 0:
            page = StatusPage(address)
            threading.Thread(target=self._watch, args=(page,), name="titan_ft_rank_watch", daemon=True).start()

    def close(self) -> None:
        """Leave: from now on this rank may be silent. A second call does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(RuntimeError):  # the store ended with the group: nobody looks any more
            self._store.set(self._left_key(self._rank), "1")  # before the beats stop
        self._server.shutdown()
        if self._lighthouse is not None:
            self._lighthouse.shutdown()

    def _watch(self, page: StatusPage) -> None:
        began = time.monotonic()  # to run without a break
        interval = self._patience / _LOOKS
        while True:
            due = time.monotonic() + interval
            if self._closed.wait(interval):
                return
            status = page.read(self._patience)
            beats = status.heartbeats if status is not None else {}
            now = time.monotonic()
            own = beats.get(_name(0))
            if own is None or own > self._patience / 2 or now - due > self._patience * _LATE:
                # This process did not run, or its server does not hear: the beats of all are late, and a group that
                # was frozen as a whole thaws rank by rank. Everybody gets the whole time again.
                began = now
            elif now - began > self._patience:
                seconds = {rank: beats.get(_name(rank), 0.0) for rank in range(1, self._num_ranks)}
                silent = [rank for rank in seconds if seconds[rank] > self._patience]
                if silent and self._report(silent, max(seconds[rank] for rank in silent)):
                    return

    def _report(self, silent: Collection[int], seconds: float) -> bool:
        """Tell of those that have not left; returns whether that was the end."""
        try:
            silent = [rank for rank in silent if not self._store.check([self._left_key(rank)])]
            hosts = {rank: self._store.get(f"{self._key}/host/{rank}").decode() for rank in silent}
        except RuntimeError:  # the store ended with the group: so does this rank
            return True
        if not hosts or self._closed.is_set():
            return False
        self._on_silence(hosts, seconds)
        return True

    def _left_key(self, rank: int) -> str:
        return f"{self._key}/left/{rank}"


def describe_silence(config: FaultTolerance, hosts: dict[int, str], seconds: float) -> str:
    """Say in one line which ranks are silent and what to do."""
    who = ", ".join(f"rank {rank} on {host}" for rank, host in sorted(hosts.items()))
    return (
        f"no heartbeat from {who} for {seconds:.1f} s: stopped, frozen or cut off. This group ends, so that it starts "
        "again and the other groups need not wait for it; if ranks may be silent so long, raise "
        f"fault_tolerance.heartbeat_timeout_ms ({config.heartbeat_timeout_ms})"
    )


def _name(rank: int) -> str:
    return f"rank/{rank}"
