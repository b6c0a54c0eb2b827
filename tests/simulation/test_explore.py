# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The protocol under thousands of schedules of faults.

`bash scripts/explore.sh` runs any number of them.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.simulation import standins
from tests.simulation.faults import (
    Cut,
    CutInside,
    CutLighthouse,
    DrainGroup,
    Flip,
    Freeze,
    Hang,
    Kill,
    KillGroups,
    LighthouseDies,
    NotFinite,
    Reset,
    Slow,
)
from tests.simulation.folder import Folder
from tests.simulation.oracle import Oracle
from tests.simulation.schedule import Schedule, _smaller, draw, shrink
from tests.simulation.semi_sync import RoundOracle
from tests.simulation.world import Options, World
from titan_ft.engine import round as rounds
from titan_ft.engine import waits
from titan_ft.engine.outsiders import OutsiderWatch
from titan_ft.engine.round import Rounds
from titan_ft.membership import membership, pulse
from titan_ft.membership.control_tree import ControlTree
from titan_ft.membership.group_collectives import GroupCollectives
from titan_ft.protocol import member
from titan_ft.protocol.position import Position
from titan_ft.protocol.row import Why
from titan_ft.training.checkpoint.choice import LoadError
from titan_ft.transfer.snapshot import Snapshot

SCHEDULES = 200

QUICK = {"enable": True, "start_timeout_seconds": 0.8, "join_timeout_ms": 5000}
"""Settings of a job that need not wait for those that stay away."""
ROOT = Path(__file__).parents[2]


def test_every_promise_holds() -> None:
    # Use a process of its own, because the order of sets of strings is a part of a seed's schedule.
    # Use a nice one, because it would starve the heartbeats of the jobs of other tests. Linux may
    # share time between sessions first. A process is nice to its own session alone, so give it a
    # new one.
    begin = '(echo 19 > /proc/self/autogroup) 2>/dev/null; exec nice -n 19 "$@"'
    explore = ["-m", "tests.simulation.explore", "--seed", "0", "--schedules", str(SCHEDULES)]
    command = ["sh", "-c", begin, "sh", sys.executable, *explore]
    environ = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    explored = subprocess.run(
        command,
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    assert explored.returncode == 0, explored.stdout[-4000:] + explored.stderr[-2000:]
    assert f"{SCHEDULES} schedules" in explored.stdout


@pytest.mark.parametrize(
    "kinds", [("kill", "freeze"), ("checkpoint", "flip"), ("shape", "late")], ids="-".join
)
def test_a_seed_replays(kinds: tuple[str, ...]) -> None:
    """The same seed gives the same trace, event for event.

    So does a schedule that was written down.
    """
    with standins.installed():
        schedule = draw(7, kinds)
        first = schedule.run(traces=True)
        again = Schedule.decode(schedule.encode()).run(traces=True)
    assert first.trace
    assert first.trace == again.trace
    assert first.kernel.now == again.kernel.now


def test_what_fails_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller schedule has only the necessary faults, and breaks the same promise."""
    monkeypatch.setattr(OutsiderWatch, "has_any", lambda watch, made: False)
    monkeypatch.setattr(
        Rounds,
        "find_holders",
        lambda rounds: {} if rounds.last_round is None else rounds._membership.find_holders(),
    )
    fault_tolerance = {
        **QUICK,
        "group_size": 3,
        "process_group_timeout_ms": 60_000,
    }
    faults = (
        Slow(0.2, 0, 0, 1.5, 0.1),
        Slow(0.6, 2, 0, 12.0, 20.0),
        KillGroups(1.5, (0, 1)),
        Slow(20.0, 1, 0, 1.5, 0.1),
    )
    with standins.installed():
        whole = Schedule(1, Options(3, 1, 14, fault_tolerance, lag=0.01), faults)
        problem = whole.run().problems[0]
        small = shrink(whole, problem, tries=1, budget=30)
        assert len(small.faults) < len(faults)
        assert Schedule.decode(small.encode()).run().problems[0].promise == problem.promise


def test_a_rank_that_a_fault_names_stays_when_a_schedule_is_made_small() -> None:
    """Otherwise the fault would change. A rank may also be the other end of a link."""
    fault_tolerance = {**QUICK, "group_size": 2}
    cut, across = CutInside(0.2, 0, 0, 1, False, 1.5), Cut(0.2, 0, 1, 0, False, 1.5, other=1)
    for fault in (cut, across):
        assert all(
            small.options.ranks == 2
            for small in _smaller(Schedule(1, Options(2, 2, 4, fault_tolerance), (fault,)))
        )
        assert any(
            small.options.ranks == 2
            for small in _smaller(Schedule(1, Options(2, 3, 4, fault_tolerance), (fault,)))
        )


@pytest.mark.parametrize("waits", [True, False])
def test_a_holder_that_was_silent_in_a_long_step_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """The joiner takes a living holder outside of the quorum into account.

    Otherwise the joiner would continue without it, and count the state as lost.
    """
    if not waits:
        monkeypatch.setattr(OutsiderWatch, "has_any", lambda watch, made: False)
    fault_tolerance = {
        **QUICK,
        "group_size": 2,
        "process_group_timeout_ms": 30_000,
    }
    options = Options(
        2, 1, 14, fault_tolerance, restart_seconds=(1.0, 1.0), transfer_seconds=(18.0, 18.0)
    )
    killed, slow, frozen = (
        KillGroups(0.3, (0,)),
        Slow(1.9, 1, 0, 15.0, 20.0),
        Freeze(3.6, 1, 0, 1.6),
    )
    with standins.installed():
        world = Schedule(2, options, (killed, slow, frozen)).run()
    if waits:
        assert not world.problems
    else:
        assert "every group with the state" in world.problems[0].text


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_job_is_begun_anew_beside_a_group_in_a_long_step(
    monkeypatch: pytest.MonkeyPatch, ranks: int, waits: bool
) -> None:
    """All other groups die and form a quorum of their own. They wait for the group in a long step,
    and heal from it.

    The state server of that group answers no request meanwhile, so the others see no offer.
    """
    monkeypatch.setattr(
        Rounds,
        "find_holders",
        lambda rounds: {} if rounds.last_round is None else rounds._membership.find_holders(),
    )
    if not waits:
        monkeypatch.setattr(OutsiderWatch, "has_any", lambda watch, made: False)
    fault_tolerance = {
        **QUICK,
        "group_size": 3,
        "join_timeout_ms": 3000,
        "process_group_timeout_ms": 30_000,
    }
    options = Options(3, ranks, 14, fault_tolerance, restart_seconds=(0.5, 0.5))
    faults = Slow(1.2, 2, 0, 10.0, 0.5), KillGroups(1.65, (0, 1))
    with standins.installed():
        worlds = [Schedule(seed, options, faults).run() for seed in range(6)]
    found = [world.problems[0].text for world in worlds if world.problems]
    if waits:
        assert not found
    else:
        assert any("started anew at step 0 while groups [2] hold more" in text for text in found)


@pytest.mark.parametrize("waits", [True, False])
def test_nobody_leaves_a_group_in_a_long_step_behind_at_the_end(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """A group was silent for a moment in a long step.

    The other group continues alone, finishes, and waits for it.
    """
    if not waits:
        monkeypatch.setattr(OutsiderWatch, "has_any", lambda watch, made: False)
    fault_tolerance = {
        **QUICK,
        "group_size": 2,
        "process_group_timeout_ms": 30_000,
    }
    options = Options(2, 1, 8, fault_tolerance)
    with standins.installed():
        world = Schedule(1, options, (Slow(0.9, 1, 0, 10.0, 0.15), Freeze(1.3, 1, -1, 1.6))).run(
            traces=True
        )
    assert not world.problems
    finished = sorted(who for _, who, text in world.trace if text.startswith("finished"))
    assert finished == ["g0r0", "g1r0"][: 1 + waits]


@pytest.mark.parametrize("buffers", [True, False])
def test_a_group_that_hangs_keeps_the_others_from_going_on_until_it_has_ended(
    buffers: bool,
) -> None:
    """A hung group has heartbeats, so nobody can know that it will never request a quorum.

    Its offer is then the latest state that is left. If its model has buffers, the hung thread would
    have to copy the state. Then the job starts anew: one group trains the first step, and the other
    one heals from it.
    """
    fault_tolerance = {
        **QUICK,
        "group_size": 3,
        "join_timeout_ms": 3000,
        "process_group_timeout_ms": 30_000,
        "hang_timeout_seconds": 15.0,
    }
    options = Options(3, 1, 14, fault_tolerance, restart_seconds=(0.5, 0.5), buffers=buffers)
    with standins.installed():
        world = Schedule(1, options, (Hang(1.25, 2, 0), KillGroups(1.5, (0, 1)))).run(traces=True)
    assert not world.problems
    (hung,) = (at for at, _, text in world.trace if text.startswith("hung"))
    begun = [at for at, _, text in world.trace if text.startswith("commits step 1 ")]
    assert (len(begun) > 3) is buffers  # three groups make the job's first step
    assert all(at > hung for at in begun[3:])
    later = [
        at
        for at, who, text in world.trace
        if who in ("g0r0a1", "g1r0a1") and text.startswith("commits")
    ]
    assert later
    assert all(at > hung for at in later)


@pytest.mark.parametrize("fooled", [False, True])
def test_a_joiner_that_is_alone_at_a_new_lighthouse_ends_no_exchange(
    monkeypatch: pytest.MonkeyPatch, fooled: bool
) -> None:
    """The joiner gets a quorum of its own while the others are in a long step.

    They finish the step together.
    """
    if fooled:
        monkeypatch.setattr(
            pulse,
            "find_successors",
            lambda own, others, quorum: (
                []
                if own.replica_id in quorum
                else [member.slot for member in pulse.members_of_job(own, quorum)]
            ),
        )
    fault_tolerance = {
        **QUICK,
        "group_size": 3,
        "process_group_timeout_ms": 60_000,
    }
    options = Options(
        3, 1, 8, fault_tolerance, restart_seconds=(1.0, 1.0), transfer_seconds=(3.0, 3.0)
    )
    faults = KillGroups(1.0, (2,)), Slow(1.2, 1, 0, 15.0, 20.0), LighthouseDies(4.0, 0.3)
    left_out = 0
    with standins.installed():
        for seed in (0, 2, 5):
            world = Schedule(seed, options, faults).run(traces=True)
            assert not world.problems
            left_out += sum("left_out" in str(line) for line in world.trace)
    assert bool(left_out) is fooled


def test_a_group_that_others_cannot_reach_is_not_waited_for_at_a_new_lighthouse() -> None:
    """A group outside the largest clique has requested a quorum like the others.

    They do not wait for it.
    """
    fault_tolerance = {
        **QUICK,
        "group_size": 3,
        "process_group_timeout_ms": 3000,
        "join_timeout_ms": 60_000,
        "semi_sync_method": "diloco",
        "sync_steps": 16,
        "num_fragments": 2,
        "batch_policy": "shrink",
    }
    options = Options(
        3, 1, 2, fault_tolerance, compute_seconds=0.25, speeds=(1.3, 1.0, 1.0), switch=0.4
    )
    faults = Cut(4.5891, 2, 0, -1, False, 25.0), LighthouseDies(10.2393, 0.3)
    with standins.installed():
        for seed in range(8):
            assert not Schedule(seed, options, faults).run().problems


CUT_OFF = Cut(0.6, 0, 1, -1, False, 100.0), Cut(0.6, 0, 2, -1, False, 100.0)
"""Group 0 of three reaches neither of the others for long."""


@pytest.mark.parametrize("waits", [False, True])
def test_two_groups_that_wait_for_one_they_cannot_reach_are_judged(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Two groups are enough without the third one.

    So the world reports their wait, although the third one came first.
    """
    if waits:
        monkeypatch.setattr(
            member,
            "largest_clique",
            lambda members, dead: tuple(
                other for place, other in enumerate(members) if place not in dead.get(0, ())
            ),
        )
    fault_tolerance = {
        **QUICK,
        "group_size": 3,
        "min_replica_size": 2,
        "process_group_timeout_ms": 3000,
    }
    with standins.installed():
        world = Schedule(1, Options(3, 1, 60, fault_tolerance), CUT_OFF).run()
    assert [problem.promise for problem in world.problems] == ["liveness"] * waits
    assert world.kernel.now < 60.0, "long before the links are back"


def test_groups_that_wait_for_the_only_one_with_the_state_are_right() -> None:
    """Two restarted groups without a state wait for the third one.

    Without it they would give up the job's state.
    """
    fault_tolerance = {
        **QUICK,
        "group_size": 3,
        "min_replica_size": 2,
        "process_group_timeout_ms": 3000,
    }
    options = Options(3, 1, 60, fault_tolerance, restart_seconds=(0.5, 0.5))
    with standins.installed():
        world = Schedule(1, options, (*CUT_OFF, KillGroups(3.6, (1, 2)))).run(traces=True)
    assert not world.problems
    commits = [at for at, _, text in world.trace if text.startswith("commits")]
    assert max(later - at for at, later in itertools.pairwise(commits)) > world.bound
    assert world.furthest == options.steps


@pytest.mark.parametrize("asked", [False, True])
def test_a_job_is_not_begun_anew_beside_a_group_that_is_outside(
    monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """A group outside sends no heartbeats, and the others die.

    A restarted group asks it before it starts anew.
    """
    if not asked:
        monkeypatch.setattr(membership, "find_cut_off", lambda *_: [])
    fault_tolerance = {**QUICK, "group_size": 3, "process_group_timeout_ms": 3000}
    options = Options(3, 2, 8, fault_tolerance, restart_seconds=(0.3, 0.3))
    faults = Cut(0.6, 0, 2, -1, False, 7.0), KillGroups(7.82, (1,)), Freeze(8.14, 0, -1, 12.0)
    with standins.installed():
        world = Schedule(1, options, faults).run(traces=True)
    (outside,) = [at for at, _, text in world.trace if text.startswith("outside")]
    assert outside < 8.14
    first = next(
        text
        for _, who, text in world.trace
        if who == "g1r0a1" and text.startswith(("commits", "heal_started"))
    )
    assert first.startswith("heal_started donor=2" if asked else "commits step 1 of groups [1]")


def test_a_group_is_waited_for_when_all_of_its_ranks_are_there() -> None:
    """A restarted group whose hosts cannot reach each other does not delay the others.

    They train on.
    """
    options = Options(2, 2, 120, {**QUICK, "group_size": 2}, restart_seconds=(0.3, 0.3))
    with standins.installed():
        for seed in range(3):
            faults = Kill(0.6, 1, 1), CutInside(0.7, 1, 1, 0, False, 12.0)
            world = Schedule(seed, options, faults).run(traces=True)
            assert not world.problems
            commits = [
                at for at, who, text in world.trace if who == "g0r0" and text.startswith("commits")
            ]
            assert len(commits) == options.steps
            assert max(later - at for at, later in itertools.pairwise(commits)) < 2.0


@pytest.mark.parametrize("seed", range(4))
def test_a_group_whose_ranks_meet_late_comes_late(seed: int) -> None:
    """An earlier group refuses a group for its shape.

    The time of the seat counts, and not the time at which its ranks have met.
    """
    fault_tolerance = {"enable": True, "group_size": 2, "start_timeout_seconds": 1.5}
    options = Options(2, 2, 40, fault_tolerance, odd=(1,), late={1: 1.1}, compute_seconds=0.2)
    with standins.installed():
        world = Schedule(seed, options, (CutInside(0.01, 0, 1, 0, True, 5.0),)).run(traces=True)
    assert not world.problems
    ended = {who for _, who, text in world.trace if "ends by ConfigMismatchError" in text}
    assert ended == {"g0r0", "g0r1"}


def test_a_nan_in_a_fragment_that_is_not_due_is_in_its_next_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lone group diverges with the NaN, as stock torchtitan does.

    The batch with the NaN was in an earlier round.
    """
    fault_tolerance = {
        **QUICK,
        "group_size": 2,
        "join_timeout_ms": 60_000,
        "batch_policy": "shrink",
    }
    fault_tolerance |= {
        "semi_sync_method": "diloco",
        "sync_steps": 2,
        "num_fragments": 2,
        "should_quantize": True,
    }
    options = Options(
        2,
        1,
        3,
        fault_tolerance,
        compute_seconds=0.5,
        jitter=0.02,
        transfer_seconds=(0.0, 2.0),
        lag=0.005,
    )

    def explore() -> list[bool]:
        faults = Kill(0.163, 1, 0), NotFinite(0.9, 0, 0, 1), Hang(1.4573, 1, 0)
        with standins.installed():
            return [bool(Schedule(seed, options, faults).run().problems) for seed in range(3, 11)]

    assert not any(explore())
    monkeypatch.setattr(RoundOracle, "_spoiled_in", Oracle._spoiled_in)
    assert any(explore())


def test_a_checkpoint_that_another_one_replaces_may_be_missed() -> None:
    """A group that missed the checkpoint started anew, and saved another state of its step.

    A group that loads may end.
    """
    kernel = SimpleNamespace(now=10.0)
    folder = Folder(cast(Any, kernel), 1, 0.5, lambda: None)
    parts = [{0: Snapshot(4, lineage, b"", torch.empty(0))} for lineage in (7, 7, 8)]
    for now, own, replaced in zip(
        (10.0, 20.0, 30.0), parts, (-math.inf, -math.inf, 30.5), strict=True
    ):
        kernel.now = now
        folder.publish_saved(0, own)
        assert folder.replaced == replaced


@pytest.mark.parametrize(
    ("missed", "replaced"), [(-math.inf, -math.inf), (12.0, -math.inf), (3.0, 12.0), (3.0, 9.9)]
)
def test_who_loads_a_checkpoint_that_goes_meanwhile_may_end(missed: float, replaced: float) -> None:
    """A group may end if its checkpoint vanishes while it loads.

    A writer may withdraw the save of an update that it made alone.
    """
    world = SimpleNamespace(faults=[], folder=SimpleNamespace(missed=missed, replaced=replaced))
    rank = SimpleNamespace(group=SimpleNamespace(over=False, began=10.0))
    crash = SimpleNamespace(error=LoadError("checkpoint: step-4 vanished after it was chosen"))
    assert World._may_end(cast(Any, world), cast(Any, rank), cast(Any, crash)) is (
        12.0 in (missed, replaced)
    )


def test_the_successor_of_a_joiner_that_hung_is_served_in_the_midst_of_a_round() -> None:
    """The donor still serves the fetch of the former process.

    The new process has a later offer, and cannot use that copy.
    """
    fault_tolerance = {
        **QUICK,
        "group_size": 2,
        "process_group_timeout_ms": 3000,
        "join_timeout_ms": 60_000,
        "hang_timeout_seconds": 20.0,
        "batch_policy": "shrink",
        "semi_sync_method": "local_sgd",
        "sync_steps": 5,
    }
    options = Options(
        2, 1, 4, fault_tolerance, jitter=0.08, compute_seconds=0.4, latency=0.002, switch=0.1
    )
    options = dataclasses.replace(
        options, lag=0.00078125, restart_seconds=(0.1, 0.4), skew=7200.0, room=2
    )
    with standins.installed():
        for seed in range(11):
            assert (
                not Schedule(seed, options, (Kill(3.5304, 0, 0), Hang(4.9817, 0, 0))).run().problems
            )


def test_a_group_finds_its_lighthouse_when_the_way_there_is_back() -> None:
    """Meanwhile the group opens a seat under another name.

    Its manager tries again, as torchft's does.
    """
    fault_tolerance = {
        **QUICK,
        "group_size": 4,
        "min_replica_size": 4,
        "process_group_timeout_ms": 3000,
    }
    options = Options(
        4, 2, 2, fault_tolerance, lag=0.05, restart_seconds=(0.3, 1.5), overlap=True, silent=True
    )
    faults = KillGroups(0.3874, (0,)), CutLighthouse(0.4727, 1, "to", 3.0)
    link_dead = 0
    with standins.installed():
        for seed in (2889, 2892, 2893):
            world = Schedule(seed, options, faults).run(traces=True)
            assert not world.problems
            link_dead += sum("link_dead" in text for _, _, text in world.trace)
    assert link_dead


def test_ranks_that_wait_long_get_the_same_quorum() -> None:
    """A group waits for a hung one.

    Its ranks notice one after the other that `PROBE_SECONDS` have passed.
    """
    fault_tolerance = {
        **QUICK,
        "group_size": 2,
        "process_group_timeout_ms": 3000,
        "hang_timeout_seconds": 6.0,
    }
    options = Options(
        2, 2, 3, fault_tolerance, lag=0.05, restart_seconds=(1.0, 1.0), probe_seconds=0.3
    )
    with standins.installed():
        for seed in range(4, 12):
            assert not Schedule(seed, options, (Hang(0.35, 0, 1),)).run().problems


def test_a_job_begun_anew_has_a_final_state_of_its_own() -> None:
    """The group with the former state was frozen in its last round, and thaws later.

    All others died in that round.
    """
    fault_tolerance = {
        **QUICK,
        "group_size": 2,
        "process_group_timeout_ms": 3000,
    }
    options = Options(2, 1, 4, fault_tolerance, restart_seconds=(1.0, 1.0), compute_seconds=0.4)
    with standins.installed():
        world = Schedule(3, options, (Freeze(1.8, 1, -1, 4.0), KillGroups(2.2, (0,)))).run(
            traces=True
        )
    assert not world.problems
    assert sum("commits step 1 " in text for _, _, text in world.trace) == 3
    assert any(who == "g1r0" and text.startswith("finished") for _, who, text in world.trace)


def test_a_group_that_heals_at_the_end_trains_on_if_the_state_is_an_earlier_one() -> None:
    """A group's bytes differ after the last step.

    All others die before it has their state, and start anew.
    """
    fault_tolerance = {
        **QUICK,
        "group_size": 3,
        "digest_every": 4,
        "process_group_timeout_ms": 3000,
    }
    options = Options(
        3,
        1,
        7,
        fault_tolerance,
        restart_seconds=(0.3, 0.3),
        transfer_seconds=(0.5, 0.5),
        coupling=0.0,
    )
    faults = Flip(0.9, 2, 0, True, 3, 22), KillGroups(1.2, (0, 1), "fetching", of=2)
    with standins.installed():
        world = Schedule(1, options, faults).run(traces=True)
    assert not world.problems
    (back,) = (
        text for _, who, text in world.trace if who == "g2r0" and text.startswith("has step ")
    )
    assert 0 < int(back.split()[2].strip(",")) < 7
    assert {who for _, who, text in world.trace if text.startswith("finished at step 7")} == {
        "g0r0a1",
        "g1r0a1",
        "g2r0",
    }


@pytest.mark.parametrize("before", [0.001, 0.003])
def test_a_rank_that_finds_its_sibling_silent_at_the_end_takes_the_group_along(
    before: float,
) -> None:
    """A rank waits for its frozen sibling in the last votes, and ends.

    The group's store ends with it.
    """
    fault_tolerance = {
        **QUICK,
        "group_size": 2,
        "process_group_timeout_ms": 3000,
    }
    options = Options(2, 2, 4, fault_tolerance, store_survives=False)
    with standins.installed():
        undisturbed = Schedule(1, options, ()).run(traces=True)
        (end,) = (
            at
            for at, who, text in undisturbed.trace
            if who == "g1r1" and text.startswith("commits step 4")
        )
        world = Schedule(1, options, (Freeze(end - before, 1, 1, 4.0),)).run(traces=True)
    assert not world.problems
    own = [text.split()[:3] for _, who, text in world.trace if who == "g1r0"]
    assert [own[-2], own[-1][0]] == [["commits", "step", "4"], "rank_silent"]


@pytest.mark.parametrize(("ranks", "told"), [(1, -1), (2, -1), (2, 1)])
def test_a_group_that_waits_at_the_end_of_its_round_leaves_before_the_others_are_there(
    ranks: int, told: int
) -> None:
    """The others' rounds last longer than the time in which the group must leave.

    They continue without it.
    """
    fault_tolerance = {
        "enable": True,
        "group_size": 2,
        "start_timeout_seconds": 1.5,
        "join_timeout_ms": 60_000,
        "process_group_timeout_ms": 30_000,
        "drain_timeout_seconds": 15.0,
        "semi_sync_method": "diloco",
        "sync_steps": 4,
        "batch_policy": "shrink",
    }
    options = Options(2, ranks, 2, fault_tolerance, compute_seconds=1.0, speeds=(1.0, 9.0))
    with standins.installed():
        world = Schedule(1, options, (DrainGroup(6.0, 0, True, told),)).run(traces=True)
    assert not world.problems
    left = [
        at for at, who, text in world.trace if who.startswith("g0") and text.startswith("drained")
    ]
    assert len(left) == ranks
    assert 17.0 < left[0] <= left[-1] < 19.0
    assert sum("commits step 1 of groups [1]" in text for _, _, text in world.trace) == ranks
    assert not any("exchange_failed" in text for _, _, text in world.trace)


@pytest.mark.parametrize("compared", [False, True])
def test_a_bit_that_flips_in_an_anchor_is_in_no_update(
    monkeypatch: pytest.MonkeyPatch, compared: bool
) -> None:
    """A bit flips in an anchor in the middle of a round without a digest.

    The group's change would be measured from this anchor.
    """
    if not compared:
        monkeypatch.setattr(Rounds, "_compares_before_sum", lambda rounds, contribution: False)
    fault_tolerance = {
        "enable": True,
        "group_size": 3,
        "digest_every": 1000,
        "semi_sync_method": "diloco",
        "sync_steps": 4,
        "batch_policy": "shrink",
    }
    options = Options(3, 2, 4, fault_tolerance, coupling=0.0)
    with standins.installed():
        world = Schedule(1, options, (Flip(0.75, 1, 1, False, 2, 22),)).run(traces=True)
    if compared:
        assert not world.problems
        said = [(who, text) for _, who, text in world.trace]
        assert sum("minority=[1]" in text for _, text in said) == 6
        assert {who for who, text in said if text.startswith("heal_finished")} == {"g1r0", "g1r1"}
        assert sum("commits step 2 of groups [0, 2]" in text for _, text in said) == 4
    else:
        assert "a change from an anchor in which a bit flipped" in world.problems[0].text


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("transfer", [0.3, 3.0])
def test_moments_that_are_not_finite_come_to_no_joiner(ranks: int, transfer: float) -> None:
    """A group whose gradients are not finite holds sound anchors.

    Its moments would corrupt the joiner's next round.
    """
    fault_tolerance = {
        "enable": True,
        "group_size": 3,
        "join_timeout_ms": 60_000,
        "semi_sync_method": "diloco",
        "sync_steps": 8,
        "batch_policy": "shrink",
    }
    options = Options(
        3, ranks, 5, fault_tolerance, compute_seconds=0.5, transfer_seconds=(transfer, transfer)
    )
    for killed in (5.0, 7.2):
        faults = NotFinite(4.4, 0, ranks - 1, 1), KillGroups(killed, (1,))
        with standins.installed():
            world = Schedule(1, options, faults).run(traces=True)
        assert not world.problems
        said = [text for _, _, text in world.trace]
        assert any(text.startswith("heal_finished") for text in said)
        assert any(text.startswith("gradient_excluded") and "slots=[0]" in text for text in said)
        assert not any(
            text.startswith("gradient_excluded") and "slots=[1]" in text for text in said
        )


@pytest.mark.parametrize("heard", [True, False])
def test_a_state_that_was_offered_and_is_lost_is_not_begun_anew_silently(
    monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    """The only holder dies after its offer, before a round with the joiner.

    The joiner reports the loss, and ends.
    """
    if not heard:
        monkeypatch.setattr(Position, "raise_seen_step", lambda position, step: None)
    fault_tolerance = {
        "enable": True,
        "group_size": 2,
        "join_timeout_ms": 60_000,
        "semi_sync_method": "diloco",
        "sync_steps": 16,
        "batch_policy": "shrink",
    }
    options = Options(2, 1, 3, fault_tolerance, compute_seconds=0.5, restart_seconds=(0.5, 0.5))
    killed, lost = KillGroups(10.0, (0,)), KillGroups(10.1, (1,), "healing", of=0, for_good=True)
    with standins.installed():
        world = Schedule(1, options, (killed, lost)).run(traces=True)
    said = [text for _, who, text in world.trace if who == "g0r0a1"]
    assert (
        any(
            "ends by JobLostError: every group with the state after step 1" in text for text in said
        )
        is heard
    )
    assert any(text.startswith("rolled_back step=0") for text in said) is not heard


def test_an_update_that_is_lost_with_its_holder_costs_no_round() -> None:
    """The only group with the update dies while the other one fetches it.

    The other group gives its own steps again.
    """
    fault_tolerance = {
        "enable": True,
        "group_size": 2,
        "process_group_timeout_ms": 3000,
        "semi_sync_method": "diloco",
        "sync_steps": 4,
        "batch_policy": "shrink",
    }
    options = Options(
        2, 1, 5, fault_tolerance, compute_seconds=0.1, transfer_seconds=(0.5, 0.5), jitter=0.1
    )
    faults = Reset(0.9, 1, 0, "vote"), KillGroups(0.9, (1,), "fetching", of=0)
    kept = 0
    with standins.installed():
        for seed in range(20):
            world = Schedule(seed, options, faults).run(traces=True)
            assert not world.problems
            said = [text for _, who, text in world.trace if who == "g0r0"]
            if "rolled_back step=1 lost=1" in said:
                assert "keeps 4 steps of its round" in said
                assert not any(text.startswith("has lost") for text in said)
                kept += 1
    assert kept


@pytest.mark.parametrize("broken", [None, "reason", "time"])
def test_what_a_group_waited_for_is_what_it_waited_for(
    monkeypatch: pytest.MonkeyPatch, broken: str | None
) -> None:
    """The reported waits equal the virtual arrival times.

    For a slow group, for a joiner, and for a group that is gone.
    """
    if broken == "reason":
        report = rounds.RoundReport
        monkeypatch.setattr(
            rounds,
            "RoundReport",
            lambda *values, **more: dataclasses.replace(
                report(*values, **more), joining_reason=Why.COMPUTING
            ),
        )
    elif broken == "time":
        monkeypatch.setattr(waits, "_charge", lambda start, arrivals: iter(()))
    options = Options(3, 1, 14, {**QUICK, "group_size": 3, "process_group_timeout_ms": 3000})
    faults = Slow(0.5, 1, 0, 1.0, 2.0), KillGroups(3.3, (2,))
    with standins.installed():
        world = Schedule(3, options, faults).run(traces=True)
    if broken:
        assert world.problems[0].promise == "waits"
        return
    assert not world.problems
    assert world.waits.judged[Why.COMPUTING] > 10
    assert world.waits.judged[Why.CATCHING_UP]
    said = {(wait.slot, wait.why) for slot, wait in world.waits.committed if slot == 0}
    assert {(1, "computing"), (2, "lost")} <= said


STREAMING = {
    "enable": True,
    "process_group_timeout_ms": 20_000,
    "semi_sync_method": "diloco",
    "num_fragments": 2,
    "batch_policy": "shrink",
}


@pytest.mark.parametrize("restart", [0.8, 1.6, 3.0])
def test_joiners_in_an_overlapped_exchange_cost_the_last_holder_no_round(restart: float) -> None:
    """The holder makes steps during the exchange of its next update.

    With the former state they would be too many.
    """
    fault_tolerance = {**STREAMING, "group_size": 3, "sync_steps": 16, "fragment_sync_delay": 6}
    times = {
        "transfer_seconds": (0.2, 0.2),
        "restart_seconds": (restart, restart),
        "compute_seconds": 0.5,
    }
    with standins.installed():
        faults = (KillGroups(11.4, (1, 2)),)
        world = Schedule(1, Options(3, 1, 6, fault_tolerance, **times), faults).run(traces=True)
    assert not world.problems
    steps = [
        text.split()[2]
        for _, who, text in world.trace
        if who == "g0r0" and text.startswith("commits")
    ]
    assert steps == ["1", "2", "3", "4", "5", "6"]


@pytest.mark.parametrize("seed", [2, 4, 6])
def test_a_joiner_finds_an_offer_that_lasts_for_one_step(seed: int) -> None:
    """A round has two steps, one of them during the exchange.

    A joiner's searches fell between the offers.
    """
    fault_tolerance = {
        "enable": True,
        "group_size": 2,
        "start_timeout_seconds": 1.5,
        "semi_sync_method": "diloco",
        "sync_steps": 4,
        "num_fragments": 2,
        "fragment_sync_delay": 1,
    }
    times = {
        "latency": 0.0002,
        "compute_seconds": 0.5,
        "restart_seconds": (0.3, 1.5),
        "jitter": 0.08,
        "switch": 0.4,
    }
    with standins.installed():
        world = Schedule(
            seed, Options(2, 1, 5, fault_tolerance, **times), (KillGroups(0.4894, (1,)),)
        ).run()
    assert not world.problems


@pytest.mark.parametrize(
    ("groups", "ranks", "seed", "after"),
    [
        (2, 1, 0, 0.3),
        (2, 1, 5, 0.35),
        (2, 2, 0, 0.45),
        (2, 2, 8, 0.3),
        (3, 2, 18, 0.25),
        (3, 2, 18, 0.45),
    ],
)
def test_no_round_is_committed_without_groups_in_the_midst_of_it(
    groups: int, ranks: int, seed: int, after: float
) -> None:
    """A newcomer heals while the lighthouse is away, and asks the new lighthouse first.

    It would commit the others' round alone. With three groups, a second newcomer joins it. The new
    lighthouse's quorum ids do not show that it was restarted.
    """
    fault_tolerance = {
        **QUICK,
        "group_size": groups,
        "join_timeout_ms": 60_000,
        "process_group_timeout_ms": 3000,
        "batch_policy": "shrink",
        "semi_sync_method": "diloco",
        "sync_steps": 2,
    }
    times = {"transfer_seconds": (0.0, 0.6), "restart_seconds": (0.3, 0.3), "compute_seconds": 1.0}
    options = Options(
        groups, ranks, 3, fault_tolerance, lag=0.001, jitter=0.08, switch=0.1, **times
    )
    faults = KillGroups(2.9, (0,)), LighthouseDies(3.2 + after, 2.0)
    with standins.installed():
        assert not Schedule(seed, options, faults).run().problems


@pytest.mark.parametrize("kill", [15.1, 15.2, 15.3, 15.6])
def test_a_joiner_in_an_overlapped_exchange_waits_for_its_update(kill: float) -> None:
    """The state before the update is no longer offered, because it would be outdated on its way.

    So the joiner fetches once.
    """
    fault_tolerance = {**STREAMING, "group_size": 2, "sync_steps": 32, "fragment_sync_delay": 6}
    times = {"transfer_seconds": (2.0, 2.0), "restart_seconds": (1.6, 1.6), "compute_seconds": 0.5}
    with standins.installed():
        faults = (KillGroups(kill, (1,)),)
        world = Schedule(1, Options(2, 1, 6, fault_tolerance, **times), faults).run(traces=True)
    assert not world.problems
    heals = [
        text.split(" ", 1)[0]
        for _, who, text in world.trace
        if who == "g1r0a1" and text.startswith("heal_")
    ]
    assert heals == ["heal_started", "heal_finished"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("restart", "seconds", "steps"),
    [
        (0.1, 0.03, 1),  # the joiner has the state when the others repeat their exchange
        (0.1, 0.3, 2),
        (0.1, 0.7, 3),
        (0.1, 1.1, 4),
        (0.4, 0.05, 1),  # in the middle of a step, to which the lone group admits the joiner
        (0.5, 0.3, 2),
    ],
)
def test_a_state_that_comes_early_in_a_step_is_loaded_in_it(
    restart: float, seconds: float, steps: int, ranks: int
) -> None:
    """A state that arrives early in a step is loaded in it, and the joiner trains the next step.

    A late state is loaded in the next step, so that the others do not wait for the load.
    """
    fault_tolerance = {"enable": True, "group_size": 2, "process_group_timeout_ms": 3000}
    times = {
        "transfer_seconds": (seconds, seconds),
        "restart_seconds": (restart, restart),
        "compute_seconds": 0.4,
    }
    with standins.installed():
        world = Schedule(
            1, Options(2, ranks, 12, fault_tolerance, **times), (KillGroups(1.0, (1,)),)
        ).run(traces=True)
    assert not world.problems
    said = [text for _, who, text in world.trace if who == "g1r0a1"]
    (begun,) = (text for text in said if text.startswith("heal_started"))
    from_step = int(begun.rpartition("step=")[2])
    first = next(text for text in said if "of groups [0, 1]" in text and text.startswith("commits"))
    assert int(first.split()[2]) == from_step + 1 + steps


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_lone_group_admits_a_joiner_to_the_step_under_way(ranks: int) -> None:
    """A lone group's quorum is fixed only after its computation.

    Otherwise each joiner would wait for a whole step.
    """
    fault_tolerance = {"enable": True, "group_size": 2, "process_group_timeout_ms": 3000}
    times = {
        "transfer_seconds": (0.05, 0.05),
        "restart_seconds": (0.5, 0.5),
        "compute_seconds": 0.4,
    }
    with standins.installed():
        world = Schedule(
            2, Options(2, ranks, 6, fault_tolerance, **times), (KillGroups(1.0, (1,)),)
        ).run(traces=True)
    assert not world.problems
    said = [(at, text) for at, who, text in world.trace if who == "g0r0" and at > 1.0]
    commits = [at for at, text in said if text.startswith("commits")]
    joined = next(
        at for at, text in said if text.startswith("joined") and "participants=[0, 1]" in text
    )
    assert commits[0] + 0.1 < joined < commits[1] - 0.1


def test_a_step_has_one_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one agreement of a step is its vote. Rank 0 announces the quorum.

    A step needs no note, and no collective in a group. Each further agreement would add twice the
    tree's depth to every step. A digest, once in `digest_every` steps, has a collective: it is made
    of the digests of a group's ranks.
    """
    counts: Counter[str] = Counter()

    def counted(owner: type, name: str) -> None:
        call = getattr(owner, name)

        def count(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return call(*arguments, **options)

        monkeypatch.setattr(owner, name, count)

    for name in ("rank0_decides", "rank0_announces", "send_note"):
        counted(ControlTree, name)
    counted(GroupCollectives, "gather")

    def run(steps: int) -> Counter[str]:
        counts.clear()
        options = Options(
            2, 2, steps, {"enable": True, "group_size": 2, "digest_every": 3}, jitter=0.0
        )
        assert not Schedule(3, options, ()).run().problems
        return Counter(counts)

    with standins.installed():
        short, long = run(4), run(14)
    assert long - short == {"rank0_decides": 10 * 4, "rank0_announces": 10 * 4, "gather": 3 * 4}


def test_a_group_that_has_yet_to_begin_serves_no_joiner_beside_one_that_trains() -> None:
    """At step 0 its bytes are the same, but its ledger has no readers.

    A joiner's ranks got one or the other ledger.
    """
    fault_tolerance = {
        **QUICK,
        "group_size": 3,
        "min_replica_size": 3,
        "digest_every": 3,
        "process_group_timeout_ms": 3000,
        "batch_policy": "constant",
        "exchange_dtype": "bfloat16",
    }
    options = Options(
        3,
        2,
        2,
        fault_tolerance,
        compute_seconds=0.4,
        restart_seconds=(0.1, 0.4),
        overlap=True,
        skew=7200.0,
        switch=0.4,
    )
    faults = (
        Kill(0.6817, 1, 1),
        Kill(0.6817, -1, 1, "serving"),
        Kill(1.7732, 2, 1),
        Kill(2.2628, 2, 1),
    )
    with standins.installed():
        for seed in range(8):
            assert not Schedule(seed, options, faults).run().problems


def test_a_fault_that_waits_for_its_moment_disturbs_the_world_when_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The world measures delays from the time at which the fault strikes."""
    disturbed = []
    monkeypatch.setattr(World, "silenced", lambda self, *_: disturbed.append(self.disturbed))
    with standins.installed():
        fault_tolerance = {"enable": True, "group_size": 2}
        options = Options(2, 1, 3, fault_tolerance, compute_seconds=2.0)
        world = Schedule(1, options, (Freeze(0.5, 0, -1, 0.2, "exchange"),)).run(traces=True)
    assert not world.problems
    (since,) = disturbed
    assert since > 1.5, "it waits from 0.5 on, and the first exchange is at the step's end"


def test_a_world_goes_when_it_is_dropped() -> None:
    """A schedule that is dropped leaves no memory.

    A process runs thousands of them.
    """
    with standins.installed():
        schedule = draw(7, ("kill", "freeze"))
        overlapping = dataclasses.replace(
            schedule, options=dataclasses.replace(schedule.options, overlap=True)
        )
        world = weakref.ref(overlapping.run())
    gc.collect()
    assert world() is None


def test_the_real_world_is_back_afterwards() -> None:
    """Other tests of the process get the real time."""
    module = vars(sys.modules["titan_ft.membership.seat"])
    with standins.installed():
        assert module["time"] is not time
    assert module["time"] is time
    assert module["threading"] is threading
