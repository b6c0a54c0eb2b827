# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Promise 1, as far as one history can show it: groups that made the same state report the same figures of it."""

from __future__ import annotations

from titan_ft.history.judgement import Judgement, count
from titan_ft.history.record.run_record import RunRecord

FIGURES = ("loss", "grad_norm", "lr", "tokens")


def check_arithmetic(record: RunRecord, found: Judgement) -> None:
    """Check that all ranks of all groups report the same figures, bit for bit, of each state.

    Whether they are those of a run without failures only such a run can show: see `titan_ft.history.against`.
    """
    num_states = 0
    for lineage, events in record.commits_of.items():
        first: dict[str, float] = {}
        if lineage in record.usual:
            num_states += 1
            continue
        num_states += len({event.replica for event in events}) > 1
        for event in events:
            for name in FIGURES:
                value = getattr(event, name)  # null where it was not finite
                if value is not None and first.setdefault(name, value) != value:
                    text = f"reports {name} {value!r} of the state {lineage}; another group reports {first[name]!r}"
                    found.object_to(text, event)
    found.statement = f"groups report the same {', '.join(FIGURES)} of {count(num_states, 'state')}"
