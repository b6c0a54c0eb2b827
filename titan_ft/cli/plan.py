# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""`titan-ft plan`: forecast what failures will cost a job."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_ft.cli.read_record import read_record
from titan_ft.config import ConfigError, check_folder
from titan_ft.data.assets import find_config
from titan_ft.forecast.candidate import estimate, make_candidates
from titan_ft.forecast.choice import Case, Forecast, compare, run_seeds
from titan_ft.forecast.from_run import scenario_of_campaign, scenarios_like
from titan_ft.forecast.measured import Measured, measure
from titan_ft.forecast.scenario import load_scenarios
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.terminal import show
from titan_ft.options import Planning


def run(command: Planning, worker_args: Sequence[str]) -> int:
    """Do what the options ask for: one of a scenario, a run, a campaign, the validation set."""
    _check(command)
    if command.validate:
        return _validate(command)
    folders = [command.like] if command.like is not None else list(command.from_runs)
    for folder in folders:
        check_folder("--like" if command.like is not None else "--from", folder)
    try:
        records = [read_record(folder) for folder in folders]
    except ConfigError:
        raise
    except ValueError as error:
        print(f"titan-ft plan: {error}", file=sys.stderr)
        return 1
    measured = measure(records) if records else None
    if records and measured is None:
        raise ConfigError(f"--from must be a run that made steps, got {folders[0]}; give one that trained")
    if command.chaos is not None:
        assert measured is not None, "--chaos comes with --from"
        return _forecast_campaign(command, measured, _least(records))
    return _compare(command, measured, records)


def _check(command: Planning) -> None:
    asked = [
        name
        for name, is_asked in (
            ("SCENARIO", command.scenario is not None),
            ("--like", command.like is not None),
            ("--chaos", command.chaos is not None),
            ("--validate", command.validate),
        )
        if is_asked
    ]
    if len(asked) != 1:
        got = " and ".join(asked) or "nothing"
        raise ConfigError(f"SCENARIO must be given, or one of --like, --chaos, --validate, got {got}; give one of them")
    if command.chaos is not None and not command.from_runs:
        raise ConfigError(
            "--chaos must come with --from RUN_DIR, got it alone; a run's record has the costs of failures"
        )
    if command.chaos is None and (command.chaos_seed is not None or command.minutes is not None):
        name = "--minutes" if command.chaos_seed is None else "--chaos-seed"
        raise ConfigError(f"{name} must come with --chaos PLAN, got it alone; give the plan too")
    if command.trace_out is not None and command.scenario is None:
        raise ConfigError(f"--trace-out must come with SCENARIO, got {asked[0]}; give one")
    if command.seeds < 2:
        raise ConfigError(f"--seeds must be >= 2, got {command.seeds}; an interval needs two runs")


def _validate(command: Planning) -> int:
    from titan_ft.forecast.published import validate
    from titan_ft.forecast.table import validation_table

    rows = validate()
    if command.json:
        figures = [
            {
                "id": row.case.id,
                "figure": row.figure,
                "kind": row.kind,
                "published": row.published,
                "ours": row.ours,
                "error": row.error,
                "holds": row.holds,
                "source": row.case.source,
            }
            for row in rows
        ]
        print(json.dumps(figures, indent=2))
    else:
        show(validation_table(rows))
    return int(any(row.holds is False for row in rows))


def _forecast_campaign(command: Planning, measured: Measured, least: int) -> int:
    from titan_ft.forecast.table import campaign_table, forecast_figures, observation_table

    assert command.chaos is not None, "the caller has looked"
    seconds = measured.seconds if command.minutes is None else 60 * command.minutes
    plan = find_config(command.chaos, "chaos")
    scenario = scenario_of_campaign(measured, plan, command.chaos_seed, seconds, least)
    (candidate,) = make_candidates(scenario, measured)
    forecast = Forecast(candidate, estimate(candidate), run_seeds(candidate, measured, command.seeds, seconds))
    if command.json:
        print(json.dumps(forecast_figures(forecast) | {"seconds": seconds}, indent=2))
        return 0
    show(campaign_table(forecast, round(seconds / 60, 2)))
    print()
    show(observation_table(measured))
    return 0


def _compare(command: Planning, measured: Measured | None, records: Sequence[RunRecord]) -> int:
    from titan_ft.forecast.sizes import Sizes
    from titan_ft.forecast.table import case_figures, observation_rows
    from titan_ft.forecast.trace import write_drawn

    if command.scenario is not None:
        scenarios = load_scenarios(command.scenario)
        folder, source = (
            command.scenario.with_suffix("").with_name(f"{command.scenario.stem}-plan"),
            command.scenario.name,
        )
    else:
        assert command.like is not None, "one of both is given"
        assert measured is not None, "--like is a run"
        scenarios = scenarios_like(measured, _least(records))
        folder, source = command.like / "plan", str(command.like)
    if command.trace_out is not None:
        number = write_drawn(command.trace_out, scenarios[0], command.seed)
        print(f"trace: {command.trace_out}, {number} faults")
        return 0
    folder = command.out or folder
    cases = compare(scenarios, measured, command.seeds, Sizes(folder / "sizes.json").bound)
    if command.json:
        figures: dict[str, Any] = {"cases": [case_figures(case) for case in cases]}
        if measured is not None:
            figures["record"] = [
                dict(zip(("input", "value", "rests_on"), row, strict=True)) for row in observation_rows(measured)
            ]
        print(json.dumps(figures, indent=2))
        return 0
    _show(cases, measured, folder, source)
    return 0


def _show(cases: Sequence[Case], measured: Measured | None, folder: Path, source: str) -> None:
    from titan_ft.forecast.page import write_page
    from titan_ft.forecast.table import NOTES, case_notes, case_table, observation_table

    for case in cases:
        show(case_table(case))
        print(case.advice)
        for note in case_notes(case):
            print(note)
        print()
    if measured is not None:
        show(observation_table(measured))
        print()
    for note in NOTES:
        print(note)
    print(f"page: {write_page(folder, cases, measured, source)}")


def _least(records: Sequence[RunRecord]) -> int:
    """Return `min_replica_size` of the runs."""
    configs = [process.config for record in records for process in record.processes]
    return max((config.min_replica_size for config in configs if config is not None), default=1)
