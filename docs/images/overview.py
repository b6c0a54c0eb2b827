# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Draw the README's picture: a failure and a return, as the groups of a job live through it.

python docs/images/overview.py > docs/images/overview.svg
"""

from __future__ import annotations

from collections.abc import Iterator

STEPS = 11
KILLED, BACK, WHOLE = 3, 6, 8  # group 2: dies in step 3, fetches from step 6 on, contributes from step 8 on
LEFT, TOP, WIDTH, HEIGHT, GAP = 120, 56, 66, 40, 14

STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }
.small { font-size: 11.5px; fill: #59636e }
.step { fill: #2f81f7 } .lost { fill: #cf222e } .heal { fill: #bf8700 } .away { fill: #d1d9e0 }
.on { font-size: 11.5px; fill: #ffffff; text-anchor: middle } .number { text-anchor: middle }
.line { stroke: #8c959f; stroke-dasharray: 3 3 } .arrow { stroke: #bf8700; stroke-width: 2; fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .small { fill: #9198a1 } .away { fill: #3d444d } .line { stroke: #656c76 }
}
"""


def _box(group: int, start: float, end: float, kind: str, text: str = "") -> Iterator[str]:
    """Draw what a group does from one step to another; the text stands in the middle."""
    x, y = LEFT + start * WIDTH, TOP + group * (HEIGHT + GAP)
    width = (end - start) * WIDTH - 3
    yield f'<rect class="{kind}" x="{x:g}" y="{y}" width="{width:g}" height="{HEIGHT}" rx="4"/>'
    if text:
        yield f'<text class="on" x="{x + width / 2:g}" y="{y + HEIGHT / 2 + 4:g}">{text}</text>'


def _groups() -> Iterator[str]:
    for group in range(3):
        y = TOP + group * (HEIGHT + GAP)
        yield f'<text x="8" y="{y + 17}">group {group}</text>'
        yield f'<text class="small" x="8" y="{y + 33}">FSDP2, TP, PP, CP</text>'
        for step in range(STEPS):
            if group < 2 or step < KILLED or step >= WHOLE:
                yield from _box(group, step, step + 1, "step")
    yield from _box(2, KILLED, KILLED + 0.5, "lost")
    yield from _box(2, KILLED + 0.5, BACK, "away")
    yield from _box(2, BACK, WHOLE, "heal", "fetches, replays")


def _notes() -> Iterator[str]:
    bottom = TOP + 3 * (HEIGHT + GAP)
    for step in range(STEPS):
        yield f'<text class="small number" x="{LEFT + (step + 0.5) * WIDTH:g}" y="{TOP - 10}">{120 + step}</text>'
    x = LEFT + (KILLED + 1) * WIDTH - 1.5
    yield f'<line class="line" x1="{x}" x2="{x}" y1="{TOP - 30}" y2="{bottom}"/>'
    note = f"step {120 + KILLED} is committed by those who are left: the same gradients, exchanged once more"
    yield f'<text x="{LEFT}" y="{TOP - 40}">{note}</text>'
    x, y = LEFT + BACK * WIDTH + 12, TOP + HEIGHT + GAP + HEIGHT
    yield f'<path class="arrow" d="M {x} {y - 8} v {GAP + 12} m -4 -6 l 4 6 l 4 -6"/>'
    yield f'<text class="small" x="{LEFT + KILLED * WIDTH}" y="{bottom + 8}">SIGKILL</text>'
    note = "live state from a peer, which trains on; no checkpoint"
    yield f'<text class="small" x="{LEFT + BACK * WIDTH}" y="{bottom + 8}">{note}</text>'
    yield f'<text class="small" x="8" y="{TOP - 10}">step</text>'


def picture() -> str:
    """Return the SVG; light or dark as the reader's browser is."""
    width, height = LEFT + STEPS * WIDTH + 8, TOP + 3 * (HEIGHT + GAP) + 20
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    title = "<title>A replica group dies in step 123; the others commit that step and train on while it heals</title>"
    return "\n".join([head, title, f"<style>{STYLE}</style>", *_groups(), *_notes(), "</svg>\n"])


if __name__ == "__main__":
    print(picture(), end="")
