# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""`titan-ft plan`: forecast the cost of failures for a job.

The command has one of four subjects: a scenario file, a recorded run (`--like`), a campaign with a
chaos plan (`--chaos`), or the published figures (`--validate`). The first two compare several
candidates, and write a page. See docs/planning.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_ft.cli.read_record import read_record
from titan_ft.config import ConfigError, check_folder
from titan_ft.data.assets import find_config
from titan_ft.forecast.candidate import check_costs, make_candidates
from titan_ft.forecast.choice import Forecast, compare, run_seeds
from titan_ft.forecast.closed_forms import estimate
from titan_ft.forecast.from_run import scenario_of_campaign, scenarios_like
from titan_ft.forecast.measured import Measured, measure
from titan_ft.forecast.scenario import Scenario, load_scenarios
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.terminal import show
from titan_ft.options import Planning

MAX_SEEDS = 10_000
MAX_MINUTES = 1_000_000
_SUBJECTS = {
    "SCENARIO": ("--from", "--trace-out", "--out"),
    "--like": ("--out",),
    "--chaos": ("--from", "--chaos-seed", "--minutes"),
    "--validate": (),
}
"""The subjects of the command, each with the options that it takes.

Every subject also takes --json and --seeds.
"""


def run(command: Planning, worker_args: Sequence[str]) -> int:
    """Make the requested forecast; return the exit status."""
    _check_options(command)
    if command.validate:
        return _validate(command)
    option = "--from"
    run_folders = command.from_runs
    if command.like is not None:
        option = "--like"
        run_folders = (command.like,)
    for run_folder in run_folders:
        check_folder(option, run_folder)
    try:
        records = [read_record(run_folder) for run_folder in run_folders]
    except ConfigError:  # a ValueError, too; the caller reports it
        raise
    except ValueError as error:
        print(f"titan-ft plan: {error}", file=sys.stderr)
        return 1
    measured: Measured | None = None
    if records:
        measured = measure(records)
        if measured is None:
            rule = "must be a run that made steps"
            raise ConfigError(f"{option} {rule}, got {run_folders[0]}; give one that trained")
    if command.chaos is not None:
        assert measured is not None, "--chaos comes with --from"
        return _forecast_campaign(command, command.chaos, measured, _find_min_groups(records))
    if command.scenario is not None:
        page_folder = command.scenario.with_name(f"{command.scenario.stem}-plan")
        scenarios = load_scenarios(command.scenario)
        return _compare(command, scenarios, measured, page_folder, str(command.scenario))
    assert command.like is not None, "the command has exactly one subject"
    assert measured is not None, "--like is a run"
    scenarios = scenarios_like(measured, _find_min_groups(records))
    return _compare(command, scenarios, measured, command.like / "plan", str(command.like))


def _check_options(command: Planning) -> None:
    """Check that the command has exactly one subject, and only options that the subject takes.

    Raises:
        ConfigError: the command has no subject, several, or an option that does not fit.
    """
    given = {
        "SCENARIO": command.scenario,
        "--like": command.like,
        "--chaos": command.chaos,
        "--validate": command.validate or None,
        "--from": command.from_runs or None,
        "--trace-out": command.trace_out,
        "--out": command.out,
        "--chaos-seed": command.chaos_seed,
        "--minutes": command.minutes,
    }
    subjects = [name for name in _SUBJECTS if given[name] is not None]
    if len(subjects) != 1:
        got = " and ".join(subjects) or "nothing"
        rule = "must be given, or one of --like, --chaos, --validate"
        raise ConfigError(f"SCENARIO {rule}, got {got}; give one of them")
    (subject,) = subjects
    for name, value in given.items():
        if value is None or name == subject or name in _SUBJECTS[subject]:
            continue
        takers = [taker for taker, options in _SUBJECTS.items() if name in options]
        raise ConfigError(
            f"{name} must come with {' or '.join(takers)}, got {subject}; leave it out"
        )
    if command.chaos is not None and not command.from_runs:
        raise ConfigError(
            "--chaos must come with --from RUN_DIR, got it alone; a run's record has the costs of "
            "failures"
        )
    if command.minutes is not None and not 0 < command.minutes <= MAX_MINUTES:
        rule = f"must be a number > 0, at most {MAX_MINUTES:,}"
        remedy = "the default is that of the runs"
        raise ConfigError(f"--minutes {rule}, got {command.minutes}; {remedy}")
    if command.seed != 0 and command.trace_out is None:
        rule = "must come with --trace-out"
        remedy = "forecasts take the seeds 0, 1, ..., as many as --seeds says"
        raise ConfigError(f"--seed {rule}, got it alone; {remedy}")
    if not 2 <= command.seeds <= MAX_SEEDS:
        rule = f"must be from 2 to {MAX_SEEDS}"
        raise ConfigError(f"--seeds {rule}, got {command.seeds}; an interval needs two runs")


def _validate(command: Planning) -> int:
    """Compare forecasts with published figures; return 1 if one is out of its tolerance."""
    from titan_ft.forecast.published import validate
    from titan_ft.forecast.table import validation_table

    rows = validate()
    if command.json:
        names = ("figure", "kind", "published", "ours", "error", "holds")
        figures = []
        for row in rows:
            values = {name: getattr(row, name) for name in names}
            figures.append({"id": row.case.id, "source": row.case.source, **values})
        print(json.dumps(figures, indent=2))
    else:
        show(validation_table(rows))
    return int(any(row.holds is False for row in rows))


def _forecast_campaign(command: Planning, chaos: Path, measured: Measured, min_groups: int) -> int:
    """Forecast a campaign with the faults of a chaos plan, and print the forecast.

    Args:
        chaos: path or name of the chaos plan.
        measured: the record of a run with the same groups. The campaign has its costs, and by
            default its length.
    """
    from titan_ft.forecast.table import campaign_table, forecast_figures, observation_table

    seconds = measured.observed_seconds
    if command.minutes is not None:
        seconds = 60 * command.minutes
    plan = find_config(chaos, "chaos")
    scenario = scenario_of_campaign(measured, plan, command.chaos_seed, seconds, min_groups)
    (candidate,) = make_candidates(scenario, measured)
    (accounts,) = run_seeds([candidate], measured, command.seeds, seconds)
    forecast = Forecast(candidate, estimate(candidate), accounts)
    if command.json:
        print(json.dumps(forecast_figures(forecast) | {"seconds": seconds}, indent=2))
        return 0
    show(campaign_table(forecast, round(seconds / 60, 2)))
    print()
    show(observation_table(measured))
    return 0


def _compare(
    command: Planning,
    scenarios: Sequence[Scenario],
    measured: Measured | None,
    page_folder: Path,
    source: str,
) -> int:
    """Compare the candidates of scenarios, print the comparison, and write its page.

    With --trace-out, only write the failures of the first scenario as a chaos trace.

    Args:
        page_folder: folder of the page, unless --out names another one.
        source: the scenario's file or the run, for the page's title and for errors.
    """
    from titan_ft.forecast.page import write_page
    from titan_ft.forecast.sizes import Sizes
    from titan_ft.forecast.table import (
        NOTES,
        case_figures,
        case_notes,
        case_table,
        observation_table,
    )
    from titan_ft.forecast.trace import write_drawn

    if command.trace_out is not None:
        num_faults = write_drawn(command.trace_out, scenarios[0], command.seed)
        print(f"trace: {command.trace_out}, {num_faults} faults")
        return 0
    page_folder = command.out or page_folder
    try:
        for scenario in scenarios:
            check_costs(scenario, measured)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    fit_to_sizes = Sizes(page_folder / "sizes.json").fit
    cases = compare(scenarios, measured, command.seeds, fit_to_sizes)
    if command.json:
        figures: dict[str, Any] = {"cases": [case_figures(case) for case in cases]}
        if measured is not None:
            figures["record"] = [row._asdict() for row in measured.observations()]
        print(json.dumps(figures, indent=2))
        return 0
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
    print(f"page: {write_page(page_folder, cases, measured, source)}")
    return 0


def _find_min_groups(records: Sequence[RunRecord]) -> int:
    """Return the largest `min_replica_size` in the configs of the runs; 1 without a config."""
    sizes: list[int] = []
    for record in records:
        configs = [process.config for process in record.processes]
        sizes += [config.min_replica_size for config in configs if config is not None]
    return max(sizes, default=1)
