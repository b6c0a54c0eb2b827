# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Make scenarios out of a run: a campaign before it runs, and the run under other failures.

`titan-ft plan --chaos` and `--like` compute these scenarios in place of a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from titan_ft.chaos.plan import Plan
from titan_ft.config import ConfigError
from titan_ft.forecast.measured import Measured
from titan_ft.forecast.scenario import DAY, Scenario, read_scenarios
from titan_ft.options import QUIET_SECONDS

TIMES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""How much rarer failures are than in the run, in `scenarios_like`."""
LIKE_DAYS = 1.0
"""Length of its simulated runs."""


def scenario_of_campaign(
    measured: Measured,
    plan: Path,
    seed: int | None,
    seconds: float,
    least: int,
) -> Scenario:
    """Return the scenario of a campaign by a chaos plan on the groups of a run, each group a node.

    Args:
        seed: of the plan; its own when None.
        least: `min_replica_size` of the job.
    """
    # Wrong numbers are found when the groups next compare digests: after about a step.
    failure: dict[str, Any] = {
        "name": plan.name,
        "chaos": str(plan),
        "found_after": measured.step,
    }
    if seed is not None:
        failure["seed"] = seed
    (scenario,) = read_scenarios(_tables(measured, [failure], seconds, least), Path())
    plans = {name: _until_quiet(plan, seconds) for name, plan in scenario.plans.items()}
    return msgspec.structs.replace(scenario, plans=plans)


def _until_quiet(plan: Plan, seconds: float) -> Plan:
    """Return the plan without the shots that a launch with --minutes injects no more."""
    last = seconds - QUIET_SECONDS - plan.start_seconds
    if last <= 0:
        return msgspec.structs.replace(plan, rules=())
    if plan.stop_after_seconds and plan.stop_after_seconds < last:
        return plan
    return msgspec.structs.replace(plan, stop_after_seconds=last)


def scenarios_like(measured: Measured, least: int) -> list[Scenario]:
    """Return cases of a run with rarer and more frequent failures, also with half of its groups.

    A simulated run takes `LIKE_DAYS`, and saves checkpoints as the run did.

    Raises:
        ConfigError: the run had no failure, or none from which a group came back.
    """
    if measured.mtbf is None or measured.away is None:
        rule = "must be a run with a failure from which a group came back"
        raise ConfigError(f"--like {rule}, got none; break one by chaos")
    fit = measured.fit
    failure: dict[str, Any] = {
        "name": "as in the run",
        "mtbf": [measured.mtbf * times for times in TIMES],
    }
    if fit is not None and not fit.low <= 1 <= fit.high:
        failure |= {"spacing": "weibull", "shape": fit.shape}
    else:
        failure["spacing"] = "memoryless"
    tables = _tables(measured, [failure], LIKE_DAYS * DAY, least)
    half = measured.groups // 2
    if measured.groups % 2 == 0 and half >= max(2, least):
        tables["job"]["groups"] = [measured.groups, half]
    return read_scenarios(tables, Path())


def _tables(
    measured: Measured,
    failures: list[dict[str, Any]],
    seconds: float,
    least: int,
) -> dict[str, Any]:
    checkpoint = {}
    if measured.save is not None and measured.save_interval is not None:
        interval = max(1.0, measured.save_interval)
        checkpoint["checkpoint"] = {"save": measured.save, "interval": interval}
    return {
        "clock": "wall",
        "days": seconds / DAY,
        "cluster": {"gpus": measured.groups, "gpus_per_node": 1},
        "job": {
            "step": measured.step,
            "usual_step": measured.usual_step,
            "groups": measured.groups,
            "min_replica_size": least,
        },
        "failure": failures,
        "groups": {},
        **checkpoint,
    }
