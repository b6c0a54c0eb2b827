# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Read the scenario of a forecast from TOML: a cluster, its failures, a job, and the strategies.

`titan-ft plan` reads a file with `load_scenarios`. `published` and `from_run` pass tables in memory
to `read_scenarios`. Both return one `Scenario` for each combination of the values in lists:

1. `_expand_lists` makes one table for each combination (a *case*), and turns texts such as "18 min"
   into seconds.
2. `_read_case` converts the tables of a case to the classes below. Each class is a table of the
   file, and its fields are the keys. docs/planning.md describes them.
3. `_read_case` also reads the files that the failures name: chaos plans, traces, and logs.
4. `_check_kind` and `_check` test the rules that tie several fields to each other.

A mistake is a ConfigError of one line: field, rule, value, remedy. For a single field,
`faults.schema.convert` composes this line from the `Meta` of the field: the title is the rule, the
description is the remedy.

Terms:
- group: a replica group. It holds a copy of the model on its own nodes, and trains a share of the
  batch.
- to heal: a group copies the state of another group, after a restart or because its own is wrong.
- straggler: a rank that computes slowly. All groups wait for it in each step.
- wrong numbers: silent data corruption.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta, Struct

from titan_ft.chaos.plan import Plan
from titan_ft.chaos.plan_file import load_plan
from titan_ft.chaos.schedule import shots
from titan_ft.config import ConfigError, load_toml
from titan_ft.data.assets import find_config
from titan_ft.faults.fault import Fault
from titan_ft.faults.inside import SlowRank
from titan_ft.faults.schema import (
    NonNegativeInt,
    NonNegativeNumber,
    PositiveNumber,
    convert,
)
from titan_ft.forecast.lengths import Constant, Length, LogNormal
from titan_ft.forecast.logs import LoggedFailure, read_faults, read_lanl

DAY = 86400.0
"""Seconds of a day."""
LONGEST = 1e10
"""Seconds. Powers and sums of longer times overflow."""
MAX_CASES = 2000
MIN_STEPS = 10
"""Fewest steps of a simulated run. The end of a run cuts off a step, which must not count much."""
MAX_EVENTS = 10_000_000
"""Most events of one simulated run. So many take about a minute."""
MAX_SHOTS = 10_000
"""The rate of a chaos plan is taken from so many of its shots, because a plan may never end."""
_STOPPING_OUTCOMES = ("killed", "frozen", "hung")
"""Outcomes of faults after which the group is away without having left in order."""
UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": DAY}
"""Seconds of each unit of time. `inputs.describe_seconds` needs this order, the shortest first."""
_TIME_TEXT = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(UNITS)})")
_TIME_RULE = 'a length of time, such as 20 (seconds) or "18 min"'
_TIME_REMEDY = "units: ms, s, min, h, d; at most 1e10 s"

Seconds = Annotated[float, Meta(ge=0, le=LONGEST, title=_TIME_RULE, description=_TIME_REMEDY)]
PositiveSeconds = Annotated[
    float, Meta(ge=0.001, le=LONGEST, title=f"{_TIME_RULE}, >= 1 ms", description=_TIME_REMEDY)
]
Count = Annotated[int, Meta(ge=1, le=10_000_000, title="a whole number from 1 to 10,000,000")]
CountOrZero = Annotated[int, Meta(ge=0, le=10_000_000, title="a whole number from 0 to 10,000,000")]
Share = Annotated[float, Meta(ge=0, le=1, title="a share from 0 to 1")]
Factor = Annotated[float, Meta(ge=1, le=1000, title="a factor from 1 to 1000")]
Shape = Annotated[float, Meta(ge=0.1, le=100, title="a number from 0.1 to 100")]
Rate = Annotated[float, Meta(gt=0, le=1e6, title="a number > 0, at most 1e6")]
Days = Annotated[float, Meta(gt=0, le=10_000, title="a number > 0, at most 10000")]
Interval = Annotated[float, Meta(ge=1, le=LONGEST)] | Literal["best"]
Strategy = Literal["restart", "groups", "rounds"]
Effect = Literal["stop", "drain", "slow", "corrupt"]
Spacing = Literal["memoryless", "even", "uniform", "weibull"]
Clock = Literal["wall", "training"]
_SPACINGS = ", ".join(get_args(Spacing))
_EFFECTS = ", ".join(get_args(Effect))
_RATE_FIELDS = ("per_1000_node_days", "mtbf", "mtbf_of_each")
_SOURCE_FIELDS = (*_RATE_FIELDS, "trace", "log", "chaos")
"""The fields of a kind of failure that say how often it comes: a rate, or a file of failures."""


def _remedy(text: str) -> Meta:
    """Return the remedy for a field that is missing or wrong. The type of the field has the rule."""
    return Meta(description=text)


def _array_of_tables(name: str) -> Meta:
    """Return the rule and the remedy of a field that is an array of tables."""
    return Meta(title="an array of tables", description=f"write [[{name}]] above each")


class DurationTable(Struct, frozen=True, forbid_unknown_fields=True):
    """A duration in one of two forms. One depends on the GPUs of a group. The other is random.

    Either `base` + `per_gpu` x GPUs, or a log-normal distribution by its median and its 99th
    percentile.
    """

    base: Seconds = 0.0
    per_gpu: Seconds = 0.0
    median: PositiveSeconds | None = None
    p99: PositiveSeconds | None = None

    def __post_init__(self) -> None:
        if not self._is_valid():
            # msgspec reports the field, and `convert` its rule instead of this text.
            raise ValueError("no valid form")

    def _is_valid(self) -> bool:
        has_linear_form = self.base > 0 or self.per_gpu > 0
        if self.median is None and self.p99 is None:
            return has_linear_form  # An empty table is a forgotten duration, and not 0 seconds.
        if self.median is None or self.p99 is None or has_linear_form:
            return False
        return self.median <= self.p99 <= 1000 * self.median


_DURATION = Meta(
    title=f"{_TIME_RULE}, a table of base and per_gpu, "
    "or one of median and p99 (1 to 1000 times median)",
    description='for example {median = "6 h", p99 = "2 d"}',
)
Duration = Annotated[Seconds | DurationTable, _DURATION]


def to_length(duration: float | DurationTable, gpus: int) -> Length:
    """Return the distribution of a duration for a group of so many GPUs."""
    if not isinstance(duration, DurationTable):
        return Constant(duration)
    if duration.median is None or duration.p99 is None:
        return Constant(duration.base + duration.per_gpu * gpus)
    return LogNormal(duration.median, duration.p99)


class Domain(Struct, frozen=True):
    """A division of the cluster into domains: sets of nodes that fail together, such as racks."""

    name: str
    nodes: Count
    """Nodes of each domain, such as the nodes of one rack."""


class Cluster(Struct, frozen=True):
    gpus: Annotated[Count, _remedy("give the GPUs that train; spares are beside them")]
    gpus_per_node: Count
    price_per_gpu_hour: NonNegativeNumber = 0.0
    spare_nodes: (
        Annotated[CountOrZero, _remedy("leave it out if there is always a node to take")] | None
    ) = None
    gpu_memory_gb: PositiveNumber | None = None
    domain: Annotated[tuple[Domain, ...], _array_of_tables("cluster.domain")] = ()
    """The file writes [[cluster.domain]] for each of them, hence the singular."""

    @property
    def nodes(self) -> int:
        return self.gpus // self.gpus_per_node


class FailureKind(Struct, frozen=True, kw_only=True):
    """One kind of failure: how often it comes, with which spacing, what it hits, what it does.

    Exactly one of the fields in `_SOURCE_FIELDS` says how often. A domain, where it is set, takes
    the place of a node.
    """

    name: str
    per_1000_node_days: Rate | None = None
    """Failures in 1,000 days of a node."""
    mtbf: PositiveSeconds | None = None
    """Mean time between failures in the whole cluster."""
    mtbf_of_each: PositiveSeconds | None = None
    """Mean time between failures of one node, or of one domain."""
    trace: str | None = None
    """A CSV file with the columns of a chaos trace. Its faults hit the groups that it names."""
    log: str | None = None
    """A CSV file in LANL's format. Node n of the log is node n modulo `cluster.nodes` here."""
    system: NonNegativeInt | None = None
    """The system of the log whose failures are taken; None takes those of all systems."""
    chaos: str | None = None
    """A chaos plan. The simulation follows its schedule, its choice of groups and its limits."""
    seed: NonNegativeInt | None = None
    """Seed of the chaos plan; None takes the seed in the plan."""
    spacing: Annotated[Spacing, Meta(title=f"one of {_SPACINGS}", description="set it")] | None = (
        None
    )
    """How the failures of a rate are spaced.

    - memoryless: the gaps between the failures of the cluster are exponential.
    - even: all gaps are equal.
    - uniform: the gaps are uniform from 0 to twice their mean.
    - weibull: the gaps follow a Weibull distribution with `shape`. With `mtbf`, they are the gaps
      between the failures of the cluster. With a rate of each node, each node has its own gaps
      (its *lives*).
    """
    shape: Shape | None = None
    """Shape of the Weibull distribution. Below 1, failures come in bursts, and young nodes fail
    more. Above 1, nodes wear out."""
    age: Seconds = 0.0
    """How long the first life of each node has lasted when the run begins."""
    first_node: CountOrZero = 0
    """Nodes with lower numbers are never hit."""
    domain: str | None = None
    """Each failure hits a whole domain of this name; None: it hits one node."""
    scope: Annotated[
        Literal["node", "job"],
        Meta(title='"node" or "job"', description="with domain leave it out"),
    ] = "node"
    """"job": each failure hits all groups."""
    effect: Annotated[
        Effect, Meta(title=f"one of {_EFFECTS}", description="stop is the default")
    ] = "stop"
    """What a failure does to a group that it hits.

    - stop: the group dies.
    - drain: the group leaves in order, after its step.
    - slow: the group has a straggler until it is found.
    - corrupt: the group computes wrong numbers until they are found. Then the group heals from
      another group. A job without another group returns to a checkpoint from before the wrong
      numbers.
    """
    factor: Factor = 1.0
    """How many times as long a step computes with a straggler."""
    found_after: Seconds = 0.0
    """After this time a straggler, or wrong numbers, are found."""
    leaves: bool = True
    """True: the group of a straggler leaves in order when the straggler is found. False: the group
    stays, and has its usual speed again."""
    breaks: Share = 0.0
    """Share of the failures that break the node. A broken node is missing until its repair."""
    repair: Duration = 0.0
    """How long the repair of a broken node takes."""

    @property
    def source(self) -> str:
        """Return the field that says how often failures of this kind come."""
        for name in _SOURCE_FIELDS:
            if getattr(self, name) is not None:
                return name
        raise AssertionError("_check_kind has found exactly one source")

    @property
    def has_lives(self) -> bool:
        """True if failures are drawn for each node or domain, and not for the whole cluster.

        Memoryless failures need no lives: their gaps in the whole cluster are memoryless as well.
        """
        return self.spacing == "weibull" and self.source in ("per_1000_node_days", "mtbf_of_each")

    @property
    def mean_life(self) -> float:
        """Return the mean time in seconds between two failures of one node, or of one domain."""
        if self.mtbf_of_each is not None:
            return self.mtbf_of_each
        assert self.per_1000_node_days is not None, "a rate of the whole cluster has no lives"
        return 1000 * DAY / self.per_1000_node_days


class Maintenance(Struct, frozen=True):
    """A service of the nodes, some at a time, in turn. Their groups leave in order."""

    every: PositiveSeconds
    nodes: Count
    """How many nodes are taken away each time."""
    lasts: PositiveSeconds
    """How long these nodes are missing."""


class Job(Struct, frozen=True):
    step: Annotated[PositiveSeconds, _remedy("give the length of a step without failures")]
    usual_step: PositiveSeconds | None = None
    """How much of `step` counts as effective; None: all of it. The steps of a record vary, `step` is
    their mean, and `titan-ft report` counts at most their median of each step."""
    groups: Count = 1
    min_replica_size: Count = 1
    config: str | None = None
    """The config of a run. A dry run with it says which shapes fit into the memory of a GPU, and
    how long their exchange is (`forecast.sizes`)."""
    overlap: Share = 0.6
    """The exchange costs no time as long as it takes less than this share of a step, because it runs
    beside the backward pass."""
    link_gbps: PositiveNumber | None = None


class Checkpoint(Struct, frozen=True):
    save: Annotated[Seconds, _remedy("give how long training stands still for a save")]
    interval: Annotated[
        Interval,
        Meta(
            title='a length of time >= 1 s, or "best"',
            description="it counts computing, between saves",
        ),
    ] = "best"


class Restart(Struct, frozen=True):
    """Strategy "restart": the whole job stops, and starts again from a checkpoint."""

    recover: Annotated[Duration, _remedy("give the time from a failure until training goes on")]


class Groups(Struct, frozen=True):
    """Strategy "groups": if a group fails, the other groups train on.

    A cost that is None is taken from a run's record (`--from`).
    """

    stall: Duration | None = None
    """By how much the death of a group delays the end of the others' step."""
    away: Duration | None = None
    """How long a group takes until it could join a step again. The time begins with the failure, or
    with the moment when the group has all its nodes."""
    rejoin: Duration | None = None
    """By how much a group that returns delays the end of the step."""
    drag: Seconds | None = None
    """By how much each absent group makes every step longer."""
    loses: bool = False
    """True if the death of a group costs the others the step under way, as with torchft's
    manager."""


class Rounds(Struct, frozen=True):
    """Strategy "rounds", semi-synchronous: the groups exchange only after so many local steps.

    A group that fails within a round stalls nobody.
    """

    steps: Count
    exchange: Seconds = 0.0
    value_of_a_token: Annotated[
        PositiveNumber, _remedy("1 says: as good as one of synchronous training")
    ] = 1.0


class ScenarioFile(Struct, frozen=True, kw_only=True):
    """The tables of one case, as the file has them. A strategy without a table is not compared."""

    cluster: Annotated[Cluster, _remedy("write [cluster]")]
    job: Annotated[Job, _remedy("write [job]")]
    failures: Annotated[
        tuple[FailureKind, ...], Meta(min_length=1), _array_of_tables("failure")
    ] = msgspec.field(name="failure")
    clock: Annotated[
        Clock,
        Meta(
            title='"wall" or "training"',
            description='"training" if failures come only while the job trains: 44 % can be 64 %',
        ),
    ]
    days: Annotated[Days, _remedy("30 is the default")] = 30.0
    """Length of a simulated run."""
    maintenance: Annotated[tuple[Maintenance, ...], _array_of_tables("maintenance")] = ()
    checkpoint: Checkpoint | None = None
    restart: Restart | None = None
    groups: Groups | None = None
    rounds: Rounds | None = None


class Scenario(ScenarioFile, frozen=True, kw_only=True):
    """One case: of every list in the file it has one value."""

    plans: Mapping[str, Plan]
    """The chaos plans, by the name of the kind of failure."""
    listed_failures: Mapping[str, Sequence[LoggedFailure]]
    """The failures of traces and logs, by the name of the kind of failure."""
    swept: Mapping[str, Any]
    """The values that this case takes from the lists of the file, by the names of the lists."""

    @property
    def seconds(self) -> float:
        """Return the length of a simulated run."""
        return self.days * DAY

    @property
    def strategies(self) -> list[Strategy]:
        return [name for name in get_args(Strategy) if getattr(self, name) is not None]

    def nodes_per_target(self, kind: FailureKind) -> int:
        """Return how many nodes one failure of this kind hits; 1 if it hits the whole job."""
        for domain in self.cluster.domain:
            if domain.name == kind.domain:
                return domain.nodes
        return 1

    def targets_of(self, kind: FailureKind) -> range:
        """Return the numbers of the nodes, or of the domains, that this kind of failure can hit.

        Domain n begins at node n x size. A domain that begins below `first_node` is not hit. The
        last domain may be smaller than the others.
        """
        size = self.nodes_per_target(kind)
        return range(math.ceil(kind.first_node / size), math.ceil(self.cluster.nodes / size))

    def mtbf_of(self, kind: FailureKind) -> float:
        """Return the mean seconds between two failures of a rate in the whole cluster."""
        if kind.mtbf is not None:
            return kind.mtbf
        return kind.mean_life / len(self.targets_of(kind))


def effect_of_fault(fault: Fault) -> Effect | None:
    """Return the effect of a chaos fault on its group; None if the group trains on undisturbed."""
    if isinstance(fault, SlowRank):
        return "slow"
    if fault.category == "wrong numbers" and fault.takes_down:
        return "corrupt"
    if fault.outcome == "left":
        return "drain"
    if fault.takes_down or fault.outcome in _STOPPING_OUTCOMES:
        return "stop"
    return None


# Reading


def load_scenarios(path: Path) -> list[Scenario]:
    """Read the cases of a scenario file, in the order of the values in its lists.

    Raises:
        ConfigError: the file cannot be read, or it has a mistake. The text is one line.
    """
    try:
        return read_scenarios(load_toml(path), path.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_scenarios(tables: Mapping[str, Any], folder: Path) -> list[Scenario]:
    """Return the cases of a scenario.

    Args:
        tables: the content of a scenario file.
        folder: relative paths in the tables begin here.

    Raises:
        ConfigError: the tables, or the files that they name, have a mistake.
    """
    combinations = _expand_lists(tables, "")
    return [_read_case(each.value, folder, each.swept) for each in combinations]


@dataclass(frozen=True)
class _Combination:
    """A value of the file in which each list is replaced by one of its elements."""

    value: Any
    swept: dict[str, Any]
    """The chosen elements as the file writes them, by the names of their lists."""


def _expand_lists(value: Any, name: str) -> list[_Combination]:
    """Return all combinations of the elements of the lists in a value. Times become seconds.

    A list of tables is an array of tables, such as [[failure]]. It stays whole, and the lists in
    its tables are expanded.

    Args:
        name: path of the value in the file, such as "job.groups"; empty for the file itself.
    """
    if isinstance(value, Mapping):
        prefix = f"{name}." if name else ""
        expanded = [_expand_lists(each, f"{prefix}{key}") for key, each in value.items()]
        combinations = []
        for combination in _combine(expanded):
            table = dict(zip(value, combination.value, strict=True))
            combinations.append(_Combination(table, combination.swept))
        return combinations
    if not isinstance(value, list):
        return [_Combination(_to_seconds(value), {})]
    is_array_of_tables = any(isinstance(element, Mapping) for element in value)
    if is_array_of_tables:
        return _combine(
            [_expand_lists(each, f"{name}[{index}]") for index, each in enumerate(value)]
        )
    if not value:
        raise ConfigError(f"{name} must hold at least one value, got []; give one, or leave it out")
    return [_Combination(_to_seconds(element), {name: element}) for element in value]


def _combine(expanded: Sequence[list[_Combination]]) -> list[_Combination]:
    """Return all choices of one element from each list; the choice of the last changes fastest.

    The value of a returned combination is the list of the chosen values.
    """
    combinations = [_Combination([], {})]
    for alternatives in expanded:
        number = len(combinations) * len(alternatives)
        if number > MAX_CASES:
            rule = f"must make {MAX_CASES} cases at most"
            raise ConfigError(f"the lists {rule}, got {number}; shorten one")
        longer = []
        for combination in combinations:
            for chosen in alternatives:
                values = [*combination.value, chosen.value]
                longer.append(_Combination(values, combination.swept | chosen.swept))
        combinations = longer
    return combinations


def _to_seconds(value: Any) -> Any:
    """Return the number of seconds in a text such as "18 min". Other values stay as they are."""
    if not isinstance(value, str):
        return value
    found = _TIME_TEXT.fullmatch(value)
    if found is None:
        return value
    number, unit = found.groups()
    return float(number) * UNITS[unit]


def _read_case(values: dict[str, Any], folder: Path, swept: dict[str, Any]) -> Scenario:
    # Convert the inner tables first, each with its name, so that an error names the inner field. A
    # conversion of the whole file at once would only name the outermost table.
    if "cluster" in values:
        values["cluster"] = _convert_array(Domain, values["cluster"], "cluster.domain")
    values = _convert_array(FailureKind, values, "failure")
    values = _convert_array(Maintenance, values, "maintenance")
    classes: dict[str, type[Struct]] = {
        "cluster": Cluster,
        "job": Job,
        "checkpoint": Checkpoint,
        "restart": Restart,
        "groups": Groups,
        "rounds": Rounds,
    }
    for name, table_class in classes.items():
        if name in values:
            values[name] = convert(table_class, values[name], name)
    file = convert(ScenarioFile, values)
    plans: dict[str, Plan] = {}
    listed_failures: dict[str, Sequence[LoggedFailure]] = {}
    for index, kind in enumerate(file.failures):
        _check_kind(kind, f"failure[{index}]")
        try:
            if kind.chaos is not None:
                plans[kind.name] = load_plan(_find_plan(kind.chaos, folder), kind.seed)
            if kind.trace is not None:
                listed_failures[kind.name] = read_faults(folder / kind.trace)
            if kind.log is not None:
                listed_failures[kind.name] = read_lanl(folder / kind.log, kind.system)
        except ConfigError as error:
            raise ConfigError(f"failure[{index}].{kind.source}: {error}") from error
    fields = msgspec.structs.asdict(file)
    scenario = Scenario(**fields, plans=plans, listed_failures=listed_failures, swept=swept)
    _check(scenario)
    return scenario


def _find_plan(name: str, folder: Path) -> Path:
    """Return the chaos plan in the scenario's folder, or else the name of a plan of the package."""
    path = folder / name
    return path if path.exists() else Path(name)


def _convert_array(element_class: type[Struct], table: Any, name: str) -> Any:
    """Return a copy of a table in which one array of tables is converted.

    An error names the element, such as failure[1].mtbf. A value that is no array is left alone: the
    conversion of the table itself reports it.

    Args:
        name: path of the array in the file. Its last part is the key in the table.
    """
    if not isinstance(table, Mapping):
        return table
    key = name.rpartition(".")[2]
    array = table.get(key)
    if not isinstance(array, list):
        return table
    elements = []
    for index, element in enumerate(array):
        elements.append(convert(element_class, element, f"{name}[{index}]"))
    return {**table, key: elements}


# Rules that tie several fields to each other


def _check_kind(kind: FailureKind, name: str) -> None:
    """Check the fields of one kind of failure.

    Args:
        name: path of the kind in the file, such as "failure[0]".

    Raises:
        ConfigError: a field is missing, or a field is set that has no effect.
    """
    given = [field for field in _SOURCE_FIELDS if getattr(kind, field) is not None]
    if len(given) != 1:
        rule = f"must be alone of {', '.join(_SOURCE_FIELDS)}"
        got = " and ".join(given) or "nothing"
        raise ConfigError(f"{name}.mtbf {rule}, got {got}; give one of them")
    if kind.source in _RATE_FIELDS and kind.spacing is None:
        remedy = "set it: 44 % with even spacing are 57 % without memory"
        raise ConfigError(f"{name}.spacing must be one of {_SPACINGS}, got nothing; {remedy}")
    has_shape = kind.shape is not None
    needs_shape = kind.spacing == "weibull"
    if has_shape != needs_shape:
        rule = 'must come with spacing = "weibull"'
        got = "nothing" if kind.shape is None else f"{kind.shape:g}"
        raise ConfigError(f"{name}.shape {rule}, got {got}; give both or neither")
    if kind.effect == "slow" and kind.factor == 1.0:
        raise ConfigError(f'{name}.factor must be > 1 with effect = "slow", got 1; set it')
    _check_unused_fields(kind, name)
    # The defaults 0 would mean "found at once" and "repaired at once". A forgotten field would hide
    # most of the cost of a failure.
    if kind.effect in ("slow", "corrupt") and kind.found_after == 0:
        rule = f'must be > 0 with effect = "{kind.effect}"'
        raise ConfigError(f"{name}.found_after {rule}, got 0; set it")
    # A log has the repair time of each failure.
    if kind.breaks > 0 and kind.repair == 0 and kind.log is None:
        raise ConfigError(f"{name}.repair must be > 0 with breaks, got 0; set it")
    if kind.log is not None and kind.breaks == 0 and kind.effect == "stop":
        remedy = "1 if each failure takes its node away for as long as the log says"
        raise ConfigError(f"{name}.breaks must be > 0 with log, got 0; {remedy}")


class _UnusedRule(NamedTuple):
    """Fields that have no effect under a condition, and must then keep their defaults."""

    applies: bool
    condition: str
    """The condition in words, for the error."""
    fields: tuple[str, ...]


def _check_unused_fields(kind: FailureKind, name: str) -> None:
    """Check that no field is set that has no effect: its author expects an effect."""
    is_rate = kind.source in _RATE_FIELDS
    is_file_of_faults = kind.source in ("trace", "chaos")
    hits_job = kind.scope == "job"
    with_effect = f"with effect = {kind.effect}"
    with_source_and_scope = f"with {kind.source} and scope = {kind.scope}"
    # The faults of a trace or a plan have effects of their own, and may be wrong numbers.
    is_found_later = kind.effect in ("slow", "corrupt") or is_file_of_faults
    can_break_nodes = kind.effect == "stop" and not hits_job
    without_lives = "without lives: a rate of each node, spacing = weibull"
    with_domain = "with domain: give mtbf_of_each, of one domain"
    with_faults = f"with {kind.source}, whose faults have theirs"
    rules = [
        _UnusedRule(not is_rate, f"with {kind.source}", ("spacing", "scope")),
        _UnusedRule(kind.log is None, "without log", ("system",)),
        _UnusedRule(kind.chaos is None, "without chaos", ("seed",)),
        _UnusedRule(not kind.has_lives, without_lives, ("age",)),
        _UnusedRule(not is_rate or hits_job, with_source_and_scope, ("first_node", "domain")),
        _UnusedRule(kind.domain is not None, with_domain, ("per_1000_node_days",)),
        _UnusedRule(is_file_of_faults, with_faults, ("effect",)),
        _UnusedRule(kind.effect != "slow", with_effect, ("factor", "leaves")),
        _UnusedRule(not is_found_later, with_effect, ("found_after",)),
        _UnusedRule(not can_break_nodes, f"{with_effect}, scope = {kind.scope}", ("breaks",)),
        _UnusedRule(kind.breaks == 0, "without breaks", ("repair",)),
    ]
    defaults = {field.name: field.default for field in msgspec.structs.fields(FailureKind)}
    for rule in rules:
        if not rule.applies:
            continue
        for field in rule.fields:
            value = getattr(kind, field)
            if value != defaults[field]:
                raise ConfigError(
                    f"{name}.{field} must be left out {rule.condition}, got {value!r}; remove it"
                )


def _check(scenario: Scenario) -> None:
    """Check the rules that tie tables to each other.

    Raises:
        ConfigError: a rule is broken.
    """
    cluster, job = scenario.cluster, scenario.job
    _check_unique("cluster.domain", [domain.name for domain in cluster.domain])
    _check_unique("failure", [kind.name for kind in scenario.failures])
    if cluster.gpus % cluster.gpus_per_node:
        rule = f"must be a multiple of gpus_per_node ({cluster.gpus_per_node})"
        raise ConfigError(f"cluster.gpus {rule}, got {cluster.gpus}; change either")
    if cluster.nodes % job.groups:
        rule = f"must divide the {cluster.nodes} nodes of the cluster"
        raise ConfigError(f"job.groups {rule}, got {job.groups}; change it or cluster.gpus")
    for index, kind in enumerate(scenario.failures):
        _check_kind_in_scenario(scenario, kind, f"failure[{index}]")
    if scenario.seconds < MIN_STEPS * job.step:
        rule = f"must hold {MIN_STEPS} steps of {job.step:g} s at least"
        raise ConfigError(f"days {rule}, got {scenario.days:g}; raise it")
    _check_job(job)
    _check_strategies(scenario)
    number = _expected_events(scenario)
    if number > MAX_EVENTS:
        rule = f"must have {MAX_EVENTS:,} failures and checkpoints at most"
        got = f"about {number:.2g} in {scenario.days:g} days"
        raise ConfigError(f"days {rule}, got {got}; lower days or a rate")


def _check_unique(array: str, names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            rule = "must be unlike the others"
            raise ConfigError(f"{array}[{index}].name {rule}, got {name!r}; change it")


def _check_kind_in_scenario(scenario: Scenario, kind: FailureKind, name: str) -> None:
    """Check the rules that tie a kind of failure to the cluster, to the job and to its own files.

    Args:
        name: path of the kind in the file, such as "failure[0]".
    """
    cluster, job = scenario.cluster, scenario.job
    domains = [domain.name for domain in cluster.domain]
    if kind.domain is not None and kind.domain not in domains:
        rule = f"must be one of {', '.join(domains) or 'none'}"
        remedy = "write [[cluster.domain]] with its name and nodes"
        raise ConfigError(f"{name}.domain {rule}, got {kind.domain!r}; {remedy}")
    hits_nodes = kind.source in _RATE_FIELDS and kind.scope == "node"
    if hits_nodes and not scenario.targets_of(kind):
        rule = f"must leave a part of the {cluster.nodes} nodes of the cluster"
        raise ConfigError(f"{name}.first_node {rule}, got {kind.first_node}; lower it")
    _check_wrong_numbers(scenario, kind, name)
    listed = scenario.listed_failures.get(kind.name, ())
    groups = [failure.group for failure in listed if failure.group is not None]
    if groups and max(groups) >= job.groups:
        rule = f"must hit groups below job.groups ({job.groups})"
        raise ConfigError(f"{name}.trace {rule}, got {max(groups)}; change either")


def _check_wrong_numbers(scenario: Scenario, kind: FailureKind, name: str) -> None:
    """Check that `found_after` is set if a trace or a chaos plan has faults that corrupt."""
    listed = scenario.listed_failures.get(kind.name, ())
    faults = [failure.fault for failure in listed if failure.fault is not None]
    if kind.name in scenario.plans:
        faults += [shot.fault for shot in islice(shots(scenario.plans[kind.name]), MAX_SHOTS)]
    has_wrong_numbers = any(effect_of_fault(fault) == "corrupt" for fault in faults)
    if has_wrong_numbers and kind.found_after == 0:
        rule = f"must be > 0 with the wrong numbers of {kind.source}"
        raise ConfigError(f"{name}.found_after {rule}, got 0; set it")


def _check_job(job: Job) -> None:
    if job.usual_step is not None and job.usual_step > job.step:
        rule = f"must be <= job.step ({job.step:g} s)"
        raise ConfigError(f"job.usual_step {rule}, got {job.usual_step:g}; lower it")
    if job.config is not None:
        try:
            find_config(Path(job.config))
        except ConfigError as error:
            raise ConfigError(f"job.config: {error}") from error
    if job.min_replica_size > job.groups:
        rule = f"must be <= job.groups ({job.groups})"
        raise ConfigError(f"job.min_replica_size {rule}, got {job.min_replica_size}; lower it")


def _check_strategies(scenario: Scenario) -> None:
    """Check that there is a strategy, and that each strategy has the tables that it needs."""
    if not scenario.strategies:
        remedy = "write [restart], [groups] or [rounds]"
        raise ConfigError(f"restart must be set, or groups or rounds, got none; {remedy}")
    if scenario.rounds is not None and scenario.groups is None:
        remedy = "write [groups]: stall and away are the same"
        raise ConfigError(f"groups must be set with rounds, got nothing; {remedy}")
    if scenario.restart is not None and scenario.plans:
        rule = "must be left out with a chaos plan, which leaves one group untouched"
        raise ConfigError(f"restart {rule}, got both; give a rate, or remove it")
    if scenario.restart is not None and scenario.checkpoint is None:
        remedy = "write [checkpoint] with save"
        raise ConfigError(f"checkpoint must be set with restart, got nothing; {remedy}")


def _expected_events(scenario: Scenario) -> float:
    """Estimate the events of a simulated run without its steps.

    A run with too many events would seem to hang.
    """
    number = sum(scenario.seconds / maintenance.every for maintenance in scenario.maintenance)
    for kind in scenario.failures:
        if kind.source in _RATE_FIELDS:
            number += (scenario.seconds + kind.age) / scenario.mtbf_of(kind)
        # Wrong numbers may send the job back to any save, so each save counts as an event.
        if kind.effect == "corrupt" and scenario.checkpoint is not None:
            interval = scenario.checkpoint.interval
            if interval == "best":
                interval = 1.0  # `best_interval` returns 1 s at least.
            number += scenario.seconds / interval
    return number
