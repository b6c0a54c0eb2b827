# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The Prometheus metrics follow its rules, stand in docs/metrics.md, and serve Grafana's
dashboard.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.event_builder import build
from titan_ft.history.fold.run import RunFold
from titan_ft.live import ALERTS, DASHBOARD, status
from titan_ft.live.metrics import MetricsServer
from titan_ft.live.run_status import RunStatus
from titan_ft.run import events as ev

ROOT = Path(__file__).parents[2]

# https://prometheus.io/docs/practices/naming, and what promtool check metrics finds.
UNITS = ("seconds", "bytes", "ratio", "celsius", "meters", "volts", "amperes", "joules", "grams")
NOT_BASE = (
    *(
        "milliseconds",
        "microseconds",
        "nanoseconds",
        "minutes",
        "hours",
        "days",
        "ms",
        "us",
        "ns",
        "s",
        "sec",
        "secs",
    ),
    *(
        "bits",
        "kilobytes",
        "megabytes",
        "gigabytes",
        "kb",
        "mb",
        "gb",
        "kib",
        "mib",
        "gib",
        "percent",
        "pct",
    ),
)
TYPES = ("counter", "gauge", "histogram", "summary", "untyped")
RESERVED = ("_count", "_sum", "_bucket", "_total", "_info", "_created")
OF_HISTOGRAM = ("_bucket", "_sum", "_count")


@cache
def exported() -> dict[str, tuple[str, tuple[str, ...], str]]:
    """Return type, labels and help of each metric by its name in queries; a histogram by its
    family.
    """
    server = MetricsServer(RunFold(), 0, run={"run_dir": "/runs/a"})
    try:
        server.observe(build(ev.ChaosStarted))
        server.update(RunStatus(1).groups)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            server.url, timeout=30
        ) as response:
            families = list(text_string_to_metric_families(response.read().decode()))
    finally:
        server.close()
    found = {}
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        shown = () if name.endswith("_info") else tuple(sorted(labels))
        found[name] = (family.type, shown, family.documentation)
    return found


def wrong(name: str, kind: str, labels: tuple[str, ...], text: str) -> Iterator[str]:
    """Yield which of Prometheus' rules a metric breaks."""
    words = name.split("_")
    if not re.fullmatch(r"titan_ft(_[a-z]+)+", name):
        yield "is the project's name and words of small letters"
    if kind == "counter" and not name.endswith("_total"):
        yield "a counter ends with _total"
    allowed = {"counter": "_total", "gauge": "_info"}.get(kind)
    stem = name.removesuffix(allowed) if allowed else name
    if stem.endswith(RESERVED):
        yield "no suffix that means something else"
    if set(words) & set(TYPES):
        yield "no type in its name"
    if set(words) & set(NOT_BASE):
        yield "base units"
    if units := [word for word in stem.split("_") if word in UNITS]:
        if not stem.endswith(f"_{units[-1]}") or len(units) > 1:
            yield "one unit, last"
    elif re.search(r"\b(seconds|bytes)\b", text, re.I):
        yield "has its unit in its name"
    if kind == "histogram" and not units:
        yield "a histogram has a unit"
    if not text.endswith((".", "finite.", "one.")) or len(text) < 12:
        yield "says in a sentence what it is"
    # A gauge whose name ends with a label is a set of states: 1 for the one that holds, as in
    # kube_pod_status_phase.
    named = [
        label for label in labels if label in words and not (kind == "gauge" and label == words[-1])
    ]
    if set(labels) & {"le", "quantile", "job", "instance"} or named:
        yield "labels that are free, and not in its name"


@pytest.mark.parametrize("name", exported())
def test_names_and_units_keep_prometheus_rules(name: str) -> None:
    assert list(wrong(name, *exported()[name])) == []


@pytest.mark.parametrize(
    ("name", "kind", "labels", "text"),
    [
        ("titan_ft_steps", "counter", (), "Steps that were made."),
        ("titan_ft_step_milliseconds", "gauge", (), "Time of a step."),
        ("titan_ft_seconds_step", "gauge", (), "Seconds of a step."),
        ("titan_ft_heal", "histogram", (), "Seconds of a heal."),
        ("titan_ft_groups_total", "gauge", (), "Groups of the run."),
        ("titan_ft_step_gauge", "gauge", (), "Step that was last."),
        ("titan_ft_state_bytes_seconds", "gauge", (), "Seconds for bytes."),
        ("titan_ft_restartsOfGroup_total", "counter", (), "Restarts of it."),
        ("titan_ft_replica_restarts_total", "counter", ("replica",), "Restarts of it."),
        ("titan_ft_groups", "gauge", (), ""),
    ],
)
def test_a_name_that_breaks_a_rule_is_found(
    name: str, kind: str, labels: tuple[str, ...], text: str
) -> None:
    """The test above can fail."""
    assert list(wrong(name, kind, labels, text))


def test_all_metrics_are_told() -> None:
    """docs/metrics.md has exactly one row for each metric: name, type, labels, and its help."""
    rows = re.findall(
        r"^\| `(titan_ft_\w+)` \| (\w+) \| (.*?) ?\| (.*) \|$",
        (ROOT / "docs/metrics.md").read_text(),
        re.M,
    )
    told = {
        name: (kind, tuple(re.findall(r"`(\w+)`", labels)), text)
        for name, kind, labels, text in rows
    }
    assert told == exported()


def queries(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


def test_the_dashboard_asks_for_what_is_there() -> None:
    """Each query uses existing names and labels, and each metric is on the dashboard."""
    board = json.loads(DASHBOARD.read_text())
    asked = set()
    for expr in [expr for panel in board["panels"] for expr in queries(panel)]:
        names = set(re.findall(r"\btitan_ft_\w+", expr))
        assert names, expr
        families = {
            name: exported().get(name) or exported().get(re.sub(r"_(bucket|sum|count)$", "", name))
            for name in names
        }
        assert None not in families.values(), expr
        for name, family in families.items():
            assert family is not None
            assert (family[0] == "histogram") == name.endswith(OF_HISTOGRAM), expr
            assert ("rate(" in expr or "increase(" in expr) or family[0] in ("gauge", "counter"), (
                expr
            )
        known = {label for family in families.values() if family for label in family[1]} | {"le"}
        for labels in re.findall(r"\bby \(([\w, ]+)\)", expr):
            assert set(labels.split(", ")) <= known, expr
        asked |= {
            re.sub(r"_(bucket|sum|count)$", "", name) if name not in exported() else name
            for name in names
        }
    assert asked == set(exported())


def test_the_alert_rules_ask_for_what_is_there() -> None:
    """Each rule has a unique name, a valid query over existing metrics, and a text."""
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    rules = group["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    asked = set()
    for rule in rules:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
        promql_parser.parse(rule["expr"])
        asked |= set(re.findall(r"\btitan_ft_\w+", rule["expr"]))
    assert asked <= exported().keys()
    assert {"titan_ft_participants", "titan_ft_groups", "titan_ft_failures_total"} <= asked


def test_each_state_of_a_group_has_a_number_and_a_colour() -> None:
    """The dashboard draws one row a group; its query gives each state the number of the mapping."""
    board = json.loads(DASHBOARD.read_text())
    (panel,) = [panel for panel in board["panels"] if panel["title"] == "State of each group"]
    (expr,) = queries(panel)
    numbers = {
        state: int(number) for state, number in re.findall(r'state="(\w+)"\} == 1\) \* (\d+)', expr)
    }
    assert expr.startswith("max by (replica) (")
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    assert {shown["text"]: int(number) for number, shown in mapping["options"].items()} == numbers
    assert numbers.keys() == set(status.STATES)
    assert len(set(numbers.values())) == len(status.STATES)


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    """Panels have unique numbers and places, queries have unique names, and one run is shown at a
    time.
    """
    board = json.loads(DASHBOARD.read_text())
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= board.keys()
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for box in (panel["gridPos"] for panel in panels)
        for x in range(box["x"], box["x"] + box["w"])
        for y in range(box["y"], box["y"] + box["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    variables = {each["name"] for each in board["templating"]["list"]}
    for panel in panels:
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        for expr in queries(panel):
            promql_parser.parse(expr.replace("$__rate_interval", "1m"))
            assert 'titan_ft_run_info{run_dir="$run"}' in expr
            assert set(re.findall(r"\$(?!__)(\w+)", expr)) <= variables
