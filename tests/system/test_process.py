# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Which process a rank takes for one that has ended."""

from __future__ import annotations

from dataclasses import replace

from titan_ft.system.process import Process


def test_processes_are_recognized() -> None:
    """This process lives; one of another start time under its pid is another one; other hosts cannot be looked at."""
    this = Process.parse(str(Process.this()))
    assert this == Process.this()
    assert not this.is_gone()
    assert replace(this, start="1").is_gone()
    assert not replace(this, start="1", host="elsewhere").is_gone()
    assert not replace(this, start="").is_gone(), "where there is no /proc"
