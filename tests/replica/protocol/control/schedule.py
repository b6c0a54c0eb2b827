# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A schedule: a group, its agreements and notes, and the faults of its network."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.replica.protocol.control.garbage import BAD_BYTES, BAD_MESSAGES
from titan_ft.protocol.control.tree import find_parent


@dataclass(frozen=True)
class Kill:
    """A rank dies. Its neighbours see their connections end up to `late` seconds later."""

    at: float
    rank: int
    late: float


@dataclass(frozen=True)
class Freeze:
    """A rank does nothing for some seconds. Its connections stay."""

    at: float
    rank: int
    seconds: float


@dataclass(frozen=True)
class Cut:
    """The connection of a rank to its parent breaks. The first frames under way still arrive.

    Attributes:
        at: time in seconds; ignored if `frame` is set.
        frame: the connection breaks after the link's frame of this ordinal is sent; 0 = by time.
        child_late: seconds until the child sees the end.
        parent_late: seconds until the parent sees the end; it may get a new connection first.
    """

    at: float
    child: int
    frame: int
    child_late: float
    parent_late: float


@dataclass(frozen=True)
class Block:
    """The connection of a rank to its parent breaks, and no new one is made for some seconds.

    Attributes:
        refuses: attempts to connect fail at once. False: they hang until the time is over.
    """

    at: float
    child: int
    seconds: float
    refuses: bool


@dataclass(frozen=True)
class Slow:
    """Each frame between a rank and its parent takes `delay` seconds, for some seconds."""

    at: float
    child: int
    seconds: float
    delay: float


@dataclass(frozen=True)
class Garbage:
    """A bad frame arrives before the link's frame of this ordinal.

    Attributes:
        make: makes the bad frame from the good one.
    """

    child: int
    frame: int
    make: Callable[[bytes], bytes]


Fault = Kill | Freeze | Cut | Block | Slow | Garbage


@dataclass(frozen=True)
class PlannedNote:
    """A rank says something.

    Attributes:
        before: the note is said right before the rank joins this agreement; 0 = at the time `at`.
    """

    rank: int
    topic: str
    before: int
    at: float


@dataclass(frozen=True)
class Schedule:
    """What happens in one world.

    Attributes:
        seed: decides delays and all that is not written here.
        delay: seconds that a frame takes at most.
        pause: seconds that a rank takes at most before it joins the next agreement.
        leaves: the ranks end in order after the last agreement.
        one_host: after the end of a connection, a rank can see whether its neighbour's process is
            there.
        announced: numbers of the agreements that rank 0 announces.
        shared: number of notes that need all ranks. Each rank says each of them at some time.
        watched: a parent reports a child that is frozen for `SILENT_SECONDS`.
    """

    seed: int
    num_ranks: int
    fan_out: int
    agreements: int
    delay: float
    pause: float
    leaves: bool
    one_host: bool
    notes: tuple[PlannedNote, ...]
    faults: tuple[Fault, ...]
    announced: tuple[int, ...] = ()
    watched: bool = False
    shared: int = 0

    def is_announced(self, number: int) -> bool:
        """True if rank 0 decides this agreement without words."""
        return number in self.announced


def draw(seed: int) -> Schedule:
    """Draw a schedule. Groups are small in most of them, because small ones find most defects."""
    dice = random.Random(f"control {seed}")
    first, last = dice.choice(((1, 1), (2, 4), (2, 8), (5, 12), (8, 40)))
    num_ranks = dice.randint(first, last)
    agreements = dice.randint(1, 4)
    pause = dice.choice((0.0, 0.01, 0.2))
    delay = dice.choice((0.0, 0.002, 0.03))
    seconds = 0.1 + agreements * (pause + 4 * delay)
    return Schedule(
        seed=seed,
        num_ranks=num_ranks,
        fan_out=dice.choice((1, 2, 2, 3, 16)),
        agreements=agreements,
        delay=delay,
        pause=pause,
        leaves=dice.random() < 0.7,
        one_host=dice.random() < 0.3,
        notes=_draw_notes(dice, num_ranks, agreements, seconds),
        faults=() if num_ranks == 1 else _draw_faults(dice, num_ranks, seconds),
        # Not the last one: a rank leaves after an agreement in which all ranks took part.
        announced=tuple(number for number in range(1, agreements) if dice.random() < 0.4),
        watched=dice.random() < 0.5,
        shared=dice.choice((0, 0, 1, 2)),
    )


def _draw_notes(
    dice: random.Random,
    num_ranks: int,
    agreements: int,
    seconds: float,
) -> tuple[PlannedNote, ...]:
    many = dice.random() < 0.1
    number = dice.randint(20, 60) if many else dice.choice((0, 0, 1, 2, 3, 6))
    notes = []
    for ordinal in range(number):
        topic = str(ordinal if many else dice.randrange(3))
        rank, before = dice.randrange(num_ranks), dice.randint(0, agreements)
        at = dice.uniform(0, seconds)
        notes.append(PlannedNote(rank, topic, before, at))
    return tuple(notes)


_HARMLESS = (*("cut",) * 4, "block", "freeze", "slow", *("garbage",) * 2)
_DEADLY = (*("kill",) * 2, "long block", *("long cut",) * 2)


def _draw_faults(dice: random.Random, num_ranks: int, seconds: float) -> tuple[Fault, ...]:
    """Draw faults. In half of the schedules none of them may cost a rank."""
    kinds = dice.choice((_HARMLESS, _HARMLESS, (*_HARMLESS, *_DEADLY), ("kill",)))
    number = dice.choice((0, 1, 1, 2, 3, 5))
    faults: list[Fault] = []
    for _ in range(number):
        at = dice.uniform(0, seconds)
        child, rank = dice.randint(1, num_ranks - 1), dice.randrange(num_ranks)
        match dice.choice(kinds):
            case "cut":
                faults += _draw_cuts(dice, at, child)
            case "block":
                faults.append(Block(at, child, dice.uniform(0.05, 0.6), dice.random() < 0.5))
            case "long block":
                faults.append(Block(at, child, dice.uniform(0.8, 3), dice.random() < 0.5))
            case "long cut":
                faults.append(Cut(at, child, 0, child_late=dice.uniform(0.8, 2), parent_late=0.0))
            case "freeze":
                faults.append(Freeze(at, rank, dice.choice((0.1, 0.5, 2.0))))
            case "slow":
                faults.append(Slow(at, child, dice.uniform(0.1, 1), dice.uniform(0, 0.15)))
            case "kill":
                faults.append(Kill(at, rank, dice.choice((0.0, 0.0, 0.5))))
            case "garbage":
                make = dice.choice(dice.choice((BAD_BYTES, BAD_MESSAGES)))
                faults.append(Garbage(child, dice.randint(1, 10), make))
    return tuple(_drop_repeated_garbage(faults))


def _drop_repeated_garbage(faults: list[Fault]) -> list[Fault]:
    """Leave one bad frame on each link: a neighbour that sends several is lost with good reason."""
    links: set[int] = set()
    kept: list[Fault] = []
    for fault in faults:
        if isinstance(fault, Garbage):
            if fault.child in links:
                continue
            links.add(fault.child)
        kept.append(fault)
    return kept


def _draw_cuts(dice: random.Random, at: float, child: int) -> list[Fault]:
    """Draw one break of a connection, or several that follow each other."""
    cuts: list[Fault] = []
    frame = dice.randint(1, 12)
    interval = dice.choice((0.1, 0.1, 1.5))
    for ordinal in range(dice.choice((1, 1, 1, 3))):
        child_late = dice.choice((0.0, 0.0, dice.uniform(0, 0.4)))
        parent_late = dice.choice((0.0, dice.uniform(0, 0.4), 3.0))
        by_frame = dice.random() < 0.7
        cuts.append(
            Cut(
                at + ordinal * interval,
                child,
                frame + ordinal if by_frame else 0,
                child_late,
                parent_late,
            )
        )
    return cuts


def find_neighbours(rank: int, num_ranks: int, fan_out: int) -> list[int]:
    """Return the neighbours of a rank. A node finds its children in another way."""
    children = [child for child in range(num_ranks) if find_parent(child, fan_out) == rank]
    parent = find_parent(rank, fan_out)
    return children if parent is None else [parent, *children]
