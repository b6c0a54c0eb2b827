# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Own the look of a run's report: one colour per state of a group, one mark per category of fault, the page's CSS."""

from __future__ import annotations

from collections.abc import Iterable

# Inks of the figures; the page replaces them by its CSS variables of the same name, so that figures follow its theme.
INK, MUTED, GRID, PAPER = "#1c2127", "#5f6873", "#e4e7eb", "#fefefe"

# One colour per state, in the order in which they are stacked: blues train, warm colours stall, purples waste, greens
# catch up, browns start, greys do nothing. Neighbours differ in lightness, so that they differ in print and to the
# colour-blind.
STATES: dict[str, tuple[str, str]] = {
    "productive": ("training", "#3d78b4"),
    "overhead": ("between steps", "#7f9fbe"),
    "exchange_wait": ("exchange wait", "#a9d1f2"),
    "detection": ("detection", "#c8321f"),
    "quorum": ("quorum", "#ef8a3c"),
    "rebuild": ("rebuild", "#f8cd9c"),
    "wasted": ("wasted", "#6c2f6f"),
    "hung": ("hung", "#cf8fc4"),
    "heal": ("heal", "#0d7f6d"),
    "replay": ("replay", "#7cc7b2"),
    "restart": ("restart", "#54423a"),
    "start": ("start", "#b09a8b"),
    "wait_for_groups": ("waiting for groups", "#dcc95c"),
    "idle": ("idle", "#b6bdc5"),
    "unknown": ("not told", "#e6e8eb"),
}
UNNAMED = "#000000"  # a state that this page does not know
ACCENT = STATES["productive"][1]
FAULT = "#b3261e"

# Category of a fault: its mark in the figures, and the faults in it.
CATEGORIES: dict[str, tuple[str, frozenset[str]]] = {
    "process killed": (
        "v",
        frozenset({"kill_rank", "kill_group", "kill_groups", "kill_donor", "term_group", "segfault", "out_of_memory"}),
    ),
    "error raised": ("X", frozenset({"exception", "abort_process_group", "disk_full"})),
    "stopped or slow": ("s", frozenset({"stop_rank", "stop_group", "deadlock", "slow_rank"})),
    "network": ("D", frozenset({"network_dead", "network_slow", "link_dead", "corrupt_chunk"})),
    "wrong numbers": ("P", frozenset({"nan_gradient", "flip_parameter", "flip_optimizer"})),
    "lighthouse killed": ("*", frozenset({"kill_lighthouse"})),
}
OTHER = ("other", "o")


def state_label(state: str) -> str:
    return STATES[state][0] if state in STATES else state.replace("_", " ")


def state_colour(state: str) -> str:
    return STATES[state][1] if state in STATES else UNNAMED


def state_order(states: set[str]) -> list[str]:
    """Return states in the order in which they are stacked; unknown ones last."""
    return [state for state in STATES if state in states] + sorted(states - STATES.keys())


def category(kind: str) -> tuple[str, str]:
    """Return the category of a kind of fault, and its mark."""
    return next(((name, mark) for name, (mark, kinds) in CATEGORIES.items() if kind in kinds), OTHER)


def categories(kinds: Iterable[str]) -> list[tuple[str, str]]:
    """Return the categories that kinds of faults are in, each once, in their own order."""
    found = {category(kind) for kind in kinds}
    return [known for known in [*((name, mark) for name, (mark, _) in CATEGORIES.items()), OTHER] if known in found]


CSS = """
:root { color-scheme: light dark; --ink: #1c2127; --muted: #5f6873; --grid: #e4e7eb; --paper: #fefefe; --tile: #f6f7f9;
  --good: #176b4d; --good-bg: #e3f2ec; --bad: #b3261e; --bad-bg: #fbe6e4; --open: #7a5600; --open-bg: #fbf0d5;
  --link: #2b5f94; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --muted: #9ca6b1; --grid: #31373e; --paper: #14171a;
  --tile: #1c2025; --good: #7fd3b0; --good-bg: #17352a; --bad: #ff9c92; --bad-bg: #431e1b; --open: #ecc66a;
  --open-bg: #3a2f14; --link: #8db9e3; } }
* { box-sizing: border-box; }
html { background: var(--paper); color: var(--ink); -webkit-text-size-adjust: 100%; }
body { font: 15px/1.5 -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Liberation Sans",
  sans-serif; max-width: 1128px; margin: 0 auto; padding: 40px 24px 64px; font-variant-numeric: tabular-nums; }
header { border-bottom: 2px solid var(--ink); padding-bottom: 18px; margin-bottom: 8px; }
h1 { font-size: 30px; line-height: 1.2; font-weight: 650; letter-spacing: -0.015em; margin: 0 0 2px; }
h2 { font-size: 19px; font-weight: 650; letter-spacing: -0.005em; margin: 44px 0 10px; }
p { margin: 0 0 10px; max-width: 80ch; }
.lead, figcaption, .note, small { color: var(--muted); }
.lead { margin: 0 0 16px; max-width: none; }
code { font: 0.92em ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; }
a { color: var(--link); text-underline-offset: 2px; }
dl.facts { display: grid; grid-template-columns: repeat(6, auto); justify-content: space-between; gap: 4px 24px;
  margin: 0; }
dl.facts dt, .tile h3, th { font-size: 12.5px; font-weight: 500; color: var(--muted); }
dl.facts dd { margin: 0; font-weight: 600; }
.kinds { margin: 14px 0 0; font-size: 13.5px; color: var(--muted); max-width: none; }
.kinds b { color: var(--ink); font-weight: 600; }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 14px; }
.tile { background: var(--tile); border: 1px solid var(--grid); border-radius: 6px; padding: 14px 16px; display: grid;
  grid-row: span 4; grid-template-rows: subgrid; gap: 2px; }
.tile h3 { margin: 0; }
.tile .figure { font-size: 32px; line-height: 1.15; font-weight: 650; letter-spacing: -0.02em; }
.tile .detail { font-size: 13px; }
.tile .published { font-size: 12.5px; color: var(--muted); border-top: 1px solid var(--grid); margin-top: 10px;
  padding-top: 8px; }
.tile .published b { color: var(--ink); font-weight: 600; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { text-align: left; border-bottom: 1px solid var(--ink); padding: 5px 12px 5px 0; vertical-align: bottom; }
td { border-bottom: 1px solid var(--grid); padding: 5px 12px 5px 0; vertical-align: top; }
th.number, td.number { text-align: right; white-space: nowrap; }
th:last-child, td:last-child { padding-right: 0; }
td.name { white-space: nowrap; }
.verdict { display: inline-block; white-space: nowrap; border-radius: 4px; padding: 0 8px; font-size: 12.5px;
  font-weight: 600; line-height: 21px; }
.holds { color: var(--good); background: var(--good-bg); }
.fails { color: var(--bad); background: var(--bad-bg); }
.open { color: var(--open); background: var(--open-bg); }
.quiet { color: var(--muted); background: var(--tile); }
.details { margin: 3px 0 0; padding-left: 16px; font-size: 12.5px; color: var(--muted); overflow-wrap: anywhere; }
figure { margin: 0; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
figcaption { font-size: 13.5px; margin: 0 0 6px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 0 32px; }
.note { font-size: 13px; margin-top: 10px; max-width: none; }
footer { margin-top: 48px; padding-top: 12px; border-top: 1px solid var(--grid); font-size: 12.5px;
  color: var(--muted); }
@media screen and (max-width: 900px) { .tiles { grid-template-columns: 1fr 1fr; } .pair { grid-template-columns: 1fr; }
  dl.facts { grid-template-columns: repeat(3, auto); } .wide { overflow-x: auto; } }
@page { size: A4; margin: 14mm 13mm; }
@media print {
  :root { color-scheme: light; --ink: #1c2127; --muted: #4d555e; --grid: #d5d9de; --paper: #ffffff; --tile: #ffffff;
    --good: #176b4d; --good-bg: #e3f2ec; --bad: #b3261e; --bad-bg: #fbe6e4; --open: #7a5600; --open-bg: #fbf0d5; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { font-size: 10.5pt; line-height: 1.4; max-width: none; padding: 0; }
  h1 { font-size: 20pt; } h2 { font-size: 13pt; margin: 20pt 0 6pt; break-after: avoid; }
  .tiles { gap: 8px; } .tile { padding: 8px 10px; } .tile .figure { font-size: 17pt; } .pair { gap: 0 20px; }
  table, figcaption, .note, .kinds { font-size: 8.5pt; } .tile h3, .tile .detail, .tile .published { font-size: 7.5pt; }
  dl.facts dt, th, .details, .verdict { font-size: 8pt; }
  figure, .tiles, .tile, tr, .pair, dl.facts { break-inside: avoid; }
  figcaption { break-after: avoid; } thead { display: table-header-group; } p { orphans: 3; widows: 3; }
  td, th { padding: 3px 8px 3px 0; } a { color: inherit; text-decoration: none; } .wide { overflow: visible; }
}
"""
