# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""How the page writes shares and durations."""

from __future__ import annotations

DASH = "\N{EN DASH}"


def format_percent(share: float | None) -> str:
    """Return a share in per cent."""
    return "unknown" if share is None else f"{100 * share:.1f} %"


def format_duration(seconds: float | None) -> str:
    """Return a duration with its unit and a sensible number of digits."""
    if seconds is None:
        return "unknown"
    if 0 < abs(seconds) < 0.0995:
        return f"{1000 * seconds:.0f} ms"
    if abs(seconds) < 9.995:
        return f"{seconds:.2f} s"
    if abs(seconds) < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60 and rest:
        return f"{minutes} min {rest} s"
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
