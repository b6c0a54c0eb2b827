# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Read a scenario from TOML: cluster, failures, job, strategies to compare. Each list is swept.

`titan-ft plan` and published.py read scenarios here; docs/planning.md describes the fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

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
LONGEST = 1e10
"""Seconds; beyond that, powers and sums of lengths overflow."""
MAX_CASES = 2000
MIN_STEPS = 10
"""Steps of a simulated run; in a shorter one the step that the end cuts off would count."""
MAX_EVENTS = 10_000_000
"""Events of one simulated run; so many take about a minute."""
_ENDS = ("killed", "frozen", "hung")
"""Outcomes of faults after which a group is away; "left" is one in order."""
MAX_SHOTS = 10_000
"""Shots of a chaos plan from which its rate is taken."""
UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": DAY}
"""The units of a length of time, in seconds; the shortest is first."""
_LENGTH = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(UNITS)})")
_A_LENGTH = 'a length of time, such as 20 (seconds) or "18 min"'
_UNITS_TEXT = "units: ms, s, min, h, d; at most 1e10 s"

Seconds = Annotated[float, Meta(ge=0, le=LONGEST, title=_A_LENGTH, description=_UNITS_TEXT)]
SomeSeconds = Annotated[
    float, Meta(ge=0.001, le=LONGEST, title=f"{_A_LENGTH}, >= 1 ms", description=_UNITS_TEXT)
]
Count = Annotated[int, Meta(ge=1, le=10_000_000, title="a whole number from 1 to 10,000,000")]
CountOrNone = Annotated[int, Meta(ge=0, le=10_000_000, title="a whole number from 0 to 10,000,000")]
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
_RATES = ("per_1000_node_days", "mtbf", "mtbf_of_each")
_SOURCES = (*_RATES, "trace", "log", "chaos")


def _remedy(text: str) -> Meta:
    """Return the remedy for a field that is missing or wrong; its type has the rule."""
    return Meta(description=text)


def _tables(name: str) -> Meta:
    """Return rule and remedy of an array of tables."""
    return Meta(title="an array of tables", description=f"write [[{name}]] above each")


class Spread(Struct, frozen=True, forbid_unknown_fields=True):
    """A length that depends on the GPUs of a group, or one that is spread log-normally."""

    base: Seconds = 0.0
    per_gpu: Seconds = 0.0
    median: SomeSeconds | None = None
    p99: SomeSeconds | None = None

    def __post_init__(self) -> None:
        if self.median is None and self.p99 is None:
            if not self.base and not self.per_gpu:  # an empty table is a forgotten length
                raise ValueError("msgspec reports the field, and `convert` its rule")
            return
        median, p99 = self.median or 0.0, self.p99 or 0.0
        if self.base or self.per_gpu or not 0 < median <= p99 <= 1000 * median:
            raise ValueError("msgspec reports the field, and `convert` its rule")


_AMOUNT = Meta(
    title=f"{_A_LENGTH}, a table of base and per_gpu, "
    "or one of median and p99 (1 to 1000 times median)",
    description='for example {median = "6 h", p99 = "2 d"}',
)
Amount = Annotated[Seconds | Spread, _AMOUNT]


def to_length(amount: float | Spread, gpus: int) -> Length:
    """Return the length for a group of so many GPUs."""
    if not isinstance(amount, Spread):
        return Constant(amount)
    if amount.median is None or amount.p99 is None:
        return Constant(amount.base + amount.per_gpu * gpus)
    return LogNormal(amount.median, amount.p99)


class Domain(Struct, frozen=True):
    """Nodes that fail together, such as those of a rack."""

    name: str
    nodes: Count


class Cluster(Struct, frozen=True):
    gpus: Annotated[Count, _remedy("give the GPUs that train; spares are beside them")]
    gpus_per_node: Count
    price_per_gpu_hour: NonNegativeNumber = 0.0
    spare_nodes: (
        Annotated[CountOrNone, _remedy("leave it out if there is always a node to take")] | None
    ) = None
    gpu_memory_gb: PositiveNumber | None = None
    domain: Annotated[tuple[Domain, ...], _tables("cluster.domain")] = ()

    @property
    def nodes(self) -> int:
        return self.gpus // self.gpus_per_node


class Kind(Struct, frozen=True, kw_only=True):
    """One kind of failure: how often, how spaced, what it hits, what it does."""

    name: str
    per_1000_node_days: Rate | None = None
    mtbf: SomeSeconds | None = None
    """Of the whole cluster."""
    mtbf_of_each: SomeSeconds | None = None
    """Of one node, or of one domain."""
    trace: str | None = None
    """A CSV file with the columns of a chaos trace: its faults hit its groups."""
    log: str | None = None
    """A CSV file in LANL's format: its nodes are the cluster's, modulo their number."""
    system: NonNegativeInt | None = None
    """Of the log; all systems when left out."""
    chaos: str | None = None
    """A chaos plan: its schedule, its choice of groups, its limits."""
    seed: NonNegativeInt | None = None
    """Of the chaos plan; its own when left out."""
    spacing: Annotated[Spacing, Meta(title=f"one of {_SPACINGS}", description="set it")] | None = (
        None
    )
    """Of a rate. "even" puts the failures of the whole cluster at equal gaps, "uniform" at gaps
    from 0 to twice the mean. "weibull" gives each node a life of its own if the rate is that of a
    node, else it spaces the failures of the cluster."""
    shape: Shape | None = None
    age: Seconds = 0.0
    """Age of the nodes at the start; with shape < 1 young nodes fail more."""
    first_node: CountOrNone = 0
    """Nodes below it are never hit."""
    domain: str | None = None
    """Each failure hits a whole domain of this name; a node when left out."""
    scope: Annotated[
        Literal["node", "job"],
        Meta(title='"node" or "job"', description="with domain leave it out"),
    ] = "node"
    effect: Annotated[
        Effect, Meta(title=f"one of {_EFFECTS}", description="stop is the default")
    ] = "stop"
    """"drain": the group leaves in order. "slow": a straggler until it is found. "corrupt": wrong
    numbers until they are found, then a heal, or with restarts a roll-back to a checkpoint before
    them."""
    factor: Factor = 1.0
    found_after: Seconds = 0.0
    leaves: bool = True
    """The group of a straggler that was found leaves in order; else its speed is usual again."""
    breaks: Share = 0.0
    """The part that takes the node away until it is mended."""
    repair: Amount = 0.0

    @property
    def source(self) -> str:
        """Return the field that says how often."""
        return next(name for name in _SOURCES if getattr(self, name) is not None)

    @property
    def has_lives(self) -> bool:
        """True if each node or domain has a life of its own.

        Without memory that equals gaps of the whole cluster.
        """
        return self.spacing == "weibull" and self.source in ("per_1000_node_days", "mtbf_of_each")

    @property
    def mean_life(self) -> float:
        """Return the mean life of one node, or of one domain, in seconds."""
        if self.mtbf_of_each is not None:
            return self.mtbf_of_each
        assert self.per_1000_node_days is not None, "a rate of the whole cluster has no lives"
        return 1000 * DAY / self.per_1000_node_days


class Maintenance(Struct, frozen=True):
    """Nodes that are taken away in order, in turn: a drain, which stalls nobody."""

    every: SomeSeconds
    nodes: Count
    lasts: SomeSeconds


class Job(Struct, frozen=True):
    step: Annotated[SomeSeconds, _remedy("give the length of a step without failures")]
    usual_step: SomeSeconds | None = None
    """What counts as effective of a step without failures. `titan-ft report` counts no more than
    the median step, which is below the mean if steps vary. All of it when left out."""
    groups: Count = 1
    min_replica_size: Count = 1
    config: str | None = None
    """A run's config, whose sizes bound the shape: memory of a GPU, the exchange."""
    overlap: Share = 0.6
    """The part of a step beside which the exchange is hidden: about the backward pass."""
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
    """Everybody stops, and starts again from a checkpoint."""

    recover: Annotated[Amount, _remedy("give the time from a failure until training goes on")]


class Groups(Struct, frozen=True):
    """Groups that go on without each other. A cost that is None comes from a run's record."""

    stall: Amount | None = None
    """By how much a failure makes the others' next step late."""
    away: Amount | None = None
    """From a failure, or from the moment that the nodes are there, until the group could join a
    step."""
    rejoin: Amount | None = None
    """By how much a group that comes back makes a step late."""
    drag: Seconds | None = None
    """By how much each group that is away makes every step longer."""
    loses: bool = False
    """True if the others lose the step under way, as with torchft's manager."""


class Rounds(Struct, frozen=True):
    """Groups that meet every so many steps; a failure within a round stalls nobody."""

    steps: Count
    exchange: Seconds = 0.0
    value_of_a_token: Annotated[
        PositiveNumber, _remedy("1 says: as good as one of synchronous training")
    ] = 1.0


class File(Struct, frozen=True, kw_only=True):
    """The tables of one case, as they stand in the file."""

    cluster: Annotated[Cluster, _remedy("write [cluster]")]
    job: Annotated[Job, _remedy("write [job]")]
    failures: Annotated[tuple[Kind, ...], Meta(min_length=1), _tables("failure")] = msgspec.field(
        name="failure"
    )
    clock: Annotated[
        Clock,
        Meta(
            title='"wall" or "training"',
            description='"training" if failures come only while the job trains: 44 % can be 64 %',
        ),
    ]
    days: Annotated[Days, _remedy("30 is the default")] = 30.0
    maintenance: Annotated[tuple[Maintenance, ...], _tables("maintenance")] = ()
    checkpoint: Checkpoint | None = None
    restart: Restart | None = None
    groups: Groups | None = None
    rounds: Rounds | None = None


class Scenario(File, frozen=True, kw_only=True):
    """One case: every list of the file is one value here."""

    plans: Mapping[str, Plan]
    """The chaos plans of the failures, by the failure's name."""
    listed: Mapping[str, Sequence[LoggedFailure]]
    """The failures of traces and logs, by the failure's name."""
    swept: Mapping[str, Any]
    """The values of this case that the file gives as lists."""

    @property
    def seconds(self) -> float:
        """Return the length of a simulated run."""
        return self.days * DAY

    @property
    def strategies(self) -> list[Strategy]:
        return [name for name in get_args(Strategy) if getattr(self, name) is not None]

    def nodes_of(self, kind: Kind) -> int:
        """Return how many nodes a failure of this kind hits; one if it hits the whole job."""
        if kind.domain is None:
            return 1
        return next(each.nodes for each in self.cluster.domain if each.name == kind.domain)

    def parts_of(self, kind: Kind) -> range:
        """Return the numbers of the nodes, or of the domains, that failures of this kind hit."""
        size = self.nodes_of(kind)
        # Rounded up: a domain that begins below `first_node` is never hit.
        return range(-(-kind.first_node // size), -(-self.cluster.nodes // size))

    def mtbf_of(self, kind: Kind) -> float:
        """Return the mean time in seconds between the failures of a rate in the whole cluster."""
        if kind.mtbf is not None:
            return kind.mtbf
        return kind.mean_life / len(self.parts_of(kind))


def effect_of(fault: Fault) -> Effect | None:
    """Return the effect of a chaos fault on its group; None if the group trains on as before."""
    if isinstance(fault, SlowRank):
        return "slow"
    if fault.category == "wrong numbers" and fault.takes_down:
        return "corrupt"
    if fault.outcome == "left":
        return "drain"
    return "stop" if fault.takes_down or fault.outcome in _ENDS else None


# Reading


def load_scenarios(path: Path) -> list[Scenario]:
    """Read the cases of a scenario from a file, in the order of its lists.

    Raises:
        ConfigError: the file cannot be read, or something in it is wrong; one line.
    """
    try:
        return read_scenarios(load_toml(path), path.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_scenarios(values: Mapping[str, Any], folder: Path) -> list[Scenario]:
    """Return the cases that tables describe; the files that they name are in `folder`."""
    return [_read_case(case, folder, swept) for case, swept in _combine(values, "")]


def _combine(value: Any, name: str) -> list[tuple[Any, dict[str, Any]]]:
    """Return each combination of the values in the lists below a value, in seconds.

    With each combination come the chosen values, by the names of their lists. A list of tables is
    an array of tables, which is no choice.
    """
    if isinstance(value, Mapping):
        prefix = f"{name}." if name else ""
        parts = {key: _combine(each, f"{prefix}{key}") for key, each in value.items()}
        return [(dict(zip(parts, case, strict=True)), swept) for case, swept in _multiply(parts)]
    if not isinstance(value, list):
        return [(_in_seconds(value), {})]
    if any(isinstance(each, Mapping) for each in value):
        parts = {index: _combine(each, f"{name}[{index}]") for index, each in enumerate(value)}
        return _multiply(parts)
    if not value:
        raise ConfigError(f"{name} must hold at least one value, got []; give one, or leave it out")
    return [(_in_seconds(each), {name: each}) for each in value]


def _multiply(
    parts: Mapping[Any, list[tuple[Any, dict[str, Any]]]],
) -> list[tuple[list[Any], dict[str, Any]]]:
    """Return the combinations of the parts' cases, the last part's changing fastest."""
    combinations: list[tuple[list[Any], dict[str, Any]]] = [([], {})]
    for cases in parts.values():
        number = len(combinations) * len(cases)
        if number > MAX_CASES:
            rule = f"must make {MAX_CASES} cases at most"
            raise ConfigError(f"the lists {rule}, got {number}; shorten one")
        combinations = [
            ([*values, value], swept | chosen)
            for values, swept in combinations
            for value, chosen in cases
        ]
    return combinations


def _in_seconds(value: Any) -> Any:
    """Return the number of seconds in a text such as "18 min", and any other value as it is."""
    found = _LENGTH.fullmatch(value) if isinstance(value, str) else None
    return value if found is None else float(found[1]) * UNITS[found[2]]


def _read_case(values: dict[str, Any], folder: Path, swept: dict[str, Any]) -> Scenario:
    if "cluster" in values:
        values["cluster"] = _convert_array(Domain, values["cluster"], "cluster.domain")
    values = _convert_array(Kind, values, "failure")
    values = _convert_array(Maintenance, values, "maintenance")
    tables: dict[str, type[Struct]] = {
        "cluster": Cluster,
        "job": Job,
        "checkpoint": Checkpoint,
        "restart": Restart,
        "groups": Groups,
        "rounds": Rounds,
    }
    for name, kind in tables.items():
        if name in values:
            values[name] = convert(kind, values[name], name)
    file = convert(File, values)
    plans = {}
    listed: dict[str, Sequence[LoggedFailure]] = {}
    for index, failure in enumerate(file.failures):
        _check_kind(failure, f"failure[{index}]")
        try:
            if failure.chaos is not None:
                beside = folder / failure.chaos
                path = beside if beside.exists() else Path(failure.chaos)
                plans[failure.name] = load_plan(path, failure.seed)
            if failure.trace is not None:
                listed[failure.name] = read_faults(folder / failure.trace)
            if failure.log is not None:
                listed[failure.name] = read_lanl(folder / failure.log, failure.system)
        except ConfigError as error:
            raise ConfigError(f"failure[{index}].{failure.source}: {error}") from error
    fields = msgspec.structs.asdict(file)
    scenario = Scenario(**fields, plans=plans, listed=listed, swept=swept)
    _check(scenario)
    return scenario


def _convert_array(kind: type[Struct], table: Any, name: str) -> Any:
    """Return a table in which one array of tables is converted: a mistake names its element.

    Any other value is left to the check of the table itself.
    """
    key = name.rpartition(".")[2]
    array = table.get(key) if isinstance(table, Mapping) else None
    if not isinstance(array, list):
        return table
    found = [convert(kind, each, f"{name}[{index}]") for index, each in enumerate(array)]
    return {**table, key: found}


def _check_kind(kind: Kind, name: str) -> None:
    """Check the rules that tie the fields of a kind of failure to each other."""
    given = [field for field in _SOURCES if getattr(kind, field) is not None]
    if len(given) != 1:
        rule = f"must be alone of {', '.join(_SOURCES)}"
        got = " and ".join(given) or "nothing"
        raise ConfigError(f"{name}.mtbf {rule}, got {got}; give one of them")
    (source,) = given
    is_rate = source in _RATES
    if is_rate and kind.spacing is None:
        remedy = "set it: 44 % with even spacing are 57 % without memory"
        raise ConfigError(f"{name}.spacing must be one of {_SPACINGS}, got nothing; {remedy}")
    if (kind.shape is None) != (kind.spacing != "weibull"):
        rule = 'must come with spacing = "weibull"'
        given_shape = "nothing" if kind.shape is None else f"{kind.shape:g}"
        raise ConfigError(f"{name}.shape {rule}, got {given_shape}; give both or neither")
    if kind.effect == "slow" and kind.factor == 1.0:
        raise ConfigError(f'{name}.factor must be > 1 with effect = "slow", got 1; set it')
    hits_job = kind.scope == "job"
    of_effect = f"with effect = {kind.effect}"
    of_source = f"with {source} and scope = {kind.scope}"
    without_lives = "without lives: a rate of each node, spacing = weibull"
    # The faults of a trace or a plan may be wrong numbers.
    may_be_found_late = kind.effect in ("slow", "corrupt") or source in ("trace", "chaos")
    of_domain = "with domain: give mtbf_of_each, of one domain"
    useless = [
        (not is_rate, f"with {source}", ("spacing", "scope")),
        (kind.log is None, "without log", ("system",)),
        (kind.chaos is None, "without chaos", ("seed",)),
        (not kind.has_lives, without_lives, ("age",)),
        (not is_rate or hits_job, of_source, ("first_node", "domain")),
        (kind.domain is not None, of_domain, ("per_1000_node_days",)),
        (source in ("trace", "chaos"), f"with {source}, whose faults have theirs", ("effect",)),
        (kind.effect != "slow", of_effect, ("factor", "leaves")),
        (not may_be_found_late, of_effect, ("found_after",)),
        (kind.effect != "stop" or hits_job, f"{of_effect}, scope = {kind.scope}", ("breaks",)),
        (kind.breaks == 0, "without breaks", ("repair",)),
    ]
    defaults = {field.name: field.default for field in msgspec.structs.fields(Kind)}
    for is_useless, why, fields in useless:
        for field in fields:
            value = getattr(kind, field)
            if is_useless and value != defaults[field]:
                raise ConfigError(
                    f"{name}.{field} must be left out {why}, got {value!r}; remove it"
                )
    # A forgotten field must not mean "found at once" or "mended at once": it would hide most of the
    # cost.
    if kind.effect in ("slow", "corrupt") and kind.found_after == 0:
        rule = f'must be > 0 with effect = "{kind.effect}"'
        raise ConfigError(f"{name}.found_after {rule}, got 0; set it")
    # A log has the repair of each failure.
    if kind.breaks > 0 and kind.repair == 0 and kind.log is None:
        raise ConfigError(f"{name}.repair must be > 0 with breaks, got 0; set it")
    if kind.log is not None and kind.breaks == 0 and kind.effect == "stop":
        remedy = "1 if each failure takes its node away for as long as the log says"
        raise ConfigError(f"{name}.breaks must be > 0 with log, got 0; {remedy}")


def _check(scenario: Scenario) -> None:
    """Check the rules that tie tables to each other."""
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
        name = f"failure[{index}]"
        domains = [each.name for each in cluster.domain]
        if kind.domain is not None and kind.domain not in domains:
            rule = f"must be one of {', '.join(domains) or 'none'}"
            remedy = "write [[cluster.domain]] with its name and nodes"
            raise ConfigError(f"{name}.domain {rule}, got {kind.domain!r}; {remedy}")
        if kind.source in _RATES and kind.scope == "node" and not scenario.parts_of(kind):
            rule = f"must leave a part of the {cluster.nodes} nodes of the cluster"
            raise ConfigError(f"{name}.first_node {rule}, got {kind.first_node}; lower it")
        _check_faults(scenario, kind, name)
        groups = [each.group or 0 for each in scenario.listed.get(kind.name, ())]
        highest = max(groups, default=0)
        if highest >= job.groups:
            rule = f"must hit groups below job.groups ({job.groups})"
            raise ConfigError(f"{name}.trace {rule}, got {highest}; change either")
    if scenario.seconds < MIN_STEPS * job.step:
        rule = f"must hold {MIN_STEPS} steps of {job.step:g} s at least"
        raise ConfigError(f"days {rule}, got {scenario.days:g}; raise it")
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
    number = _expected_events(scenario)
    if number > MAX_EVENTS:
        rule = f"must have {MAX_EVENTS:,} failures and checkpoints at most"
        got = f"about {number:.2g} in {scenario.days:g} days"
        raise ConfigError(f"days {rule}, got {got}; lower days or a rate")


def _check_faults(scenario: Scenario, kind: Kind, name: str) -> None:
    """Check what depends on the faults of a trace or of a chaos plan."""
    listed = scenario.listed.get(kind.name, ())
    faults = [each.fault for each in listed if each.fault is not None]
    if kind.name in scenario.plans:
        faults += [shot.fault for shot in islice(shots(scenario.plans[kind.name]), MAX_SHOTS)]
    has_wrong_numbers = any(effect_of(fault) == "corrupt" for fault in faults)
    if has_wrong_numbers and kind.found_after == 0:
        rule = f"must be > 0 with the wrong numbers of {kind.source}"
        raise ConfigError(f"{name}.found_after {rule}, got 0; set it")


def _check_unique(array: str, names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            rule = "must be unlike the others"
            raise ConfigError(f"{array}[{index}].name {rule}, got {name!r}; change it")


def _expected_events(scenario: Scenario) -> float:
    """Return about how many events a simulated run has beside its steps. Too many never end."""
    number = sum(scenario.seconds / stop.every for stop in scenario.maintenance)
    for kind in scenario.failures:
        if kind.source in _RATES:
            number += (scenario.seconds + kind.age) / scenario.mtbf_of(kind)
        if kind.effect == "corrupt" and scenario.checkpoint is not None:
            interval = scenario.checkpoint.interval
            number += scenario.seconds / (1.0 if interval == "best" else interval)
    return number
