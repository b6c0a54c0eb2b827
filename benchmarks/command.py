# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Compare titan_ft with stock torchtitan HSDP and with torchtitan's own `experiments.ft.train`, on
this machine.

Two groups of two ranks each (stock: one job of four ranks), the same model, data and seed, in turn:

    steady: step time and CPU time without failures, as ratios to stock in the same round; CPU time
        of each thread
    failure: SIGKILL of a whole group: the survivors' stall, and the steps that they lost
    rejoin: the time from that kill until the group contributes again, on one host
    recovery: titan_ft alone, each group on cores of its own: kill to contributing by a fork and by
        new processes, the survivors' steps during a slow transfer (replay against wait), a drain, a
        lighthouse that is killed

Semi-synchronous training, only if it is asked for (with --only rounds, all three; half an hour on
two idle cores):

    rounds-loss: the loss at the end for rounds of 10, 30 and 100 steps, 2 and 4 groups and two
        outer LRs, beside the synchronous mode with equal tokens; bytes per step
    rounds-diloco: torchtitan's own DiLoCo beside ours, without failures and under the same SIGKILLs
    rounds-links: tokens per second with the links between two groups throttled to 1000, 100 and 10
        Mbit/s

Only if it is asked for, too (a few minutes each):

    transfer: how fast a joiner gets a state from 1, 2, 4 and 8 donors with throttled links, also if
        one of them is killed
    exchange: how fast 2 and 4 members sum gradients over Gloo, with throttled links too, beside
        bare Gloo
    reopening: what it takes to open a shuffled stream at a saved state
    control: how long 8 to 1,024 ranks of a group take to agree, by its control tree and by one
        TCPStore

With --campaign-peer none of these, but torchtitan's own integration under a SIGKILL of a random
group each 15 s, to be set beside a run of scripts/campaign.sh (--against).

The peer runs as torchtitan ships it, with torchft's lighthouse at its defaults, restarted by
torchrun; titan_ft runs under `titan-ft launch`. Use a quiet machine: all processes share its cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import rounds
from benchmarks.bandwidth import measure_bandwidth
from benchmarks.campaign import format_campaign, run_campaign
from benchmarks.control import measure_control
from benchmarks.diloco import measure_diloco
from benchmarks.kills import measure_kills
from benchmarks.links import measure_links
from benchmarks.recovery import measure_recovery
from benchmarks.reopening import measure_reopenings
from benchmarks.run import BenchError, progress
from benchmarks.steady import LOG_FREQ, WARMUP_STEPS, measure_steady
from benchmarks.systems import OURS, PEER, STOCK
from benchmarks.table import format_report
from benchmarks.transfers import measure_transfers
from titan_ft.config import ConfigError, load_toml

PARTS = ("steady", "failure", "rejoin", "recovery")
ROUNDS = ("rounds-loss", "rounds-diloco", "rounds-links")
"""Not among what is run unless it is asked for: the work of half an hour."""
TRANSFER, EXCHANGE, REOPENING, CONTROL = "transfer", "exchange", "reopening", "control"
"""Not either."""
PACKAGES = ("torch", "torchtitan", "torchft", "torchdata")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 0, 1 when a run did not do what was to be measured, 2 for a bad
    config.
    """
    options = parse(argv)
    parts: Sequence[str] = {None: PARTS, "rounds": ROUNDS}.get(options.only, (options.only,))
    if options.campaign_peer:
        parts = ()
    arguments = sys.argv[1:] if argv is None else argv
    report: dict[str, Any] = {
        "command": shlex.join(["python", "scripts/bench.py", *arguments]),
        "machine": describe_machine(),
    }
    code = 0
    try:
        measure_parts(options, parts, report)
    except ConfigError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    except BenchError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        code = 1
    print(format_report(report, parts))
    return code


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(__file__).parents[1] / "configs" / "llama3_debug.toml"
    parser.add_argument(
        "--config", type=Path, default=default, help="TOML of the model, the data and the exchange"
    )
    parser.add_argument(
        "--rounds", type=_at_least(1), default=7, help="runs of each system for the step time"
    )
    parser.add_argument(
        "--steps",
        type=_at_least(WARMUP_STEPS + LOG_FREQ),
        default=40,
        help=f"of each, {WARMUP_STEPS} for warm-up",
    )
    parser.add_argument(
        "--kills", type=_at_least(1), default=6, help="SIGKILLs of a group, each with its return"
    )
    parser.add_argument(
        "--recoveries", type=_at_least(1), default=3, help="of each kind of recovery"
    )
    choices = (*PARTS, TRANSFER, EXCHANGE, REOPENING, CONTROL, "rounds", *ROUNDS)
    parser.add_argument(
        "--only", choices=choices, help="one part; failure and rejoin come from the same kills"
    )
    parser.add_argument(
        "--skip-peer", action="store_true", help="without torchtitan.experiments.ft"
    )
    peer = parser.add_argument_group("campaign of torchtitan.experiments.ft")
    peer.add_argument("--campaign-peer", action="store_true", help="run it, and nothing else")
    peer.add_argument(
        "--minutes", type=float, default=10.0, help="how long it takes, without the start"
    )
    peer.add_argument(
        "--seed",
        type=int,
        help="of the choice of groups to kill; a random one, printed, if left out",
    )
    peer.add_argument("--peer-groups", type=_at_least(2), default=2)
    peer.add_argument(
        "--peer-ranks",
        type=_at_least(1),
        default=2,
        help="of each group; with 1 it exchanges nothing",
    )
    peer.add_argument(
        "--against", type=Path, metavar="RUN_DIR", help="show a titan_ft campaign beside it"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument(
        "--go-on",
        action="store_true",
        help="of rounds: leave out what --json has from an earlier run",
    )
    parser.add_argument(
        "--work-dir", type=Path, help="folder for the runs, to be made; a temporary one if left out"
    )
    options = parser.parse_args(argv)
    if options.work_dir is not None and options.work_dir.exists():
        parser.error(f"--work-dir must not exist yet, got {options.work_dir}")
    if options.minutes < 1:
        parser.error(f"--minutes must be at least 1, got {options.minutes:g}")
    if options.against is not None and not any(options.against.glob("events/*.jsonl")):
        parser.error(
            f"--against must be the folder of a run, with events/*.jsonl, got {options.against}"
        )
    if options.go_on and options.json is None:
        parser.error("--go-on must come with --json FILE, which has the figures so far")
    return options


def _at_least(least: int) -> Any:
    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return number


def measure_parts(
    options: argparse.Namespace, parts: Sequence[str], report: dict[str, Any]
) -> None:
    """Fill the report, and its file after each part, so that what is measured stays whatever comes
    after.
    """
    base = load_toml(options.config)
    systems = [STOCK, OURS] if options.skip_peer else [STOCK, OURS, PEER]
    work_dir = (options.work_dir or Path(tempfile.mkdtemp(prefix="titan_ft_bench-"))).absolute()
    progress(f"runs in {work_dir}")
    if "steady" in parts:
        report["steady"] = measure_steady(base, systems, work_dir, options.rounds, options.steps)
        _save(report, options.json)
    if "failure" in parts or "rejoin" in parts:
        report["kills"] = {}
        for system in systems[1:]:  # stock has no group to lose
            report["kills"][system] = measure_kills(options.kills, base, system, work_dir)
            _save(report, options.json)
    if options.campaign_peer:
        seed = random.randrange(2**31) if options.seed is None else options.seed
        progress(f"seed {seed}")
        campaign = run_campaign(
            base, work_dir, options.minutes, seed, options.peer_groups, options.peer_ranks
        )
        report["campaign_peer"] = campaign
        report["campaign_table"] = format_campaign(campaign, options.against)
        _save(report, options.json)
    if "recovery" in parts:
        report["recovery"] = {}
        for name, figures in measure_recovery(options.recoveries, base, work_dir):
            report["recovery"][name] = figures
            _save(report, options.json)
    alone = {
        TRANSFER: lambda: measure_transfers(work_dir),
        EXCHANGE: measure_bandwidth,
        REOPENING: measure_reopenings,
        CONTROL: measure_control,
    }
    for part in [part for part in alone if part in parts]:
        report[part] = {}
        for name, figures in alone[part]():
            report[part][name] = figures
            _save(report, options.json)
    measure_rounds(options, parts, base, work_dir, report)


def measure_rounds(
    options: argparse.Namespace,
    parts: Sequence[str],
    base: Mapping[str, Any],
    work_dir: Path,
    report: dict[str, Any],
) -> None:
    """Fill the report's part of semi-synchronous training, and its file after each run.

    Raises:
        BenchError: the figures to go on from are of other runs.
    """
    wanted = [part for part in ROUNDS if part in parts]
    if not wanted:
        return
    found = report["rounds"] = {"settings": rounds.SETTINGS}
    if options.go_on and options.json.exists():
        found = report["rounds"] = json.loads(options.json.read_text(encoding="utf-8")).get(
            "rounds", found
        )
        if found["settings"] != rounds.SETTINGS:
            raise BenchError(
                f"--go-on must have figures of {rounds.SETTINGS}, got those of {found['settings']}"
            )
    for part in wanted:
        done = found.setdefault(part, {})
        for name, figures in _ROUNDS_PARTS[part](base, work_dir, done):
            done[name] = figures
            _save(report, options.json)


_ROUNDS_PARTS: Mapping[str, Callable[..., Iterator[tuple[str, Any]]]] = {
    "rounds-loss": rounds.measure_losses,
    "rounds-diloco": measure_diloco,
    "rounds-links": measure_links,
}


def _save(report: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def describe_machine() -> dict[str, str | int | float]:
    """Return CPU, cores that this process may use, memory, load when the benchmark began, and
    versions.
    """
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 0,
        "memory_gib": round(memory_bytes / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }
