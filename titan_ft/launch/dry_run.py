# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Say what a launch would start, and start nothing: `titan-ft launch --dry-run`."""

from __future__ import annotations

import shlex
import sys

from titan_ft.config import TABLE
from titan_ft.launch.launch_plan import LaunchPlan
from titan_ft.launch.lighthouse_keeper import HOST


def describe(plan: LaunchPlan) -> str:
    """Return what the plan would start, as text: what the run is, then each process with its command."""
    from titan_ft.launch.worker_group import worker_env  # torch, which counts the GPUs, takes seconds to import

    options, paths = plan.options, plan.paths
    port = str(options.lighthouse_port or "PORT")
    chosen = "" if options.lighthouse_port else " (the system chooses PORT)"
    lines = [
        f"run folder   {paths.root}",
        f"config       {plan.config}, copied to {paths.config}",
        f"groups       {plan.num_replicas} x {plan.num_ranks} ranks, {options.spares} spares",
        f"job id       {plan.job_id}",
        f"restarts     {options.max_restarts} of each group at most",
        f"lighthouse   http://{HOST}:{port}{chosen}",
        f"metrics      {options.metrics_port or 'none'}",
        f"faults       {'none' if plan.chaos is None else f'{options.chaos}, seed {plan.chaos.seed}'}",
        f"ends         {f'after {options.minutes:g} minutes' if options.minutes else 'with the last step'}",
        "",
        "lighthouse:",
        f"  {shlex.join(plan.lighthouse_command(options.lighthouse_port))}",
    ]
    for replica in range(plan.num_replicas):
        attempt = paths.next_attempt(replica)
        env = {**worker_env(replica, plan.num_ranks, f"http://{HOST}:{port}"), "TITAN_FT_TOKEN": "(a new secret)"}
        variables = " ".join(f"{name}={value}" for name, value in sorted(env.items()))
        worker = [sys.executable, "-m", plan.module, *plan.worker_flags([f"--{TABLE}.replica_id={replica}"])]
        lines += [
            f"group {replica}, {plan.num_ranks} x:",
            f"  {shlex.join(worker)}",
            f"  environment: {variables}, and torchrun's usual",
            f"  logs: {paths.logs(replica, attempt, 0).parent}/rank-*.log; events: {paths.events}",
        ]
    return "\n".join([*lines, "", "dry run: nothing was started, and no file was made"])
