# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A process of replica groups that meet again and again; see `meeting.py`.

    python -m benchmarks.meeting_ranks KIND RANKS

It reads orders as JSON objects, one a line, and answers each with a line:

- {"start": [SLOT, ...]} starts or restarts groups of RANKS ranks; the answer has their names.
- {"members": [NAME, ...], "id": N, "at": SECONDS} gives its groups a quorum at that monotonic time;
  the answer has the time at which the last of their ranks had met the others, and the process's CPU
  seconds for it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

from benchmarks.store_agreement import StoreAgreement
from benchmarks.store_meeting import StoreMeeting
from titan_ft.membership import rendezvous
from titan_ft.membership.control_tree import ControlTree
from titan_ft.membership.process_group import BreakableGloo
from titan_ft.membership.rendezvous import Rendezvous
from titan_ft.protocol.member import Member, admit
from titan_ft.system.threads import call_for_each

COLUMNS, STORE, GLOO = "columns", "store", "gloo"
"""Ways to meet: as the product does; as up to c6a0967; as the product does, with Gloo's
connections.
"""
_HOST = "127.0.0.1"
_LIMIT = timedelta(seconds=120)
"""Of each wait. All ranks of the job share a machine, and none of them dies unexpectedly."""


class NoProcessGroup:
    """Stands in for a process group: connects nothing."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing takes time."""

    def configure(self, *quorum: Any) -> None:
        """Connect nothing."""

    def abort(self, errored: bool = True) -> None:
        """Nothing is under way."""


class GlooProcessGroup(BreakableGloo):
    """A Gloo process group whose `abort` closes no socket: `BreakableGloo` would search those of
    all ranks here.
    """

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        return self._connect(store, rank, world_size)


class Rank:
    """One rank of a group, with a thread of its own."""

    def __init__(self, kind: str, rank: int, num_ranks: int, own: Member, port: int) -> None:
        self._rank, self._own = rank, own
        self._orders: SimpleQueue[Any] = SimpleQueue()
        connect = partial(
            TCPStore, _HOST, port, is_master=False, wait_for_workers=False, timeout=_LIMIT
        )
        self.control: Any
        self._meeting: Any
        if kind == STORE:
            self.control = StoreAgreement(
                connect, "agreed", group_rank=rank, group_world_size=num_ranks
            )
            self._meeting = StoreMeeting(
                _LIMIT.total_seconds(), group_rank=rank, address=f"{_HOST}:{rank}"
            )
        else:
            store = connect() if num_ranks > 1 else None
            self.control = ControlTree(
                rank, num_ranks, host=_HOST, token="t", store=store, key="tree"
            )
            self._meeting = Rendezvous(
                GlooProcessGroup(_LIMIT, _HOST) if kind == GLOO else NoProcessGroup(),
                _LIMIT,
                control=self.control,
                group_rank=rank,
                group_world_size=num_ranks,
                address=f"{_HOST}:{rank}",
            )
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, order: dict[str, Any]) -> Future[float]:
        """Let the rank meet the others; the future gets the time of the meeting's end."""
        done = Future[float]()
        self._orders.put((order, done))
        return done

    def end(self) -> None:
        """End this rank, as a death would."""
        self._orders.put(None)

    def _run(self) -> None:
        while (submitted := self._orders.get()) is not None:
            order, done = submitted
            try:
                done.set_result(self._meet(order))
            except Exception as error:  # noqa: BLE001  # the process reports it
                done.set_exception(error)
        if isinstance(self.control, ControlTree):
            self.control.close()
        if isinstance(self._meeting, Rendezvous):
            self._meeting.close()

    def _meet(self, order: dict[str, Any]) -> float:
        time.sleep(max(0.0, order["at"] - time.monotonic()))
        names = self._announce(json.dumps(order["members"]))
        members = admit(self._own, json.loads(names)).members
        error = self._meeting.configure(
            f"quorum {order['id']}", order["id"], members, self._own, order["id"]
        )
        if error is not None:
            raise RuntimeError(error)
        return time.monotonic()

    def _announce(self, text: str) -> str:
        """Return rank 0's text on all ranks of the group: the quorum's reply."""
        if isinstance(self.control, ControlTree):
            return self.control.rank0_announces(lambda: text).text
        return str(self.control.rank0_decides((), lambda _: text))


class Groups:
    """The groups of this process."""

    def __init__(self, kind: str, num_ranks: int) -> None:
        self._kind, self._num_ranks = kind, num_ranks
        self._groups: dict[int, tuple[Member, list[Rank], TCPStore]] = {}

    def start(self, slot: int) -> str:
        """Start a group, or start it again; returns its name."""
        _, former, _ = self._groups.pop(slot, (None, (), None))
        for rank in former:
            rank.end()
        store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        member = Member(
            slot,
            round(time.time(), 6),
            uuid.uuid4().hex,
            "c0ffee",
            "bench",
            f"{_HOST}:{store.port}",
        )
        start = partial(self._start_rank, member, store.port)
        ranks = call_for_each(start, range(self._num_ranks), "start", self._num_ranks)
        self._groups[slot] = member, ranks, store
        return member.replica_id

    def _start_rank(self, member: Member, port: int, rank: int) -> Rank:
        return Rank(self._kind, rank, self._num_ranks, member, port)

    def meet(self, order: dict[str, Any]) -> tuple[float, float]:
        """Let those groups meet that are members; see the module."""
        began = time.process_time()
        names = set(order["members"])
        futures = [
            rank.submit(order)
            for member, ranks, _ in self._groups.values()
            if member.replica_id in names
            for rank in ranks
        ]
        end = max((future.result(_LIMIT.total_seconds()) for future in futures), default=0.0)
        return end, time.process_time() - began


def main(argv: Sequence[str]) -> None:
    """Be one of the processes."""
    kind, num_ranks = argv
    vars(rendezvous)["_BASE_SECONDS"] = _LIMIT.total_seconds()
    groups = Groups(kind, int(num_ranks))
    for line in sys.stdin:
        order = json.loads(line)
        answer: Any = (
            [groups.start(slot) for slot in order["start"]]
            if "start" in order
            else groups.meet(order)
        )
        print(json.dumps(answer), flush=True)
    os._exit(0)  # hundreds of threads and stores would end one after the other


if __name__ == "__main__":
    main(sys.argv[1:])
