# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Show forecasts on the terminal and as JSON: the parts of the time add up to 100 per cent.

`titan-ft plan` prints these tables, and the page shows the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import attrgetter
from statistics import fmean
from typing import TYPE_CHECKING, Any

from titan_ft.forecast.choice import Case, Forecast, ValueOf, sensitivity
from titan_ft.forecast.closed_forms import find_doubts, standbys
from titan_ft.forecast.inputs import describe_seconds
from titan_ft.forecast.measured import Measured
from titan_ft.forecast.published import Comparison
from titan_ft.forecast.scenario import Scenario
from titan_ft.forecast.simulation import PARTS

if TYPE_CHECKING:
    from rich.table import Table

TEXTS = ("candidate", "notes")
"""The columns of text; the others are numbers."""
NOTES = (
    "Effective training time: usual time of committed steps x groups in them / all groups, "
    "of all time, as in titan-ft report.",
    "A spare is a node that stands ready: with titan-ft launch a group in reserve (--spares) on "
    "this host; under Slurm a node that the partition keeps free for the requeued element; on "
    "Kubernetes one for the pod's replacement.",
    "Another number of groups starts the data anew today: the data is cut for group_size.",
)


def percentages(shares: Mapping[str, float], digits: int = 1) -> dict[str, float]:
    """Return per cent that add up to 100 exactly: the largest remainders are rounded up."""
    scale = 10**digits
    exact = {name: 100 * scale * share for name, share in shares.items()}
    whole = {name: math.floor(value) for name, value in exact.items()}
    missing = round(sum(exact.values())) - sum(whole.values())
    for name in sorted(exact, key=lambda each: whole[each] - exact[each])[:missing]:
        whole[name] += 1
    assert sum(whole.values()) == 100 * scale, "the time does not add up"
    return {name: value / scale for name, value in whole.items()}


def case_rows(case: Case) -> list[dict[str, str]]:
    """Return a row for each candidate of a case, the best first, with its cells by column."""
    parts = _parts(case)
    rows = []
    for each in case.forecasts:
        candidate = each.candidate
        row = {
            "candidate": candidate.shape,
            "spares": "any" if candidate.spares is None else f"{candidate.spares}",
            "effective": f"{100 * each.estimate:.1f} %",
            "one run": "",
            **{PARTS[name]: "" for name in parts},
        }
        if each.accounts:
            low, high = each.spread()
            shares = percentages(each.shares())
            row["effective"] = f"{100 * each.effective:.2f} ±{100 * each.half_interval:.2f} %"
            row["one run"] = f"{100 * low:.1f} to {100 * high:.1f} %"
            row |= {PARTS[name]: f"{shares[name]:.1f}" for name in parts}
        row["GPU-hours lost"] = f"{each.lost_gpu_hours:,.0f}"
        if candidate.scenario.cluster.price_per_gpu_hour:
            row["money lost"] = f"{each.lost_money:,.0f}"
        row["useful / paid"] = f"{100 * each.worth:.2f} %"
        row["notes"] = "; ".join(notes_of(each))
        rows.append(row)
    return rows


def _parts(case: Case) -> list[str]:
    """Return the parts of the time that a simulated candidate of the case has."""
    shown = [percentages(each.shares()) for each in case.forecasts if each.accounts]
    return [name for name in PARTS if any(shares[name] for shares in shown)]


def case_table(case: Case) -> Table:
    """Return the table of a case for the terminal."""
    from rich.table import Table

    table = Table(title=case.title or None, title_justify="left")
    rows = case_rows(case)
    for column in rows[0] if rows else ():
        table.add_column(column, justify="left" if column in TEXTS else "right")
    for row in rows:
        table.add_row(*row.values())
    return table


def notes_of(forecast: Forecast) -> list[str]:
    """Return the reasons to doubt a row, and the judgements that are in it."""
    candidate = forecast.candidate
    notes = []
    if not forecast.accounts:
        doubts = ", ".join(find_doubts(candidate))
        notes.append("closed forms only")
        if doubts:
            notes.append(f"may be off by more than 1 %: {doubts}")
    if forecast.closed_forms_disagree:
        notes.append(f"closed forms say {100 * forecast.estimate:.1f} %")
    if candidate.beyond:
        times = f"{candidate.beyond:.1f} times"
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
    """Return notes on a case: its runs, failures from files, shapes left out, bounds of the
    shape, spares that are enough.
    """
    notes = [f"Left out: {text}." for text in case.excluded]
    candidates = [each.candidate for each in case.forecasts]
    for forecast in case.forecasts[:1]:
        scenario = forecast.candidate.scenario
        length = describe_seconds(scenario.seconds)
        notes.append(f"Simulated: {len(forecast.accounts)} runs of {length} each.")
        notes += _file_notes(scenario)
    in_groups = [each for each in candidates if each.strategy != "restart"]
    if any(not each.bounded for each in in_groups):
        notes.append("The shape is not bounded by memory and exchange: give job.config.")
    elif in_groups and in_groups[0].scenario.cluster.gpu_memory_gb is None:
        notes.append("The shape is not bounded by memory: give cluster.gpu_memory_gb.")
    expected = max((each.rates.broken_nodes for each in candidates), default=0.0)
    if expected:
        notes.append(f"99 % of the time {standbys(expected)} nodes at most are being mended.")
    return notes


def _file_notes(scenario: Scenario) -> list[str]:
    """Return what to know of failures that are listed in files: they are one draw, and they end."""
    notes = []
    for name, listed in scenario.listed.items():
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
    """Return what a campaign will show: the mean, and the 5th to 95th percentile of one run."""
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
        numbers = ["" if value is None else f"{value:,.4g}" for value in (row.published, row.ours)]
        error = "" if row.error is None else f"{100 * row.error:+.2f} %"
        reason = row.case.why if row.kind == "open" else row.case.fitted
        table.add_row(
            row.case.id,
            row.figure,
            row.kind,
            row.case.grade,
            *numbers,
            error,
            verdicts[row.holds],
            reason,
        )
    return table


# JSON


def case_figures(case: Case) -> dict[str, Any]:
    """Return a case as plain values for JSON."""
    rows = sensitivity(case.forecasts[0].candidate) if case.forecasts else []
    return {
        "circumstances": dict(case.circumstances),
        "advice": case.advice,
        "notes": case_notes(case),
        "candidates": [forecast_figures(each) for each in case.forecasts],
        "sensitivity": [
            dict(zip(("input", "half", "as_it_is", "twice"), row, strict=True)) for row in rows
        ],
    }


def forecast_figures(forecast: Forecast) -> dict[str, Any]:
    """Return a forecast as plain values for JSON."""
    candidate, costs = forecast.candidate, forecast.candidate.costs
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
