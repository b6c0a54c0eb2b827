# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The `[fault_tolerance]` table of a run's TOML: its settings, and every rule about their values.

A config is checked twice:

1. The launcher calls `load_toml` and `check_toml` before it starts any process. Neither torch nor
   torchtitan is imported by then, because their import takes seconds. So this module imports only
   the standard library, tomli and two small modules of this package.
2. Each worker calls `validate` when torchtitan has read the whole config. torchtitan adds the table
   to its own config by `[job] custom_config_module = "titan_ft.config"`, which names the class
   `JobConfig` below.

Each mistake is a `ConfigError` of one line. `docs/settings.py` prints docs/settings.md from the
docstrings of the fields. docs/glossary.md explains their words, such as group, lighthouse, quorum,
joiner, donor and heal.

There is no `from __future__ import annotations` here, on purpose. torchtitan's
`ConfigManager._merge_configs` reads the types of the fields as objects. It would take types written
as strings for plain values.
"""

import difflib
import ipaddress
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

import tomli

from titan_ft import round_settings
from titan_ft.round_settings import SEMI_SYNC_METHODS
from titan_ft.setting_rule import SettingRule

TABLE = "fault_tolerance"
LIGHTHOUSE_VARIABLE = "TORCHFT_LIGHTHOUSE"
"""Environment variable with the lighthouse's address, for a config without `lighthouse`."""
MODULE_TOML_PREFIX = "titan_ft_module_"
"""Prefix of the name of a temporary folder. A command writes the TOML of a job that is given as
`--module M --config F` into it, and removes the folder at its end."""
CHOICES = {
    "process_group": ("gloo", "nccl"),
    "exchange_dtype": ("float32", "bfloat16"),
    "batch_policy": ("shrink", "constant"),
    "lr_policy": ("none", "sqrt", "linear"),
}
"""Valid values of the settings that are words; the default is the first."""
REMOVED = {
    "bind_address": ("a donor serves its state at advertise_address", "set advertise_address"),
    "catch_up": (
        "the others train until the queue of catch_up_max_gb is full",
        "remove it, or let them wait after one update: catch_up_max_gb = 0.001",
    ),
    "catch_up_max_steps": ("catch_up_max_gb alone bounds the queue", "set catch_up_max_gb"),
    "connect_timeout_seconds": ("it is always 10 s", "remove it"),
    "events_folder": ("it is always events, below job.dump_folder", "remove it"),
    "finish_timeout_seconds": ("it is always 60 s", "remove it"),
    "heartbeat_interval_ms": (
        "it is a tenth of heartbeat_timeout_ms, and more from 65 groups on",
        "remove it, or set heartbeat_timeout_ms",
    ),
    "max_exchange_retries": ("it is always 10", "remove it"),
    "outer_nesterov": ("the momentum is always Nesterov's", "remove it, or set outer_momentum"),
    "quorum_tick_ms": ("it is always 20 ms", "remove it"),
    "quorum_timeout_seconds": ("it is always 60 s", "remove it"),
    "straggler_factor": ("it is always 1.5", "remove it"),
    "straggler_steps": ("it is always 5", "remove it"),
    "transfer_connections": ("it is always 4", "remove it"),
    "transfer_timeout_seconds": ("a transfer may last as long as bytes arrive", "remove it"),
    "vote_timeout_seconds": ("it is always 60 s", "remove it"),
}
"""Former settings: the rule that holds instead, and the remedy for a config that has one."""


class ConfigError(ValueError):
    """A mistake in a run's configuration. The message is one line: field, rule, value, remedy."""


def suggest_name(name: object, names: Iterable[str]) -> str:
    """Return "did you mean ...? " with the name that is most like `name`, or an empty text."""
    close = difflib.get_close_matches(str(name), names, n=1)
    return f"did you mean {close[0]}? " if close else ""


def describe_removed(field: str, value: object) -> str:
    """Return the message about a setting that no longer exists.

    Args:
        field: full name of the setting, as the user has written it in the TOML or as a flag.
    """
    name = field.rpartition(".")[2]
    instead, remedy = REMOVED[name]
    rule = f"is no setting any more ({instead}) and must be left out"
    return f"{field} {rule}, got {value!r}; {remedy}"


def check_folder(name: str, folder: Path, what: str = "a run") -> None:
    """Check that an argument of a command is an existing folder.

    Args:
        name: the argument's name, for the message.
        what: the contents that the folder should have, for the message.

    Raises:
        ConfigError: the folder does not exist.
    """
    if not folder.is_dir():
        remedy = "it is a file" if folder.exists() else "there is no such folder"
        raise ConfigError(f"{name} must be the folder of {what}, got {folder}; {remedy}")


def unwritable_folder_error(name: str, folder: Path, error: OSError) -> ConfigError:
    """Return the error of a command whose output folder cannot be written."""
    got = f"got {folder} ({error.strerror})"
    return ConfigError(
        f"{name} must be a folder that can be written, {got}; make room, or give another"
    )


@dataclass
class FaultTolerance:
    # Start here.

    enable: bool = False
    """Train as one replica group of several that average their gradients. False is exactly stock
    torchtitan."""

    group_size: int = 0
    """Number of replica groups of the run when all are present. The data is divided among this
    number of groups, so the number stays the same for the whole run. 0 means not set, which is
    refused when `enable` is true; `titan-ft launch --replicas` sets it."""

    min_replica_size: int = 1
    """Fewest groups that may commit a step together; with fewer, training waits. 1 <=
    min_replica_size <= group_size. Raise it if an update from a small part of the batch is worse
    than waiting."""

    process_group: str = "gloo"
    """Backend of the exchange between groups: "gloo" (CPU or GPU) or "nccl" (GPU). Set "nccl" if
    each rank has a GPU of its own: the gradients then travel from GPU to GPU, and not through the
    host's memory."""

    batch_policy: str = "shrink"
    """What happens to the data of absent groups. With "shrink" the data waits for them, and the
    global batch is smaller meanwhile. With "constant" the present groups read this data too, in
    extra microbatches: the global batch keeps its size, and a step takes longer. Set "constant" if
    the optimizer's settings need a batch of constant size."""

    lr_policy: str = "none"
    """How the LR of an update follows the share of the global batch in that update: "none", "sqrt"
    (LR times the square root of the share, as FT-HSDP does) or "linear". Set one if groups are
    absent for so long that a smaller batch with the full LR would harm. With batch_policy =
    "constant" the share is nearly always 1."""

    # The exchange of gradients.

    process_group_timeout_ms: int = 10000
    """Milliseconds that one operation between groups may take before the exchange counts as failed;
    > 0. With `nccl` the time begins when a rank has started all operations of an exchange and waits
    for their end. With `gloo` a link must carry 4 MiB in this time: raise it for links below 3.4
    Mbit/s."""

    exchange_dtype: str = "float32"
    """Type of the gradients between groups: "float32" or "bfloat16". Set "bfloat16" if the network
    between groups limits the speed: it halves the bytes, the memory of the buckets, and the memory
    of the updates that a joiner queues. Each group's gradients are rounded to bfloat16 and added up
    in fp32. The sum is rounded once more, and has the same bytes in all groups. Its error is less
    than 1/127 of the sum of its terms' magnitudes. The token counts of a mixture of experts stay
    exact. Not with `should_quantize`."""

    bucket_size_mb: float = 25.0
    """Mebibytes of gradients that one all-reduce between groups carries; > 0. A larger single
    gradient gets a bucket of its own. Raise it if the groups are far apart, because each all-reduce
    costs round trips; lower it if backward is short, so that the first bucket leaves earlier."""

    digest_every: int = 50
    """Steps between two comparisons of parameters, optimizer state and LR across the groups. Lower
    it to find damage sooner; each comparison reads the whole state once. With 0 the groups compare
    only when a joiner asks for the state, so that no group serves a corrupt state. With
    `semi_sync_method` the groups compare the weights on which they agree: after the round in which
    such a step falls, and at the end of each round before the changes of the round are used."""

    # Membership.

    replica_id: int = 0
    """Slot of the replica group that this process belongs to: 0 <= replica_id < group_size. The
    slot names the group's part of the data. `titan-ft launch` and `titan-ft group` set it; set it
    yourself if you start groups by torchrun."""

    job_id: str = ""
    """Name of the job, without spaces and slashes. If two jobs use one lighthouse by mistake, the
    later job ends, and the earlier job ignores it. A job continues from its latest save, even with
    `checkpoint.load_step`; under another name it begins at `load_step` again. `titan-ft launch`
    gives each run a name of its own; a Slurm array has a name as well. Set it if you start groups
    in another way."""

    lighthouse: str = ""
    """Address of the lighthouse: http://HOST:PORT, or file:PATH with the absolute path of the file
    that a lighthouse with --announce writes, so that the lighthouse may move. Empty takes the
    environment variable TORCHFT_LIGHTHOUSE. Set one of the two if groups run on several hosts."""

    start_timeout_seconds: float = 300.0
    """Seconds that the first step waits for `group_size` groups before it continues with the
    present ones, if they are at least `min_replica_size`; > 0. Raise it if a queue starts the
    groups at very different times. The step waits longer for a group that heartbeats but has not
    joined: that group may be in a long step, and hold the job's state. A group whose token the
    lighthouse refuses waits as long before it ends."""

    advertise_address: str = ""
    """Numeric address at which other groups reach this one. Set it to an address of the fast fabric
    if hosts have several networks. Empty resolves the host's name once. Numeric, because each new
    quorum would resolve a name again, which takes seconds with a bad resolver."""

    # The transfer of state to a joiner.

    catch_up_max_gb: float = 0.0
    """Gigabytes (2**30 bytes) of updates that a rank of a joiner queues while the state travels.
    Each update is as large as the rank's gradients in `exchange_dtype`. The queue is on the GPU if
    it fits and the groups exchange over NCCL, else in host memory (pinned if there is a GPU). The
    rank of the group with least room decides. When the queue is full, the joiner fetches a newer
    state if that is likely to arrive in time, once in a heal; otherwise the other groups wait until
    the transfer ends. 0 takes half of the memory that the host, or its cgroup, has free when the
    heal begins, divided among the ranks on the host, and the free memory of the GPU besides. Set a
    number if other programs need the host's memory as well. One update is always queued, so with
    0.001 the other groups wait from the second update on. Set `TITAN_FT_RANKS_ON_HOST` if you start
    several groups on one host by hand."""

    heal_donors: int = 8
    """Groups from which a joiner fetches the state at the same time, a part from each. Each donor
    copies its state to host memory, and keeps that memory for the next copy. With a GPU it reserves
    this memory right after the first update, unless `heal_donors` is 1. Lower it if host memory is
    scarce; a donor without room copies only its part. 0 takes all groups that hold the state. With
    `semi_sync_method` it is always one."""

    transfer_max_mbps: float = 0.0
    """Megabits (10**6 bits) per second that one rank of a donor sends at most, over all its
    connections. 0 sends as fast as possible. Set it if transfers slow the exchange of gradients
    down."""

    transfer_tls: bool = False
    """Encrypt the state on its way to a joiner with TLS 1.3. A donor makes a certificate at its
    start, with the command openssl; the run's token vouches for it. Gradients are not encrypted:
    Gloo and NCCL cannot. Set it where the transfer leaves the closed network that the gradients
    have."""

    # Leaving and hanging.

    drain_timeout_seconds: float = 25.0
    """Seconds after SIGTERM in which a group may finish its step, save the state if no other group
    holds it, and leave; > 0. After this time the group ends in any case, perhaps without a save.
    Raise it if a step and a save take longer, but keep it below the time that the platform allows
    before SIGKILL (Kubernetes and Slurm: 30 s by default)."""

    hang_timeout_seconds: float = 600.0
    """Seconds without progress of the training thread, not counting waits for other groups, after
    which a worker prints the stacks of its threads and ends itself. Raise it if the longest step,
    compilation or checkpoint takes longer. 0 never ends a worker."""

    # Tests of failures.

    chaos: bool = False
    """Let `titan-ft chaos` and `titan-ft launch --chaos` inject faults inside the workers. With it,
    everybody who may write the run's folder can crash, slow down or corrupt the workers, so leave
    it false in production."""

    # The lighthouse. `titan-ft launch` and `titan-ft lighthouse` use these; workers check them.

    heartbeat_timeout_ms: int = 500
    """Milliseconds without a heartbeat after which the lighthouse counts a group as gone; shorter
    than process_group_timeout_ms. Raise it if healthy groups on busy hosts are evicted, which is
    frequent below 250; each failure then costs the survivors that much longer. In a group of
    several ranks, a rank that is silent for twice as long ends the group, which then restarts."""

    join_timeout_ms: int = 60_000
    """Milliseconds, counted from the first request, that the lighthouse waits for groups that
    heartbeat but have not asked for the quorum yet; > 0, because 0 makes it form quorums without
    end. Raise it above the longest step: a joining group asks at any time within a step, so a
    shorter value evicts healthy groups. The lighthouse does not wait for a dead group, see
    heartbeat_timeout_ms. With `semi_sync_method` the lighthouse of `launch` waits for a day at
    least; give --join-timeout-ms 86400000 to a lighthouse that you start yourself."""

    # Semi-synchronous training: LocalSGD, DiLoCo (arXiv 2311.08105), Streaming DiLoCo (2501.18512).

    semi_sync_method: str | None = None
    """Exchange only once in `sync_steps` steps, which make a round; each group trains by itself
    meanwhile. With "local_sgd" all groups continue from the mean of their parameters. With "diloco"
    an outer optimizer makes the update from the mean of their changes. Not set, the groups exchange
    gradients at each step. Set it if the network between groups is too slow for that. A method
    needs batch_policy = "shrink" and lr_policy = "none"."""

    sync_steps: int = 5
    """Steps of each group from one exchange of a parameter to the next ("H" of DiLoCo); >= 1, and a
    multiple of the number of fragments. Raise it to exchange less; the loss suffers if it is too
    large. Only used with `semi_sync_method`."""

    sync_deadline_seconds: float = 0.0
    """Seconds of training after which a group asks for the exchange, even if steps of the round are
    left; >= 0. The group trains on until the other groups are ready too, and its change is weighted
    by the tokens that it has trained. Set it if groups differ in speed, so that slow groups do not
    hold up the others. 0 makes all steps. Only used with `semi_sync_method`."""

    outer_lr: float = 0.7
    """LR of the outer optimizer; > 0. 0.7 is DiLoCo's; its scaling laws (arXiv 2503.09799) find 0.4
    to 0.8 best, depending on the number of groups. Only used with `semi_sync_method = "diloco"`."""

    outer_momentum: float = 0.9
    """Momentum of the outer optimizer, which is Nesterov's; 0 <= outer_momentum < 1. Lower it for
    short rounds. 0 keeps none, and saves its memory. Only used with `semi_sync_method =
    "diloco"`."""

    should_quantize: bool = False
    """Send changes of parameters in 8 bits. Each block of 256 values has a scale of its own, and
    the rounding error of a group's change is added to its next change. Every group sends its change
    to every other group: each of G groups sends G/8 of the bytes that it sends in fp32, so set it
    for fewer than 8 groups. Only used with `semi_sync_method = "diloco"`."""

    num_fragments: int = 1
    """Number of fragments that the model is cut into, by whole blocks and about equal bytes ("P" of
    Streaming DiLoCo); >= 1. One fragment is exchanged every sync_steps / num_fragments steps, in
    turn. Raise it to lower the peak of the traffic. Only used with `semi_sync_method =
    "diloco"`."""

    module_fqns_per_model_fragment: list[list[str]] = field(default_factory=list)
    """Fully qualified names of the modules of each fragment, as [["tok_embeddings", "layers.0"],
    ["layers.1", ...]]; each trained parameter belongs to one. Empty lets `num_fragments` decide;
    set it if the cuts have to be elsewhere. Only used with `semi_sync_method = "diloco"`."""

    fragment_sync_delay: int = 0
    """Steps that a group makes between the start of a fragment's exchange and the use of its result
    ("tau" of Streaming DiLoCo); 0 <= fragment_sync_delay < sync_steps / number of fragments. 0
    waits for the result. Raise it until training does not wait for the network. Only used with
    `semi_sync_method = "diloco"`."""

    fragment_update_alpha: float = 0.0
    """Share of a group's own parameters after an exchange ("alpha" of Streaming DiLoCo); the rest
    is the global ones; 0 <= fragment_update_alpha < 1. Raise it if the loss jumps after an
    exchange. Only used with `semi_sync_method = "diloco"`."""


@dataclass
class JobConfig:
    """The table that torchtitan adds to its own config; it finds the class by this name."""

    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)


def read_flags(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each torchtitan flag on a command line.

    A flag is `--section.key=value` or `--section.key value`. Each "-" of a name becomes "_". A flag
    at the end without a value has an empty one.
    """
    for position, arg in enumerate(args):
        if not arg.startswith("--"):
            continue
        name, equals, value = arg.removeprefix("--").partition("=")
        is_last = position + 1 == len(args)
        if not equals and not is_last:
            value = args[position + 1]
        yield name.replace("-", "_"), value


def flat_values(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables with their full names, such as "optimizer.lr"."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from flat_values(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def load_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        ConfigError: the file cannot be read or is not TOML. The error names the file and the place
            of a syntax error.
    """
    try:
        with open(path, "rb") as file:
            return tomli.load(file)
    except OSError as error:
        remedy = "give the path of an existing TOML file"
        raise ConfigError(
            f"config file must be readable, got {path} ({error.strerror}); {remedy}"
        ) from error
    except tomli.TOMLDecodeError as error:
        raise ConfigError(
            f"config file must be valid TOML, got {path}: {error}; correct that line"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"config file must be valid TOML, got {path} (not UTF-8 at byte {error.start}); save "
            "it as UTF-8"
        ) from error
    except (ValueError, RecursionError) as error:
        # tomli raises these for a number of thousands of digits, and for a key of as many parts.
        raise ConfigError(
            f"config file must be valid TOML, got {path}: {error}; correct it"
        ) from error


def check_toml(values: Mapping[str, Any], schema: type = FaultTolerance) -> None:
    """Check a loaded TOML as far as that is possible without torchtitan.

    Checks that each entry is a table, and that `[fault_tolerance]` has known keys of the right
    types.

    Args:
        values: the whole TOML, as `load_toml` returns it.
        schema: the dataclass of `[fault_tolerance]`.

    Raises:
        ConfigError: names the wrong key, the closest valid key, and where all valid keys are
            listed.
    """
    for name, table in values.items():
        _require_table(name, table)
    if TABLE in values:
        check_table(TABLE, values[TABLE], schema)
        return
    # The table is missing, or its name has a typing error. An ignored table would let the run train
    # without fault tolerance.
    close = difflib.get_close_matches(TABLE, values, n=1, cutoff=0.8)
    if close:
        raise ConfigError(f"[{close[0]}] is no table of the config; did you mean [{TABLE}]?")


def check_table(name: str, table: Any, schema: Any) -> None:
    """Check a table of a TOML, and its inner tables, for unknown keys and wrong types.

    Args:
        name: the table's full name; empty for the whole TOML.
        schema: the table's dataclass.

    Raises:
        ConfigError: names the first wrong key.
    """
    _require_table(name, table)
    types = {setting.name: setting.type for setting in fields(schema)}
    for key, value in table.items():
        full_name = f"{name}.{key}" if name else key
        if key not in types:
            if name == TABLE and key in REMOVED:
                raise ConfigError(describe_removed(full_name, value))
            kind = "key" if name else "table"
            hint = suggest_name(key, types)
            remedy = "titan-ft config llama3_debug --json prints all of them"
            raise ConfigError(f"{full_name} is not a valid {kind}; {hint}{remedy}")
        if is_dataclass(types[key]):
            check_table(full_name, value, types[key])
        elif name != TABLE and _is_whole_float(value, types[key]):
            continue  # torchtitan accepts 1e4 for a whole number.
        else:
            _check_type(full_name, value, types[key])


def _is_whole_float(value: Any, annotation: Any) -> bool:
    return annotation is int and isinstance(value, float) and value.is_integer()


def _require_table(name: str, table: Any) -> None:
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"{name} must be a table, got {table!r}; write [{name}] with the keys below it"
        )


def resolve_lighthouse(ft: FaultTolerance, fallback: str | None) -> str:
    """Return the lighthouse's address from the config; without one, return `fallback`.

    Args:
        fallback: the value of the environment variable TORCHFT_LIGHTHOUSE; None if unset.

    Raises:
        ConfigError: neither gives an address, or the address is malformed.
    """
    if ft.lighthouse:
        name, address = f"{TABLE}.lighthouse", ft.lighthouse
    elif fallback:
        name, address = LIGHTHOUSE_VARIABLE, fallback
    else:
        raise ConfigError(
            f"{TABLE}.lighthouse must be set when {TABLE}.enable is true, got nothing; "
            f"set it or the environment variable {LIGHTHOUSE_VARIABLE} to http://host:port"
        )
    check_lighthouse(name, address)
    return address.rstrip("/")


def validate(config: Any) -> None:
    """Check a whole job config, as torchtitan's ConfigManager returns it.

    With `enable = false` nothing is checked. A `semi_sync_method` in upper case, which torchtitan
    accepts, is changed to lower case, because all other code expects lower case.

    Raises:
        ConfigError: the first rule that does not hold.
    """
    ft = config.fault_tolerance
    _check_type(f"{TABLE}.enable", ft.enable, bool)
    if not ft.enable:
        return
    for setting in fields(FaultTolerance):
        _check_type(f"{TABLE}.{setting.name}", getattr(ft, setting.name), setting.type)
    if ft.semi_sync_method and ft.semi_sync_method.lower() in SEMI_SYNC_METHODS:
        ft.semi_sync_method = ft.semi_sync_method.lower()
    check_rules(_refusals(config))
    check_rules(_group_rules(ft))
    check_rules(_number_rules(ft))
    check_rules(_order_rules(ft))
    check_rules(_round_rules(ft))
    check_rules(_dtype_rules(config))
    check_rules(_batch_rules(config))
    parallel = config.parallelism
    check_replicate(
        parallel.data_parallel_replicate_degree,
        parallel.data_parallel_shard_degree,
        parallel.context_parallel_degree,
    )
    if ft.lighthouse:
        check_lighthouse(f"{TABLE}.lighthouse", ft.lighthouse)
    if ft.advertise_address:
        _check_advertised(ft.advertise_address)


def check_replicate(replicate: int, shard: int, context: int) -> None:
    """Refuse DDP inside a group. DDP is used if a group has copies of the model and no shards.

    torchtitan 0.2.2's DDP averages gradients over the copies, but the loss is averaged over them
    already.

    Args:
        replicate: data-parallel replicate degree of the group.
        shard: data-parallel shard degree. -1 stands for all ranks that are left, and is accepted
            here: the worker calls this function again when it knows the real degree.
        context: context-parallel degree.

    Raises:
        ConfigError: the group would use DDP.
    """
    if replicate > 1 and shard == 1 and context == 1:
        raise ConfigError(
            "parallelism.data_parallel_replicate_degree must be 1 in a group that does not shard "
            "the model (data_parallel_shard_degree and context_parallel_degree are 1), got "
            f"{replicate}; set it to 1 and start {replicate} times as many groups "
            f"({TABLE}.group_size), or shard: data_parallel_shard_degree >= 2"
        )


def check_rules(rules: Iterable[SettingRule]) -> None:
    """Check rules in order.

    Raises:
        ConfigError: the first rule that does not hold.
    """
    for rule in rules:
        if not rule.holds:
            raise ConfigError(rule.describe())


def _refusals(config: Any) -> Iterator[SettingRule]:
    """Yield a rule for each setting of torchtitan that fault-tolerant runs do not support yet."""
    early_step = config.optimizer.early_step_in_backward
    yield SettingRule(
        holds=not early_step,
        field="optimizer.early_step_in_backward",
        rule="is not supported yet (an update must wait for the vote) and must be false",
        value=early_step,
        remedy="set optimizer.early_step_in_backward = false",
    )
    seed_checkpoint = config.checkpoint.create_seed_checkpoint
    yield SettingRule(
        holds=not seed_checkpoint,
        field="checkpoint.create_seed_checkpoint",
        rule="is not supported yet for fault-tolerant runs and must be false",
        value=seed_checkpoint,
        remedy="set checkpoint.create_seed_checkpoint = false",
    )
    yield SettingRule(
        holds=config.comm.mode == "default",
        field="comm.mode",
        rule=(f'must be "default" when {TABLE}.enable is true (other modes are not supported yet)'),
        value=config.comm.mode,
        remedy='set comm.mode = "default"',
    )


def _group_rules(ft: FaultTolerance) -> Iterator[SettingRule]:
    """Yield the rules about words, and about the number of groups."""
    for name, choices in CHOICES.items():
        yield SettingRule(
            holds=getattr(ft, name) in choices,
            field=f"{TABLE}.{name}",
            rule=f"must be one of {', '.join(choices)}",
            value=getattr(ft, name),
            remedy=f"the default is {choices[0]}",
        )
    method = ft.semi_sync_method
    hint = suggest_name(str(method).lower().replace("-", "_"), SEMI_SYNC_METHODS)
    yield SettingRule(
        holds=method is None or method in SEMI_SYNC_METHODS,
        field=f"{TABLE}.semi_sync_method",
        rule=f"must be one of {', '.join(SEMI_SYNC_METHODS)}, or left out",
        value=method,
        remedy=f"{hint}without it gradients are exchanged at each step",
    )
    # The job's name becomes a part of each group's name at the lighthouse.
    forbidden = set(ft.job_id) & set("/ \t\n")
    yield SettingRule(
        holds=not forbidden,
        field=f"{TABLE}.job_id",
        rule="must be without spaces and slashes",
        value=ft.job_id,
        remedy="use letters, digits and dashes",
    )
    size = ft.group_size
    yield SettingRule(
        holds=size >= 1,
        field=f"{TABLE}.group_size",
        rule="must be >= 1",
        value=size,
        remedy="set it to the number of replica groups",
    )
    yield SettingRule(
        holds=ft.replica_id >= 0,
        field=f"{TABLE}.replica_id",
        rule="must be >= 0",
        value=ft.replica_id,
        remedy="number the groups from 0",
    )
    yield SettingRule(
        holds=ft.replica_id < size,
        field=f"{TABLE}.replica_id",
        rule=f"must be < group_size ({size})",
        value=ft.replica_id,
        remedy="number the groups from 0, or raise group_size",
    )
    yield SettingRule(
        holds=ft.min_replica_size >= 1,
        field=f"{TABLE}.min_replica_size",
        rule="must be >= 1",
        value=ft.min_replica_size,
        remedy="1 lets a single group go on alone",
    )
    yield SettingRule(
        holds=ft.min_replica_size <= size,
        field=f"{TABLE}.min_replica_size",
        rule=f"must be <= group_size ({size})",
        value=ft.min_replica_size,
        remedy="lower it, or raise group_size",
    )


_ZERO_MEANS = {
    "digest_every": "never compares",
    "transfer_max_mbps": "sends as fast as it goes",
    "catch_up_max_gb": "takes half of the host's free memory",
    "heal_donors": "takes all groups that hold the state",
    "hang_timeout_seconds": "never ends a worker",
    "sync_deadline_seconds": "makes all steps of a round",
}
"""Settings that may be 0, with the meaning of 0."""
_POSITIVE_SUFFIXES = ("_seconds", "_ms", "_mb")
"""A setting with such a name must be greater than 0, unless `_ZERO_MEANS` has it."""


def _number_rules(ft: FaultTolerance) -> Iterator[SettingRule]:
    """Yield the rules about durations, sizes and counts, each by itself."""
    for setting in fields(FaultTolerance):
        name = setting.name
        if name.endswith(_POSITIVE_SUFFIXES) and name not in _ZERO_MEANS:
            yield SettingRule(
                holds=getattr(ft, name) > 0,
                field=f"{TABLE}.{name}",
                rule="must be > 0",
                value=getattr(ft, name),
                remedy=f"the default is {setting.default}",
            )
    for name, meaning in _ZERO_MEANS.items():
        yield SettingRule(
            holds=getattr(ft, name) >= 0,
            field=f"{TABLE}.{name}",
            rule="must be >= 0",
            value=getattr(ft, name),
            remedy=f"0 {meaning}",
        )


def _order_rules(ft: FaultTolerance) -> Iterator[SettingRule]:
    """Yield the rules about the order of timeouts.

    The lighthouse must notice a dead group before an exchange with that group times out. Otherwise
    the next quorum would have the dead group again.
    """
    yield SettingRule(
        holds=ft.heartbeat_timeout_ms >= 50,
        field=f"{TABLE}.heartbeat_timeout_ms",
        rule="must be >= 50",
        value=ft.heartbeat_timeout_ms,
        remedy="the lighthouse looks every 20 ms",
    )
    yield SettingRule(
        holds=ft.heartbeat_timeout_ms < ft.process_group_timeout_ms,
        field=f"{TABLE}.heartbeat_timeout_ms",
        rule=f"must be < process_group_timeout_ms ({ft.process_group_timeout_ms})",
        value=ft.heartbeat_timeout_ms,
        remedy="lower it, or raise process_group_timeout_ms",
    )


def _round_rules(ft: FaultTolerance) -> Iterator[SettingRule]:
    """Yield the rules about semi-synchronous training, with the full names of the settings."""
    for rule in round_settings.rules(ft):
        yield replace(rule, field=f"{TABLE}.{rule.field}")


def _dtype_rules(config: Any) -> Iterator[SettingRule]:
    """Yield the rule about the type of the weights.

    With a semi-synchronous method the groups agree on weights in fp32. Weights of another type
    would lose digits of them. The model may choose the type, so the trainer also checks the weights
    of the built model.
    """
    dtype = config.training.dtype
    yield SettingRule(
        holds=config.fault_tolerance.semi_sync_method is None or dtype == "float32",
        field="training.dtype",
        rule=(
            f'must be "float32" with {TABLE}.semi_sync_method (a checkpoint has the weights that '
            "the groups agree on)"
        ),
        value=dtype,
        remedy="training.mixed_precision_param lets the steps compute in another one",
    )


def _batch_rules(config: Any) -> Iterator[SettingRule]:
    """Yield the rules about the global batch, which is the number of sequences of all groups in an
    update. It must split into whole microbatches of each rank.
    """
    training = config.training
    parallel = config.parallelism
    replicate = parallel.data_parallel_replicate_degree
    shard = parallel.data_parallel_shard_degree
    _check_type("training.global_batch_size", training.global_batch_size, int)
    _check_type("training.local_batch_size", training.local_batch_size, int)
    _check_type("parallelism.data_parallel_replicate_degree", replicate, int)
    _check_type("parallelism.data_parallel_shard_degree", shard, int)
    num_groups = config.fault_tolerance.group_size
    total = training.global_batch_size
    name = "training.global_batch_size"
    yield SettingRule(
        holds=total != 0,
        field=name,
        rule="must be > 0, or -1 for one microbatch per rank",
        value=total,
        remedy="set it to -1 or to a positive number",
    )
    if total < 0:
        return
    remedy = "it counts the sequences of all groups"
    yield SettingRule(
        holds=total % num_groups == 0,
        field=name,
        rule=f"must be divisible by {TABLE}.group_size ({num_groups})",
        value=total,
        remedy=remedy,
    )
    local = training.local_batch_size
    # A shard degree of -1 stands for a number that only the worker knows. torchtitan checks the
    # batch there. Here it counts as 1.
    degree = replicate * max(shard, 1)
    if local < 1 or degree < 1:
        return  # torchtitan has errors of its own for these values.
    factors = f"{TABLE}.group_size ({num_groups}) x training.local_batch_size ({local})"
    if degree > 1:
        factors += f" x the data-parallel degree of a group ({degree})"
    sequences_per_group = total // num_groups
    yield SettingRule(
        holds=sequences_per_group % (local * degree) == 0,
        field=name,
        rule=f"must be a multiple of {factors}",
        value=total,
        remedy=remedy,
    )


def check_lighthouse(name: str, address: str) -> None:
    """Check the form of a lighthouse's address.

    Raises:
        ConfigError: the address is neither http://host:port nor file:PATH.
    """
    if address.startswith("file:"):
        is_absolute = address.startswith("file:/")
        if not is_absolute or address.endswith("/"):
            raise ConfigError(
                f"{name} must have an absolute path behind file:, got {address!r}; for example "
                "file:/shared/run/lighthouse.json, which the lighthouse gets as --announce"
            )
        return
    has_space = any(character.isspace() for character in address)
    if has_space or not _is_http_address(address):
        raise ConfigError(
            f"{name} must look like http://host:port, got {address!r}; for example "
            "http://10.0.0.1:29510"
        )


def _is_http_address(address: str) -> bool:
    """Return True for http://host:port, with or without a slash at the end."""
    try:
        parts = urlsplit(address)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            return False
        if parts.query or parts.fragment or parts.username:
            return False
        return parts.path in ("", "/")
    except ValueError:  # The port is no number or out of range, or an IPv6 address is broken.
        return False


def _check_advertised(address: str) -> None:
    """Check that other hosts can use the address without resolving it.

    Raises:
        ConfigError: the address is a name, or stands for all of a host's addresses.
    """
    name = f"{TABLE}.advertise_address"
    try:
        unspecified = ipaddress.ip_address(address).is_unspecified
    except ValueError as error:
        remedy = "give the number that the name stands for, or leave it out"
        raise ConfigError(f"{name} must be a numeric address, got {address!r}; {remedy}") from error
    if unspecified:
        remedy = "give the one of the network that the groups share, or leave it out"
        raise ConfigError(
            f"{name} must be an address that other hosts can reach, got {address!r}; {remedy}"
        )


_TYPE_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
}


def _check_type(name: str, value: Any, annotation: Any) -> None:
    """Check the type of a value. An integer is a valid float; a bool is no number.

    Raises:
        ConfigError: the value is of another type, or is a float that is not finite.
    """
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        if value not in choices:
            names = ", ".join(map(str, choices))
            raise ConfigError(
                f"{name} must be one of {names}, got {value!r}; {suggest_name(value, choices)}set it"
            )
        return
    if not _is_instance(value, annotation):
        expected = _TYPE_NAMES.get(annotation)
        if expected is None:
            type_name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
            expected = f"of type {type_name}"
        raise ConfigError(f"{name} must be {expected}, got {value!r}; correct its value")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} must be finite, got {value!r}; correct its value")


def _is_instance(value: Any, annotation: Any) -> bool:
    """Return True if a value from TOML or the command line is of a type that the schema uses."""
    if get_origin(annotation) is Literal:
        return value in get_args(annotation)
    if isinstance(annotation, UnionType):
        return any(_is_instance(value, part) for part in get_args(annotation))
    if get_origin(annotation) is list:
        if not isinstance(value, list):
            return False
        (item_type,) = get_args(annotation)
        return all(_is_instance(item, item_type) for item in value)
    if annotation in (bool, int, str, NoneType):
        return type(value) is annotation
    if annotation is float:
        return type(value) in (int, float)
    return True  # Only the fields of a custom config module have other types.
