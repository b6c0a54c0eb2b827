# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The catalogue of faults."""

from __future__ import annotations

import subprocess
import sys

import pytest

from titan_ft.config import ConfigError
from titan_ft.faults.catalogue import FAULTS, find_fault, make_fault, read_category, read_outcome
from titan_ft.faults.fault import Need
from titan_ft.faults.inside import InWorker, SlowRank
from titan_ft.faults.outside import KillGroups, Signal

OUTSIDE = {
    "kill_rank",
    "kill_group",
    "kill_groups",
    "kill_agent",
    "term_group",
    "stop_rank",
    "stop_group",
    "kill_lighthouse",
}
INSIDE = {
    "segfault",
    "deadlock",
    "abort_process_group",
    "out_of_memory",
    "exception",
    "slow_rank",
    "network_dead",
    "network_slow",
    "link_dead",
    "kill_donor",
    "corrupt_chunk",
    "nan_gradient",
    "flip_parameter",
    "flip_optimizer",
    "disk_full",
}


def test_the_catalogue_is_complete() -> None:
    """Every fault that histories may name is in the catalogue, either outside or inside a
    worker.
    """
    assert set(FAULTS) == OUTSIDE | INSIDE
    assert all(name == fault.name for name, fault in FAULTS.items())
    assert {name for name, fault in FAULTS.items() if issubclass(fault, Signal)} == OUTSIDE
    assert {name for name, fault in FAULTS.items() if issubclass(fault, InWorker)} == INSIDE


def test_needs_follow_from_who_acts() -> None:
    """Faults inside a worker need an agent, and faults from outside do not."""
    for fault in FAULTS.values():
        assert (Need.AGENT in fault.needs) == issubclass(fault, InWorker)
        assert (Need.LIGHTHOUSE in fault.needs) == (fault.scope == "lighthouse")
    assert [fault.name for fault in FAULTS.values() if Need.CHECKPOINT in fault.needs] == [
        "disk_full"
    ]
    assert [fault.name for fault in FAULTS.values() if Need.KEEPER in fault.needs] == ["kill_agent"]


def test_help_is_one_line_and_defaults_keep_their_rules() -> None:
    """Each fault has a summary that fits a help text, and valid defaults."""
    for name, fault in FAULTS.items():
        assert 0 < len(fault.summary()) <= 90
        made = make_fault(name, {})
        assert make_fault(name, made.params) == made


def test_what_lasts_is_undone() -> None:
    """Exactly the faults that are undone have a duration."""
    for name, fault in FAULTS.items():
        assert (make_fault(name, {}).duration_seconds > 0) == (fault.ends == "undone")


@pytest.mark.parametrize(
    ("outcome", "names"),
    [
        (
            "killed",
            {
                *("kill_rank", "kill_group", "kill_groups", "kill_agent", "kill_donor"),
                *("segfault", "out_of_memory", "exception", "sigkill_group", "sigkill:forward"),
            },
        ),
        ("left", {"term_group"}),
        ("frozen", {"stop_rank", "stop_group"}),
        ("hung", {"deadlock"}),
        ("relaunched", {"kill_lighthouse"}),
    ],
)
def test_outcomes(outcome: str, names: set[str]) -> None:
    """Histories are judged by a fault's outcome. Scripts that kill have their own names, and
    unknown names have no outcome.
    """
    known = {*FAULTS, "sigkill_group", "sigkill:forward", "flood"}
    assert {name for name in known if read_outcome(name) == outcome} == names
    assert read_outcome("flood") == ""
    assert read_category("flood") is None
    assert read_category("sigkill_group") == "process killed"


@pytest.mark.parametrize(
    ("name", "required"),
    [
        ("kill_group", 2),  # one is left
        ("kill_groups", 3),  # two by default
        ("link_dead", 3),  # both its ends are disturbed
        ("kill_donor", 3),  # the group that heals and the donor
        ("corrupt_chunk", 2),
        ("flip_parameter", 3),  # a majority
        ("flip_optimizer", 3),
        ("nan_gradient", 2),
        ("slow_rank", 1),
        ("disk_full", 1),
        ("kill_lighthouse", 1),
    ],
)
def test_groups_that_must_be_up(name: str, required: int) -> None:
    """A fault needs one group more than it takes down; a flipped bit needs a majority to
    find it.
    """
    assert make_fault(name, {}).required_up == required


def test_count_of_kill_groups_counts() -> None:
    """The more groups die at once, the more groups must contribute before."""
    assert KillGroups(5).required_up == 6
    assert KillGroups(5).num_targets == 5


def test_params_are_completed() -> None:
    """Given parameters override the defaults, which stay unchanged."""
    assert make_fault("slow_rank", {"factor": 8}) == SlowRank(factor=8, seconds=20)
    assert make_fault("slow_rank", {}) == SlowRank()
    assert make_fault("link_dead", {}).params == {"seconds": 10}
    assert make_fault("link_dead", {"peer": 0}).params == {"seconds": 10, "peer": 0}


@pytest.mark.parametrize(
    ("name", "given", "line"),
    [
        (
            "slow_rank",
            {"facter": 2},
            "params.facter is not a valid key of slow_rank; did you mean factor? valid keys: factor, seconds",
        ),
        (
            "kill_group",
            {"seconds": 2},
            "params.seconds is not a valid key of kill_group; valid keys: none",
        ),
        (
            "stop_rank",
            {"seconds": 0},
            "params.seconds must be a number > 0, got 0; the default is 10",
        ),
        (
            "stop_rank",
            {"seconds": "5"},
            "params.seconds must be a number > 0, got '5'; the default is 10",
        ),
        (
            "stop_rank",
            {"seconds": True},
            "params.seconds must be a number > 0, got True; the default is 10",
        ),
        (
            "stop_rank",
            {"seconds": float("nan")},
            "params.seconds must be a number > 0, got nan; the default is 10",
        ),
        (
            "stop_rank",
            {"seconds": float("inf")},
            "params.seconds must be a number > 0, got inf; the default is 10",
        ),
        ("slow_rank", {"factor": 1}, "params.factor must be a number > 1, got 1; the default is 3"),
        (
            "network_slow",
            {"loss": 1.0},
            "params.loss must be a number > 0 and < 1, got 1.0; the default is 0.05",
        ),
        (
            "kill_groups",
            {"count": 1.5},
            "params.count must be a whole number >= 1, got 1.5; the default is 2",
        ),
        (
            "kill_groups",
            {"count": 0},
            "params.count must be a whole number >= 1, got 0; the default is 2",
        ),
        (
            "link_dead",
            {"pear": 1},
            "params.pear is not a valid key of link_dead; did you mean peer? valid keys: seconds, peer",
        ),
        (
            "link_dead",
            {"peer": -1},
            "params.peer must be a whole number >= 0, got -1; leave it out for a random one",
        ),
        (
            "link_dead",
            {"peer": 1.5},
            "params.peer must be a whole number >= 0, got 1.5; leave it out for a random one",
        ),
        ("stop_rank", 5, "params must be a table, got 5; write its keys below it"),
    ],
)
def test_wrong_params_are_refused(name: str, given: object, line: str) -> None:
    """An unknown parameter or a value out of range is refused in one line with the remedy."""
    with pytest.raises(ConfigError) as caught:
        make_fault(name, given)
    assert str(caught.value) == line


def test_an_unknown_fault_is_refused() -> None:
    """The line names the closest fault and all other faults."""
    with pytest.raises(ConfigError) as caught:
        find_fault("kill_grop")
    line = f"fault must name a fault, got 'kill_grop'; did you mean kill_group? faults: {', '.join(FAULTS)}"
    assert str(caught.value) == line
    with pytest.raises(ConfigError, match=r"got 3; faults: "):
        find_fault(3)


@pytest.mark.parametrize(
    ("name", "replica", "rank", "line"),
    [
        ("kill_group", 0, 1, "rank must be left out with kill_group, got 1; it hits a whole group"),
        ("link_dead", 0, 1, "rank must be left out with link_dead, got 1; it hits a whole group"),
        ("kill_donor", 0, 1, "rank must be left out with kill_donor, got 1; it hits a whole group"),
        (
            "kill_lighthouse",
            0,
            None,
            "replica must be left out with kill_lighthouse, got 0; remove it",
        ),
        ("kill_groups", 0, None, "replica must be left out with kill_groups, got 0; remove it"),
    ],
)
def test_wrong_targets_are_refused(
    name: str, replica: int | None, rank: int | None, line: str
) -> None:
    """A target that the fault's scope does not have is refused."""
    with pytest.raises(ConfigError) as caught:
        make_fault(name, {}).check_target(replica, rank, "params")
    assert str(caught.value) == line


def test_right_targets_are_accepted() -> None:
    """No target, a group, and for faults of ranks a rank with or without its group are accepted."""
    for name in FAULTS:
        make_fault(name, {}).check_target(None, None, "params")
    for name, replica, rank in (
        ("kill_group", 1, None),
        ("kill_rank", 1, 3),
        ("kill_rank", None, 3),
    ):
        make_fault(name, {}).check_target(replica, rank, "params")


def test_nothing_slow_is_imported() -> None:
    """The decisions about faults load without torch, so that the commands start at once."""
    code = (
        "import sys, titan_ft.chaos.schedule, titan_ft.chaos.plan_file\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'torchtitan', 'torchft', 'numpy'}))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == ""
