# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Read a scenario from TOML: cluster, failures, job, strategies to compare. Each list is swept."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from titan_ft.chaos.plan import Plan
from titan_ft.chaos.plan_file import load_plan
from titan_ft.config import ConfigError, load_toml
from titan_ft.faults.schema import (
    NonNegativeInt,
    NonNegativeNumber,
    PositiveNumber,
    check_keys,
    convert,
)
from titan_ft.forecast.lengths import Constant, Length, LogNormal
from titan_ft.forecast.logs import LoggedFailure, read_faults, read_lanl

DAY = 86400.0
LONGEST = 1e10
"""Seconds; beyond that, powers and sums of lengths overflow."""
MAX_CASES = 2000
MAX_EVENTS = 10_000_000
"""Events of one simulated run; so many take about a minute."""
_UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": DAY}
_LENGTH = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})")
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
T = TypeVar("T", bound=Struct)
Strategy = Literal["restart", "groups", "rounds"]
Effect = Literal["stop", "drain", "slow", "corrupt"]
Spacing = Literal["memoryless", "even", "uniform", "weibull"]
SPACINGS = ", ".join(get_args(Spacing))


class Spread(Struct, frozen=True, forbid_unknown_fields=True):
    """A length that depends on the GPUs of a group, or one that is spread log-normally."""

    base: Seconds = 0.0
    per_gpu: Seconds = 0.0
    median: SomeSeconds | None = None
    p99: SomeSeconds | None = None


_AMOUNT = Meta(
    title=f"{_A_LENGTH}, a table of base and per_gpu, or one of median and p99 (1 to 1000 times median)",
    description='for example {median = "6 h", p99 = "2 d"}',
)
Amount = Annotated[Seconds | Spread, _AMOUNT]


def to_length(name: str, amount: float | Spread, gpus: int) -> Length:
    """Return the length for a group of so many GPUs."""
    if not isinstance(amount, Spread):
        return Constant(amount)
    if amount.median is None and amount.p99 is None:
        return Constant(amount.base + amount.per_gpu * gpus)
    median, p99 = amount.median or 0.0, amount.p99 or 0.0
    is_mixed = amount.base > 0 or amount.per_gpu > 0
    if is_mixed or not 0 < median <= p99 <= 1000 * median:
        values = msgspec.structs.asdict(amount)
        given = ", ".join(f"{key} = {value:g}" for key, value in values.items() if value)
        raise ConfigError(f"{name} must be {_AMOUNT.title}, got {{{given}}}; {_AMOUNT.description}")
    return LogNormal(median, p99)


class Domain(Struct, frozen=True):
    """Nodes that fail together, such as those of a rack."""

    name: str
    nodes: Count


class Cluster(Struct, frozen=True):
    gpus: Annotated[Count, Meta(description="give the GPUs that train; spares are beside them")]
    gpus_per_node: Count
    price_per_gpu_hour: NonNegativeNumber = 0.0
    spare_nodes: (
        Annotated[CountOrNone, Meta(description="leave it out if there is always a node to take")]
        | None
    ) = None
    gpu_memory_gb: PositiveNumber | None = None
    domain: Annotated[
        list[Any],
        Meta(title="an array of tables", description="write [[cluster.domain]] above each"),
    ] = []

    @property
    def nodes(self) -> int:
        return self.gpus // self.gpus_per_node


_RATES = ("per_1000_node_days", "mtbf", "mtbf_of_each", "trace", "log", "chaos")


class Kind(Struct, frozen=True, kw_only=True):
    """One kind of failure: how often, how spaced, what it hits, what it does."""

    name: str
    per_1000_node_days: (
        Annotated[float, Meta(gt=0, le=1e6, title="a number > 0, at most 1e6")] | None
    ) = None
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
    spacing: Annotated[Spacing, Meta(title=f"one of {SPACINGS}", description="set it")] | None = (
        None
    )
    """Of a rate. "even" puts the failures of the whole cluster at equal gaps, "uniform" at gaps from
    0 to twice the mean. "weibull" gives each node a life of its own if the rate is that of a node,
    else the gaps of the cluster."""
    shape: Shape | None = None
    age: Seconds = 0.0
    """Age of the nodes at the start; with shape < 1 young nodes fail more."""
    first_node: CountOrNone = 0
    """Nodes below it are never hit."""
    domain: str | None = None
    """Each failure hits a whole one of these; a node when left out."""
    scope: Annotated[
        Literal["node", "job"],
        Meta(title='"node" or "job"', description="with domain leave it out"),
    ] = "node"
    effect: Annotated[
        Effect,
        Meta(title=f"one of {', '.join(get_args(Effect))}", description="stop is the default"),
    ] = "stop"
    """"drain": the group leaves in order. "slow": a straggler until it is found. "corrupt": wrong numbers until they
    are found, then a heal, or with restarts a roll-back to a checkpoint before them."""
    factor: Factor = 1.0
    found_after: Seconds = 0.0
    leaves: bool = True
    """The group of a straggler that was found leaves in order; else it goes on at its usual
    speed."""
    breaks: Share = 0.0
    """The part that takes the node away until it is mended."""
    repair: Amount = 0.0

    @property
    def source(self) -> str:
        """Return the field that says how often, checked to be one."""
        return next(name for name in _RATES if getattr(self, name) is not None)

    @property
    def has_lives(self) -> bool:
        """True if each node or domain has a life of its own.

        Without memory that equals gaps of the whole cluster.
        """
        return self.spacing == "weibull" and self.source in ("per_1000_node_days", "mtbf_of_each")


def _check_kind(kind: Kind) -> None:
    """Check the rules that tie the fields of a kind of failure to each other.

    Raises:
        ConfigError: the text begins with the name of a field.
    """
    given = [name for name in _RATES if getattr(kind, name) is not None]
    if len(given) != 1:
        got = " and ".join(given) or "nothing"
        raise ConfigError(f"mtbf must be alone of {', '.join(_RATES)}, got {got}; give one of them")
    is_rate = kind.source in _RATES[:3]
    if is_rate and kind.spacing is None:
        remedy = "44 % with even spacing are 57 % without memory"
        raise ConfigError(f"spacing must be one of {SPACINGS}, got nothing; set it: {remedy}")
    if (kind.shape is None) != (kind.spacing != "weibull"):
        rule = 'must come with spacing = "weibull"'
        raise ConfigError(f"shape {rule}, got {kind.shape}; give both or neither")
    if kind.effect == "slow" and kind.factor == 1.0:
        raise ConfigError('factor must be > 1 with effect = "slow", got 1; set it')
    is_late = kind.effect in ("slow", "corrupt")
    has_fault = kind.source in ("trace", "chaos")
    useless = {
        "spacing": (not is_rate, f"with {kind.source}"),
        "system": (kind.log is None, "without log"),
        "seed": (kind.chaos is None, "without chaos"),
        "age": (not kind.has_lives, "without lives: a rate of each node, spacing = weibull"),
        "first_node": (
            not is_rate or kind.scope == "job",
            f"with {kind.source} and scope = {kind.scope}",
        ),
        "domain": (
            not is_rate or kind.scope == "job",
            f"with {kind.source} and scope = {kind.scope}",
        ),
        "per_1000_node_days": (
            kind.domain is not None,
            "with domain: give mtbf_of_each, of one domain",
        ),
        "scope": (not is_rate, f"with {kind.source}"),
        "effect": (has_fault, f"with {kind.source}, whose faults have theirs"),
        "factor": (kind.effect != "slow", f"with effect = {kind.effect}"),
        "leaves": (kind.effect != "slow", f"with effect = {kind.effect}"),
        "found_after": (not is_late, f"with effect = {kind.effect}"),
        "breaks": (
            kind.effect != "stop" or kind.scope == "job",
            f"with effect = {kind.effect}, scope = {kind.scope}",
        ),
        "repair": (kind.breaks == 0, "without breaks"),
    }
    defaults = Kind(name=kind.name)
    for field, (is_useless, why) in useless.items():
        value = getattr(kind, field)
        if is_useless and value != getattr(defaults, field):
            raise ConfigError(f"{field} must be left out {why}, got {value!r}; remove it")


class Maintenance(Struct, frozen=True):
    """Nodes that are taken away in order, in turn: a drain, which stalls nobody."""

    every: SomeSeconds
    nodes: Count
    lasts: SomeSeconds


class Job(Struct, frozen=True):
    step: Annotated[SomeSeconds, Meta(description="give the length of a step without failures")]
    groups: Count = 1
    min_replica_size: Count = 1
    config: str | None = None
    """A run's config, whose sizes bound the shape: memory of a GPU, the exchange."""
    overlap: Share = 0.6
    """The part of a step beside which the exchange is hidden: about the backward pass."""
    link_gbps: PositiveNumber | None = None


class Checkpoint(Struct, frozen=True):
    save: Annotated[Seconds, Meta(description="give how long training stands still for a save")]
    interval: Annotated[
        Annotated[float, Meta(ge=1, le=LONGEST)] | Literal["best"],
        Meta(
            title='a length of time >= 1 s, or "best"',
            description="it counts computing, between saves",
        ),
    ] = "best"


class Restart(Struct, frozen=True):
    """Everybody stops, and starts again from a checkpoint."""

    recover: Annotated[
        Amount, Meta(description="give the time from a failure until training goes on")
    ]


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
        PositiveNumber, Meta(description="1 says: as good as one of synchronous training")
    ] = 1.0


class Scenario(Struct, frozen=True):
    """One case: every list of the file is one value here."""

    cluster: Cluster
    failures: tuple[Kind, ...]
    maintenance: tuple[Maintenance, ...]
    job: Job
    clock: Literal["wall", "training"]
    days: float
    domains: Mapping[str, int]
    plans: Mapping[str, Plan]
    """The chaos plans of the failures, by the failure's name."""
    listed: Mapping[str, tuple[LoggedFailure, ...]]
    """The failures of traces and logs, by the failure's name."""
    swept: Mapping[str, Any]
    """The values of this case that the file gives as lists."""
    checkpoint: Checkpoint | None = None
    restart: Restart | None = None
    groups: Groups | None = None
    rounds: Rounds | None = None

    @property
    def strategies(self) -> list[Strategy]:
        tables: list[tuple[Strategy, object]] = [
            ("restart", self.restart),
            ("groups", self.groups),
            ("rounds", self.rounds),
        ]
        return [name for name, table in tables if table is not None]

    def nodes_of(self, kind: Kind) -> int:
        """Return how many nodes a failure of this kind hits; one if it hits the whole job."""
        return 1 if kind.domain is None else self.domains[kind.domain]

    def parts_of(self, kind: Kind) -> range:
        """Return the numbers of the nodes, or of the domains, that failures of this kind hit."""
        size = self.nodes_of(kind)
        return range(kind.first_node // size, -(-self.cluster.nodes // size))


class _File(Struct):
    cluster: Annotated[Any, Meta(description="write [cluster]")]
    job: Annotated[Any, Meta(description="write [job]")]
    failure: Annotated[
        list[Any],
        Meta(min_length=1, title="an array of tables", description="write [[failure]] above each"),
    ]
    clock: Annotated[
        Literal["wall", "training"],
        Meta(
            title='"wall" or "training"',
            description='"training" if failures come only while the job trains: 44 % can be 64 %',
        ),
    ]
    days: Annotated[
        float,
        Meta(gt=0, le=10_000, title="a number > 0, at most 10000", description="30 is the default"),
    ] = 30.0
    maintenance: Annotated[
        list[Any], Meta(title="an array of tables", description="write [[maintenance]] above each")
    ] = []
    checkpoint: Any = None
    restart: Any = None
    groups: Any = None
    rounds: Any = None


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
    return [_read_case(case, folder, swept) for case, swept in _expand(values)]


def _expand(values: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the tables for each combination of the values in their lists, with these by name."""
    lists = list(_find_lists(values, ()))
    number = 1
    for path, several in lists:
        number *= len(several)
        if not several:
            rule = "must hold at least one value"
            raise ConfigError(f"{_name(path)} {rule}, got []; give one, or leave it out")
    if number > MAX_CASES:
        rule = f"must make {MAX_CASES} cases at most"
        raise ConfigError(f"the lists {rule}, got {number}; shorten one")
    for chosen in itertools.product(*(several for _, several in lists)):
        case = copy.deepcopy(dict(values))
        for (path, _), value in zip(lists, chosen, strict=True):
            place: Any = case
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
        yield (
            _in_seconds(case),
            {_name(path): value for (path, _), value in zip(lists, chosen, strict=True)},
        )


def _find_lists(values: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], list[Any]]]:
    """Yield the places and the values of lists; a list of tables is an array of tables."""
    items = values.items() if isinstance(values, Mapping) else enumerate(values)
    for key, value in items:
        has_tables = isinstance(value, list) and any(isinstance(each, Mapping) for each in value)
        if isinstance(value, Mapping) or has_tables:
            yield from _find_lists(value, (*path, key))
        elif isinstance(value, list):
            yield (*path, key), value


def _name(path: tuple[Any, ...]) -> str:
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else str(key)
    return text


def _in_seconds(value: Any) -> Any:
    """Return tables in which each text such as "18 min" is a number of seconds."""
    if isinstance(value, dict):
        return {key: _in_seconds(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_in_seconds(each) for each in value]
    found = _LENGTH.fullmatch(value) if isinstance(value, str) else None
    return value if found is None else float(found[1]) * _UNITS[found[2]]


def _read_case(values: dict[str, Any], folder: Path, swept: dict[str, Any]) -> Scenario:
    file = convert(_File, values)
    cluster = convert(Cluster, file.cluster, "cluster")
    job = convert(Job, file.job, "job")
    kinds = tuple(
        convert(Kind, table, f"failure[{index}]") for index, table in enumerate(file.failure)
    )
    domains = [
        convert(Domain, table, f"cluster.domain[{index}]")
        for index, table in enumerate(cluster.domain)
    ]
    stops = [
        convert(Maintenance, table, f"maintenance[{index}]")
        for index, table in enumerate(file.maintenance)
    ]
    for index, domain in enumerate(domains):
        if sum(each.name == domain.name for each in domains) > 1 and index:
            name = f"cluster.domain[{index}].name"
            raise ConfigError(f"{name} must be unlike the others, got {domain.name!r}; change it")
    plans, listed = {}, {}
    for index, kind in enumerate(kinds):
        try:
            _check_kind(kind)
        except ConfigError as error:
            raise ConfigError(f"failure[{index}].{error}") from error
        if sum(each.name == kind.name for each in kinds) > 1:
            name = f"failure[{index}].name"
            raise ConfigError(f"{name} must be unlike the others, got {kind.name!r}; change it")
        if kind.domain is not None:
            known = [domain.name for domain in domains]
            check_keys(f"failure[{index}].domain ", [kind.domain], known)
        if kind.chaos is not None:
            beside = folder / kind.chaos
            plans[kind.name] = load_plan(beside if beside.exists() else Path(kind.chaos), kind.seed)
        if kind.trace is not None:
            listed[kind.name] = tuple(read_faults(folder / kind.trace))
        if kind.log is not None:
            listed[kind.name] = tuple(read_lanl(folder / kind.log, kind.system))
    scenario = Scenario(
        cluster=cluster,
        failures=kinds,
        maintenance=tuple(stops),
        job=job,
        clock=file.clock,
        days=file.days,
        domains={domain.name: domain.nodes for domain in domains},
        plans=plans,
        listed=listed,
        swept=swept,
        checkpoint=_convert_if_given(Checkpoint, file.checkpoint, "checkpoint"),
        restart=_convert_if_given(Restart, file.restart, "restart"),
        groups=_convert_if_given(Groups, file.groups, "groups"),
        rounds=_convert_if_given(Rounds, file.rounds, "rounds"),
    )
    _check(scenario)
    return scenario


def _convert_if_given(kind: type[T], values: Any, name: str) -> T | None:
    return None if values is None else convert(kind, values, name)


def _check(scenario: Scenario) -> None:
    """Check the rules that tie tables to each other."""
    cluster, job = scenario.cluster, scenario.job
    if cluster.gpus % cluster.gpus_per_node:
        rule = f"must be a multiple of gpus_per_node ({cluster.gpus_per_node})"
        raise ConfigError(f"cluster.gpus {rule}, got {cluster.gpus}; change either")
    if cluster.nodes % job.groups:
        rule = f"must divide the {cluster.nodes} nodes of the cluster"
        raise ConfigError(f"job.groups {rule}, got {job.groups}; change it or cluster.gpus")
    for index, kind in enumerate(scenario.failures):
        if kind.first_node >= cluster.nodes:
            rule = f"must be < the {cluster.nodes} nodes of the cluster"
            name = f"failure[{index}].first_node"
            raise ConfigError(f"{name} {rule}, got {kind.first_node}; lower it")
        highest = max((each.group or 0 for each in scenario.listed.get(kind.name, ())), default=0)
        if highest >= job.groups:
            rule = f"must hit groups below job.groups ({job.groups})"
            raise ConfigError(f"failure[{index}].trace {rule}, got {highest}; change either")
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


def _expected_events(scenario: Scenario) -> float:
    """Return about how many events a simulated run has beside its steps. Too many never end."""
    seconds = scenario.days * DAY
    number = sum(seconds / stop.every for stop in scenario.maintenance)
    for kind in scenario.failures:
        if kind.mtbf is not None:
            number += seconds / kind.mtbf
        elif kind.source in _RATES[:3]:
            each = kind.mtbf_of_each or 1000 * DAY / (kind.per_1000_node_days or 1.0)
            number += (seconds + kind.age) / each * len(scenario.parts_of(kind))
        if kind.effect == "corrupt" and scenario.checkpoint is not None:
            interval = scenario.checkpoint.interval
            number += seconds / (1.0 if interval == "best" else float(interval))
    return number
