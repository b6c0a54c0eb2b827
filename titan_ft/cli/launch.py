# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""`titan-ft launch`: start the groups of a run on this host."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from titan_ft.config import ConfigError
from titan_ft.launch.launch_plan import LaunchPlan
from titan_ft.launch.local import launch
from titan_ft.options import Launch
from titan_ft.run.output import protect_output


def run(command: Launch, worker_args: Sequence[str]) -> int:
    """Check everything, then start the run, or with --dry-run describe it."""
    if command.chaos is None and command.chaos_seed is not None:
        raise ConfigError(
            f"--chaos-seed must come with --chaos FILE, got {command.chaos_seed} alone; give the "
            "plan too"
        )
    if command.json and not command.dry_run:
        raise ConfigError(
            "--json must come with --dry-run, got it alone; titan-ft report RUN_DIR --json has a "
            "run's figures"
        )
    chaos = None
    if command.chaos is not None:
        # Imported here: a run without chaos loads no code that can break it.
        from titan_ft.chaos.plan_file import load_plan

        chaos = load_plan(command.chaos, command.chaos_seed)
    plan = LaunchPlan(command, worker_args, chaos=chaos)
    for note in plan.notes:
        print(f"titan-ft: {note}", file=sys.stderr)
    if command.dry_run:
        # Imported here: the module imports torch, and a launcher must not.
        from titan_ft.launch.dry_run import describe, describe_sizes

        if command.json:
            print(json.dumps(describe_sizes(plan), indent=2))
        else:
            print(describe(plan))
        return 0
    protect_output()
    return launch(plan)
