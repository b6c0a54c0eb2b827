# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Describe the inputs of a forecast in the words of a scenario file. The page lists them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import Struct

from titan_ft.forecast.candidate import Candidate
from titan_ft.forecast.lengths import fit_weibull
from titan_ft.forecast.logs import LoggedFailure
from titan_ft.forecast.scenario import UNITS, Scenario
from titan_ft.training.traffic import LINK_GBPS

FIELDS_IN_SECONDS = {
    *("mtbf", "mtbf_of_each", "age", "found_after", "repair"),
    *("every", "lasts", "step", "usual_step", "save", "interval", "recover"),
    *("stall", "away", "rejoin", "drag", "exchange"),
    *("base", "per_gpu", "median", "p99"),
}
"""The fields of a scenario that hold seconds. A test holds this set against the fields' types."""


def describe_inputs(candidate: Candidate) -> list[tuple[str, str]]:
    """Return the inputs of a candidate as (name, value), about one row for each table.

    Fields with their default values are left out. So costs that come from a record are not listed.
    """
    scenario = candidate.scenario
    rows = [("clock of failures", _describe_clock(scenario))]
    for name in ("cluster", "job", "checkpoint", "restart", "groups", "rounds"):
        table = getattr(scenario, name)
        text = "" if table is None else _describe_table(table)
        if text:
            rows.append((name, text))
    if candidate.save_every:
        seconds = candidate.save_every * candidate.step
        rows.append(("computing between saves", describe_seconds(seconds)))
    if candidate.has_sizes:
        rows.append(("exchange beyond the step", _describe_exchange(candidate)))
    rows += [("maintenance", _describe_table(stop)) for stop in scenario.maintenance]
    for kind in scenario.failures:
        rows.append((f"failures: {kind.name}", _describe_table(kind)))
        if kind.name in scenario.listed_failures:
            gaps = _describe_gaps(scenario.listed_failures[kind.name])
            rows.append((f"gaps between failures: {kind.name}", gaps))
    return rows


def _describe_clock(scenario: Scenario) -> str:
    if scenario.clock == "training":
        return "only while the job trains"
    return "goes on while the job waits"


def _describe_exchange(candidate: Candidate) -> str:
    job = candidate.scenario.job
    link = f"link of {LINK_GBPS:g} Gb/s by default"
    if job.link_gbps is not None:
        link = f"link of {job.link_gbps:g} Gb/s"
    hidden = f"{job.overlap:g} of a step hides it"
    if candidate.strategy == "rounds":
        hidden = "nothing hides it"
    seconds = describe_seconds(candidate.exchange)
    return f"{seconds} by launch --dry-run of {job.config}, {link}, {hidden}"


def _describe_table(table: Struct) -> str:
    """Return the fields of a table that differ from their defaults, in TOML."""
    texts = []
    for field in msgspec.structs.fields(type(table)):
        value = getattr(table, field.name)
        # The name of a kind of failure is in the name of its row already.
        if field.name == "name" or value == field.default:
            continue
        texts.append(f"{field.name} = {_describe_value(field.name, value)}")
    return ", ".join(texts)


def _describe_value(name: str, value: Any) -> str:
    if isinstance(value, tuple):  # the only arrays in these tables are domains
        return ", ".join(f"{each.name} of {each.nodes} nodes" for each in value)
    if isinstance(value, Struct):
        return f"{{ {_describe_table(value)} }}"
    if isinstance(value, bool):
        return f"{value}".lower()
    if isinstance(value, str):
        return value
    if name in FIELDS_IN_SECONDS:
        return describe_seconds(value)
    return f"{value:,.10g}"


def describe_seconds(seconds: float) -> str:
    """Return a length of time such as "18 min", in the largest unit of which it has at least one."""
    for unit, unit_seconds in reversed(UNITS.items()):
        if seconds >= unit_seconds:
            return f"{seconds / unit_seconds:.4g} {unit}"
    return f"{1000 * seconds:.4g} ms"


def _describe_gaps(listed: Sequence[LoggedFailure]) -> str:
    """Describe the Weibull distribution that fits the gaps between the failures of a file."""
    fit = fit_weibull([after.time - before.time for before, after in pairwise(listed)])
    if fit is None:
        return f"{len(listed)} failures, too few to fit"
    shape = f"shape {fit.shape:.2f} ({fit.low:.2f} to {fit.high:.2f})"
    return f"{fit.number} gaps, mean {describe_seconds(fit.mean)}, {shape}"
