# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The lines of a log that explain why its process ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from titan_ft.run.excerpt import MAX_BYTES, explain_end, read_end

NOISE = [f"step {step}" for step in range(50)]
BOOM = [
    "Traceback (most recent call last):",
    '  File "a.py", line 3, in <module>',
    "    f()",
    "ValueError: boom",
]


def printed_by(program: str, tmp_path: Path) -> list[str]:
    """Return the log of a real process that runs `program`."""
    log = tmp_path / "rank-0.log"
    with log.open("wb") as file:
        subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", program],
            stdout=file,
            stderr=file,
            check=False,
        )
    return read_end(log)


def test_last_traceback_is_returned_without_what_was_printed_around_it(tmp_path: Path) -> None:
    """Lines before the traceback, and those of exit handlers after it, do not explain anything."""
    program = "import atexit; atexit.register(print, 'bye'); print('step 1', flush=True); {}['key']"
    assert explain_end(printed_by(program, tmp_path), 20)[-1] == "KeyError: 'key'"
    assert explain_end(printed_by(program, tmp_path), 20)[0] == "Traceback (most recent call last):"


def test_causes_of_an_exception_are_part_of_it(tmp_path: Path) -> None:
    """An exception that was raised from another one is explained by both."""
    program = (
        "try:\n  {}['key']\nexcept KeyError as error:\n  raise ValueError('bad key') from error\n"
    )
    lines = explain_end(printed_by(program, tmp_path), 20)
    assert [line for line in lines if "Error:" in line] == [
        "KeyError: 'key'",
        "ValueError: bad key",
    ]


def test_an_earlier_exception_is_no_part_of_the_last_one() -> None:
    """A worker may report an exception and train on."""
    earlier = [*BOOM[:-1], "OSError: retried"]
    assert explain_end([*earlier, "step 7", *BOOM], 20) == BOOM


def test_stacks_of_a_fatal_signal(tmp_path: Path) -> None:
    """A segmentation fault leaves stacks and no traceback."""
    lines = explain_end(printed_by("import faulthandler; faulthandler._sigsegv()", tmp_path), 20)
    assert "Fatal Python error: Segmentation fault" in lines


@pytest.mark.parametrize(
    ("lines", "expected"), [(NOISE, NOISE[-4:]), ([], []), ([*NOISE, *BOOM], BOOM)]
)
def test_limit(lines: list[str], expected: list[str]) -> None:
    """Without an exception the last lines are returned; the innermost frames and the exception are
    kept.
    """
    assert explain_end(lines, 4) == expected


def test_long_traceback_keeps_its_end() -> None:
    """The exception and the innermost frame are what a reader needs."""
    deep = [BOOM[0], *(f'  File "b.py", line {n}, in f' for n in range(100)), BOOM[-1]]
    assert explain_end(deep, 3) == [*deep[-3:-1], "ValueError: boom"]


def test_colours_ranks_and_progress_bars_are_removed(tmp_path: Path) -> None:
    """A log is shown on a page and in files, where escape sequences are noise."""
    log = tmp_path / "log"
    log.write_bytes(
        b"x" * MAX_BYTES
        + b"\n 0%\r 50%\r100%\n\x1b[31mred\x1b[39m\n[rank0]: ValueError: boom\n\n\n"
    )
    assert read_end(log)[1:] == ["100%", "red", "ValueError: boom"]
    assert read_end(tmp_path / "none") == []
