# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Groups that cannot reach each other, with real workers: the largest clique trains on, the others
return later.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness.events import audit
from harness.job import Job
from harness.trajectory import check_finished, check_one_trajectory, named

from titan_ft.chaos.inside import blackhole
from titan_ft.chaos.orders import Order

SECONDS = 20.0  # that the link is dead; the others train on without it after about five


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.skipif(not blackhole.supported(), reason="socket filters are Linux's")
def test_the_largest_clique_trains_on(make_job: Callable[..., Job], ranks: int) -> None:
    """Groups 0 and 2 lose their link: 0 and 1 train on within seconds; 2 waits with its state,
    returns and heals.
    """
    delays = [
        {"replica": replica, "rank": 0, "attempt": "any", "seconds": 0.1} for replica in range(3)
    ]
    job = make_job(
        groups=3,
        ranks=ranks,
        steps=100,
        flags=["--fault_tolerance.chaos"],
        hooks={"delays": delays},
        late=False,
    )
    job.start()
    job.wait_until(
        lambda: {e["replica"] for e in job.events("step_committed") if e["step"] >= 3} == {0, 1, 2},
        60,
        "all train",
    )
    for replica, peer in ((0, 2), (2, 0)):
        params = {"seconds": SECONDS, "peer": peer}
        Order(fault="link_dead", replica=replica, params=params, seed=7, shot=1).append_to(
            job.paths.chaos_orders
        )
    job.finish(200)
    events = job.events()
    assert [group.attempt for group in job.groups] == [0, 0, 0]
    begun = max(e["time"] for e in named(events, "fault_injected"))
    over = min(e["time"] for e in named(events, "fault_undone"))
    committed = [e for e in named(events, "step_committed") if e["rank"] == 0]
    without = [e for e in committed if begun < e["time"] < over and e["participants"] == [0, 1]]
    assert {e["replica"] for e in without} == {0, 1}
    (outside,), (back,) = named(events, "outside"), named(events, "link_back")
    assert (outside["replica"], outside["members"], outside["unreached"]) == (2, [0, 1], [0])
    assert (back["replica"], back["slots"]) == (2, [0])
    assert back["time"] > over
    assert {(e["replica"], *e["slots"]) for e in named(events, "link_dead")} <= {(0, 2), (2, 0)}
    assert {e["replica"] for e in named(events, "heal_finished")} == {2}
    assert committed[-1]["participants"] == [0, 1, 2]
    check_one_trajectory(named(events, "step_committed"))
    check_finished(job, events, job.steps)
    assert audit(events).verdict == "holds"
