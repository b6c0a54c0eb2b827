# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The arguments of each command of `titan-ft`, with their help texts.

One class is one command. tyro parses the command line into it (`cli/command_line.py`), and prints
the docstrings of the class and its fields as help. The last paragraph of a command's docstring is
an example, `Example: titan-ft ...`, which also ends the message about missing arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

_CONFIG = tyro.conf.arg(metavar="CONFIG")
_RUN_DIR = tyro.conf.arg(metavar="RUN_DIR")
# Without tyro's hint "(default: None)" or "(default: False)": the help text says as much.
_FLAG = tyro.conf.arg(help_behavior_hint="")


def _unset(metavar: str, *aliases: str, name: str | None = None) -> object:
    """Return tyro's settings for an option that may be left out.

    The help shows `metavar`, the name of the value. Without it, tyro would show the type,
    "{None}|FLOAT".
    """
    return tyro.conf.arg(metavar=metavar, name=name, aliases=aliases, help_behavior_hint="")


# Further names of options, the same in every command: those of torchrun and of clusters.
_REPLICAS = ("--groups",)
_REPLICA = ("--group",)
_RANKS_PER_REPLICA = ("--ranks-per-group",)
_RANKS_PER_NODE = ("--nproc-per-node",)
_NODES = ("--nnodes",)


SECONDS_WITHOUT_FAULTS_AT_END = 40.0
"""Chaos injects no fault in this time before the end of --minutes, so that all groups are back at
the end."""


@dataclass(frozen=True)
class Launch:
    """Start a lighthouse and supervised replica groups on this host, and show their progress.

    What follows a -- goes to the workers as torchtitan's own flags. The exit status is 0 when all
    groups finished, 1 when training failed, 2 when the usage or the config is wrong, 130 or 143
    when Ctrl-C or SIGTERM stopped it.

    Example: titan-ft launch llama3_debug --replicas 2 --ranks-per-replica 1 --run-dir runs/1 --
        --training.steps=60
    """

    config: Annotated[tyro.conf.Positional[Path], _CONFIG]
    """TOML of the run, as for torchtitan: a path, or the name of a packaged one, such as
    llama3_debug."""
    replicas: Annotated[int, tyro.conf.arg(aliases=_REPLICAS)]
    """Number of replica groups; each trains on its own share of the data."""
    ranks_per_replica: Annotated[
        int, tyro.conf.arg(aliases=(*_RANKS_PER_REPLICA, "--ranks-per-node", *_RANKS_PER_NODE))
    ]
    """Number of processes of each group; with GPUs, one GPU each."""
    run_dir: Annotated[Path, _RUN_DIR]
    """Folder for all files of the run. It must not hold another run, except with --resume."""
    max_restarts: int = 100
    """Restarts of each group before it counts as failed. A restart does not count once it is older
    than 24 hours and the group contributes to a step again."""
    lighthouse_port: int = 0
    """Port of the lighthouse; 0 lets the system choose one."""
    spares: int = 0
    """Groups in reserve: each takes the place of a group that is out of restarts."""
    drain_timeout: Annotated[float | None, _unset("SECONDS")] = None
    """Seconds that groups get to finish their step and leave after Ctrl-C or SIGTERM; when left
    out, fault_tolerance.drain_timeout_seconds."""
    no_zygote: Annotated[bool, _FLAG] = False
    """Start each worker as a new process, which must import everything and shares no memory.
    Without this option, workers are forks of one process that has imported everything."""
    private_network: Annotated[bool, _FLAG] = False
    """Give the run a loopback interface of its own, which no other process of this host reaches,
    and no other network. So data, loggers and weights must be on this host's disks; --metrics-port
    stays reachable."""
    resume: Annotated[bool, _FLAG] = False
    """Continue from the last checkpoint of the earlier run in --run-dir. Compared with its latest
    launch, only settings that change neither the arithmetic nor the data may differ."""
    resume_with: Annotated[str, _unset("NAME[,NAME]")] = ""
    """With --resume: fields that may differ although they change the arithmetic or the data, such
    as lr,training.seq_len."""
    dry_run: Annotated[bool, _FLAG] = False
    """Check everything and print what the job would be: batch, memory of a rank, what a step and a
    heal move; ports, folders, environment, commands. Start nothing and leave no files."""
    json: Annotated[bool, _FLAG] = False
    """With --dry-run: print only the sizes of the job, what a rank holds and moves, as JSON."""
    link_gbps: Annotated[float | None, _unset("GBPS")] = None
    """For --dry-run: gigabits (10**9 bits) per second that one rank sends to other groups, the
    ranks of a host sharing its network; 25 when left out."""
    host_link_gbps: Annotated[float | None, _unset("GBPS")] = None
    """For --dry-run: gigabits per second between a GPU and its host's memory; 200, PCIe 4.0 with 16
    lanes, when left out."""
    minutes: Annotated[float, tyro.conf.arg(metavar="MINUTES")] = 0.0
    """End the run in order this many minutes after its first step. The run succeeds if every group
    could leave. 0 trains to the last step."""
    chaos: Annotated[Path | None, _unset("PLAN")] = None
    """TOML of the faults to inject into the run: a path, or the name of a packaged plan, such as
    every_15s. Faults inside the workers need fault_tolerance.chaos = true."""
    chaos_seed: Annotated[int | None, _unset("SEED")] = None
    """Seed of the faults, instead of the seed in their TOML. The same seed gives the same
    faults."""
    metrics_port: Annotated[str, _unset("[HOST:]PORT")] = ""
    """PORT or HOST:PORT at which Prometheus reads the run's figures. With a PORT alone, only this
    host can."""


@dataclass(frozen=True)
class LighthouseSettings:
    """When a lighthouse counts a group as present."""

    min_replicas: int = 1
    """Fewest groups of a quorum. Leave it at 1: commits wait for fault_tolerance.min_replica_size,
    and the last group of a run would wait for a larger quorum forever."""
    heartbeat_timeout_ms: int = 500
    """Milliseconds without a heartbeat after which a group counts as gone."""
    join_timeout_ms: int = 60_000
    """Milliseconds, from the first request, to wait for groups that heartbeat but have not asked
    for the quorum yet. With a semi_sync_method use the value of the job's config."""


@dataclass(frozen=True)
class Lighthouse(LighthouseSettings):
    """Run a lighthouse, where the groups of a run meet, until SIGTERM or Ctrl-C.

    Example: titan-ft lighthouse --bind 10.0.0.1:29510
    """

    bind: Annotated[str, tyro.conf.arg(metavar="HOST:PORT")] = "[::]:29510"
    """HOST:PORT to listen at, with a numeric host; [::] is all addresses of this host, port 0 lets
    the system choose one."""
    announce: Annotated[Path | None, _unset("FILE")] = None
    """Write the address of this lighthouse to FILE, in the run's folder, for groups with
    fault_tolerance.lighthouse = "file:FILE". The lighthouse ends when another one, such as its
    successor on another host, writes its address."""
    standby: Annotated[bool, _FLAG] = False
    """With --announce: wait until the lighthouse in FILE does not answer, then announce this one.
    The groups follow within two seconds."""
    run_dir: Annotated[Path | None, _unset("FOLDER")] = None
    """Folder of the run, for the events of this lighthouse; when left out, the folder of
    --announce's FILE."""
    advertise: Annotated[str, _unset("HOST")] = ""
    """Numeric address at which groups reach this host; it is printed and announced. When left out,
    the address of --bind, or of the interface with the default route."""


@dataclass(frozen=True)
class _AgentOptions:
    """Options of the agents that keep a group's processes on a cluster."""

    config: Annotated[tyro.conf.Positional[Path], _CONFIG]
    """TOML of the run: a path, or the name of a packaged one."""
    run_dir: Annotated[Path, _RUN_DIR]
    """Folder of the run, on storage that all groups share: events, logs, checkpoints."""
    no_zygote: Annotated[bool, _FLAG] = False
    """Start each worker as a new process. Without this option, workers are forks of their node's
    agent, which has imported everything."""
    max_restarts: int = 100
    """Restarts of the group on its nodes before it counts as failed. A restart does not count once
    it is older than 24 hours and the group contributes to a step again."""
    host_window: int = 3600
    """Seconds over which --host-deaths counts."""
    on_host_suspected: Annotated[str, _unset("COMMAND")] = ""
    """Command to run when a host is left, with the host and the reason as further arguments."""


@dataclass(frozen=True)
class Group(_AgentOptions):
    """Run one replica group: the same command once on each of the group's nodes.

    Options that are left out are taken from Slurm's environment, where there is one. What follows a
    -- goes to the workers as torchtitan's own flags. TITAN_FT_TOKEN, a secret that all groups
    share, must be set unless every address is on this host. The exit status is 0 when the group
    finished, 1 when training failed or SIGTERM stopped it, 2 when the usage or the config is wrong,
    3 when the group must not come back, 4 when it should go on on another host, 130 after Ctrl-C.

    Example: titan-ft group llama3_8b --replica 0 --replicas 2 --ranks-per-node 8 --lighthouse
    http://10.0.0.1:29510 --run-dir /shared/runs/1
    """

    replica: Annotated[int | None, _unset("K", *_REPLICA)] = None
    """Number of this group, from 0; when left out, SLURM_ARRAY_TASK_ID."""
    replicas: Annotated[int | None, _unset("N", *_REPLICAS)] = None
    """Number of groups; when left out, SLURM_ARRAY_TASK_COUNT, else group_size of the config."""
    lighthouse: Annotated[str, _unset("ADDRESS")] = ""
    """Address that `titan-ft lighthouse` prints, http://HOST:PORT, or file:FILE of its --announce
    FILE; when left out, fault_tolerance.lighthouse of the config, else TORCHFT_LIGHTHOUSE."""
    ranks_per_node: Annotated[int | None, _unset("R", *_RANKS_PER_NODE)] = None
    """Number of processes on each node; when left out, SLURM_GPUS_ON_NODE, SLURM_GPUS_PER_NODE or
    SLURM_NTASKS_PER_NODE."""
    ranks_per_replica: Annotated[int | None, _unset("R", *_RANKS_PER_REPLICA)] = None
    """Number of processes on all nodes of the group together, instead of the number on each
    node."""
    nodes: Annotated[int | None, _unset("M", *_NODES)] = None
    """Number of nodes of the group; when left out, SLURM_NNODES, else 1."""
    rendezvous: Annotated[str, _unset("HOST:PORT", "--rdzv-endpoint")] = ""
    """HOST:PORT at which the nodes of the group meet: a free port of one node. When left out, the
    first node of SLURM_JOB_NODELIST. A single node needs no such address."""
    metrics_port: Annotated[str, _unset("[HOST:]PORT")] = ""
    """PORT or HOST:PORT of the group's first node at which Prometheus reads the group's figures."""
    host_deaths: int = 0
    """Leave with exit status 4 after this many deaths of the job's workers on this host; 0 =
    never."""
    dry_run: Annotated[bool, _FLAG] = False
    """Print the command with its environment, and start nothing."""


@dataclass(frozen=True, kw_only=True)
class SlurmSubmit(_AgentOptions):
    """Submit a run to Slurm: a lighthouse, and an array with one element for each replica group.

    A group whose node dies is started elsewhere, and heals. The environment of this shell goes
    along. What follows a -- goes to the workers as torchtitan's own flags. The exit status is 0
    when all jobs were submitted, 1 when sbatch refused one, which takes back the others, 2 when the
    usage or the config is wrong.

    Example: titan-ft slurm submit llama3_8b --run-dir /shared/runs/1 --replicas 8 --ranks-per-node
    8 --group-options "--gpus-per-node=8"
    """

    replicas: Annotated[int, tyro.conf.arg(metavar="N", aliases=_REPLICAS)]
    """Number of replica groups."""
    ranks_per_node: Annotated[int | None, _unset("R", *_RANKS_PER_NODE)] = None
    """Number of processes on each node: as many as it has GPUs."""
    ranks_per_replica: Annotated[int | None, _unset("R", *_RANKS_PER_REPLICA)] = None
    """Number of processes on all nodes of a group together, instead of the number on each node."""
    nodes: Annotated[int, tyro.conf.arg(metavar="M", aliases=_NODES)] = 1
    """Number of nodes of each group."""
    time: Annotated[str, _unset("TIME")] = ""
    """Time limit of the groups' jobs, in the form of sbatch. Each group leaves in order before the
    limit, and is requeued. When left out, the limit of the partition."""
    standby: Annotated[bool, _FLAG] = False
    """Submit a second lighthouse, which takes over within seconds when the first one dies with its
    node."""
    group_options: Annotated[str, _unset("OPTIONS")] = ""
    """More options of sbatch for the groups, such as "--partition=gpu --gpus-per-node=8"."""
    lighthouse_options: Annotated[str, _unset("OPTIONS")] = ""
    """More options of sbatch for the lighthouses, such as "--partition=cpu --exclusive"."""
    token_file: Annotated[Path | None, _unset("FILE")] = None
    """File with the token that all groups share, readable by you alone. When left out,
    RUN_DIR/token is made."""
    host_deaths: int = 5
    """A group leaves a host after this many deaths of the run's workers there; 0 = never."""
    dry_run: Annotated[bool, _FLAG] = False
    """Print what would be submitted, and leave no files."""


@dataclass(frozen=True)
class Kubernetes:
    """Print the objects that run a job on Kubernetes, for kubectl: a lighthouse, a JobSet, a
    volume, the config.

    It needs JobSet's controller in the cluster, an image with titan-ft and tini, and a Secret
    NAME-token, made by kubectl create secret generic titan-ft-token --from-literal=token=$(openssl
    rand -hex 32). What follows a -- goes to the workers as torchtitan's own flags.

    Example: titan-ft kubernetes llama3_8b --image registry/titan-ft --replicas 8 --ranks-per-node 8
    """

    config: Annotated[tyro.conf.Positional[Path], _CONFIG]
    """TOML of the run: a path, or the name of a packaged one. The pods get its present content."""
    image: str
    """Image of all pods."""
    replicas: Annotated[int, tyro.conf.arg(metavar="N", aliases=_REPLICAS)]
    """Number of replica groups."""
    ranks_per_node: Annotated[int | None, _unset("R", *_RANKS_PER_NODE)] = None
    """Number of processes, and of GPUs, of each pod."""
    ranks_per_replica: Annotated[int | None, _unset("R", *_RANKS_PER_REPLICA)] = None
    """Number of processes on all pods of a group together, instead of the number on each pod."""
    nodes: Annotated[int, tyro.conf.arg(metavar="M", aliases=_NODES)] = 1
    """Number of pods of each group."""
    name: str = "titan-ft"
    """Name of the job, and of its folder on the volume."""
    storage: str = "1Ti"
    """Size of the volume for events, logs and checkpoints."""
    storage_class: Annotated[str, _unset("CLASS")] = ""
    """Storage class of the volume, which many pods must be able to write; when left out, the
    cluster's default."""
    gpu_resource: str = "nvidia.com/gpu"
    """The cluster's name for a GPU; an empty text requests no GPUs."""


@dataclass(frozen=True)
class Chaos:
    """Inject faults into a running job: one FAULT now, or a --plan, until its end, the job's end or
    Ctrl-C.

    The exit status is 0 when the fault was injected or the plan carried out, 1 when the fault could
    not be injected, 2 when the usage is wrong or no such job runs. Processes that were stopped go
    on in any case.

    Example: titan-ft chaos runs/1 kill_group --replica 1
    """

    run_dir: Annotated[tyro.conf.Positional[Path | None], _unset("RUN_DIR")] = None
    """The --run-dir of a running job."""
    fault: Annotated[tyro.conf.Positional[str | None], _unset("FAULT")] = None
    """A fault to inject now; see --list."""
    replica: Annotated[int | None, _unset("K", *_REPLICA)] = None
    """Group that FAULT hits; when left out, the seed chooses."""
    rank: Annotated[int | None, _unset("RANK")] = None
    """Rank of the group that FAULT hits; when left out, the seed chooses."""
    settings: Annotated[tuple[str, ...], _unset("NAME=VALUE ...", name="set")] = ()
    """Parameters of FAULT, such as seconds=5."""
    plan: Annotated[Path | None, _unset("PLAN")] = None
    """TOML of a plan to carry out: a path, or the name of a packaged plan, such as poisson."""
    seed: Annotated[int | None, _unset("SEED")] = None
    """Seed of all choices, to repeat an earlier plan or fault. When left out, a new seed is drawn
    and printed."""
    for_seconds: Annotated[float | None, _unset("SECONDS")] = None
    """End after this time."""
    list_faults: Annotated[bool, tyro.conf.arg(name="list", help_behavior_hint="")] = False
    """Print the faults and do nothing."""


@dataclass(frozen=True)
class _OfRunFolder:
    run_dir: Annotated[tyro.conf.Positional[Path], _RUN_DIR]
    """The --run-dir of a launch, or any folder with events/*.jsonl."""


@dataclass(frozen=True)
class Check(_OfRunFolder):
    """Verify the promises of a run from its events: each holds, does not hold, or is unknown.

    What became of the batches is part of it: lost, repeated, void. The exit status is 0 when
    everything asked holds, else 1.

    Example: titan-ft check runs/1 --against runs/calm
    """

    against: Annotated[Path | None, _unset("RUN_DIR")] = None
    """The --run-dir of a run without failures and with the same config. The loss curves must
    agree."""
    reread: Annotated[bool, _FLAG] = False
    """Read the trained data again, each slot without a break, and compare every batch with the
    trained one. This takes as long as reading and tokenizing did in training, and needs the same
    access to the data."""
    json: Annotated[bool, _FLAG] = False
    """Print all findings as JSON."""


@dataclass(frozen=True)
class Top(_OfRunFolder):
    """Show a run live in the terminal: its groups, its loss and its latest events.

    Without a terminal it is shown once. r shows the ranks, ? explains the columns, q or Ctrl-C
    leaves. A run that is over is shown as it ended.

    Example: titan-ft top runs/1
    """

    once: Annotated[bool, _FLAG] = False
    """Show the run once, as it is now."""


@dataclass(frozen=True)
class Logs(_OfRunFolder):
    """Print why groups of a run ended: exception, rank and line of each, with the last lines of its
    log.

    Each reason comes once, the one that ended the run first. Where nothing ended by itself, the
    last lines of each group's rank 0 are printed.

    Example: titan-ft logs runs/1 --group 1
    """

    group: Annotated[int | None, _unset("GROUP")] = None
    """The only group to print; all when left out."""
    lines: Annotated[int, tyro.conf.arg(metavar="LINES")] = 30
    """Lines of each log at most."""


@dataclass(frozen=True)
class Curves(_OfRunFolder):
    """Write the job's curves for TensorBoard, of a run whose groups were started one by one, and
    follow it to its end.

    `titan-ft launch` does so by itself. A run that is over is written anew as a whole. Ctrl-C
    leaves.

    Example: titan-ft curves runs/1
    """

    out: Annotated[Path | None, _unset("FOLDER")] = None
    """Folder for the curves and nothing else; when left out, RUN_DIR/tb/job."""


@dataclass(frozen=True)
class Report(_OfRunFolder):
    """Sum up a run: figures on the terminal, a page with plots in RUN_DIR/report (--json: figures
    only).

    With a second run both are compared: outcomes, figures and their differences, curves over each
        other.

    Example: titan-ft report runs/1
    """

    other: Annotated[tyro.conf.Positional[Path | None], _unset("[RUN_DIR2]", name="run_dir2")] = (
        None
    )
    """Another run to compare with."""
    json: Annotated[bool, _FLAG] = False
    """Print the figures as JSON, and write no page."""
    out: Annotated[Path | None, _unset("FOLDER")] = None
    """Folder of the page (index.html, or compare.html of two runs); when left out,
    RUN_DIR/report."""
    against: Annotated[Path | None, _unset("RUN_DIR")] = None
    """Another run to compare with; the same as a second RUN_DIR."""


@dataclass(frozen=True)
class Planning:
    """Forecast what failures will cost a job, and which shape of groups to take: a table and a
    page, without a GPU.

    Of SCENARIO, a TOML, each list is swept. Runs give the costs that it leaves out, with the number
    of observations. Without SCENARIO: --like for a run's own groups under other failures, --chaos
    for a campaign before it runs, --validate for published figures beside this planner's. The exit
    status is 1 if one of these does not come out.

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
    """Seed of the plan, instead of the seed in its file."""
    minutes: Annotated[float | None, _unset("MINUTES")] = None
    """Length of the campaign from its first step; when left out, the length of the runs."""
    validate: Annotated[bool, _FLAG] = False
    """Print the validation set: published, this planner's, error, and which input was fitted."""
    trace_out: Annotated[Path | None, _unset("FILE")] = None
    """Write the drawn failures of SCENARIO as a chaos trace, for a plan with when = "trace"."""
    seed: int = 0
    """Of the failures in --trace-out."""
    seeds: int = 20
    """Simulated runs of each candidate of the shortlist."""
    out: Annotated[Path | None, _unset("FOLDER")] = None
    """Folder of the page and of sizes that were measured; when left out, RUN_DIR/plan, or SCENARIO
    without .toml and with -plan."""
    json: Annotated[bool, _FLAG] = False
    """Print all figures as JSON, and write no page."""


@dataclass(frozen=True)
class ShowConfig:
    """Print the config that workers would train with, or the first mistake in it.

    TOML, flags and defaults are put together: the fields that matter most, with --json every field.
    What follows a -- are torchtitan's own flags, as for launch. The exit status is 0 when the
    config is right, 2 when it is not.

    Example: titan-ft config llama3_debug --replicas 4 -- --training.steps=60
    """

    config: Annotated[tyro.conf.Positional[Path], _CONFIG]
    """TOML of the run: a path, or the name of a packaged one."""
    replicas: Annotated[int | None, _unset("N", *_REPLICAS)] = None
    """Resolve it as `titan-ft launch --replicas` does, which sets enable and group_size; when left
    out, as a worker of torchrun does."""
    json: Annotated[bool, _FLAG] = False
    """Print every field as JSON."""


@dataclass(frozen=True)
class Dashboard:
    """Print a dashboard of a run's figures for Grafana, to import there; it asks for the Prometheus
    and the run.

    Example: titan-ft dashboard
    """

    alerts: Annotated[bool, _FLAG] = False
    """Print rules for Prometheus instead, which alert on a run that stands still or lacks
    groups."""


@dataclass(frozen=True)
class Completion:
    """Print what lets a shell complete the commands of titan-ft and their options.

    Example: titan-ft completion bash
    """

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """The shell: `eval "$(titan-ft completion bash)"` in ~/.bashrc; `source <(titan-ft completion
    zsh)` in ~/.zshrc; `titan-ft completion fish | source` in fish's config."""


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
