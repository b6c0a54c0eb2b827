# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Show forecasts on the terminal and as JSON.

`titan-ft plan` prints these tables, and the page shows the same rows. A row shows one candidate: its
effective training time, the share of each time category, its price, and notes on what to doubt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import attrgetter
from statistics import fmean
from typing import TYPE_CHECKING, Any

from titan_ft.forecast.choice import Case, Forecast, ValueOf, find_sensitivities
from titan_ft.forecast.closed_forms import enough_spares, find_doubts
from titan_ft.forecast.inputs import describe_seconds
from titan_ft.forecast.measured import Measured
from titan_ft.forecast.published import Comparison
from titan_ft.forecast.scenario import Scenario
from titan_ft.forecast.simulation import TIME_CATEGORIES

if TYPE_CHECKING:
    from rich.table import Table

TEXT_COLUMNS = ("candidate", "notes")
"""Columns of text, aligned to the left. All other columns are numbers."""
NOTES = (
    "Effective training time: usual time of committed steps x groups in them / all groups, "
    "of all time, as in titan-ft report.",
    "A spare is a node that stands ready: with titan-ft launch a group in reserve (--spares) on "
    "this host; under Slurm a node that the partition keeps free for the requeued element; on "
    "Kubernetes one for the pod's replacement.",
    "Another number of groups starts the data anew today: the data is cut for group_size.",
)


def percentages(shares: Mapping[str, float], digits: int = 1) -> dict[str, float]:
    """Return shares in per cent, rounded so that they add up to exactly 100.

    Each percentage is rounded down. The units that are then missing go to those with the largest
    remainders.

    Args:
        shares: shares that add up to 1.
        digits: digits after the point.
    """
    scale = 10**digits
    exact = {name: 100 * scale * share for name, share in shares.items()}
    rounded = {name: math.floor(value) for name, value in exact.items()}
    num_missing = round(sum(exact.values())) - sum(rounded.values())
    largest_remainder_first = sorted(exact, key=lambda name: rounded[name] - exact[name])
    for name in largest_remainder_first[:num_missing]:
        rounded[name] += 1
    assert sum(rounded.values()) == 100 * scale, "the time does not add up"
    return {name: value / scale for name, value in rounded.items()}


def case_rows(case: Case) -> list[dict[str, str]]:
    """Return a row for each candidate of a case, the best first. A row maps columns to cells.

    All rows have the same columns. A candidate that was not simulated has empty cells for the
    figures that only a simulation gives.
    """
    categories = _find_shown_categories(case)
    rows = []
    for forecast in case.forecasts:
        candidate = forecast.candidate
        row = {
            "candidate": candidate.shape,
            "spares": "any" if candidate.spares is None else f"{candidate.spares}",
            "effective": f"{100 * forecast.estimate:.1f} %",
            "one run": "",
        }
        for name in categories:
            row[TIME_CATEGORIES[name]] = ""
        if forecast.accounts:
            low, high = forecast.spread()
            half_interval = 100 * forecast.half_interval
            row["effective"] = f"{100 * forecast.effective:.2f} ±{half_interval:.2f} %"
            row["one run"] = f"{100 * low:.1f} to {100 * high:.1f} %"
            shares = percentages(forecast.shares())
            for name in categories:
                row[TIME_CATEGORIES[name]] = f"{shares[name]:.1f}"
        row["GPU-hours lost"] = f"{forecast.lost_gpu_hours:,.0f}"
        if candidate.scenario.cluster.price_per_gpu_hour:
            row["money lost"] = f"{forecast.lost_money:,.0f}"
        row["useful / paid"] = f"{100 * forecast.worth:.2f} %"
        row["notes"] = "; ".join(notes_of(forecast))
        rows.append(row)
    return rows


def _find_shown_categories(case: Case) -> list[str]:
    """Return the time categories that are not 0.0 % for every simulated candidate of the case."""
    simulated = [percentages(each.shares()) for each in case.forecasts if each.accounts]
    return [name for name in TIME_CATEGORIES if any(shares[name] for shares in simulated)]


def case_table(case: Case) -> Table:
    """Return the table of a case for the terminal."""
    from rich.table import Table

    table = Table(title=case.title or None, title_justify="left")
    rows = case_rows(case)
    for column in rows[0] if rows else ():
        table.add_column(column, justify="left" if column in TEXT_COLUMNS else "right")
    for row in rows:
        table.add_row(*row.values())
    return table


def notes_of(forecast: Forecast) -> list[str]:
    """Return the notes on a candidate: reasons to doubt its figures, and inputs that are opinions."""
    candidate = forecast.candidate
    notes = []
    if not forecast.accounts:
        doubts = ", ".join(find_doubts(candidate))
        notes.append("closed forms only")
        if doubts:
            notes.append(f"may be off by more than 1 %: {doubts}")
    if forecast.closed_forms_disagree:
        notes.append(f"closed forms say {100 * forecast.estimate:.1f} %")
    if candidate.pressure_ratio:
        times = f"{candidate.pressure_ratio:.1f} times"
        notes.append(f"BEYOND THE RECORD: {times} the pressure that was measured")
    rounds = candidate.scenario.rounds
    if candidate.strategy == "rounds" and rounds is not None:
        value = rounds.value_of_a_token
        notes.append(
            f"a token counts {value:g} (rounds.value_of_a_token), which nothing here measures"
        )
    has_restarted = any(account.restarts for account in forecast.accounts)
    if has_restarted and not candidate.save_every:
        notes.append("no checkpoints: all was lost when no group was left")
    return notes


def case_notes(case: Case) -> list[str]:
    """Return the notes that hold for all candidates of a case."""
    notes = [f"Left out: {text}." for text in case.excluded]
    if not case.forecasts:
        return notes
    best = case.forecasts[0]
    scenario = best.candidate.scenario
    length = describe_seconds(scenario.seconds)
    notes.append(f"Simulated: {len(best.accounts)} runs of {length} each.")
    notes += _file_notes(scenario)
    candidates = [forecast.candidate for forecast in case.forecasts]
    in_groups = [candidate for candidate in candidates if candidate.strategy != "restart"]
    if any(not candidate.has_sizes for candidate in in_groups):
        notes.append("The shape is not bounded by memory and exchange: give job.config.")
    elif in_groups and scenario.cluster.gpu_memory_gb is None:
        notes.append("The shape is not bounded by memory: give cluster.gpu_memory_gb.")
    mean_broken_nodes = max(candidate.rates.broken_nodes for candidate in candidates)
    if mean_broken_nodes:
        enough = enough_spares(mean_broken_nodes)
        notes.append(f"99 % of the time {enough} nodes at most are being mended.")
    return notes


def _file_notes(scenario: Scenario) -> list[str]:
    """Return notes on the failures of traces and logs.

    They are not drawn anew for each run, and a file may be shorter than a run.
    """
    notes = []
    for name, listed in scenario.listed_failures.items():
        note = f"All runs meet the same failures of {name}, those of its file"
        # After its last failure a file may have gone on for about one gap.
        covered = listed[-1].time * (1 + 1 / len(listed))
        if scenario.seconds > covered:
            whole = describe_seconds(scenario.seconds)
            part = describe_seconds(covered)
            note += f"; IT COVERS {part} of {whole}, and then nothing of that kind fails"
        elif scenario.seconds < listed[-1].time:
            note += f" in its first {describe_seconds(scenario.seconds)}"
        notes.append(f"{note}.")
    return notes


def observation_table(measured: Measured) -> Table:
    from titan_ft.history.terminal import make_grid

    return make_grid([("input of the record", "", ""), *measured.observations()])


COUNTS = {
    "steps": "steps",
    "votes": "exchanges attempted",
    "contributions": "groups x steps",
    "failures": "faults that hit",
    "skipped": "faults skipped",
}
"""The counts of an account, with their names in the table of a campaign."""


def campaign_table(forecast: Forecast, minutes: float) -> Table:
    """Return the table of `--chaos`: the mean of each figure, and the range of 90 % of the runs.

    Args:
        minutes: length of the campaign.
    """
    from titan_ft.history.terminal import make_grid

    rows = [(f"in {minutes:g} minutes", "mean", "90 % of runs")]
    for count, name in COUNTS.items():
        rows.append(_campaign_row(forecast, name, attrgetter(count)))
    name = "effective training time (%)"
    rows.append(_campaign_row(forecast, name, lambda run: 100 * run.effective))
    rows += [(note, "", "") for note in notes_of(forecast)]
    return make_grid(rows)


def _campaign_row(forecast: Forecast, name: str, value_of: ValueOf) -> tuple[str, str, str]:
    low, high = forecast.spread(value_of)
    mean = fmean(value_of(run) for run in forecast.accounts)
    return name, f"{mean:,.1f}", f"{low:,.1f} to {high:,.1f}"


def validation_table(rows: Iterable[Comparison]) -> Table:
    """Return the table of `--validate`."""
    from rich.table import Table

    table = Table()
    for column in ("case", "figure", "kind", "grade"):
        table.add_column(column)
    for column in ("published", "ours", "error"):
        table.add_column(column, justify="right")
    table.add_column("holds")
    table.add_column("fitted, or why it is open")
    verdicts = {True: "yes", False: "NO", None: "open"}
    for row in rows:
        published = "" if row.published is None else f"{row.published:,.4g}"
        ours = "" if row.ours is None else f"{row.ours:,.4g}"
        error = "" if row.error is None else f"{100 * row.error:+.2f} %"
        reason = row.case.why if row.kind == "open" else row.case.fitted
        table.add_row(
            row.case.id,
            row.figure,
            row.kind,
            row.case.grade,
            published,
            ours,
            error,
            verdicts[row.holds],
            reason,
        )
    return table


# JSON


def case_figures(case: Case) -> dict[str, Any]:
    """Return a case as plain values for JSON."""
    keys = ("input", "half", "as_it_is", "twice")
    sensitivities = find_sensitivities(case.forecasts[0].candidate) if case.forecasts else []
    return {
        "circumstances": dict(case.circumstances),
        "advice": case.advice,
        "notes": case_notes(case),
        "candidates": [forecast_figures(each) for each in case.forecasts],
        "sensitivity": [dict(zip(keys, row, strict=True)) for row in sensitivities],
    }


def forecast_figures(forecast: Forecast) -> dict[str, Any]:
    """Return a forecast as plain values for JSON."""
    candidate = forecast.candidate
    costs = candidate.costs
    figures = {
        "strategy": candidate.strategy,
        "groups": candidate.groups,
        "gpus_per_group": candidate.gpus,
        "spare_nodes": candidate.spares,
        "step_seconds": candidate.step,
        "stall_seconds": costs.stall.mean,
        "away_seconds": costs.away.mean,
        "rejoin_seconds": costs.rejoin.mean,
        "drag_seconds": costs.drag,
        "exchange_seconds": candidate.exchange,
        "pressure": candidate.pressure,
        "effective": forecast.effective,
        "half_interval": forecast.half_interval,
        "closed_forms": forecast.estimate,
        "useful_of_paid": forecast.worth,
        "gpu_hours_lost_a_month": forecast.lost_gpu_hours,
        "money_lost_a_month": forecast.lost_money,
        "notes": notes_of(forecast),
    }
    if not forecast.accounts:
        return figures
    counts = {}
    for name in (*COUNTS, "restarts"):
        values = [getattr(run, name) for run in forecast.accounts]
        counts[name] = {"mean": fmean(values), "range": forecast.spread(attrgetter(name))}
    return figures | {
        "range": forecast.spread(),
        "time_percent": percentages(forecast.shares()),
        "counts": counts,
    }
