# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A synthetic run that tells its events as a real one would, for the tests of the checks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest

from tests.event_builder import build, named
from titan_ft.history.record.trajectory import ROOT
from titan_ft.run.events import Event

RANKS = 2
TOKENS = 512
"""Valid tokens of a group's batch."""
START = 1_700_000_000.0


class SyntheticRun:
    """Writes the history of a job of groups of two ranks with steps of one second. See
    `digest_every`.

    Attributes:
        events: so far, in order of time.
        loss_scale: factor of all losses.
    """

    def __init__(self, num_groups: int = 3, **config: Any) -> None:
        self.events: list[Event] = []
        self.num_groups = num_groups
        self.config = {
            "group_size": num_groups,
            "min_replica_size": 1,
            "digest_every": 2,
            "hang_timeout_seconds": 600.0,
            **config,
        }
        self.loss_scale = 1.0
        self.now = 0.0
        self.step_number = 0
        self.state = ROOT
        self.tokens = 0
        self.attempts = dict.fromkeys(range(num_groups), 0)
        self.ends = dict.fromkeys(range(num_groups), 0)

    def tell(self, event: str, pid: int, **fields: Any) -> Event:
        self.now += 0.001
        told = build(
            named(event),
            **{"time": START + self.now, "mono": 50.0 + self.now, "pid": pid, **fields},
        )
        self.events.append(told)
        return told

    def of(self, event: str, group: int, **fields: Any) -> None:
        """Write an event of all ranks of a group, each with its own digest."""
        attempt = self.attempts[group]
        for rank in range(RANKS):
            pid = 1000 + 100 * attempt + 10 * group + rank
            own = {"digest": self.digest(rank)} if "digest" in fields else {}
            self.tell(event, pid, replica=group, rank=rank, attempt=attempt, **{**fields, **own})

    def begin(self, **fields: Any) -> None:
        self.tell(
            "launch_started",
            1,
            replicas=self.num_groups,
            ranks_per_replica=RANKS,
            spares=0,
            job_id="job",
        )
        for group in range(self.num_groups):
            self.start(group, **fields)

    def start(self, group: int, **fields: Any) -> None:
        told = {
            "config_digest": "c0ffee",
            "host": "here",
            "slurm": None,
            "config": self.config,
            **fields,
        }
        self.of("worker_started", group, **told)
        self.of("joined", group, quorum=1, participants=[group], step=self.step_number)
        if not self.ends[group]:
            self.of(
                "loader_checked", group, loader="Loader", exact=True, batches=4, transparent=True
            )
        self.of(
            "data_opened",
            group,
            slot=group,
            first_batch=self.ends[group],
            exact=True if self.ends[group] else None,
        )

    def own_loss(self, group: int) -> float:
        """Return the mean loss of a group's next batch: falling with the tokens, with some
        scatter.
        """
        scatter = 0.02 * math.sin(12.9 * self.ends[group] + 78.2 * group)
        return self.loss_scale * (2.0 + 6.0 * math.exp(-self.tokens / 40_000) + scatter)

    def step(
        self,
        groups: Iterable[int],
        by: Collection[int] | None = None,
        excluded: Collection[int] = (),
        num_exchanges: int = 1,
        seconds: float = 1.0,
        waits: Sequence[tuple[int, float, str]] = (),
    ) -> None:
        """Commit a step.

        Args:
            groups: the participants.
            by: the participants that live to report it; all by default.
            excluded: further groups, whose gradients were not finite.
            waits: group, duration and reason of each rank's waits.
        """
        groups = list(groups)
        self.now += seconds
        self.step_number += 1
        parent, text = self.state, f"{self.state}/{groups}/{self.step_number}"
        self.state = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        loss = sum(self.own_loss(group) for group in groups) / len(groups)
        digests = self.step_number % self.config["digest_every"] == 0
        for group in sorted({*groups, *excluded}) if by is None else by:
            if excluded:
                self.of("gradient_excluded", group, step=self.step_number, slots=sorted(excluded))
            weight = TOKENS if group in groups else 0
            self.of(
                "step_committed",
                group,
                step=self.step_number,
                **self.inner(),
                lineage=self.state,
                parent=parent,
                participants=groups,
                tokens=TOKENS * len(groups),
                loss=loss,
                own_tokens=weight,
                own_loss=self.own_loss(group) if weight else None,
                grad_norm=loss / 7,
                lr=0.001 / self.step_number,
                seconds=seconds,
                compute_seconds=0.8,
                exchanges=num_exchanges,
                waits=[
                    {"slot": slot, "seconds": waited, "why": why} for slot, waited, why in waits
                ],
                forward_passes=1,
                data={
                    "slot": group,
                    "first_batch": self.ends[group],
                    "num_batches": 1,
                    "checksum": "c5",
                },
                extra_data=[],
                batches={str(slot): [self.ends[slot], 1] for slot in groups},
                **({"digest": None} if digests else {}),
            )
        self.tokens += TOKENS * len(groups)
        for group in groups:
            self.ends[group] += 1

    def inner(self) -> dict[str, Any]:
        """Return a commit's fields about torchtitan's steps, if it is a round of several."""
        length = self.config.get("sync_steps", 1)
        return (
            {"inner_step": length * self.step_number, "inner_steps": length} if length > 1 else {}
        )

    def digest(self, rank: int) -> str:
        return hashlib.blake2b(f"{self.state}/{rank}".encode(), digest_size=16).hexdigest()

    def steps(self, number_of: int, groups: Collection[int] | None = None, **fields: Any) -> None:
        for _ in range(number_of):
            self.step(range(self.num_groups) if groups is None else groups, **fields)

    def exit(self, group: int, **how: Any) -> None:
        for rank in range(RANKS):
            pid = 1000 + 100 * self.attempts[group] + 10 * group + rank
            told = {
                "reason": "rank 0 was killed by SIGKILL",
                "stopped": False,
                "signal": "SIGKILL",
                **how,
            }
            fields = {"rank": rank, "attempt": self.attempts[group], "worker_pid": pid, **told}
            self.tell("worker_exited", 10 + group, replica=group, **fields)

    def kill(self, group: int) -> None:
        self.tell(
            "fault_injected",
            2,
            fault="kill_group",
            target={"replica": group},
            seed=1,
            shot=1,
            params={},
        )
        self.exit(group)

    def restart(self, group: int) -> None:
        self.attempts[group] += 1
        self.tell(
            "replica_restarted",
            10 + group,
            replica=group,
            attempt=self.attempts[group],
            reason="killed",
        )
        self.start(group)

    def heal(self, group: int, while_others: Callable[[], object]) -> None:
        first = self.step_number
        self.of("heal_started", group, donor=0, from_step=first, step=first)
        while_others()
        fields = {"bytes": 1, "seconds": 1.0, "replayed": self.step_number - first}
        self.of("heal_finished", group, donor=0, from_step=first, step=self.step_number, **fields)

    def finish(self) -> None:
        for group in range(self.num_groups):
            self.of(
                "training_finished",
                group,
                step=self.step_number,
                tokens=self.tokens,
                digest=None,
                lineage=self.state,
            )
        for group in range(self.num_groups):
            self.exit(group, reason="rank 0 ended with exit status 0", signal=None, code=0)
        self.tell("launch_finished", 1, code=0, reason="all groups finished")

    def named(self, name: str, **fields: Any) -> list[Any]:
        """Return the events of a name with these fields."""
        return [
            e
            for e in self.events
            if e.name == name and all(getattr(e, k) == v for k, v in fields.items())
        ]


def build_run(
    during_heal: Callable[[SyntheticRun], object] | None = None, **config: Any
) -> SyntheticRun:
    """Build a good run of three groups: one is killed and heals, later the gradient of one is not
    finite.
    """
    run = SyntheticRun(**config)
    run.begin()
    run.steps(6)
    run.kill(2)
    for group in (0, 1):
        run.of("exchange_failed", group, error="closed", seconds=0.1, step=6)
    run.step([0, 1], num_exchanges=2)
    run.restart(2)
    run.steps(2, [0, 1])
    run.heal(2, lambda: run.steps(12, [0, 1]) if during_heal is None else during_heal(run))
    run.steps(4)
    run.step([0, 2], excluded=[1])
    run.steps(5)
    run.finish()
    return run


@pytest.fixture
def run_builder() -> Callable[..., SyntheticRun]:
    """Builds the good run with a death, a heal and an excluded gradient."""
    return build_run


@pytest.fixture
def synthetic_run() -> type[SyntheticRun]:
    """The class of synthetic runs, for those of another kind."""
    return SyntheticRun


@pytest.fixture
def good_run() -> SyntheticRun:
    """A good run, to be broken."""
    return build_run()
