# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Checks of a run that used the hook `experts`."""

from __future__ import annotations

import json

from harness.job import Job


def check_biases(job: Job, balanced: bool = True) -> None:
    """All ranks of all groups have the same biases. Load balancing moved each layer's biases, or
    there are none.
    """
    ranks = [json.loads(path.read_text()) for path in sorted(job.markers.glob("biases-*.json"))]
    assert len(ranks) == sum(group.num_ranks for group in job.groups)
    assert all(biases == ranks[0] for biases in ranks)
    assert bool(ranks[0]) == balanced
    assert all(any(biases) for biases in ranks[0].values())


def read_counts(job: Job, replica: int, rank: int = 0) -> list[list[float]]:
    """Return the number of tokens of all experts, by layer, for each update that a rank applied,
    live or replayed.
    """
    path = job.markers / f"counts-{replica}-{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]
