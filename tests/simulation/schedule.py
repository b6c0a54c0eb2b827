# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Schedules: a world and its faults, drawn from a seed. Failing schedules are made smaller."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.simulation.faults import (
    Cut,
    CutInside,
    CutLighthouse,
    DrainGroup,
    Fault,
    Flip,
    Freeze,
    Hang,
    Kill,
    KillGroups,
    LighthouseDies,
    LossyLink,
    NotFinite,
    Publish,
    Reset,
    ResetOwn,
    Slow,
    SlowLink,
    TakeAway,
    as_json,
    from_json,
)
from tests.simulation.world import Options, Problem, World

MOMENTS = ("", "", "exchange", "exchange", "vote", "rendezvous", "fetching")


@dataclass(frozen=True)
class Schedule:
    """A world and its faults. They determine everything that happens.

    Attributes:
        seed: of the scheduler.
    """

    seed: int
    options: Options
    faults: tuple[Fault, ...]

    def run(self, traces: bool = False) -> World:
        """Run the schedule. The stand-ins must be installed."""
        world = World(self.seed, self.options, list(self.faults), traces)
        # Autograd's mode belongs to the real thread. All tasks share it, and are switched in the
        # middle of a no_grad block.
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            world.run()
        return world

    def encode(self) -> str:
        """Encode the schedule as one line of JSON."""
        options = {
            field.name: getattr(self.options, field.name)
            for field in dataclasses.fields(Options)
            if getattr(self.options, field.name) != _default(field)
        }
        return json.dumps(
            {
                "seed": self.seed,
                "options": options,
                "faults": [as_json(fault) for fault in self.faults],
            }
        )

    @staticmethod
    def decode(text: str) -> Schedule:
        """Return the schedule that `encode` has encoded."""
        values = json.loads(text)
        options = values["options"]
        for name in ("absent", "odd", "restart_seconds", "transfer_seconds", "speeds"):
            if name in options:
                options[name] = tuple(options[name])
        if "late" in options:
            options["late"] = {int(slot): seconds for slot, seconds in options["late"].items()}
        return Schedule(values["seed"], Options(**options), tuple(map(from_json, values["faults"])))


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


class _Draw:
    """Draws one schedule; each kind of fault is a method."""

    def __init__(self, seed: int, kinds: Sequence[str]) -> None:
        rng = self.rng = random.Random(seed * 7919 + 17)
        chosen = rng.sample(list(kinds), min(len(kinds), rng.choice([1, 1, 2, 2, 3])))
        sizes = [kind for kind in chosen if kind in _SIZES]
        # A kind that sets the number of groups goes alone.
        self.kinds = sizes[:1] or sorted(chosen)
        self.groups = rng.choice(
            [2, 3, 3, 3, 4, 5] if "cut" in self.kinds else [2, 2, 2, 3, 3, 3, 4]
        )
        self.ranks = rng.choice(
            [1, 1, 1, 2, 2, 3]
            if self.groups < 3
            else [1, 1, 1, 2, 2]
            if self.groups < 4
            else [1, 1, 1, 1, 2]
        )
        self.steps = rng.choice([2, 3, 3, 4, 4, 5, 7])
        self.compute = rng.choice([0.05, 0.1, 0.2, 0.4])
        self.span = 0.3 + self.steps * (self.compute + 0.05)
        self.faults: list[Fault] = []
        self.changes: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.room = 0

    def schedule(self, seed: int) -> Schedule:
        rng = self.rng
        self._draw_config()
        # Kinds that set the number of groups come first.
        for kind in sorted(self.kinds, key=lambda kind: kind not in _SIZES):
            getattr(self, kind)()
        flips = any(isinstance(fault, Flip) for fault in self.faults)
        lost = any(isinstance(fault, KillGroups) and fault.for_good for fault in self.faults)
        if lost or self.changes.get("absent") or self.changes.get("odd"):
            # The others end by this timeout. A longer wait for a group that cannot come shows
            # nothing.
            self.changes["finish_seconds"] = 0.6
        drawn: dict[str, Any] = {
            "groups": self.groups,
            "ranks": self.ranks,
            "steps": self.steps,
            "fault_tolerance": self.config,
            "lag": rng.choice([0.0, 0.001, 0.005, 0.02, 0.05]),
            "latency": rng.choice([0.0002, 0.0005, 0.002]),
            "jitter": rng.choice([0.001, 0.02, 0.08]),
            "transfer_seconds": (0.0, rng.choice([0.05, 0.5, 2.0])),
            "compute_seconds": self.compute,
            "restart_seconds": rng.choice([(0.1, 0.4), (0.3, 1.5)]),
            "overlap": rng.random() < 0.5,
            "skew": rng.choice([0.0, 0.0, 5.0, 7200.0]),
            "drift": rng.choice([0.0, 0.0, 0.0001, 0.001]),
            "silent": rng.random() < 0.2,
            "store_survives": rng.random() < 0.7,
            "coupling": 0.0 if flips else 0.1,
            "switch": rng.choice([0.05, 0.1, 0.4]),
        }
        drawn["room"] = self.room
        if not self.room:
            # A generator of its own, so that the rest of the schedule stays as it was.
            drawn["room"] = random.Random(f"room {seed}").choice([0, 1, 2, 3, 5])
        scarce = random.Random(f"scarce {seed}")
        if scarce.random() < 0.25:
            drawn["scarce"] = scarce.choice([0.3, 1.0])
        if random.Random(f"forgets {seed}").random() < 0.15:
            drawn["forgets"] = True
        self._draw_rounding(random.Random(f"rounding {seed}"))
        options = Options(**drawn | self.changes)
        return Schedule(seed, options, tuple(sorted(self.faults, key=lambda fault: fault.at)))

    def _draw_config(self) -> None:
        rng = self.rng
        self.config = {
            "enable": True,
            "group_size": self.groups,
            "digest_every": rng.choice([1, 2, 3, 5]),
            "start_timeout_seconds": rng.choice([0.8, 1.5]),
            "process_group_timeout_ms": 3000,
            "join_timeout_ms": 5000,
            "hang_timeout_seconds": 20.0,
            "drain_timeout_seconds": 15.0,
            "batch_policy": rng.choice(["shrink", "shrink", "constant"]),
            "lr_policy": rng.choice(["none", "sqrt"]),
        }
        # With a queue for one update, the others wait for a joiner after one update.
        is_tight = rng.choice([False, False, False, True])
        self.room = rng.choice([0, 1, 2, 100])
        if is_tight:
            self.room = 1
        if rng.random() < 0.35:
            least = rng.choice([2, 2, self.groups])
            self.config["min_replica_size"] = least if self.groups > 2 else rng.choice([1, 2])

    def _draw_rounding(self, rng: random.Random) -> None:
        """Let gradients travel in fewer bits."""
        if rng.random() < 0.15:
            self.config["exchange_dtype"] = "bfloat16"

    def _time(self, low: float = 0.0) -> float:
        return round(low + (self.span - low) * self.rng.random(), 4)

    def _slot(self) -> int:
        return self.rng.randrange(self.groups)

    def _rank(self) -> int:
        return self.rng.randrange(self.ranks)

    def _pair(self) -> tuple[int, int]:
        a, b = self.rng.sample(range(self.groups), 2)
        return a, b

    # Kinds

    def none(self) -> None:
        """No fault."""

    def absent(self) -> None:
        """A group never starts; the others are enough."""
        if self.groups > self.config.get("min_replica_size", 1):
            self.changes["absent"] = (self._slot(),)

    def late(self) -> None:
        """One or two groups start later."""
        slots = self.rng.sample(range(self.groups), min(self.groups - 1, self.rng.randint(1, 2)))
        self.changes["late"] = {slot: round(self.span * self.rng.random(), 3) for slot in slots}

    def kill(self) -> None:
        """One to three ranks die."""
        for _ in range(self.rng.randint(1, 3)):
            self.faults.append(
                Kill(self._time(), self._slot(), self._rank(), self.rng.choice(MOMENTS))
            )

    def many(self) -> None:
        """Ranks die all the time."""
        for _ in range(self.rng.randint(3, 7)):
            at = round(self.span * 2 * self.rng.random(), 4)
            self.faults.append(Kill(at, self._slot(), self._rank(), self.rng.choice(MOMENTS)))

    def groups_die(self) -> None:
        """Several groups die at once, but not all."""
        slots = self.rng.sample(range(self.groups), self.rng.randint(1, max(1, self.groups - 1)))
        self.faults.append(
            KillGroups(self._time(), tuple(slots), self.rng.choice(["", "exchange", "vote"]))
        )

    def donor(self) -> None:
        """A group restarts, and its donor dies while it serves."""
        at, slot = self._time(), self._slot()
        self.faults.append(Kill(at, slot, self._rank()))
        for _ in range(self.rng.randint(1, 2)):
            self.faults.append(Kill(at, -1, self._rank(), "serving"))

    def tail(self) -> None:
        """A rank dies in an exchange of four or five groups.

        Some of them have the result, others do not.
        """
        self.groups, self.ranks, self.steps = self.rng.choice([4, 5]), 1, self.rng.choice([3, 4])
        self.config["group_size"] = self.groups
        for _ in range(self.rng.randint(2, 4)):
            self.faults.append(Kill(self._time(), self._slot(), 0, "exchange"))
        self.changes["jitter"] = 0.08

    def lost(self) -> None:
        """While a group restarts, another one is lost for good."""
        self.groups, self.ranks, self.steps = 3, self.rng.choice([1, 1, 2]), 6
        self.config |= {"group_size": 3, "min_replica_size": 2}
        back, gone = self._pair()
        at = self._time(0.3)
        self.faults.append(KillGroups(at, (back,)))
        moment = self.rng.choice(["fetched", "fetched", "exchange"])
        self.faults.append(
            KillGroups(at + self.rng.random(), (gone,), moment, of=back, for_good=True)
        )

    def fork(self) -> None:
        """One of three groups is a step ahead while the others are frozen.

        It gives its state to a fourth group.
        """
        self.groups, self.ranks, self.steps = 4, 1, 6
        self.compute = self.changes["compute_seconds"] = 0.1
        self.config |= {"group_size": 4, "min_replica_size": 2, "batch_policy": "shrink"}
        # the groups wait for the fourth one for up to 1.5 s
        at = round(1.8 + 0.3 * self.rng.random(), 4)
        self.changes |= {
            "late": {3: at + 1.0},
            "jitter": 0.5,
            "transfer_seconds": (0.0, 0.05),
            "silent": False,
        }
        self.faults.append(Reset(at, 1, 0, "vote"))
        self.faults += [Freeze(at, slot, 0, 3.0, "broke") for slot in (0, 2)]
        self.faults.append(Freeze(at, 3, 0, round(1.4 + 1.4 * self.rng.random(), 3), "fetched"))
        # With buffers there is no early offer. An early offer is compared with the rows before the
        # base of the queue matters.
        self.changes["buffers"] = self.rng.choice([True, True, False])

    def last(self) -> None:
        """A group restarts and queues many updates, and all others die while it replays them."""
        self.groups, self.ranks, self.steps = 2, 1, 26
        self.config |= {"group_size": 2, "min_replica_size": 1}
        self.room = 100
        self.faults.append(Kill(0.5, 1, 0))
        self.faults.append(KillGroups(1.0, (0,), "fetched", of=1))
        self.compute = self.changes["compute_seconds"] = 0.02
        self.changes |= {
            "apply_seconds": 0.6,
            "transfer_seconds": (0.0, 16.0),
            "restart_seconds": (0.1, 0.2),
        }

    def rejoin(self) -> None:
        """A group restarts, and its transfer takes many steps of the others."""
        self.steps = self.rng.choice([6, 9])
        self.room = self.rng.choice([0, 0, 100, 3])
        self.compute = self.changes["compute_seconds"] = self.rng.choice([0.1, 0.3])
        most = self.steps * self.compute
        # The group comes back after some steps: the others are then past its end and its start.
        self.changes |= {
            "transfer_seconds": (most / 2, 3 * most),
            "build_seconds": 3 * self.compute,
        }
        self.faults.append(
            Kill(
                round(3 * self.compute + 0.3 + most / 4 * self.rng.random(), 4),
                self._slot(),
                self._rank(),
            )
        )

    def freeze(self) -> None:
        """One or two ranks or groups are stopped for a while."""
        for _ in range(self.rng.randint(1, 2)):
            rank = self.rng.choice([-1, 0, self._rank()])
            seconds = self.rng.choice([0.2, 0.7, 1.5, 4.0, 8.0])
            self.faults.append(
                Freeze(self._time(), self._slot(), rank, seconds, self.rng.choice(MOMENTS[:5]))
            )

    def hang(self) -> None:
        """A training thread hangs.

        It may hang for longer than the others wait before they probe the lighthouse.
        """
        self.faults.append(Hang(self._time(0.2), self._slot(), self._rank()))
        if not any(kind.endswith("lighthouse") for kind in self.kinds):
            self.changes["probe_seconds"] = self.rng.choice([0.3, 2.0, 20.0])

    def slow(self) -> None:
        """A rank or a link is slow."""
        if self.rng.random() < 0.5:
            self.faults.append(Slow(self._time(), self._slot(), self._rank(), 0.5, 2.0))
        else:
            self.faults.append(
                SlowLink(self._time(), *self._pair(), self.rng.choice([0.02, 0.2]), 2.0)
            )

    def long(self) -> None:
        """All groups but one die, and return while that one is in a long step."""
        self.groups, self.ranks = self.rng.choice([3, 3, 4]), self.rng.choice([1, 1, 2])
        self.config |= {"group_size": self.groups, "min_replica_size": self.rng.choice([1, 2])}
        at, slot, seconds = self._time(0.3), self._slot(), self.rng.choice([6.0, 9.0, 12.0])
        self.faults.append(Slow(at, slot, self._rank(), seconds, 2 * self.compute))
        others = tuple(other for other in range(self.groups) if other != slot)
        self.faults.append(KillGroups(at + 2 * self.compute + 0.2, others))

    def lossy(self) -> None:
        """Packets between two groups are lost, and connections are reset."""
        for _ in range(self.rng.randint(0, 2)):
            chance, seconds = self.rng.choice([0.05, 0.3, 0.6]), self.rng.choice([0.5, 2.0, 6.0])
            self.faults.append(LossyLink(self._time(), *self._pair(), chance, seconds))
        for _ in range(self.rng.randint(0, 3)):
            moment = self.rng.choice(["", "exchange", "exchange", "vote", "rendezvous"])
            self.faults.append(Reset(self._time(), self._slot(), self._rank(), moment))

    def reset_own(self) -> None:
        """Ranks lose connections within their groups.

        At that moment they ask for a quorum, vote or exchange.
        """
        if self.ranks == 1:
            self.ranks = self.rng.choice([2, 2, 3])
        for _ in range(self.rng.randint(1, 3)):
            moment = self.rng.choice(["", "asking", "asking", "vote"])
            self.faults.append(
                ResetOwn(self._time(), self._slot(), self.rng.randrange(1, self.ranks), moment)
            )

    def cut(self) -> None:
        """The network between two groups is dead, or comes and goes."""
        seconds = self.rng.choice([0.3, 1.5, 5.0, 25.0])
        rank = self.rng.choice([-1, -1, self._rank()])
        flaps = self.rng.choice([0.0, 0.0, 0.2, 0.9]) if seconds < 10 else 0.0
        self.faults.append(
            Cut(self._time(), *self._pair(), rank, self.rng.random() < 0.3, seconds, flaps)
        )

    def cut_ranks(self) -> None:
        """The network between two ranks is dead.

        They are two ranks of one group, or one rank each of two groups.
        """
        if self.ranks == 1:
            self.ranks = self.rng.choice([2, 2, 3])
        rank, other = self.rng.sample(range(self.ranks), 2)
        at, one_way, seconds = (
            self._time(),
            self.rng.random() < 0.3,
            self.rng.choice([0.3, 1.5, 5.0, 25.0]),
        )
        if self.rng.random() < 0.5:
            self.faults.append(CutInside(at, self._slot(), rank, other, one_way, seconds))
        else:
            a, b = self._pair()
            self.faults.append(Cut(at, a, b, rank, one_way, seconds, other=other))
            # Such a link is used when groups meet, and when one heals.
            if self.rng.random() < 0.7:
                self.faults.append(Kill(at, self.rng.choice([a, b]), self._rank()))

    def cut_lighthouse(self) -> None:
        """The network between a group and the lighthouse is dead."""
        seconds = self.rng.choice([0.3, 1.0, 3.0, 8.0])
        self.faults.append(
            CutLighthouse(
                self._time(), self._slot(), self.rng.choice(["to", "from", "both"]), seconds
            )
        )

    def lighthouse(self) -> None:
        """The lighthouse dies and comes back."""
        self.faults.append(LighthouseDies(self._time(), self.rng.choice([0.01, 0.3, 2.0])))

    def drain(self) -> None:
        """A group gets a leave request."""
        least = self.config.get("min_replica_size", 1)
        stays = self.groups - 1 >= max(2, least + 1)
        rank = self._rank() if self.rng.random() < 0.4 else -1
        comes_back = not stays or self.rng.random() < 0.5
        if "cut" in self.kinds and self.rng.random() < 0.5:
            self.faults.append(DrainGroup(0.0, -1, True, rank, "outside"))
        else:
            self.faults.append(DrainGroup(self._time(), self._slot(), comes_back, rank))

    def preempt(self) -> None:
        """All groups get a leave request while the job saves, at once or within two steps.

        They may restart. A group may die in its save.
        """
        every, seconds = self.rng.choice([1, 3, 100]), self.rng.choice([0.02, 0.3, 1.0])
        self.changes |= {"folder": True, "save_every": every, "save_seconds": seconds}
        self.changes["sight"] = self.rng.choice([0.0, 0.0, 0.3])
        at, comes_back = self._time(0.3), self.rng.random() < 0.5
        apart = self.rng.choice([0.0, 0.02, self.compute, 2 * self.compute])
        moment = self.rng.choice(["", "", "exchange"])
        for slot in range(self.groups):
            rank = self._rank() if self.rng.random() < 0.3 else -1
            self.faults.append(
                DrainGroup(round(at + apart * self.rng.random(), 4), slot, comes_back, rank, moment)
            )
        if self.rng.random() < 0.3:
            self.faults.append(Kill(at, -1, self._rank(), "saving"))

    def flip(self) -> None:
        """A bit flips."""
        place, bit = self.rng.randrange(5), self.rng.choice([3, 15, 22, 24])
        moment = self.rng.choice(["", "", "naming"])
        slot = -1 if moment else self._slot()
        fault = Flip(
            self._time(0.3), slot, self._rank(), self.rng.random() < 0.4, place, bit, moment
        )
        self.faults.append(fault)

    def checkpoint(self) -> None:
        """All groups die.

        Another process publishes checkpoints before, meanwhile and afterwards.
        """
        self.changes |= {"folder": True, "sight": self.rng.choice([0.0, 0.0, 0.3, 2.0])}
        self.changes |= {
            "save_every": self.rng.choice([0, 1, 2]),
            "save_seconds": self.rng.choice([0.01, 0.3, 1.0]),
        }
        self.changes["save_failures"] = self.rng.choice([0.0, 0.0, 0.3])
        at = self._time(0.3)
        for _ in range(self.rng.randint(1, 2)):
            self.faults.append(Publish(self._time()))
        for _ in range(self.rng.randint(1, 2)):
            self.faults.append(Publish(at, "listing"))
        if self.rng.random() < 0.3:
            moment = self.rng.choice(["listing", "chosen", "loading"])
            self.faults.append(TakeAway(at, moment, self.rng.choice([0.0, 0.01, 0.6])))
        self.faults.append(KillGroups(at, tuple(range(self.groups))))
        if self.rng.random() < 0.3:  # a second time: then one step has several states
            again = at + 1.0 + self.span * self.rng.random()
            self.faults += [
                KillGroups(again, tuple(range(self.groups))),
                TakeAway(again, "chosen", 0.01),
            ]

    def save(self) -> None:
        """The job saves, and its writer dies, is ahead of the others, or has another state.

        All groups may die.
        """
        self.steps = 9
        self.compute = self.changes["compute_seconds"] = 0.1
        self.span = 0.3 + self.steps * (self.compute + 0.05)
        seconds = self.rng.choice([0.02, 0.1, 0.4])
        self.changes |= {
            "folder": True,
            "save_every": self.rng.choice([1, 2]),
            "save_seconds": seconds,
        }
        self.changes |= {
            "sight": self.rng.choice([0.0, 0.3]),
            "jitter": self.rng.choice([0.001, 0.08]),
        }
        if (what := self.rng.choice(["dies", "ahead", "corrupt", "fails"])) == "fails":
            self.changes["save_failures"] = 0.3
        elif what == "corrupt":
            # The save is before the digests are compared, and long before the next save.
            self.steps, self.changes["save_every"], self.config["digest_every"] = 16, 8, 9
            at = round(0.3 + 8 * self.compute * self.rng.random(), 4)
            self.faults.append(Flip(at, 0, self._rank(), False, self.rng.randrange(5), 15))
        else:
            moment = "saving" if what == "dies" else "exchange"
            self.faults.append(
                Kill(self._time(), self._slot() if what == "ahead" else -1, self._rank(), moment)
            )
        if self.rng.random() < 0.5:
            self.faults.append(KillGroups(self._time(0.5), tuple(range(self.groups))))

    def shape(self) -> None:
        """A group starts late with another model; the other groups suffice without it."""
        if self.groups > self.config.get("min_replica_size", 1):
            slot = self._slot()
            self.changes["late"] = {slot: round(1.0 + self.span * self.rng.random(), 3)}
            # The group whose clock says that it came first defines the shape: docs/limits.md.
            self.changes |= {"odd": (slot,), "skew": 0.0}

    def least(self) -> None:
        """The lighthouse waits for as many groups as a step does.

        A user may have started it this way.
        """
        least = self.config.get("min_replica_size") or min(2, self.groups - 1)
        self.config["min_replica_size"] = self.changes["min_replicas"] = least

    def nan(self) -> None:
        """A gradient is not finite."""
        times = self.rng.choice([1, 1, 2, 4])
        self.faults.append(NotFinite(self._time(), self._slot(), self._rank(), times))


class _DrawRounds(_Draw):
    """Draws a schedule of a semi-synchronous method.

    It has rounds of steps, and groups of different speed.
    """

    def __init__(self, seed: int, kinds: Sequence[str]) -> None:
        super().__init__(seed, kinds)
        rng = self.rng
        self.alpha = (0.0, 0.25, 0.0, 0.5)[seed // _EVERY % 4]
        self.steps = rng.choice([2, 3, 3, 4, 5])
        self.length = rng.choice([1, 2, 3, 3, 5, 8])
        self.seconds = rng.choice([0.2, 0.5, 1.0, 2.0])  # duration of a round
        # Patience of the lighthouse: more than a round. Otherwise it leaves groups out that are at
        # different places in the round.
        self.patience = rng.choice([5.0, 60.0])
        slow = rng.choice([1.0, 1.0, 1.3, 2.0])
        # One for each possible group.
        self.changes["speeds"] = tuple(rng.choice([1.0, slow]) for _ in range(5))
        self.changes["overlap"] = False
        self._plan()

    def _plan(self) -> None:
        self.compute = self.changes["compute_seconds"] = round(self.seconds / self.length, 4)
        slowest = max(self.changes["speeds"], default=1.0)
        self.span = 0.3 + self.steps * (self.seconds * slowest + 0.1)
        # Timeout of the exchange: more than a step of the slowest group, as the config's text asks
        # for.
        self.config["process_group_timeout_ms"] = max(3000, int(3000 * self.compute * slowest))

    def _draw_config(self) -> None:
        super()._draw_config()
        rng, length = self.rng, self.length
        self.config |= {
            "semi_sync_method": (method := rng.choice(["diloco", "diloco", "local_sgd"])),
            "sync_steps": length,
            "digest_every": rng.choice([1, length, 2 * length + 1]),
            "batch_policy": "shrink",
            "lr_policy": "none",
            "join_timeout_ms": int(1000 * self.patience),
        }
        self._plan()
        if rng.random() < 0.3:
            self.changes["last_steps"] = rng.randint(1, length)
        if rng.random() < 0.3:
            self.config["sync_deadline_seconds"] = rng.choice([0.5, 0.9]) * self.seconds
        if method == "diloco" and rng.random() < 0.5:
            self.config |= {"num_fragments": 2, "fragment_sync_delay": rng.choice([0, 1, 2])}
            self._cut()
        if method == "diloco":
            self.config["fragment_update_alpha"] = self.alpha

    def _cut(self) -> None:
        """Let rounds be as long as before, and let the delay fit into them."""
        config = self.config
        config["sync_steps"] = self.length * config.get("num_fragments", 1)
        config["fragment_sync_delay"] = min(config.get("fragment_sync_delay", 0), self.length - 1)

    def _draw_rounding(self, rng: random.Random) -> None:
        if self.config["semi_sync_method"] == "diloco" and rng.random() < 0.3:
            self.config["should_quantize"] = True
        else:
            super()._draw_rounding(rng)

    def alone(self) -> None:
        """All groups but one die in a long round, and return in the middle of it."""
        self._lengthen(12.0)
        holder = self._slot()
        others = tuple(slot for slot in range(self.groups) if slot != holder)
        for _ in range(self.rng.randint(1, 2)):
            self.faults.append(KillGroups(self._time(1.0), others))

    def impatient(self) -> None:
        """All groups but one die in a long round, and return in the middle of it.

        The lighthouse does not wait for that group until its round ends.
        """
        self.alone()
        self.config["join_timeout_ms"] = 5000

    def preempt(self) -> None:
        """All groups get a leave request.

        Often they are in the middle of rounds that take longer than the time left to leave.
        """
        if self.rng.random() < 0.6:
            self._lengthen(20.0)
        super().preempt()

    def leave(self) -> None:
        """A group gets a leave request in the middle of a round.

        The round takes longer than the time left to leave.
        """
        self._lengthen(20.0)
        for _ in range(self.rng.randint(1, 2)):
            rank = self._rank() if self.rng.random() < 0.4 else -1
            self.faults.append(
                DrainGroup(self._time(), self._slot(), self.rng.random() < 0.7, rank)
            )

    def _lengthen(self, seconds: float) -> None:
        """Make the rounds of a schedule long."""
        self.length, self.seconds, self.patience = self.rng.choice([4, 8]), seconds, 60.0
        self.steps = self.rng.choice([2, 3])
        self._plan()
        self.config["join_timeout_ms"] = 60_000
        self._cut()
        self.changes.pop("last_steps", None)

    def joiner(self) -> None:
        """A group returns in the middle of a round; its transfer takes a part of the round."""
        self._lengthen(self.rng.choice([3.0, 6.0]))
        self.steps = self.rng.choice([3, 4, 5])
        self._plan()
        self.changes["transfer_seconds"] = (0.0, self.rng.choice([0.1, 0.5, 1.0]) * self.seconds)
        for _ in range(self.rng.randint(1, 2)):
            self.faults.append(
                Kill(self._time(0.5), self._slot(), self._rank(), self.rng.choice(MOMENTS))
            )


KINDS = (
    "none",
    "absent",
    "late",
    "kill",
    "many",
    "groups_die",
    "donor",
    "freeze",
    "hang",
    "slow",
    "long",
    "lossy",
    "reset_own",
    "cut",
    "cut_ranks",
    "cut_lighthouse",
    "lighthouse",
    "drain",
    "preempt",
    "flip",
    "nan",
    "tail",
    "fork",
    "last",
    "lost",
    "rejoin",
    "least",
    "checkpoint",
    "save",
    "shape",
)
"""What is drawn from unless kinds are given."""
_SIZES = ("fork", "last", "long", "lost", "tail")

_NOT_IN_ROUNDS = ("long", "fork", "last", "rejoin", "checkpoint", "save", "shape")
ROUND_KINDS = (
    *(kind for kind in KINDS if kind not in _NOT_IN_ROUNDS),
    "alone",
    "joiner",
    "leave",
    "impatient",
)
"""The same with a semi-synchronous method."""

MODES = ("sync", "semi", "mixed")
_EVERY = 20  # with mixed modes, one of this many seeds has a semi-synchronous method


def is_semi(seed: int, mode: str) -> bool:
    """Return True if the schedule of a seed has a semi-synchronous method."""
    return mode == "semi" or (mode == "mixed" and seed % _EVERY == _EVERY - 1)


def draw(seed: int, kinds: Sequence[str] = (), mode: str = "sync") -> Schedule:
    """Return the schedule of a seed, with faults of these kinds; no kinds = all."""
    return _drawing(seed, kinds, mode).schedule(seed)


def drawn_kinds(seed: int, kinds: Sequence[str] = (), mode: str = "sync") -> list[str]:
    """Return the kinds of faults of a seed's schedule."""
    return _drawing(seed, kinds, mode).kinds


def _drawing(seed: int, kinds: Sequence[str], mode: str) -> _Draw:
    if is_semi(seed, mode):
        return _DrawRounds(seed, kinds or ROUND_KINDS)
    return _Draw(seed, kinds or KINDS)


def shrink(schedule: Schedule, problem: Problem, tries: int = 4, budget: int = 400) -> Schedule:
    """Return a smaller schedule that breaks the same promise.

    It has fewer faults, groups, ranks and steps, and no lag.

    Args:
        tries: scheduler seeds for each candidate.
        budget: largest total number of runs.
    """
    runs = 0
    best = schedule
    improved = True
    while improved and runs < budget:
        improved = False
        for candidate in _smaller(best):
            for number in range(tries):
                runs += 1
                attempt = dataclasses.replace(candidate, seed=best.seed + number)
                problems = attempt.run().problems
                if problems and problems[0].promise == problem.promise:
                    best, improved = attempt, True
                    break
            if improved or runs >= budget:
                break
    return best


def _smaller(schedule: Schedule) -> list[Schedule]:
    options, faults = schedule.options, schedule.faults
    found = [
        dataclasses.replace(schedule, faults=faults[:place] + faults[place + 1 :])
        for place in range(len(faults))
    ]
    for place, fault in enumerate(faults):
        found += [
            dataclasses.replace(schedule, faults=(*faults[:place], other, *faults[place + 1 :]))
            for other in fault.shorter()
        ]

    def change(**changes: Any) -> None:
        found.append(dataclasses.replace(schedule, options=dataclasses.replace(options, **changes)))

    used = (
        {value for fault in faults for value in _slots(fault)}
        | set(options.absent)
        | set(options.late)
    )
    last = options.groups - 1
    if options.groups > 2 and last not in used:
        config = {**options.fault_tolerance, "group_size": last}
        change(groups=last, fault_tolerance=config)
    if options.ranks > 1 and all(
        getattr(fault, name, 0) < options.ranks - 1
        for fault in faults
        for name in ("rank", "other")
    ):
        change(ranks=options.ranks - 1)
    if options.steps > 2:
        change(steps=options.steps - 1)
    if options.silent:
        change(silent=False)
    if options.late:
        change(late={})
    defaults = {"batch_policy": "shrink", "lr_policy": "none", "exchange_dtype": "float32"}
    for name, value in (defaults | {"should_quantize": False}).items():
        if options.fault_tolerance.get(name, value) != value:
            change(fault_tolerance={**options.fault_tolerance, name: value})
    if options.fault_tolerance.get("min_replica_size", 1) > 1:
        change(fault_tolerance={**options.fault_tolerance, "min_replica_size": 1}, min_replicas=1)
    if options.lag > 0.001:
        change(lag=options.lag / 4)
    return found


def _slots(fault: Fault) -> set[int]:
    slots = {getattr(fault, name) for name in ("slot", "a", "b") if hasattr(fault, name)} - {-1}
    return slots | set(getattr(fault, "slots", ()))
