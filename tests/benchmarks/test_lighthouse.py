# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/bench.py --only control: a group that is killed at a lighthouse, with a gate and
without.
"""

from __future__ import annotations

from benchmarks import table
from benchmarks.lighthouse import measure_kills


def test_a_killed_group_is_in_no_later_quorum() -> None:
    """The new quorum waits until the lighthouse counts the killed group as gone, which takes far
    longer than a quorum without a change.
    """
    figures = measure_kills(2, num_rounds=1, num_kills=2)
    for way in ("open", "gate"):
        times = figures[way]
        assert times["steady"] < times["median"] <= times["longest"]
    _, _, row = table._lighthouse_kill_table({"kill-2": figures})
    assert row.split("|")[1].strip() == "2"
    assert table._lighthouse_kill_table({"lighthouse-30-0": {"groups": 30}}) == []
