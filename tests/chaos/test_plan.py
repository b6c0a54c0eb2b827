# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Plans, from TOML and from the command line."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from titan_ft.chaos.plan import Every, Limits, Listed, ListedFault, Poisson, UniformGaps, single
from titan_ft.chaos.plan_file import load_plan
from titan_ft.chaos.schedule import GroupView, Injection, View, aim, shots
from titan_ft.config import ConfigError
from titan_ft.faults.catalogue import FAULTS, make_fault
from titan_ft.faults.fault import Need
from titan_ft.faults.outside import StopRank

SHIPPED = sorted((Path(__file__).parents[2] / "configs" / "chaos").glob("*.toml"))
FULL = View({replica: GroupView(replica, 1, True) for replica in range(4)}, frozenset(Need))
EVERY = '[[rule]]\nwhen = "every"\nseconds = 15\nfaults = ["kill_group"]\n'
TRACE = '[[rule]]\nwhen = "trace"\nfile = "t.csv"\n'


def write(folder: Path, text: str, trace: str | None = None) -> Path:
    path = folder / "plan.toml"
    path.write_text(text)
    if trace is not None:
        (folder / "t.csv").write_text(trace)
    return path


# What a file may say.


def test_a_plan_is_read(tmp_path: Path) -> None:
    """Every setting of a plan is read, and missing parameters get their defaults."""
    text = (
        "seed = 9\nstart_seconds = 5\nstop_after_seconds = 60.5\n"
        "[limits]\nmax_down = 2\nexempt = [0, 3]\npatience_seconds = 7\n"
        '[[rule]]\nwhen = "every"\nseconds = 15\nfaults = ["kill_group", "slow_rank"]\n'
        "params = {slow_rank = {factor = 8}}\nreplica = 1\n"
        '[[rule]]\nwhen = "uniform"\nmin_seconds = 0\nmax_seconds = 3\nrank = 2\n'
        "faults = {kill_rank = 1, segfault = 0.5}\n"
    )
    plan = load_plan(write(tmp_path, text))
    assert (plan.name, plan.seed, plan.start_seconds, plan.stop_after_seconds) == (
        "plan.toml",
        9,
        5,
        60.5,
    )
    assert plan.limits == Limits(2, (0, 3), 7)
    first, second = plan.rules
    assert first == Every(
        15, faults=["kill_group", "slow_rank"], params={"slow_rank": {"factor": 8}}, replica=1
    )
    assert {name: fault.params for name, fault in first.params.items()} == {
        "kill_group": {},
        "slow_rank": {"factor": 8, "seconds": 20},
    }
    assert first.weights == {"kill_group": 1, "slow_rank": 1}
    assert second == UniformGaps(0, 3, faults={"kill_rank": 1, "segfault": 0.5}, rank=2)
    assert second.params == {
        "kill_rank": make_fault("kill_rank", {}),
        "segfault": make_fault("segfault", {}),
    }


def test_defaults_are_gentle(tmp_path: Path) -> None:
    """A plan with a single rule starts at once, never stops, exempts no group, and takes one group
    down at a time.
    """
    plan = load_plan(write(tmp_path, EVERY))
    assert (plan.start_seconds, plan.stop_after_seconds, plan.limits) == (0, 0, Limits(1, (), 30))


@pytest.mark.parametrize(
    ("keys", "mtbf_seconds"),
    [
        ("mtbf_seconds = 90", 90),
        ("mtbf_hours_per_gpu = 50_000\ngpus = 16_384", 50_000 * 3600 / 16_384),
    ],
)
def test_poisson_takes_the_job_or_its_parts(tmp_path: Path, keys: str, mtbf_seconds: float) -> None:
    """The job's mean time between failures is given, or follows from the mean time of a GPU and the
    number of GPUs.
    """
    plan = load_plan(
        write(tmp_path, f'[[rule]]\nwhen = "poisson"\n{keys}\nfaults = ["kill_group"]\n')
    )
    (rule,) = plan.rules
    assert isinstance(rule, Poisson)
    assert rule.mtbf_seconds == pytest.approx(mtbf_seconds)


def test_a_script_is_put_in_order(tmp_path: Path) -> None:
    """A script is sorted by time. Faults of the same time keep their order."""
    text = (
        '[[rule]]\nwhen = "script"\nshots = [\n'
        '{at = 9, fault = "kill_lighthouse"},\n'
        '{at = 2.5, fault = "stop_rank", replica = 1, rank = 0, params = {seconds = 4}},\n'
        '{at = 2.5, fault = "kill_group"},\n]\n'
    )
    assert load_plan(write(tmp_path, text)).rules[0] == Listed(
        (
            ListedFault(2.5, "stop_rank", {"seconds": 4}, 1, 0),
            ListedFault(2.5, "kill_group", {}),
            ListedFault(9, "kill_lighthouse", {}),
        )
    )


def test_a_trace_is_read(tmp_path: Path) -> None:
    """A trace beside the plan may have comments, empty lines, all forms of targets, and any
    order.
    """
    trace = (
        "# a comment\ntime,fault,target,params\n"
        "30, kill_lighthouse, lighthouse,\n\n"
        "12.5,kill_group,2,\n"
        "  # another\n"
        "3,stop_rank,1/0,seconds=4\n"
        "40,slow_rank,,factor=2 seconds=5\n"
    )
    assert load_plan(write(tmp_path, TRACE, trace)).rules[0] == Listed(
        (
            ListedFault(3, "stop_rank", {"seconds": 4}, 1, 0),
            ListedFault(12.5, "kill_group", {}, 2),
            ListedFault(30, "kill_lighthouse", {}),
            ListedFault(40, "slow_rank", {"factor": 2, "seconds": 5}),
        )
    )


def test_a_trace_needs_no_params(tmp_path: Path) -> None:
    """Three columns are enough, also as a spreadsheet on Windows saves them."""
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbftime,fault,target\r\n5,kill_group,1\r\n")
    assert load_plan(write(tmp_path, TRACE)).rules[0] == Listed(
        (ListedFault(5, "kill_group", {}, 1),)
    )


def test_who_decides_the_seed(tmp_path: Path) -> None:
    """The caller's seed wins over the file's, also if it is 0. Without either, a new seed is
    drawn.
    """
    with_seed, without = EVERY, write(tmp_path, EVERY)
    assert load_plan(without, seed=5).seed == 5
    assert len({load_plan(without).seed for _ in range(5)}) > 1
    path = write(tmp_path, "seed = 3\n" + with_seed)
    assert load_plan(path).seed == 3
    assert load_plan(path, seed=0).seed == 0


def test_a_plan_says_what_it_does(tmp_path: Path) -> None:
    """A plan describes itself in one line, for the history and for people."""
    text = "[limits]\nmax_down = 2\nexempt = [0]\n" + EVERY
    text += '[[rule]]\nwhen = "poisson"\nmtbf_seconds = 90\nfaults = ["kill_rank", "term_group"]\n'
    text += (
        '[[rule]]\nwhen = "uniform"\nmin_seconds = 1\nmax_seconds = 3\nfaults = ["kill_lighthouse"]\n'
        + TRACE
    )
    trace = "time,fault,target\n5,kill_group,1\n8,kill_group,2\n"
    assert str(load_plan(write(tmp_path, text, trace))) == (
        "every 15 s: kill_group; on average every 90 s: kill_rank, term_group; every 1 to 3 s: kill_lighthouse; "
        "2 times from 5 to 8 s: kill_group; at most 2 down, never of 0"
    )
    assert str(single("kill_group")) == "at 0 s: kill_group"


# What it may not say.

RULE = '[[rule]]\nwhen = "every"\nseconds = 15\n'
SCRIPT = '[[rule]]\nwhen = "script"\n'
KEYS = "valid keys: when, seconds, faults, params, replica, rank"

MISTAKES = {
    "unknown key": (
        "sed = 3\n" + EVERY,
        "sed is not a valid key; did you mean seed? valid keys: rule, seed, start_seconds, stop_after_seconds, limits",
    ),
    "seed": (
        "seed = 1.5\n" + EVERY,
        "seed must be a whole number >= 0, got 1.5; leave it out to have one drawn",
    ),
    "start": (
        "start_seconds = -1\n" + EVERY,
        "start_seconds must be a number >= 0, got -1; 0 starts at once",
    ),
    "stop": (
        "stop_after_seconds = inf\n" + EVERY,
        "stop_after_seconds must be a number >= 0, got inf; 0 never stops",
    ),
    "no rule": ("seed = 1\n", "rule must be set, got nothing; write [[rule]] above each"),
    "no array": (
        '[rule]\nwhen = "every"\n',
        "rule must be an array of tables, got {'when': 'every'}; write [[rule]] above each",
    ),
    "empty array": (
        "rule = []\n",
        "rule must be an array of tables, got []; write [[rule]] above each",
    ),
    "rule of no table": (
        "rule = [3]\n",
        "rule[0].when must be one of every, poisson, uniform, trace, script, got None; set it",
    ),
    "limits of no table": (
        "limits = 3\n" + EVERY,
        "limits must be a table, got 3; write its keys below it",
    ),
    "limits key": (
        "[limits]\nmax_dwn = 3\n" + EVERY,
        "limits.max_dwn is not a valid key; did you mean max_down? valid keys: max_down, exempt, patience_seconds",
    ),
    "max_down": (
        "[limits]\nmax_down = 0\n" + EVERY,
        "limits.max_down must be a whole number >= 1, got 0; 1 hits one group at a time",
    ),
    "exempt": (
        "[limits]\nexempt = [true]\n" + EVERY,
        "limits.exempt must be a list of whole numbers >= 0, got [True]; for example [0]",
    ),
    "exempt no list": (
        "[limits]\nexempt = 0\n" + EVERY,
        "limits.exempt must be a list of whole numbers >= 0, got 0; for example [0]",
    ),
    "patience": (
        '[limits]\npatience_seconds = "1"\n' + EVERY,
        "limits.patience_seconds must be a number >= 0, got '1'; 0 postpones nothing",
    ),
    "when": (
        '[[rule]]\nwhen = "poison"\n',
        "rule[0].when must be one of every, poisson, uniform, trace, script, got 'poison'; "
        "did you mean poisson? set it",
    ),
    "second rule": (
        EVERY + "[[rule]]\n",
        "rule[1].when must be one of every, poisson, uniform, trace, script, got None; set it",
    ),
    "rule key": (
        EVERY + "secnds = 3\n",
        f'rule[0].secnds is not a valid key with when = "every"; did you mean seconds? {KEYS}',
    ),
    "another rule's key": (
        EVERY + "mtbf_seconds = 3\n",
        f'rule[0].mtbf_seconds is not a valid key with when = "every"; did you mean seconds? {KEYS}',
    ),
    "no seconds": (
        '[[rule]]\nwhen = "every"\nfaults = ["kill_group"]\n',
        "rule[0].seconds must be set, got nothing; give the seconds from one fault to the next",
    ),
    "seconds": (
        '[[rule]]\nwhen = "every"\nfaults = ["kill_group"]\nseconds = 0\n',
        "rule[0].seconds must be a number > 0, got 0; give the seconds from one fault to the next",
    ),
    "poisson without": (
        '[[rule]]\nwhen = "poisson"\nfaults = ["kill_group"]\n',
        "rule[0].mtbf_seconds must be set, got nothing; give the mean time from one failure of the job to the next",
    ),
    "poisson half": (
        '[[rule]]\nwhen = "poisson"\nmtbf_hours_per_gpu = 3\nfaults = ["kill_group"]\n',
        "rule[0].mtbf_seconds must be alone, or left out for both mtbf_hours_per_gpu and gpus, got mtbf_hours_per_gpu; "
        "give one or the other",
    ),
    "poisson other half": (
        '[[rule]]\nwhen = "poisson"\ngpus = 3\nfaults = ["kill_group"]\n',
        "rule[0].mtbf_seconds must be alone, or left out for both mtbf_hours_per_gpu and gpus, got gpus; give one or "
        "the other",
    ),
    "poisson gpus": (
        '[[rule]]\nwhen = "poisson"\nmtbf_hours_per_gpu = 3\ngpus = 0\nfaults = ["kill_group"]\n',
        "rule[0].gpus must be a whole number >= 1, got 0; give the number of GPUs of the job",
    ),
    "poisson both": (
        '[[rule]]\nwhen = "poisson"\nmtbf_seconds = 3\ngpus = 8\nfaults = ["kill_group"]\n',
        "rule[0].mtbf_seconds must be alone, or left out for both mtbf_hours_per_gpu and gpus, got mtbf_seconds and "
        "gpus; give one or the other",
    ),
    "uniform order": (
        '[[rule]]\nwhen = "uniform"\nmin_seconds = 9\nmax_seconds = 3\nfaults = ["kill_group"]\n',
        "rule[0].max_seconds must be >= min_seconds (9), got 3; exchange the two",
    ),
    "uniform without gaps": (
        '[[rule]]\nwhen = "uniform"\nmin_seconds = 0\nmax_seconds = 0\nfaults = ["kill_group"]\n',
        "rule[0].max_seconds must be a number > 0, got 0; give the longest gap",
    ),
    "no faults": (RULE, 'rule[0].faults must be set, got nothing; for example ["kill_group"]'),
    "empty faults": (
        RULE + "faults = []\n",
        "rule[0].faults must be a list of names, or a table of names and weights > 0, got []; for example "
        '["kill_group"]',
    ),
    "faults of no list": (
        RULE + 'faults = "kill_group"\n',
        "rule[0].faults must be a list of names, or a table of names and weights > 0, got 'kill_group'; "
        'for example ["kill_group"]',
    ),
    "fault": (
        RULE + 'faults = ["kil_rank"]\n',
        f"rule[0].faults must name a fault, got 'kil_rank'; did you mean kill_rank? faults: {', '.join(FAULTS)}",
    ),
    "fault of no name": (
        RULE + "faults = [[3]]\n",
        "rule[0].faults must be a list of names, or a table of names and weights > 0, got [[3]]; for example "
        '["kill_group"]',
    ),
    "fault twice": (
        RULE + 'faults = ["kill_rank", "segfault", "kill_rank"]\n',
        "rule[0].faults must name each fault once, got kill_rank twice; use a table of weights",
    ),
    "weight": (
        RULE + "faults = {kill_rank = 0}\n",
        "rule[0].faults must be a list of names, or a table of names and weights > 0, got {'kill_rank': 0}; "
        'for example ["kill_group"]',
    ),
    "params of another fault": (
        EVERY + "params = {stop_rank = {seconds = 3}}\n",
        "rule[0].params.stop_rank is not a valid key (a fault of this rule); valid keys: kill_group",
    ),
    "params of no table": (
        EVERY + "params = 3\n",
        "rule[0].params must be a table, got 3; write its keys below it",
    ),
    "param of no table": (
        EVERY + "params = {kill_group = 3}\n",
        "rule[0].params.kill_group must be a table, got 3; write its keys below it",
    ),
    "param": (
        RULE + 'faults = ["stop_rank"]\nparams = {stop_rank = {secs = 3}}\n',
        "rule[0].params.stop_rank.secs is not a valid key of stop_rank; did you mean seconds? valid keys: seconds",
    ),
    "param value": (
        RULE + 'faults = ["network_slow"]\nparams = {network_slow = {loss = 2}}\n',
        "rule[0].params.network_slow.loss must be a number > 0 and < 1, got 2; the default is 0.05",
    ),
    "replica": (
        EVERY + 'replica = "0"\n',
        "rule[0].replica must be a whole number >= 0, got '0'; leave it out for a random one",
    ),
    "replica of a bool": (
        EVERY + "replica = true\n",
        "rule[0].replica must be a whole number >= 0, got True; leave it out for a random one",
    ),
    "negative replica": (
        EVERY + "replica = -1\n",
        "rule[0].replica must be a whole number >= 0, got -1; leave it out for a random one",
    ),
    "peer": (
        '[[rule]]\nwhen = "every"\nseconds = 1\nfaults = ["link_dead"]\nreplica = 1\nparams.link_dead.peer = 1\n',
        "rule[0].params.link_dead.peer must be another group than the target, group 1, got 1; leave it out for a "
        "random one",
    ),
    "rank": (
        EVERY + "rank = 0\n",
        "rule[0].rank must be left out with kill_group, got 0; it hits a whole group",
    ),
    "beyond max_down": (
        RULE + 'faults = ["kill_group", "kill_groups"]\n',
        "rule[0] must keep the limits, got kill_groups: it hits 2 groups at once, limits.max_down is 1; "
        "remove it, or change the limits",
    ),
    "donor and exempt": (
        "[limits]\nmax_down = 2\nexempt = [0]\n" + RULE + 'faults = ["kill_donor"]\n',
        "rule[0] must keep the limits, got kill_donor: the job itself chooses the donor, which could be a group in "
        "limits.exempt; remove it, or change the limits",
    ),
    "exempt target": (
        "[limits]\nexempt = [2]\n" + EVERY + "replica = 2\n",
        "rule[0] must keep the limits, got kill_group: group 2 is in limits.exempt; remove it, or change the limits",
    ),
    "exempt target of a script": (
        "[limits]\nexempt = [2]\n"
        + SCRIPT
        + 'shots = [{at = 0, fault = "kill_group", replica = 2}]\n',
        "rule[0] must keep the limits, got kill_group: group 2 is in limits.exempt; remove it, or change the limits",
    ),
    "no shots": (
        SCRIPT,
        'rule[0].shots must be set, got nothing; for example [{at = 10, fault = "kill_group"}]',
    ),
    "empty shots": (
        SCRIPT + "shots = []\n",
        'rule[0].shots must be a list of tables, got []; for example [{at = 10, fault = "kill_group"}]',
    ),
    "shot of no table": (
        SCRIPT + "shots = [3]\n",
        "rule[0].shots[0] must be a table, got 3; write its keys below it",
    ),
    "shot key": (
        SCRIPT + 'shots = [{at = 1, fault = "kill_rank", target = 2}]\n',
        "rule[0].shots[0].target is not a valid key; valid keys: at, fault, params, replica, rank",
    ),
    "shot without time": (
        SCRIPT + 'shots = [{fault = "kill_rank"}]\n',
        "rule[0].shots[0].at must be set, got nothing; give the seconds since the schedule's start",
    ),
    "shot without fault": (
        SCRIPT + "shots = [{at = 1}]\n",
        "rule[0].shots[0].fault must be set, got nothing; titan-ft chaos --list has them",
    ),
    "shot before the start": (
        SCRIPT + 'shots = [{at = 3, fault = "kill_rank"}, {at = -1, fault = "kill_rank"}]\n',
        "rule[0].shots[1].at must be a number >= 0, got -1; give the seconds since the schedule's start",
    ),
    "shot's fault": (
        SCRIPT + 'shots = [{at = 1, fault = "sigsegv"}]\n',
        f"rule[0].shots[0].fault must name a fault, got 'sigsegv'; faults: {', '.join(FAULTS)}",
    ),
    "shot's target": (
        SCRIPT + 'shots = [{at = 1, fault = "kill_lighthouse", replica = 1}]\n',
        "rule[0].shots[0].replica must be left out with kill_lighthouse, got 1; remove it",
    ),
    "shot's params": (
        SCRIPT + 'shots = [{at = 1, fault = "kill_rank", params = {seconds = 1}}]\n',
        "rule[0].shots[0].params.seconds is not a valid key of kill_rank; valid keys: none",
    ),
    "script with faults": (
        SCRIPT + 'faults = ["kill_rank"]\n',
        'rule[0].faults is not a valid key with when = "script"; valid keys: when, shots',
    ),
    "no file": (
        '[[rule]]\nwhen = "trace"\n',
        "rule[0].file must be set, got nothing; that of a CSV file, relative to this file",
    ),
    "file of no path": (
        '[[rule]]\nwhen = "trace"\nfile = 3\n',
        "rule[0].file must be a path, got 3; that of a CSV file, relative to this file",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(tmp_path: Path, mistake: str) -> None:
    """Each mistake is one line after the file's name: field, rule, value, remedy."""
    text, line = MISTAKES[mistake]
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_plan(path)
    assert str(caught.value) == f"{path}: {line}"


HEAD = "time,fault,target,params\n"
TRACE_MISTAKES = {
    "empty": (
        "",
        "t.csv must hold at least one fault, got none; add a line such as 30,kill_group,0",
    ),
    "only a head": (
        HEAD,
        "t.csv must hold at least one fault, got none; add a line such as 30,kill_group,0",
    ),
    "no head": (
        "3,kill_group,1\n",
        "t.csv:1 must name the columns time,fault,target,params (the last may be missing), got '3,kill_group,1'; "
        "put them in the first line",
    ),
    "too few": (
        HEAD + "3,kill_group\n",
        "t.csv:2 must have 4 columns, got 2; an empty cell needs its comma",
    ),
    "too many": (
        HEAD + "3,kill_group,,,\n",
        "t.csv:2 must have 4 columns, got 5; an empty cell needs its comma",
    ),
    "line number": (
        "# one\n\n" + HEAD + "\n# two\n3,kil_group,,\n",
        f"t.csv:6.fault must name a fault, got 'kil_group'; did you mean kill_group? faults: {', '.join(FAULTS)}",
    ),
    "time": (
        HEAD + "soon,kill_group,,\n",
        "t.csv:2.at must be a number >= 0, got 'soon'; give the seconds since the schedule's start",
    ),
    "no time": (
        HEAD + "nan,kill_group,,\n",
        "t.csv:2.at must be a number >= 0, got nan; give the seconds since the schedule's start",
    ),
    "target": (
        HEAD + "3,kill_group,replica-1,\n",
        "t.csv:2.target must be a group (2), a rank of one (2/0), empty, or the lighthouse for a fault of it, got "
        "'replica-1'; correct it",
    ),
    "rank of a group's fault": (
        HEAD + "3,kill_group,1/0,\n",
        "t.csv:2.rank must be left out with kill_group, got 0; it hits a whole group",
    ),
    "lighthouse as a group": (
        HEAD + "3,kill_group,lighthouse,\n",
        "t.csv:2.target must be a group (2), a rank of one (2/0), empty, or the lighthouse for a fault of it, got "
        "'lighthouse'; correct it",
    ),
    "params": (
        HEAD + "3,stop_rank,,5\n",
        "t.csv:2.params must be NAME=VALUE, got '5'; write for example seconds=10",
    ),
    "param": (
        HEAD + "3,stop_rank,,seconds=long\n",
        "t.csv:2.params.seconds must be a number > 0, got 'long'; the default is 10",
    ),
}


@pytest.mark.parametrize("mistake", TRACE_MISTAKES)
def test_a_mistake_in_a_trace_names_its_line(tmp_path: Path, mistake: str) -> None:
    """Each mistake in a trace is one line after both files' names and the line's number."""
    trace, line = TRACE_MISTAKES[mistake]
    path = write(tmp_path, TRACE, trace)
    with pytest.raises(ConfigError) as caught:
        load_plan(path)
    assert str(caught.value) == f"{path}: {line}"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """The error names a missing plan, a plan that is not TOML, a missing trace, or a trace that is
    not text.
    """
    with pytest.raises(
        ConfigError, match=r"config file must be readable, got .*plan\.toml \(No such file"
    ):
        load_plan(tmp_path / "plan.toml")
    with pytest.raises(ConfigError, match=r"config file must be valid TOML, got .*plan\.toml"):
        load_plan(write(tmp_path, "seed ="))
    with pytest.raises(
        ConfigError, match=r"trace must be a readable CSV file, got .*t\.csv \(No such file"
    ):
        load_plan(write(tmp_path, TRACE))
    (tmp_path / "t.csv").write_bytes(b"time\xff")
    with pytest.raises(
        ConfigError, match=r"trace must be a readable CSV file, got .*t\.csv \(not UTF-8\)"
    ):
        load_plan(write(tmp_path, TRACE))


# One shot from the command line.


def test_single_is_one_shot_at_once() -> None:
    """The plan of a single fault has one fault at time 0, with the requested target and
    parameters.
    """
    plan = single("stop_rank", replica=2, rank=1, params={"seconds": 3.0}, seed=8)
    (shot,) = shots(plan)
    assert (shot.time, shot.fault, shot.replica, shot.rank) == (0, StopRank(3.0), 2, 1)
    assert (plan.seed, plan.start_seconds) == (8, 0)
    assert list(shots(single("stop_rank", 2, 1, {"seconds": 3.0}, 8))) == [shot]
    assert len({single("kill_group").seed for _ in range(5)}) > 1


def test_single_may_take_down_all_but_one() -> None:
    """For an operator's own fault no max_down applies, but one group stays untouched."""
    (shot,) = shots(plan := single("kill_groups", params={"count": 3}))
    assert isinstance(aim(shot, FULL, plan.limits), Injection)
    (shot,) = shots(plan := single("kill_groups", params={"count": 4}))
    assert not isinstance(aim(shot, FULL, plan.limits), Injection)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("kill_grup", None, None, {}),
            "fault must name a fault, got 'kill_grup'; did you mean kill_group? faults: ",
        ),
        (
            ("link_dead", 2, None, {"peer": 2}),
            "params.peer must be another group than the target, group 2, got 2; leave it out for a random one",
        ),
        (
            ("kill_group", 0, 0, {}),
            "rank must be left out with kill_group, got 0; it hits a whole group",
        ),
        (
            ("kill_group", 0, None, {"seconds": 1.0}),
            "params.seconds is not a valid key of kill_group; valid keys: none",
        ),
    ],
)
def test_single_refuses_mistakes(
    arguments: tuple[str, int | None, int | None, dict[str, float]], line: str
) -> None:
    """A wrong fault, target or parameter is refused in one line."""
    with pytest.raises(ConfigError) as caught:
        single(*arguments)
    assert str(caught.value).startswith(line)


# What is shipped.


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_plans_work(path: Path) -> None:
    """Each bundled plan loads, and each of its first faults is possible in a healthy job of four
    groups of one rank.
    """
    plan = load_plan(path, seed=1)
    first = list(islice(shots(plan), 100))
    assert first
    for shot in first:
        assert isinstance(aim(shot, FULL, plan.limits), Injection), shot


def test_all_plans_are_shipped() -> None:
    """The plans that the documentation names are there."""
    names = {
        "campaign",
        "ranks",
        "every_5s",
        "every_15s",
        "every_60s",
        "blog_15s",
        "blog_60s",
        "poisson",
        "trace",
        "script",
        "ci",
    }
    assert names <= {path.stem for path in SHIPPED}


def test_the_campaign_leaves_nothing_out() -> None:
    """The campaign draws each fault, except faults that equal another fault if a group has one
    rank.
    """
    path = next(path for path in SHIPPED if path.stem == "campaign")
    drawn = {shot.fault.name for shot in islice(shots(load_plan(path, seed=1)), 2000)}
    assert set(FAULTS) - drawn == {"kill_rank", "stop_rank"}


def test_ci_is_short_and_the_same_each_time() -> None:
    """The CI plan has a fixed seed, ends within two minutes, and has several kinds of faults."""
    plan = load_plan(next(path for path in SHIPPED if path.stem == "ci"))
    all_shots = list(shots(plan))
    assert all_shots == list(shots(load_plan(next(path for path in SHIPPED if path.stem == "ci"))))
    assert plan.start_seconds + all_shots[-1].time <= 100
    assert len({shot.fault for shot in all_shots}) == len(all_shots) == 7
