# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Scenarios for tests: tables with what a test does not care about filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titan_ft.forecast.candidate import Candidate, make_candidates
from titan_ft.forecast.scenario import Scenario, read_scenarios

MEMORYLESS = {"name": "any", "mtbf": 1080.0, "spacing": "memoryless"}


def tables(**changes: Any) -> dict[str, Any]:
    """Return a scenario of 12 groups of 8,192 GPUs and a failure each 18 minutes; a change of None
    leaves out.
    """
    usual = {
        "clock": "wall",
        "days": 10.0,
        "cluster": {"gpus": 98304, "gpus_per_node": 8},
        "job": {"step": 20.0, "groups": 12},
        "failure": [MEMORYLESS],
        "groups": {"stall": 2.0, "away": 600.0},
    }
    return {name: value for name, value in (usual | changes).items() if value is not None}


def scenario(folder: Path = Path(), **changes: Any) -> Scenario:
    (only,) = read_scenarios(tables(**changes), folder)
    return only


def candidate(folder: Path = Path(), **changes: Any) -> Candidate:
    return make_candidates(scenario(folder, **changes))[0]


def restart(mtbf: float, save: float, recover: float, **changes: Any) -> Candidate:
    """Return a job that restarts from checkpoints at the best interval."""
    failure = [{"name": "any", "mtbf": mtbf, "spacing": "memoryless"}]
    return candidate(
        failure=failure,
        groups=None,
        job={"step": 1.0},
        cluster={"gpus": 8, "gpus_per_node": 8},
        checkpoint={"save": save},
        restart={"recover": recover},
        **changes,
    )
