# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Measure the lighthouse's CPU time for the heartbeats of many groups, with and without a gate.

    python -m benchmarks.heartbeats

The groups are torchft's own clients in this process, each with a connection of its own. Lighthouses
with a gate and without one take turns, so that load on the machine affects both.
"""

from __future__ import annotations

import os
from datetime import timedelta

from titan_ft.launch.gate import raise_descriptor_limit
from titan_ft.system.threads import call_for_each

SIZES = (300, 1_000)
"""Groups."""
BEATS = 4_000
_ROUNDS = 2
_THREADS = 4
_LIMIT = timedelta(seconds=120)


def measure_beats(num_groups: int, has_gate: bool) -> float:
    """Return the milliseconds of CPU that a heartbeat costs the lighthouse's process."""
    from torchft.coordination import LighthouseClient

    from benchmarks.lighthouse import read_cpu, run_lighthouse

    with run_lighthouse(has_gate) as (pid, url):
        clients = [LighthouseClient(url, _LIMIT) for _ in range(num_groups)]
        for slot, client in enumerate(clients):
            client.heartbeat(f"group {slot}", _LIMIT)

        def beat(first: int) -> None:
            for number in range(first, BEATS, _THREADS):
                slot = number % num_groups
                clients[slot].heartbeat(f"group {slot}", _LIMIT)

        before = read_cpu(pid)
        call_for_each(beat, range(_THREADS), "beat", _THREADS)
        return 1000 * (read_cpu(pid) - before) / BEATS


def main() -> None:
    os.environ.setdefault("RUST_LOG", "warn")  # torchft reads it when it is imported
    raise_descriptor_limit()
    for num_groups in SIZES:
        for _ in range(_ROUNDS):
            for has_gate in (False, True):
                cost = measure_beats(num_groups, has_gate)
                print(
                    f"{num_groups} groups, {_name(has_gate)}: {cost:.3f} ms of CPU a heartbeat",
                    flush=True,
                )


def _name(has_gate: bool) -> str:
    return "with a gate" if has_gate else "without a gate"


if __name__ == "__main__":
    main()
