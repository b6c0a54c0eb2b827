# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Promise 1, as far as one history can prove it: groups report equal figures of equal states.

Only a comparison with a run without failures proves the promise (`titan_ft.history.against`).
"""

from __future__ import annotations

from titan_ft.history.judgement import Judgement, count
from titan_ft.history.record.run_record import RunRecord

FIGURES = ("loss", "grad_norm", "lr", "tokens")


def check_arithmetic(record: RunRecord, found: Judgement) -> None:
    """Check that all ranks of all groups report the same figures of each state, bit for bit."""
    num_states = 0
    for lineage, events in record.commits_by_lineage.items():
        if lineage in record.usual_lineages:
            num_states += 1  # the reduction of the events has made the same comparison
            continue
        if len({event.replica for event in events}) > 1:
            num_states += 1
        first_values: dict[str, float] = {}
        for event in events:
            for name in FIGURES:
                value = getattr(event, name)
                if value is None:
                    continue  # the figure was not finite
                first = first_values.setdefault(name, value)
                if first != value:
                    own = f"reports {name} {value!r} of the state {lineage}"
                    found.object_to(f"{own}; another group reports {first!r}", event)
    figures = ", ".join(FIGURES)
    found.statement = f"groups report the same {figures} of {count(num_states, 'state')}"
