# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Draw where the time of docs/planning.toml goes: python docs/images/planning.py > docs/images/planning.svg

Restarts from checkpoints, and 12 groups whose failures stall the others for 180, 20 and 2 seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from titan_ft.config import load_toml
from titan_ft.forecast.choice import Forecast, compare
from titan_ft.forecast.scenario import read_scenarios
from titan_ft.forecast.simulation import TIME_CATEGORIES
from titan_ft.forecast.table import percentages

FOLDER = Path(__file__).parents[1]
STALLS = ["180 s", "20 s", "2 s"]
COLOURS = {
    "useful": "#2b66ab",
    "stall": "#9c1c12",
    "slower": "#f5cf4e",
    "exchange": "#b6bdc5",
    "checkpoints": "#cdb7ea",
    "lost": "#2fb18c",
    "waiting": "#e2e5e9",
    "away": "#87909b",
    "nodes": "#d23f31",
}
LEFT, WIDTH, HEIGHT, BAR = 250, 560, 46, 26


def forecasts() -> Iterator[tuple[str, Forecast]]:
    """Yield the rows of the picture, with their names."""
    values = load_toml(FOLDER / "planning.toml")
    values["cluster"]["spare_nodes"] = 24
    values["job"]["groups"] = 12
    values["groups"]["stall"] = STALLS
    cases = compare(read_scenarios(values, FOLDER))
    yield (
        "restarts",
        next(each for each in cases[0].forecasts if each.candidate.strategy == "restart"),
    )
    for stall, case in zip(STALLS, cases, strict=True):
        yield (
            f"12 groups, stall {stall}",
            next(each for each in case.forecasts if each.candidate.strategy == "groups"),
        )


def draw() -> Iterator[str]:
    """Yield the lines of the SVG."""
    rows = [(name, percentages(each.shares())) for name, each in forecasts()]
    shown = [part for part in TIME_CATEGORIES if any(shares[part] >= 0.1 for _, shares in rows)]
    height = HEIGHT * (len(rows) + 1) + 10
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 {height}" font-family="sans-serif" font-size="14">'
    yield f'<rect width="880" height="{height}" fill="#ffffff"/>'
    for row, (name, shares) in enumerate(rows):
        top, x = HEIGHT * row + 10, float(LEFT)
        yield f'<text x="{LEFT - 12}" y="{top + 18}" text-anchor="end">{name}</text>'
        for part in shown:
            width = WIDTH * shares[part] / 100
            colour = COLOURS[part]
            yield f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>'
            x += width
        yield f'<text x="{LEFT + WIDTH + 8}" y="{top + 18}">{shares["useful"]:.1f} %</text>'
    for place, part in enumerate(shown):
        x, top = LEFT + 110 * place - 200, HEIGHT * len(rows) + 14
        yield f'<rect x="{x}" y="{top}" width="12" height="12" fill="{COLOURS[part]}"/>'
        yield f'<text x="{x + 18}" y="{top + 11}">{TIME_CATEGORIES[part]}</text>'
    yield "</svg>"


if __name__ == "__main__":
    print("\n".join(draw()))
