# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Make scenarios from the record of a run, in place of a scenario file.

`titan-ft plan --chaos` forecasts a campaign before it runs: the groups of the record, with the
faults of a chaos plan. `titan-ft plan --like` forecasts the recorded run itself with rarer and more
frequent failures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from titan_ft.chaos.plan import Plan
from titan_ft.config import ConfigError
from titan_ft.forecast.measured import Measured
from titan_ft.forecast.scenario import DAY, Scenario, read_scenarios
from titan_ft.options import SECONDS_WITHOUT_FAULTS_AT_END

MTBF_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""`scenarios_like` multiplies the run's time between failures by these factors."""
LIKE_DAYS = 1.0
"""Length of the simulated runs of `scenarios_like`."""


def scenario_of_campaign(
    measured: Measured,
    plan: Path,
    seed: int | None,
    seconds: float,
    min_groups: int,
) -> Scenario:
    """Return the scenario of a campaign: a chaos plan on the groups of a run. A group is one node.

    Args:
        seed: seed of the plan; None takes the seed in the plan.
        seconds: length of the campaign.
        min_groups: `min_replica_size` of the job.
    """
    # Groups find wrong numbers by comparing digests. Assume that this happens a step later.
    failure: dict[str, Any] = {
        "name": plan.name,
        "chaos": str(plan),
        "found_after": measured.step,
    }
    if seed is not None:
        failure["seed"] = seed
    tables = _make_tables(measured, [failure], seconds, min_groups)
    (scenario,) = read_scenarios(tables, Path())
    plans = {name: _end_before_quiet(plan, seconds) for name, plan in scenario.plans.items()}
    return msgspec.structs.replace(scenario, plans=plans)


def _end_before_quiet(plan: Plan, seconds: float) -> Plan:
    """Return the plan with its end before the last `SECONDS_WITHOUT_FAULTS_AT_END` of the campaign.

    A launch with --minutes injects nothing in that time.
    """
    last_shot = seconds - SECONDS_WITHOUT_FAULTS_AT_END - plan.start_seconds
    if last_shot <= 0:
        return msgspec.structs.replace(plan, rules=())
    if plan.stop_after_seconds and plan.stop_after_seconds < last_shot:
        return plan
    return msgspec.structs.replace(plan, stop_after_seconds=last_shot)


def scenarios_like(measured: Measured, min_groups: int) -> list[Scenario]:
    """Return cases like a run, with rarer and with more frequent failures.

    A simulated run takes `LIKE_DAYS`, and saves checkpoints as the run did. If the number of groups
    is even, half of the groups compete with all of them.

    Args:
        min_groups: `min_replica_size` of the job.

    Raises:
        ConfigError: the run had no failure, or none from which a group came back.
    """
    if measured.mtbf is None or measured.away is None:
        rule = "must be a run with a failure from which a group came back"
        raise ConfigError(f"--like {rule}, got none; break one by chaos")
    fit = measured.gap_fit
    failure: dict[str, Any] = {
        "name": "as in the run",
        "mtbf": [measured.mtbf * factor for factor in MTBF_FACTORS],
    }
    # Memoryless failures have a Weibull distribution of shape 1.
    if fit is None or fit.low <= 1 <= fit.high:
        failure["spacing"] = "memoryless"
    else:
        failure |= {"spacing": "weibull", "shape": fit.shape}
    tables = _make_tables(measured, [failure], LIKE_DAYS * DAY, min_groups)
    half = measured.groups // 2
    if measured.groups % 2 == 0 and half >= max(2, min_groups):
        tables["job"]["groups"] = [measured.groups, half]
    return read_scenarios(tables, Path())


def _make_tables(
    measured: Measured,
    failures: list[dict[str, Any]],
    seconds: float,
    min_groups: int,
) -> dict[str, Any]:
    """Return the tables of a scenario file for the job of a record, its costs left to the record."""
    tables: dict[str, Any] = {
        "clock": "wall",
        "days": seconds / DAY,
        "cluster": {"gpus": measured.groups, "gpus_per_node": 1},
        "job": {
            "step": measured.step,
            "usual_step": measured.usual_step,
            "groups": measured.groups,
            "min_replica_size": min_groups,
        },
        "failure": failures,
        "groups": {},
    }
    if measured.save is not None and measured.save_interval is not None:
        interval = max(1.0, measured.save_interval)  # a scenario allows no shorter one
        tables["checkpoint"] = {"save": measured.save, "interval": interval}
    return tables
