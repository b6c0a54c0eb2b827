# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What each command of `titan-ft` takes: its arguments, with the text of its help.

The last paragraph of a command's docstring is an example, `Example: titan-ft ...`, which also ends the line about
arguments that are missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

_CONFIG = tyro.conf.arg(metavar="CONFIG")
_RUN_DIR = tyro.conf.arg(metavar="RUN_DIR")
# Without a hint "(default: None)" or "(default: False)", which says nothing that the text does not.
_FLAG = tyro.conf.arg(help_behavior_hint="")


def _unset(metavar: str, *aliases: str, name: str | None = None) -> object:
    """Show an option that may be left out by the name of its value, not by its type "{None}|FLOAT"."""
    return tyro.conf.arg(metavar=metavar, name=name, aliases=aliases, help_behavior_hint="")


# The same option has the same names in every command: torchrun's and a cluster's habits are accepted, too.
_REPLICAS = ("--groups",)
_REPLICA = ("--group",)
_RANKS_PER_REPLICA = ("--ranks-per-group",)
_RANKS_PER_NODE = ("--nproc-per-node",)
_NODES = ("--nnodes",)


QUIET_SECONDS = 40.0
"""Before the end that --minutes sets: no fault comes any more, so that all groups are back when it is time to leave."""


@dataclass(frozen=True)
class Launch:
    """Start a lighthouse and supervised replica groups on this host, and show how they do.

    What follows a -- goes to the workers as torchtitan's own flags. The exit status is 0 when all groups finished, 1
    when training failed, 2 when the usage or the config is wrong, 130 or 143 when Ctrl-C or SIGTERM stopped it.

    Example: titan-ft launch llama3_debug --replicas 2 --ranks-per-replica 1 --run-dir runs/1 -- --training.steps=60
    """

    config: Annotated[tyro.conf.Positional[Path], _CONFIG]
    """TOML of the run, as for torchtitan: a path, or the name of one that comes with titan-ft, such as llama3_debug."""
    replicas: Annotated[int, tyro.conf.arg(aliases=_REPLICAS)]
    """Number of replica groups; each trains on its own share of the data."""
    ranks_per_replica: Annotated[
        int, tyro.conf.arg(aliases=(*_RANKS_PER_REPLICA, "--ranks-per-node", *_RANKS_PER_NODE))
    ]
    """Number of processes of each group; with GPUs, one GPU each."""
    run_dir: Annotated[Path, _RUN_DIR]
    """Folder for logs, events and everything else of the run; it must not hold another run, except with --resume."""
    max_restarts: int = 100
    """Restarts of each group before it counts as failed. A restart is forgotten when it is older than 24 hours and the
    group contributes to a step again."""
    lighthouse_port: int = 0
    """Port of the lighthouse; 0 lets the system choose one."""
    spares: int = 0
    """Groups in reserve: each takes the place of a group that is out of restarts."""
    drain_timeout: Annotated[float | None, _unset("SECONDS")] = None
    """Seconds that groups get to finish their step and leave after Ctrl-C or SIGTERM; when left out, what
    fault_tolerance.drain_timeout_seconds says."""
    no_zygote: Annotated[bool, _FLAG] = False
    """Start each worker as a new process, which takes as long as its imports, and has their memory to itself; without
    this, workers are forks of one process that has imported everything."""
    private_network: Annotated[bool, _FLAG] = False
    """Give the run a loopback interface of its own, which no other process of this host reaches, and no other network.
    So data, loggers and weights must be on this host's disks; --metrics-port stays reachable."""
    resume: Annotated[bool, _FLAG] = False
    """Go on from the last checkpoint of the earlier run in --run-dir. TOML, flags and numbers may differ from those of
    its latest launch where that changes neither the arithmetic nor the data."""
    resume_with: Annotated[str, _unset("NAME[,NAME]")] = ""
    """With --resume: fields that may differ although they change the arithmetic or the data, such as
    lr,training.seq_len."""
    dry_run: Annotated[bool, _FLAG] = False
    """Check everything and print what the job would be: batch, memory of a rank, what a step and a heal move; ports,
    folders, environment, commands. Start nothing and leave no files."""
    json: Annotated[bool, _FLAG] = False
    """With --dry-run: print only the sizes of the job, what a rank holds and moves, as JSON."""
    link_gbps: Annotated[float | None, _unset("GBPS")] = None
    """For --dry-run: gigabits (10**9 bits) per second that one rank sends to other groups, the ranks of a host sharing
    its network; 25 when left out."""
    host_link_gbps: Annotated[float | None, _unset("GBPS")] = None
    """For --dry-run: gigabits per second between a GPU and its host's memory; 200, PCIe 4.0 with 16 lanes, when left
    out."""
    minutes: Annotated[float, tyro.conf.arg(metavar="MINUTES")] = 0.0
    """End the run in order so long after its first step, which is a success if every group could leave; 0 trains to the
    last step."""
    chaos: Annotated[Path | None, _unset("PLAN")] = None
    """TOML of the faults to inject into the run: a path, or the name of one that comes with titan-ft, such as
    every_15s; those inside the workers need fault_tolerance.chaos = true."""
    chaos_seed: Annotated[int | None, _unset("SEED")] = None
    """Seed of the faults, in place of the one in their TOML: the same seed brings the same faults."""
    metrics_port: Annotated[str, _unset("[HOST:]PORT")] = ""
    """PORT or HOST:PORT where Prometheus finds the run's figures; a PORT alone is open to this host only."""


@dataclass(frozen=True)
class LighthouseSettings:
    """How a lighthouse judges who is there."""

    min_replicas: int = 1
    """Fewest groups of a quorum. Leave it at 1: fault_tolerance.min_replica_size is what commits wait for, and a group
    that is left alone at the end of a run would wait here for ever."""
    heartbeat_timeout_ms: int = 500
    """Milliseconds without a heartbeat after which a group counts as gone."""
    join_timeout_ms: int = 60_000
    """Milliseconds, from the first request, to wait for groups that heartbeat but have not asked for the quorum yet.
    With a semi_sync_method as many as the job's config has."""


@dataclass(frozen=True)
class Lighthouse(LighthouseSettings):
    """Run a lighthouse, where the groups of a run meet, until SIGTERM or Ctrl-C.

    Example: titan-ft lighthouse --bind 10.0.0.1:29510
    """

    bind: Annotated[str, tyro.conf.arg(metavar="HOST:PORT")] = "[::]:29510"
    """HOST:PORT to listen at, with a numeric host; [::] is all addresses of this host, port 0 lets the system choose
    one."""
    announce: Annotated[Path | None, _unset("FILE")] = None
    """Say in FILE, in the run's folder, where this lighthouse is, for groups with fault_tolerance.lighthouse =
    "file:FILE". It steps down when another one says so there, as its successor on another host does."""
    standby: Annotated[bool, _FLAG] = False
    """With --announce: be ready, and announce this lighthouse when the one in FILE does not answer; then the groups
    follow within two seconds."""
    run_dir: Annotated[Path | None, _unset("FOLDER")] = None
    """Folder of the run, for the events of this lighthouse; when left out, the folder of --announce's FILE."""
    advertise: Annotated[str, _unset("HOST")] = ""
    """The numeric address that the groups reach this host at, which is printed and announced; when left out, that of
    --bind, or of the interface which leads out of this host."""


@dataclass(frozen=True)
class _OfGroup:
    """What runs the processes of a group, on a cluster."""

    config: Annotated[tyro.conf.Positional[Path], _CONFIG]
    """TOML of the run: a path, or the name of one that comes with titan-ft."""
    run_dir: Annotated[Path, _RUN_DIR]
    """Folder of the run, on storage that all groups share: events, logs, checkpoints."""
    no_zygote: Annotated[bool, _FLAG] = False
    """Start each worker as a new process; without this, workers are forks of their node's agent, which has imported
    everything."""
    max_restarts: int = 100
    """Restarts of the group on its nodes before it counts as failed. A restart is forgotten when it is older than 24
    hours and the group contributes to a step again."""
    host_window: int = 3600
    """Seconds within which --host-deaths are counted."""
    on_host_suspected: Annotated[str, _unset("COMMAND")] = ""
    """Command to run when a host is left, with the host and the reason as further arguments."""


@dataclass(frozen=True)
class Group(_OfGroup):
    """Run one replica group: the same command once on each of the group's nodes.

    Options that are left out are taken from Slurm's environment, where there is one. What follows a -- goes to the
    workers as torchtitan's own flags. TITAN_FT_TOKEN, a secret that all groups share, must be set unless every address
    is on this host. The exit status is 0 when the group finished, 1 when training failed or SIGTERM stopped it, 2 when
    the usage or the config is wrong, 3 when the group must not come back, 4 when it should go on on another host, 130
    after Ctrl-C.

    Example: titan-ft group llama3_8b --replica 0 --replicas 2 --ranks-per-node 8 --lighthouse http://10.0.0.1:29510
    --run-dir /shared/runs/1
    """

    replica: Annotated[int | None, _unset("K", *_REPLICA)] = None
    """Number of this group, from 0; when left out, SLURM_ARRAY_TASK_ID."""
    replicas: Annotated[int | None, _unset("N", *_REPLICAS)] = None
    """Number of groups; when left out, SLURM_ARRAY_TASK_COUNT, else group_size of the config."""
    lighthouse: Annotated[str, _unset("ADDRESS")] = ""
    """Address that `titan-ft lighthouse` prints, http://HOST:PORT, or file:FILE of its --announce FILE; when left out,
    fault_tolerance.lighthouse of the config, else TORCHFT_LIGHTHOUSE."""
    ranks_per_node: Annotated[int | None, _unset("R", *_RANKS_PER_NODE)] = None
    """Number of processes on each node; when left out, SLURM_GPUS_ON_NODE, SLURM_GPUS_PER_NODE or
    SLURM_NTASKS_PER_NODE."""
    ranks_per_replica: Annotated[int | None, _unset("R", *_RANKS_PER_REPLICA)] = None
    """The same for the whole group: as many processes on all of its nodes together."""
    nodes: Annotated[int | None, _unset("M", *_NODES)] = None
    """Number of nodes of the group; when left out, SLURM_NNODES, else 1."""
    rendezvous: Annotated[str, _unset("HOST:PORT", "--rdzv-endpoint")] = ""
    """HOST:PORT where the nodes of the group meet: a free port of one of them. When left out, the first of
    SLURM_JOB_NODELIST; a single node needs none."""
    metrics_port: Annotated[str, _unset("[HOST:]PORT")] = ""
    """PORT or HOST:PORT of the group's first node where Prometheus finds the group's figures."""
    host_deaths: int = 0
    """Leave with exit status 4 when workers of the job have died so often on this host; 0: never."""
    dry_run: Annotated[bool, _FLAG] = False
    """Print the command with its environment, and start nothing."""


@dataclass(frozen=True, kw_only=True)
class SlurmSubmit(_OfGroup):
    """Submit a run to Slurm: a lighthouse, and an array with one element for each replica group.

    A group whose node dies is started elsewhere, and heals. The environment of this shell goes along. What follows a --
    goes to the workers as torchtitan's own flags. The exit status is 0 when all jobs were submitted, 1 when sbatch
    refused one, which takes back the others, 2 when the usage or the config is wrong.

    Example: titan-ft slurm submit llama3_8b --run-dir /shared/runs/1 --replicas 8 --ranks-per-node 8
    --group-options "--gpus-per-node=8"
    """

    replicas: Annotated[int, tyro.conf.arg(metavar="N", aliases=_REPLICAS)]
    """Number of replica groups."""
    ranks_per_node: Annotated[int | None, _unset("R", *_RANKS_PER_NODE)] = None
    """Number of processes on each node: as many as it has GPUs."""
    ranks_per_replica: Annotated[int | None, _unset("R", *_RANKS_PER_REPLICA)] = None
    """The same for a whole group: as many processes on all of its nodes together."""
    nodes: Annotated[int, tyro.conf.arg(metavar="M", aliases=_NODES)] = 1
    """Number of nodes of each group."""
    time: Annotated[str, _unset("TIME")] = ""
    """Time limit of the groups' jobs, as sbatch takes it. Each group leaves in order before, and is requeued; when left
    out, that of the partition."""
    standby: Annotated[bool, _FLAG] = False
    """Submit a second lighthouse, which takes over within seconds when the first one dies with its node."""
    group_options: Annotated[str, _unset("OPTIONS")] = ""
    """More options of sbatch for the groups, such as "--partition=gpu --gpus-per-node=8"."""
    lighthouse_options: Annotated[str, _unset("OPTIONS")] = ""
    """More options of sbatch for the lighthouses, such as "--partition=cpu --exclusive"."""
    token_file: Annotated[Path | None, _unset("FILE")] = None
    """The secret that all groups share, readable by you alone; when left out, it is made, as RUN_DIR/token."""
    host_deaths: int = 5
    """A group leaves a host on which workers of the run have died so often; 0: never."""
    dry_run: Annotated[bool, _FLAG] = False
    """Print what would be submitted, and leave no files."""


@dataclass(frozen=True)
class Kubernetes:
    """Print the objects that run a job on Kubernetes, for kubectl: a lighthouse, a JobSet, a volume, the config.

    It needs JobSet's controller in the cluster, an image with titan-ft and tini, and a Secret NAME-token, made by
    kubectl create secret generic titan-ft-token --from-literal=token=$(openssl rand -hex 32). What follows a -- goes to
    the workers as torchtitan's own flags.

    Example: titan-ft kubernetes llama3_8b --image registry/titan-ft --replicas 8 --ranks-per-node 8
    """

    config: Annotated[tyro.conf.Positional[Path], _CONFIG]
    """TOML of the run: a path, or the name of one that comes with titan-ft. The pods get what it holds now."""
    image: str
    """Image of all pods."""
    replicas: Annotated[int, tyro.conf.arg(metavar="N", aliases=_REPLICAS)]
    """Number of replica groups."""
    ranks_per_node: Annotated[int | None, _unset("R", *_RANKS_PER_NODE)] = None
    """Number of processes, and of GPUs, of each pod."""
    ranks_per_replica: Annotated[int | None, _unset("R", *_RANKS_PER_REPLICA)] = None
    """The same for a whole group: as many processes on all of its pods together."""
    nodes: Annotated[int, tyro.conf.arg(metavar="M", aliases=_NODES)] = 1
    """Number of pods of each group."""
    name: str = "titan-ft"
    """Name of the job, and of its folder on the volume."""
    storage: str = "1Ti"
    """Size of the volume for events, logs and checkpoints."""
    storage_class: Annotated[str, _unset("CLASS")] = ""
    """Class of its storage, on which many pods can write; when left out, the cluster's default."""
    gpu_resource: str = "nvidia.com/gpu"
    """What a GPU is called in the cluster; an empty text asks for none."""


@dataclass(frozen=True)
class Chaos:
    """Break a running job on purpose: one FAULT now, or a whole --plan, until that or the job ends, or Ctrl-C.

    The exit status is 0 when the fault was injected or the plan carried out, 1 when the fault could not be injected, 2
    when the usage is wrong or no such job runs. Processes that were stopped go on in any case.

    Example: titan-ft chaos runs/1 kill_group --replica 1
    """

    run_dir: Annotated[tyro.conf.Positional[Path | None], _unset("RUN_DIR")] = None
    """The --run-dir of a running job."""
    fault: Annotated[tyro.conf.Positional[str | None], _unset("FAULT")] = None
    """A fault to inject now; see --list."""
    replica: Annotated[int | None, _unset("K", *_REPLICA)] = None
    """Group that FAULT hits; left to chance when left out."""
    rank: Annotated[int | None, _unset("RANK")] = None
    """Rank of it that FAULT hits; left to chance when left out."""
    settings: Annotated[tuple[str, ...], _unset("NAME=VALUE ...", name="set")] = ()
    """Parameters of FAULT, such as seconds=5."""
    plan: Annotated[Path | None, _unset("PLAN")] = None
    """TOML of a plan to carry out: a path, or the name of one that comes with titan-ft, such as poisson."""
    seed: Annotated[int | None, _unset("SEED")] = None
    """Replays the choices of an earlier plan or fault; a new one is drawn and told when left out."""
    for_seconds: Annotated[float | None, _unset("SECONDS")] = None
    """End after this time."""
    list_faults: Annotated[bool, tyro.conf.arg(name="list", help_behavior_hint="")] = False
    """Print the faults and do nothing."""


@dataclass(frozen=True)
class _OfRun:
    run_dir: Annotated[tyro.conf.Positional[Path], _RUN_DIR]
    """The --run-dir of a launch, or any folder with events/*.jsonl."""


@dataclass(frozen=True)
class Check(_OfRun):
    """Verify the promises of a run from its events: each holds, does not hold, or cannot be told.

    What became of the batches is part of it: lost, repeated, void. The exit status is 0 when everything asked holds,
    else 1.

    Example: titan-ft check runs/1 --against runs/calm
    """

    against: Annotated[Path | None, _unset("RUN_DIR")] = None
    """The --run-dir of a run without failures, of the same config: its loss curve must be followed."""
    reread: Annotated[bool, _FLAG] = False
    """Read the data that were trained once more, each slot without a break, and compare every batch with what was
    trained; takes as long as reading and tokenizing them did, and needs what training needed to read them."""
    json: Annotated[bool, _FLAG] = False
    """Print all findings as JSON."""


@dataclass(frozen=True)
class Top(_OfRun):
    """Show a run live in the terminal: its groups, its loss and what happens to it.

    Without a terminal it is shown once. r shows the ranks, ? explains the columns, q or Ctrl-C leaves. A run that is
    over is shown as it ended.

    Example: titan-ft top runs/1
    """

    once: Annotated[bool, _FLAG] = False
    """Show it once, as it is now."""


@dataclass(frozen=True)
class Logs(_OfRun):
    """Print why groups of a run ended: exception, rank and line of each, with the last lines of its log.

    Each reason comes once, the one that ended the run first. Where nothing ended by itself, the last lines of each
    group's rank 0 are printed.

    Example: titan-ft logs runs/1 --group 1
    """

    group: Annotated[int | None, _unset("GROUP")] = None
    """The only group to print; all when left out."""
    lines: Annotated[int, tyro.conf.arg(metavar="LINES")] = 30
    """Lines of each log at most."""


@dataclass(frozen=True)
class Curves(_OfRun):
    """Write the job's curves for TensorBoard, of a run whose groups were started one by one, and follow it to its end.

    `titan-ft launch` does so by itself. A run that is over is written anew as a whole. Ctrl-C leaves.

    Example: titan-ft curves runs/1
    """

    out: Annotated[Path | None, _unset("FOLDER")] = None
    """Folder of the curves, which is theirs alone; when left out, RUN_DIR/tb/job."""


@dataclass(frozen=True)
class Report(_OfRun):
    """Sum up a run: figures on the terminal, a page with plots in RUN_DIR/report (--json: figures only).

    With a second run both are compared: outcomes, figures and their differences, curves over each other.

    Example: titan-ft report runs/1
    """

    other: Annotated[tyro.conf.Positional[Path | None], _unset("[RUN_DIR2]", name="run_dir2")] = None
    """Another run, to compare the first one with."""
    json: Annotated[bool, _FLAG] = False
    """Print the figures as JSON, and write no page."""
    out: Annotated[Path | None, _unset("FOLDER")] = None
    """Folder of the page (index.html, or compare.html of two runs); when left out, RUN_DIR/report."""
    against: Annotated[Path | None, _unset("RUN_DIR")] = None
    """The same as a second run."""


@dataclass(frozen=True)
class Planning:
    """Forecast what failures will cost a job, and which shape of groups to take: a table and a page, without a GPU.

    Of SCENARIO, a TOML, each list is swept. Runs give the costs that it leaves out, with the number of observations.
    Without SCENARIO: --like for a run's own groups under other failures, --chaos for a campaign before it runs,
    --validate for published figures beside this planner's. The exit status is 1 if one of these does not come out.

    Example: titan-ft plan SCENARIO.toml --from runs/1
    """

    scenario: Annotated[tyro.conf.Positional[Path | None], _unset("[SCENARIO]")] = None
    """TOML of the cluster, its failures, the job, and the strategies to compare."""
    from_runs: Annotated[tuple[Path, ...], _unset("RUN_DIR ...", name="from")] = ()
    """Runs whose record has the costs of failures."""
    like: Annotated[Path | None, _unset("RUN_DIR")] = None
    """A run whose groups meet rarer and more frequent failures."""
    chaos: Annotated[Path | None, _unset("PLAN")] = None
    """With --from: a chaos plan, carried out on the groups of these runs."""
    chaos_seed: Annotated[int | None, _unset("SEED")] = None
    """Seed of that plan, in place of its own."""
    minutes: Annotated[float | None, _unset("MINUTES")] = None
    """Length of that campaign from its first step; when left out, that of the runs."""
    validate: Annotated[bool, _FLAG] = False
    """Print the validation set: published, this planner's, error, and which input was fitted."""
    trace_out: Annotated[Path | None, _unset("FILE")] = None
    """Write the drawn failures of SCENARIO as a chaos trace, for a plan with when = "trace"."""
    seed: int = 0
    """Of the failures in --trace-out."""
    seeds: int = 20
    """Simulated runs of each candidate of the shortlist."""
    out: Annotated[Path | None, _unset("FOLDER")] = None
    """Folder of the page and of sizes that were measured; when left out, RUN_DIR/plan, or SCENARIO without .toml and
    with -plan."""
    json: Annotated[bool, _FLAG] = False
    """Print all figures as JSON, and write no page."""


@dataclass(frozen=True)
class ShowConfig:
    """Print the config that workers would train with, or the first mistake in it.

    TOML, flags and defaults are put together: the fields that matter most, with --json every field. What follows a --
    are torchtitan's own flags, as for launch. The exit status is 0 when the config is right, 2 when it is not.

    Example: titan-ft config llama3_debug --replicas 4 -- --training.steps=60
    """

    config: Annotated[tyro.conf.Positional[Path], _CONFIG]
    """TOML of the run: a path, or the name of one that comes with titan-ft."""
    replicas: Annotated[int | None, _unset("N", *_REPLICAS)] = None
    """Resolve it as `titan-ft launch --replicas` does, which sets enable and group_size; when left out, as a worker
    of torchrun does."""
    json: Annotated[bool, _FLAG] = False
    """Print every field as JSON."""


@dataclass(frozen=True)
class Dashboard:
    """Print a dashboard of a run's figures for Grafana, to import there; it asks for the Prometheus and the run.

    Example: titan-ft dashboard
    """

    alerts: Annotated[bool, _FLAG] = False
    """Print rules for Prometheus instead, which alert on a run that stands still or lacks groups."""


@dataclass(frozen=True)
class Completion:
    """Print what lets a shell complete the commands of titan-ft and their options.

    Example: titan-ft completion bash
    """

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """The shell: `eval "$(titan-ft completion bash)"` in ~/.bashrc; `source <(titan-ft completion zsh)` in ~/.zshrc;
    `titan-ft completion fish | source` in fish's config."""


COMMANDS: dict[str, type] = {
    "launch": Launch,
    "config": ShowConfig,
    "top": Top,
    "logs": Logs,
    "check": Check,
    "report": Report,
    "curves": Curves,
    "chaos": Chaos,
    "plan": Planning,
    "group": Group,
    "lighthouse": Lighthouse,
    "slurm submit": SlurmSubmit,
    "kubernetes": Kubernetes,
    "dashboard": Dashboard,
    "completion": Completion,
}
"""By what is typed after titan-ft, which may be two words."""
OPTIONS_OF_OPTIONS = ("--group-options", "--lighthouse-options")
"""Options whose value is a text of further options, for another program."""
TAKES_FLAGS = (Launch, ShowConfig, Group, SlurmSubmit, Kubernetes)
"""Commands that hand torchtitan's flags, after a --, to workers."""
