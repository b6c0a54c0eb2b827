# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The times and targets of faults."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from itertools import islice, pairwise, permutations

import pytest

from titan_ft.chaos.plan import Every, Limits, Listed, ListedFault, Plan, Poisson, Rule, UniformGaps
from titan_ft.chaos.schedule import GroupView, Injection, Refusal, Shot, View, aim, shots
from titan_ft.faults.catalogue import FAULTS, make_fault
from titan_ft.faults.fault import Need
from titan_ft.faults.outside import KillGroup, Signal, StopRank
from titan_ft.run.events import Target

ALL = frozenset(Need)


def make_plan(*rules: Rule | Listed, seed: int = 7, **rest: float) -> Plan:
    return Plan("test", seed, rules=rules, **rest)  # type: ignore[arg-type]


def make_view(
    num_groups: int, down: Collection[int] = (), num_ranks: int = 1, has: frozenset[Need] = ALL
) -> View:
    """Make a view of a job with all groups up except `down`."""
    groups = {
        replica: GroupView(replica, num_ranks, replica not in down) for replica in range(num_groups)
    }
    return View(groups, has)


def make_shot(
    fault: str, seed: int = 1, replica: int | None = None, rank: int | None = None, **params: float
) -> Shot:
    return Shot(0, 0.0, make_fault(fault, params), seed, replica, rank)


def targets_of(decision: Injection | Refusal) -> list[int | None]:
    assert isinstance(decision, Injection), decision
    return [target.replica for target in decision.targets]


def reason_of(decision: Injection | Refusal, *, final: bool) -> str:
    assert isinstance(decision, Refusal), decision
    assert decision.final == final, decision
    return decision.reason


# When.


def test_every_starts_at_once_and_does_not_drift() -> None:
    """Shots come at exact multiples of the period, numbered from 0."""
    plan = make_plan(Every(0.1, faults=["kill_group"]))
    first = list(islice(shots(plan), 1001))
    assert [shot.number for shot in first] == list(range(1001))
    assert first[0].time == 0
    assert first[1000].time == 1000 * 0.1


def test_poisson_gaps_are_exponential() -> None:
    """Mean and standard deviation of the gaps are the MTBF, and a share of 1/e is longer than
    it.
    """
    times = [
        0.0,
        *(
            shot.time
            for shot in islice(shots(make_plan(Poisson(30.0, faults=["kill_group"]))), 6_000)
        ),
    ]
    gaps = [after - before for before, after in pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(30, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(30, rel=0.06)
    assert sum(gap > 30 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.025)


def test_poisson_gaps_are_independent() -> None:
    """A short gap predicts nothing about the next one, although each is drawn from its own
    source.
    """
    times = [
        shot.time for shot in islice(shots(make_plan(Poisson(30.0, faults=["kill_group"]))), 4_000)
    ]
    gaps = [after - before for before, after in pairwise(times)]
    assert abs(statistics.correlation(gaps[:-1], gaps[1:])) < 0.05


def test_uniform_gaps_are_within_their_bounds() -> None:
    """Gaps fill the whole range evenly, and never leave it."""
    times = [
        0.0,
        *(
            shot.time
            for shot in islice(shots(make_plan(UniformGaps(5, 15, faults=["kill_group"]))), 5_000)
        ),
    ]
    gaps = [after - before for before, after in pairwise(times)]
    assert min(gaps) >= 5 - 1e-6
    assert max(gaps) <= 15 + 1e-6
    assert statistics.fmean(gaps) == pytest.approx(10, abs=0.2)
    assert sum(gap < 7.5 for gap in gaps) / len(gaps) == pytest.approx(0.25, abs=0.03)


def test_weights_decide_how_often_a_fault_comes() -> None:
    """A fault of three times the weight comes three times as often; all that are listed come."""
    plan = make_plan(Every(1, faults={"kill_group": 3.0, "kill_lighthouse": 1.0}))
    counts = Counter(shot.fault.name for shot in islice(shots(plan), 8_000))
    assert set(counts) == {"kill_group", "kill_lighthouse"}
    assert counts["kill_group"] / counts["kill_lighthouse"] == pytest.approx(3, rel=0.12)


def test_rules_are_merged_by_time() -> None:
    """Several rules' shots are merged in order of time; at equal times the earlier rule's shot is
    first.
    """
    listed = Listed((ListedFault(10.0, "term_group", {}), ListedFault(25.0, "kill_rank", {})))
    plan = make_plan(Every(10, faults=["kill_group"]), listed, Poisson(7, faults=["segfault"]))
    merged = list(islice(shots(plan), 200))
    assert [shot.time for shot in merged] == sorted(shot.time for shot in merged)
    assert [shot.number for shot in merged] == list(range(200))
    at_ten = [shot.fault.name for shot in merged if shot.time == 10]
    assert at_ten == ["kill_group", "term_group"]
    assert {"kill_group", "term_group", "kill_rank", "segfault"} == {
        shot.fault.name for shot in merged
    }


def test_a_list_ends() -> None:
    """A plan of lists only has an end, and passes on the targets and parameters of its lines."""
    entries = (
        ListedFault(0.0, "stop_rank", {"seconds": 3.0}, 2, 1),
        ListedFault(4.0, "kill_group", {}),
    )
    first, second = shots(make_plan(Listed(entries)))
    assert (first.time, first.fault, first.replica, first.rank) == (0, StopRank(3.0), 2, 1)
    assert (second.time, second.fault, second.replica, second.rank) == (4, KillGroup(), None, None)
    assert first.seed != second.seed


def test_stop_after_ends_the_schedule() -> None:
    """No shot comes later than stop_after_seconds; one exactly then still does."""
    plan = make_plan(Every(15, faults=["kill_group"]), stop_after_seconds=45)
    assert [shot.time for shot in shots(plan)] == [0, 15, 30, 45]


def test_a_plan_without_rules_has_no_shots() -> None:
    """An empty plan is valid."""
    assert list(shots(make_plan())) == []


# Seeds.


def test_the_seed_decides_everything() -> None:
    """The same plan gives the same shots, and another seed gives others."""
    rules = (
        Poisson(10, faults=["kill_group", "segfault"]),
        UniformGaps(3, 9, faults=["nan_gradient"]),
    )
    first, again, other = (
        list(islice(shots(make_plan(*rules, seed=seed)), 300)) for seed in (3, 3, 4)
    )
    assert first == again
    assert [shot.time for shot in first] != [shot.time for shot in other]
    assert len({shot.seed for shot in first}) == 300


def test_another_process_draws_the_same() -> None:
    """Neither the process nor its hash seed matters, so that another machine can replay a
    campaign.
    """
    code = (
        "import json; from itertools import islice\n"
        "from titan_ft.chaos.plan import Plan, Poisson\n"
        "from titan_ft.chaos.schedule import shots\n"
        "rule = Poisson(10.0, faults=['kill_group', 'segfault'])\n"
        "print(json.dumps([[s.time, s.fault.name, s.seed] for s in islice(shots(Plan('p', 5, rules=(rule,))), 50)]))"
    )
    drawn = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", code],
                env={"PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            ).stdout
        )
        for seed in ("1", "2")
    ]
    assert drawn[0] == drawn[1]


def test_a_rule_does_not_shift_another() -> None:
    """A rule's shots stay the same when another rule follows it, and when the schedule ends
    earlier.
    """
    kills, flips = (
        Poisson(10, faults=["kill_group", "kill_rank"]),
        Poisson(4, faults=["nan_gradient"]),
    )

    def of_kills(*rules: Rule | Listed, **rest: float) -> list[tuple[float, str, int]]:
        stream = shots(make_plan(*rules, **rest))
        found = (
            (shot.time, shot.fault.name, shot.seed)
            for shot in stream
            if shot.fault.name.startswith("kill")
        )
        return list(islice(found, 20))

    assert of_kills(kills) == of_kills(kills, flips)
    assert of_kills(kills)[:5] == of_kills(kills, stop_after_seconds=2000.0)[:5]


def test_aim_depends_on_nothing_else() -> None:
    """The same shot and view give the same targets, whatever used the global random source."""
    for seed in range(50):
        shot, view = make_shot("kill_rank", seed), make_view(6, num_ranks=8)
        random.seed(seed)
        first = aim(shot, view, Limits())
        assert first == aim(shot, view, Limits())


def test_aim_reaches_every_group_and_rank() -> None:
    """Over many seeds each rank of each group is hit about equally often."""
    view = make_view(3, num_ranks=4)
    hits: Counter[Target] = Counter()
    for seed in range(2400):
        decision = aim(make_shot("kill_rank", seed), view, Limits())
        assert isinstance(decision, Injection)
        hits.update(decision.targets)
    assert len(hits) == 12
    assert all(140 < count < 260 for count in hits.values()), hits


def test_a_group_that_is_down_elsewhere_changes_no_choice() -> None:
    """A replay in which another group is down still hits the same group."""
    num_same = 0
    for seed in range(200):
        (chosen,) = targets_of(aim(make_shot("kill_group", seed), make_view(5), Limits(max_down=2)))
        for other in set(range(5)) - {chosen}:
            decision = aim(
                make_shot("kill_group", seed), make_view(5, down=[other]), Limits(max_down=2)
            )
            num_same += targets_of(decision) == [chosen]
    assert num_same == 200 * 4


# Whom.


@pytest.mark.parametrize("name", FAULTS)
def test_scope_decides_the_targets(name: str) -> None:
    """In a healthy job each fault gets the number and kind of targets of its scope."""
    fault = make_fault(name, {})
    decision = aim(make_shot(name), make_view(4, num_ranks=2), Limits(max_down=2))
    assert isinstance(decision, Injection)
    assert decision.shot.fault == fault
    assert len(decision.targets) == (2 if fault.scope in ("groups", "link") else 1)
    assert len(set(decision.targets)) == len(decision.targets)
    for target in decision.targets:
        assert target.lighthouse == (target.replica is None) == (fault.scope == "lighthouse")
        assert (target.rank is not None) == (fault.scope == "rank")


def test_wishes_are_granted() -> None:
    """A named group and rank are hit; if only a rank is named, the seed chooses the group."""
    view = make_view(4, num_ranks=4)
    for seed in range(30):
        decision = aim(make_shot("kill_rank", seed, replica=2, rank=3), view, Limits())
        assert isinstance(decision, Injection)
        assert decision.targets == (Target(2, 3),)
    decisions = [aim(make_shot("kill_rank", seed, rank=3), view, Limits()) for seed in range(30)]
    chosen = [decision.targets[0] for decision in decisions if isinstance(decision, Injection)]
    assert {target.rank for target in chosen} == {3}
    assert {target.replica for target in chosen} == {0, 1, 2, 3}


def test_a_full_disk_hits_the_group_that_saves() -> None:
    """The first contributing group saves for all, so the fault hits that group."""
    for seed in range(20):
        assert targets_of(aim(make_shot("disk_full", seed), make_view(4), Limits())) == [0]
        assert targets_of(
            aim(make_shot("disk_full", seed), make_view(4, down=[0]), Limits(max_down=2))
        ) == [1]


# Constraints.


def test_no_plan_ever_takes_all_groups_down() -> None:
    """For any fault, groups and limits: targets are up and not exempt, and the limits hold
    afterwards.
    """
    source = random.Random(20)
    num_injected = 0
    for _ in range(5_000):
        num_groups = source.randint(1, 7)
        down = [replica for replica in range(num_groups) if source.random() < 0.3]
        exempt = tuple(replica for replica in range(num_groups) if source.random() < 0.2)
        limits = Limits(max_down=source.randint(1, 9), exempt=exempt)
        name = source.choice(list(FAULTS))
        params = {"count": source.randint(1, 6)} if name == "kill_groups" else {}
        shot = make_shot(name, source.getrandbits(32), **params)
        fault = shot.fault
        decision = aim(shot, make_view(num_groups, down, num_ranks=2), limits)
        if isinstance(decision, Refusal):
            assert decision.reason
            continue
        num_injected += 1
        hit = {target.replica for target in decision.targets} - {None}
        assert not hit & set(down)
        assert not hit & set(exempt)
        assert num_groups - len(down) >= fault.min_up
        if hit:
            num_hit = len(hit) + fault.extra_down
            assert len(down) + num_hit <= limits.max_down
            untouched = num_groups - len(down) - num_hit
            assert untouched >= (1 if fault.takes_down else 0)
    assert num_injected > 500


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.takes_down])
def test_the_last_group_is_left_alone(name: str) -> None:
    """The last group that is up is not taken down, whatever max_down is; the shot may be retried
    later.
    """
    reason = reason_of(
        aim(make_shot(name), make_view(4, down=[0, 1, 2]), Limits(max_down=99)), final=False
    )
    assert reason.endswith("groups that are up, 1 of 4 are")


def test_max_down_counts_what_is_down_already() -> None:
    """A group that died by itself counts towards max_down until it is back."""
    shot = make_shot("kill_group")
    reason = reason_of(aim(shot, make_view(4, down=[3]), Limits(max_down=1)), final=False)
    assert reason == "2 groups would be down or under a fault, limits.max_down is 1"
    assert isinstance(aim(shot, make_view(4, down=[3]), Limits(max_down=2)), Injection)
    assert isinstance(aim(shot, make_view(4), Limits(max_down=1)), Injection)


def test_exempt_groups_are_never_hit() -> None:
    """Exempt groups are hit neither by chance nor by request; with all groups exempt a shot is
    impossible.
    """
    limits = Limits(max_down=3, exempt=(0, 2))
    hit = [
        targets_of(aim(make_shot("kill_group", seed), make_view(4), limits))[0]
        for seed in range(100)
    ]
    assert set(hit) == {1, 3}
    assert "group 2 is in limits.exempt" in reason_of(
        aim(make_shot("kill_group", replica=2), make_view(4), limits), final=True
    )
    everyone = Limits(max_down=3, exempt=(0, 1, 2, 3))
    assert (
        reason_of(aim(make_shot("kill_group"), make_view(4), everyone), final=True)
        == "all other groups are exempt"
    )
    assert reason_of(aim(make_shot("kill_groups", count=3), make_view(4), limits), final=True)
    # The two that are not exempt are down: later.
    view = make_view(4, down=[1, 3])
    assert (
        reason_of(aim(make_shot("kill_group"), view, limits), final=False)
        == "no group is up that may be a target"
    )


def test_two_groups_allow_kills_and_no_flips() -> None:
    """In a job of two groups one can be killed; a flip cannot be found, because neither group is a
    majority.
    """
    view = make_view(2)
    allowed = {
        name
        for name in FAULTS
        if isinstance(aim(make_shot(name), view, Limits(max_down=2)), Injection)
    }
    assert set(FAULTS) - allowed == {
        "kill_groups",
        "link_dead",
        "kill_donor",
        "flip_parameter",
        "flip_optimizer",
    }
    reason = reason_of(aim(make_shot("flip_parameter"), view, Limits(max_down=2)), final=True)
    assert reason == "it needs 3 groups, the job has 2"


def test_one_group_is_only_slowed_down() -> None:
    """A job of one group gets only faults that need no other group."""
    decisions = {name: aim(make_shot(name), make_view(1), Limits(max_down=2)) for name in FAULTS}
    allowed = {name for name, decision in decisions.items() if isinstance(decision, Injection)}
    assert allowed == {"kill_lighthouse", "slow_rank", "disk_full"}
    assert all(decisions[name].final for name in FAULTS if name not in allowed)  # type: ignore[union-attr]


def test_kill_groups_hits_as_many_as_it_says() -> None:
    """Several groups at once, all different, within max_down."""
    hit = targets_of(aim(make_shot("kill_groups", count=3), make_view(5), Limits(max_down=3)))
    assert len(set(hit)) == 3
    assert "it hits 3 groups at once, limits.max_down is 2" in reason_of(
        aim(make_shot("kill_groups", count=3), make_view(5), Limits(max_down=2)), final=True
    )
    reason_of(
        aim(make_shot("kill_groups", count=3), make_view(5, down=[0, 1]), Limits(max_down=9)),
        final=False,
    )


def test_kill_donor_counts_twice() -> None:
    """kill_donor takes down a group and its donor: it needs three groups up, and max_down
    of two.
    """
    shot = make_shot("kill_donor")
    assert len(targets_of(aim(shot, make_view(3), Limits(max_down=2)))) == 1
    reason_of(aim(shot, make_view(3), Limits(max_down=1)), final=True)
    reason_of(aim(shot, make_view(4, down=[0]), Limits(max_down=2)), final=False)
    assert "donor" in reason_of(
        aim(shot, make_view(4), Limits(max_down=2, exempt=(3,))), final=True
    )
    assert isinstance(
        aim(make_shot("corrupt_chunk"), make_view(4), Limits(max_down=1, exempt=(3,))), Injection
    )


def test_a_link_has_two_ends() -> None:
    """The shot names the ends, or its seed draws them; each group can be either end."""
    view, limits = make_view(4), Limits(max_down=2)
    assert targets_of(aim(make_shot("link_dead", replica=2, peer=1), view, limits)) == [2, 1]
    drawn = [targets_of(aim(make_shot("link_dead", seed), view, limits)) for seed in range(200)]
    assert drawn == [
        targets_of(aim(make_shot("link_dead", seed), view, limits)) for seed in range(200)
    ]
    assert {tuple(ends) for ends in drawn} == set(permutations(range(4), 2))
    for seed in range(20):
        one, other = targets_of(aim(make_shot("link_dead", seed, replica=3), view, limits))
        assert one == 3 != other
        one, other = targets_of(aim(make_shot("link_dead", seed, peer=3), view, limits))
        assert one != 3 == other


def test_a_link_keeps_the_limits() -> None:
    """Both ends count, and must be up, in the job and not exempt; a third group is left
    untouched.
    """
    view, limits = make_view(4), Limits(max_down=2)
    reasons = [
        reason_of(aim(make_shot("link_dead", **wish), view, limits), final=True)
        for wish, limits in (
            ({}, Limits(max_down=1)),
            ({"peer": 7}, limits),
            ({"peer": 1}, Limits(max_down=2, exempt=(1,))),
            ({}, Limits(max_down=2, exempt=(0, 1, 2))),
        )
    ]
    assert reasons == [
        "it hits 2 groups at once, limits.max_down is 1",
        "the job has no group 7; it has 0, 1, 2, 3",
        "group 1 is in limits.exempt",
        "all other groups are exempt",
    ]
    down = make_view(4, down=[1])
    reason = reason_of(aim(make_shot("link_dead", peer=1), down, Limits(max_down=3)), final=False)
    assert reason == "group 1 is not up"
    for seed in range(20):
        assert 1 not in targets_of(aim(make_shot("link_dead", seed), down, Limits(max_down=3)))


def test_flips_need_a_majority_that_is_up() -> None:
    """Groups that are down cannot help to find a flip."""
    limits = Limits(max_down=3)
    assert isinstance(aim(make_shot("flip_optimizer"), make_view(4, down=[0]), limits), Injection)
    reason = reason_of(
        aim(make_shot("flip_optimizer"), make_view(4, down=[0, 1]), limits), final=False
    )
    assert reason == "it needs 3 groups that are up, 2 of 4 are"


@pytest.mark.parametrize(
    ("name", "missing", "word"),
    [
        ("segfault", Need.AGENT, "fault_tolerance.chaos = true"),
        ("disk_full", Need.CHECKPOINT, "checkpoint.enable = true"),
        ("kill_lighthouse", Need.LIGHTHOUSE, "titan-ft launch"),
        ("kill_agent", Need.KEEPER, "titan-ft launch, or under Slurm"),
    ],
)
def test_what_the_job_lacks_is_final(name: str, missing: Need, word: str) -> None:
    """A fault that the job cannot have is final, and the reason names the missing means."""
    decision = aim(make_shot(name), make_view(4, has=ALL - {missing}), Limits())
    assert word in reason_of(decision, final=True)


def test_signals_need_nothing_of_the_job() -> None:
    """All that signals do to workers works on any job."""
    for name, fault in FAULTS.items():
        if issubclass(fault, Signal) and not fault.needs:
            assert isinstance(
                aim(make_shot(name), make_view(4, has=frozenset()), Limits(max_down=2)), Injection
            )


def test_a_wish_for_what_does_not_exist_is_final() -> None:
    """A group or a rank that the job does not have will not come."""
    view = make_view(2, num_ranks=2)
    reasons = [
        reason_of(
            aim(make_shot("kill_rank", replica=replica, rank=rank), view, Limits()), final=True
        )
        for replica, rank in ((7, None), (1, 2), (None, 2))
    ]
    assert reasons == [
        "the job has no group 7; it has 0, 1",
        "group 1 has no rank 2; it has ranks 0 to 1",
        "no group has a rank 2",
    ]


def test_a_wish_for_a_group_that_is_down_waits() -> None:
    """A named group that is down may return, so the refusal is not final."""
    decision = aim(make_shot("kill_group", replica=1), make_view(4, down=[1]), Limits(max_down=9))
    assert reason_of(decision, final=False) == "group 1 is not up"


@pytest.mark.parametrize("name", FAULTS)
def test_a_job_of_which_nothing_is_known_waits(name: str) -> None:
    """Before any group has appeared nothing is impossible, and nothing allowed."""
    reason_of(aim(make_shot(name), make_view(0), Limits(max_down=2)), final=False)
    if FAULTS[name].scope == "rank":
        reason_of(
            aim(make_shot(name, replica=3, rank=0), make_view(0), Limits(max_down=2)), final=False
        )


def test_the_lighthouse_is_hit_whatever_is_down() -> None:
    """The lighthouse's fault takes no group down, so neither max_down nor exempt groups
    prevent it.
    """
    limits = Limits(max_down=1, exempt=(0, 1, 2, 3))
    decision = aim(make_shot("kill_lighthouse"), make_view(4, down=[0, 1, 2]), limits)
    assert isinstance(decision, Injection)
    assert decision.targets == (Target(lighthouse=True),)


def test_params_and_number_stay_with_the_shot() -> None:
    """The injection contains the shot itself, for the history."""
    shot = replace(make_shot("slow_rank", factor=9.0), number=17)
    decision = aim(shot, make_view(2), Limits())
    assert isinstance(decision, Injection)
    assert decision.shot == shot
