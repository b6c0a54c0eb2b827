# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A rank of a group that falls silent is noticed by rank 0; one that has left, or that thaws with its group, is not."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
import torchft.coordination

from titan_ft.config import FaultTolerance
from titan_ft.membership import rank_watch
from titan_ft.membership.pulse import Status, StatusPage
from titan_ft.membership.rank_watch import RankWatch, describe_silence
from titan_ft.protocol.errors import LighthouseError

DEADLINE = 20.0  # seconds; only ever reached by a bug
CONFIG = FaultTolerance(enable=True, heartbeat_timeout_ms=200)
Told = queue.SimpleQueue[tuple[dict[int, str], float]]


class Ranks:
    """The ranks of a group, all in this process, with a lighthouse and servers of torchft."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.told: Told = queue.SimpleQueue()
        self.watches: list[RankWatch] = []
        self._looked = threading.Condition()
        self._looks = 0
        self.change: Callable[[dict[str, float]], dict[str, float]] = dict
        read = StatusPage.read

        def look(page: StatusPage, timeout: float) -> Status:
            status = read(page, timeout)
            assert status is not None
            beats = Status(self.change(status.heartbeats))
            with self._looked:
                self._looks += 1
                self._looked.notify_all()
            return beats

        monkeypatch.setattr(StatusPage, "read", look)

    def start(self, *ranks: int, number: int = 3, config: FaultTolerance = CONFIG) -> None:
        """Start these ranks of `number`; none = all of them. Rank 0 comes first."""
        for rank in ranks or range(number):
            watch = RankWatch(
                config,
                rank=rank,
                num_ranks=number,
                host="127.0.0.1",
                hostname=f"host-{rank}",
                store=self.store,
                key="ranks",
                on_silence=lambda hosts, seconds: self.told.put((hosts, seconds)),
            )
            self.watches.append(watch)

    def wait_for_looks(self, number: int) -> None:
        """Wait until rank 0 has looked so often from now on."""
        with self._looked:
            end = self._looks + number
            assert self._looked.wait_for(lambda: self._looks >= end, DEADLINE)

    def close(self) -> None:
        for watch in self.watches:
            watch.close()


LONG = 2 * rank_watch._LOOKS  # looks; after half of them a silent rank is found


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    ranks = Ranks(monkeypatch)
    yield ranks
    ranks.close()


def test_ranks_that_beat_are_left_alone(ranks: Ranks) -> None:
    """Nobody is told anything as long as all beat."""
    ranks.start()
    ranks.wait_for_looks(LONG)
    assert ranks.told.empty()


def test_a_silent_rank_is_told_once(ranks: Ranks, wait_until: Callable[..., None]) -> None:
    """With its host's name and for how long; rank 0 then looks no more."""
    ranks.start()
    ranks.wait_for_looks(1)
    ranks.watches[2]._server.shutdown()  # as if its process was stopped
    hosts, seconds = ranks.told.get(timeout=DEADLINE)
    assert hosts == {2: "host-2"}
    assert seconds > 2 * CONFIG.heartbeat_timeout_ms / 1000
    line = describe_silence(CONFIG, hosts, seconds)
    for part in ("rank 2 on host-2", f"{seconds:.1f} s", "fault_tolerance.heartbeat_timeout_ms (200)"):
        assert part in line
    assert "\n" not in line
    wait_until(
        lambda: "titan_ft_rank_watch" not in [thread.name for thread in threading.enumerate()], "it looks no more"
    )
    assert ranks.told.empty()


def test_a_rank_that_has_left_may_be_silent(ranks: Ranks) -> None:
    """At the end of a run one rank is gone seconds before the other; only those that did not leave are told."""
    ranks.start()
    ranks.wait_for_looks(1)
    ranks.watches[1].close()
    ranks.wait_for_looks(LONG)
    assert ranks.told.empty()
    ranks.watches[2]._server.shutdown()
    hosts, _ = ranks.told.get(timeout=DEADLINE)
    assert hosts == {2: "host-2"}


def test_a_rank_that_has_not_come_yet_is_given_time(ranks: Ranks) -> None:
    """Rank 0 may be ready long before another one."""
    ranks.start(0)
    ranks.wait_for_looks(LONG)
    assert ranks.told.empty()


@pytest.mark.parametrize("own", [{"rank/0": 5.0}, {}], ids=["late", "unknown"])
def test_a_group_that_thaws_rank_by_rank(ranks: Ranks, own: dict[str, float]) -> None:
    """When rank 0 itself was not heard of, all get the whole time again, from when it is heard of."""
    looks = []

    def thaw(beats: dict[str, float]) -> dict[str, float]:
        looks.append(0)
        if len(looks) == LONG:  # rank 0's own beat is late, as after a freeze
            return {"rank/1": 5.0, **own}
        # It is heard of again at once, the other one only then.
        return {"rank/0": 0.0, "rank/1": 5.0 if len(looks) == LONG + 1 else 0.0}

    ranks.change = thaw
    ranks.start(number=2)
    ranks.wait_for_looks(2 * LONG)
    assert ranks.told.empty()
    ranks.change = lambda beats: {"rank/0": 0.0, "rank/1": 5.0}
    assert ranks.told.get(timeout=DEADLINE) == ({1: "host-1"}, 5.0)


def test_large_groups_beat_more_seldom(monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    """Rank 0 hears a bounded number of beats a second, and waits for several of each rank's."""
    monkeypatch.setattr(rank_watch, "_MAX_BEATS", 30.0)
    made: list[dict[str, Any]] = []
    server = torchft.coordination.ManagerServer

    def make(**options: Any) -> Any:
        made.append(options)
        return server(**options)

    monkeypatch.setattr(torchft.coordination, "ManagerServer", make)
    ranks.start()
    assert {options["heartbeat_interval"].total_seconds() for options in made} == {0.1}
    assert ranks.watches[0]._patience == pytest.approx(0.5)
    ranks.wait_for_looks(LONG)
    assert ranks.told.empty()


def test_rank_0_cannot_be_reached(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says from where to where, for how long, and what to check."""
    ranks.store.set("ranks/lighthouse", "http://127.0.0.1:9")
    monkeypatch.setattr(rank_watch, "CONNECT_SECONDS", 0.3)
    with pytest.raises(LighthouseError) as caught:
        ranks.start(1)
    for part in ("rank 1", "host-1", "http://127.0.0.1:9", "within 0.3 s"):
        assert part in str(caught.value)
