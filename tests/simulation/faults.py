# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Faults of the simulated world. Each fault is a value that can be printed, stored and replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from tests.simulation.network import LIGHTHOUSE, Node
from titan_ft.membership import seat
from titan_ft.membership.pulse import SILENT_BEATS
from titan_ft.protocol.control.link import GRACE_SECONDS

if TYPE_CHECKING:
    from tests.simulation.rank import Rank
    from tests.simulation.world import World


@dataclass(frozen=True)
class Fault:
    """A fault of the simulated world.

    Attributes:
        at: time of the fault, in virtual seconds.
    """

    at: float
    spoils: ClassVar[bool] = False  # the fault makes gradients that are not finite
    only_leaves: ClassVar[bool] = False  # the fault breaks nothing: groups leave in order
    kinds: ClassVar[dict[str, type[Fault]]] = {}

    def __init_subclass__(cls) -> None:
        Fault.kinds[cls.__name__] = cls

    @property
    def ends(self) -> float:
        """Return when the world works as before the fault.

        A killed process restarts by itself.
        """
        return self.at + float(getattr(self, "seconds", 0.0))

    def inject(self, world: World) -> None:
        """Inject the fault. The world's code calls this, so it must not block."""
        raise NotImplementedError

    def excuses(self, error: str, rank: Rank, world: World) -> bool:
        """Return True if this fault justifies that a rank ends with this error."""
        return False

    def concerns(self, slot: int) -> bool:
        """Return True if this fault may void a group's own work.

        It may if the group or one of its links fails.
        """
        return not isinstance(self, Kill | KillGroups) and slot in {
            getattr(self, name, None) for name in ("slot", "a", "b")
        }

    def __str__(self) -> str:
        words = [
            f"{field.name}={_text(getattr(self, field.name))}"
            for field in fields(self)
            if field.name != "at"
        ]
        return f"{type(self).__name__} at {self.at:.3f} s: {' '.join(words)}"

    def shorter(self) -> list[Fault]:
        """Return simpler versions of this fault, for shrinking."""
        return []


def _text(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _at_moment(
    world: World,
    moment: str,
    slot: int,
    act: Callable[[Node], None],
    node: Node,
    *,
    breaks: bool = True,
) -> None:
    """Act now, or at the group's next moment of this kind."""
    if moment:
        world.when(moment, slot, act, breaks=breaks)
    else:
        act(node)


@dataclass(frozen=True)
class Kill(Fault):
    """SIGKILL of one rank at the group's next `moment`.

    A moment is "exchange", "vote", "rendezvous", "serving" or "fetching".
    """

    slot: int  # -1 = the first group at that moment
    rank: int
    moment: str = ""

    def inject(self, world: World) -> None:
        def act(node: Node) -> None:
            group = world.groups.get(node[0])
            if group is not None:
                world.say("fault", f"kills g{node[0]}r{self.rank}")
                group.ranks[self.rank].process.end()

        _at_moment(world, self.moment, self.slot, act, (self.slot, self.rank))

    def shorter(self) -> list[Fault]:
        return [Kill(self.at, self.slot, self.rank)] if self.moment and self.slot >= 0 else []


@dataclass(frozen=True)
class KillGroups(Fault):
    """SIGKILL of all ranks of several groups at once.

    Attributes:
        of: slot of the group at whose next `moment` the groups die; -1 = any group.
        for_good: the groups do not restart.
    """

    slots: tuple[int, ...]
    moment: str = ""
    of: int = -1
    for_good: bool = False

    def inject(self, world: World) -> None:
        def act(node: Node) -> None:
            for slot in self.slots:
                group = world.groups.get(slot)
                if self.for_good:
                    world.gone[slot] = "lost"
                for rank in group.ranks if group is not None else ():
                    rank.process.end()

        _at_moment(
            world, self.moment, self.slots[0] if self.of < 0 else self.of, act, (self.slots[0], 0)
        )


@dataclass(frozen=True)
class Freeze(Fault):
    """SIGSTOP of one rank, and SIGCONT after `seconds`.

    Attributes:
        rank: -1 = all ranks of the group.
    """

    slot: int
    rank: int
    seconds: float
    moment: str = ""

    def inject(self, world: World) -> None:
        def act(node: Node) -> None:
            group = world.groups.get(self.slot)
            if group is None:
                return
            chosen = group.ranks if self.rank < 0 else [group.ranks[self.rank]]
            processes = [rank.process for rank in chosen if not rank.process.frozen]
            for process in processes:
                process.freeze()
            world.silenced(group, chosen, self.seconds)

            def thaw() -> None:
                world.say("fault", f"thaws g{self.slot}r{self.rank}")
                for process in processes:
                    process.thaw()
                world.thaws(group)

            world.kernel.after(self.seconds, thaw)

        _at_moment(world, self.moment, self.slot, act, (self.slot, self.rank))

    def excuses(self, error: str, rank: Rank, world: World) -> bool:
        """Return True for an error that a frozen rank explains.

        A group with one frozen rank ends. A sibling may notice the loss before rank 0 has ended.
        """
        patience = SILENT_BEATS * world.config["heartbeat_timeout_ms"] / 1000
        is_silent = self.rank >= 0 and self.seconds >= patience
        return error == "RankLostError" and rank.slot == self.slot and is_silent

    def shorter(self) -> list[Fault]:
        return [Freeze(self.at, self.slot, self.rank, self.seconds, "")] if self.moment else []


@dataclass(frozen=True)
class Hang(Fault):
    """The training thread of one rank stops for good. Its heartbeats go on."""

    slot: int
    rank: int

    def inject(self, world: World) -> None:
        group = world.groups.get(self.slot)
        if group is not None:
            group.ranks[self.rank].hangs = True


@dataclass(frozen=True)
class Slow(Fault):
    """The backward of one rank takes longer for a while."""

    slot: int
    rank: int
    delay: float
    seconds: float

    def inject(self, world: World) -> None:
        group = world.groups.get(self.slot)
        if group is None:
            return
        rank = group.ranks[self.rank]
        rank.slowness = self.delay

        def end() -> None:
            rank.slowness = 0.0
            world.disturb()

        world.kernel.after(self.seconds, end)


@dataclass(frozen=True)
class Cut(Fault):
    """The network between two groups is dead, in one direction or both.

    Attributes:
        rank: the link of this rank is dead; negative = the links of all ranks.
        flaps: seconds for which the link alternately works and fails; 0 = it stays dead.
        other: rank of `b`; -1 = the same as that of `a`.
    """

    a: int
    b: int
    rank: int
    one_way: bool
    seconds: float
    flaps: float = 0.0
    other: int = -1

    def inject(self, world: World) -> None:
        ranks = range(world.options.ranks)
        pairs: list[tuple[Node, Node]] = []
        for i in ranks:
            for j in ranks:
                if self.rank < 0 or (i, j) == (
                    self.rank,
                    self.rank if self.other < 0 else self.other,
                ):
                    pairs.append(((self.a, i), (self.b, j)))
                    if not self.one_way:
                        pairs.append(((self.b, j), (self.a, i)))
        _cut_for(world, pairs, self.seconds, self.flaps)

    def shorter(self) -> list[Fault]:
        found: list[Fault] = []
        if self.flaps:
            found.append(replace(self, flaps=0.0))
        if self.one_way:
            found.append(replace(self, one_way=False))
        return found


@dataclass(frozen=True)
class CutInside(Fault):
    """The network between two ranks of one group is dead, in one direction or both."""

    slot: int
    rank: int
    other: int
    one_way: bool
    seconds: float

    def inject(self, world: World) -> None:
        a, b = (self.slot, self.rank), (self.slot, self.other)
        _cut_for(world, [(a, b)] if self.one_way else [(a, b), (b, a)], self.seconds, 0.0)
        group = world.groups.get(self.slot)
        if group is not None and 0 in (self.rank, self.other):  # rank 0's host watches the others
            world.silenced(group, [group.ranks[self.rank or self.other]], self.seconds)

    def excuses(self, error: str, rank: Rank, world: World) -> bool:
        """Return True for an error that the cut explains.

        A rank that is not built yet loses nothing. After a cut that is longer than the grace, the
        group loses a rank.
        """
        if rank.slot != self.slot:
            return False
        if error == "RankLostError":
            return self.seconds >= GRACE_SECONDS
        return error == "DistNetworkError" and not rank.is_built

    def shorter(self) -> list[Fault]:
        return [replace(self, one_way=False)] if self.one_way else []


@dataclass(frozen=True)
class CutLighthouse(Fault):
    """The network between one group and the lighthouse is dead, in one direction or both."""

    slot: int
    way: str  # "to", "from" or "both"
    seconds: float

    def inject(self, world: World) -> None:
        node = (self.slot, 0)
        pairs = [(node, LIGHTHOUSE)] if self.way != "from" else []
        pairs += [(LIGHTHOUSE, node)] if self.way != "to" else []
        _cut_for(world, pairs, self.seconds, 0.0)

    def excuses(self, error: str, rank: Rank, world: World) -> bool:
        return error == "LighthouseError" and rank.slot == self.slot


def _cut_for(world: World, pairs: list[tuple[Node, Node]], seconds: float, flaps: float) -> None:
    ends = world.kernel.now + seconds

    def cut() -> None:
        for source, target in pairs:
            world.network.cut(source, target)
        world.kernel.after(min(flaps, ends - world.kernel.now) if flaps else seconds, mend)

    def mend() -> None:
        for source, target in pairs:
            world.network.mend(source, target)
        world.disturb()
        if flaps and world.kernel.now + flaps < ends:
            world.kernel.after(flaps, cut)
        else:
            world.say("fault", f"mends {pairs[0][0]}-{pairs[0][1]}")

    cut()


@dataclass(frozen=True)
class LossyLink(Fault):
    """Packets between two groups are lost at random.

    TCP sends them again, and waits longer after each further loss.
    """

    a: int
    b: int
    chance: float
    seconds: float

    def inject(self, world: World) -> None:
        ranks = range(world.options.ranks)
        pairs = [((self.a, i), (self.b, j)) for i in ranks for j in ranks]
        pairs += [(target, source) for source, target in pairs]
        for source, target in pairs:
            world.network.lose(source, target, self.chance)

        def end() -> None:
            for source, target in pairs:
                world.network.lose(source, target, 0.0)
            world.disturb()

        world.kernel.after(self.seconds, end)


@dataclass(frozen=True)
class Reset(Fault):
    """A connection of one rank to another group is reset at the group's next `moment`.

    No process dies.
    """

    slot: int  # -1 = the first group at that moment
    rank: int
    moment: str = ""

    def inject(self, world: World) -> None:
        def act(node: Node) -> None:
            group = world.groups.get(node[0])
            if group is not None and group.ranks[self.rank].met:
                world.say("fault", f"resets a connection of g{node[0]}r{self.rank}")
                group.ranks[self.rank].reset_connection()

        _at_moment(world, self.moment, self.slot, act, (self.slot, self.rank))

    def shorter(self) -> list[Fault]:
        return [Reset(self.at, self.slot, self.rank)] if self.moment and self.slot >= 0 else []


@dataclass(frozen=True)
class ResetOwn(Fault):
    """The connections on which a rank waits for an answer in its own group are reset.

    They lead to rank 0's server and to the group's store. The rank's requests have arrived there.
    The reset comes at the group's next `moment`. No process dies.
    """

    slot: int  # -1 = the first group at that moment
    rank: int
    moment: str = ""

    def inject(self, world: World) -> None:
        def act(node: Node) -> None:
            if node[0] in world.groups:
                world.say(
                    "fault", f"resets the connections of g{node[0]}r{self.rank} within its group"
                )
                world.network.reset((node[0], self.rank))

        _at_moment(world, self.moment, self.slot, act, (self.slot, self.rank))

    def excuses(self, error: str, rank: Rank, world: World) -> bool:
        """Return True for an error that the reset explains.

        A rank that has not reached the lighthouse yet loses nothing, and restarts.
        """
        return error == "DistNetworkError" and self.slot in (-1, rank.slot) and not rank.is_built

    def shorter(self) -> list[Fault]:
        return [ResetOwn(self.at, self.slot, self.rank)] if self.moment and self.slot >= 0 else []


@dataclass(frozen=True)
class SlowLink(Fault):
    """Each message between two groups takes longer."""

    a: int
    b: int
    delay: float
    seconds: float

    def inject(self, world: World) -> None:
        pairs = [
            pair
            for i in range(world.options.ranks)
            for j in range(world.options.ranks)
            for pair in (((self.a, i), (self.b, j)), ((self.b, j), (self.a, i)))
        ]
        for source, target in pairs:
            world.network.slow(source, target, self.delay)

        def end() -> None:
            for source, target in pairs:
                world.network.slow(source, target, 0.0)
            world.disturb()

        world.kernel.after(self.seconds, end)


@dataclass(frozen=True)
class LighthouseDies(Fault):
    """The lighthouse dies, and another one listens at its address after `seconds`."""

    seconds: float

    def inject(self, world: World) -> None:
        world.lighthouse.die()

        def start() -> None:
            world.say("fault", "the lighthouse is back")
            world.disturb()
            world.lighthouse.start()

        world.kernel.after(self.seconds, start)

    def excuses(self, error: str, rank: Rank, world: World) -> bool:
        return error == "LighthouseError" and self.seconds >= seat.CONNECT_SECONDS / 2


@dataclass(frozen=True)
class DrainGroup(Fault):
    """A scheduler sends SIGTERM to one rank, or to all ranks within milliseconds.

    The group may restart.

    Attributes:
        slot: -1 = the first group that reaches the moment.
        rank: -1 = all ranks.
        moment: "outside" (of the largest clique) or "exchange"; empty = at once.
    """

    slot: int
    comes_back: bool
    rank: int = -1
    moment: str = ""
    only_leaves: ClassVar[bool] = True

    def inject(self, world: World) -> None:
        def act(node: Node) -> None:
            group = world.groups.get(node[0])
            if group is not None and not group.over:
                ranks = [self.rank] if self.rank >= 0 else range(len(group.ranks))
                world.tell_to_leave(group, ranks, self.comes_back)

        _at_moment(world, self.moment, self.slot, act, (self.slot, 0), breaks=False)

    def shorter(self) -> list[Fault]:
        return [replace(self, rank=-1)] if self.rank >= 0 else []


@dataclass(frozen=True)
class Flip(Fault):
    """A bit flips in a rank's weights or momentum at the group's next `moment`.

    At the moment "naming", the group is a donor.
    """

    slot: int  # -1 = the first group at that moment
    rank: int
    momentum: bool
    place: int
    bit: int
    moment: str = ""

    def inject(self, world: World) -> None:
        _at_moment(
            world, self.moment, self.slot, partial(self._flip, world), (self.slot, self.rank)
        )

    def _flip(self, world: World, node: Node) -> None:
        group = world.groups.get(node[0])
        # Before the first step, any state is as good as another. After the last digest, no group
        # compares the bytes any more.
        if group is None or not group.ready or not 0 < world.furthest < world.options.steps:
            return
        if group.ranks[self.rank].held[0] == 0:
            return
        state = group.ranks[self.rank].state
        state.flip(self.momentum, self.place, self.bit)
        state.tainted = True
        world.flipped.add(group.slot)
        world.say("fault", f"flips a bit of g{group.slot}r{self.rank}")

    def excuses(self, error: str, rank: Rank, world: World) -> bool:
        """Return True for a tie.

        With as many corrupt holders as sound ones, the right bytes cannot be determined.
        """
        return error == "DivergedError" and rank.tied

    def shorter(self) -> list[Fault]:
        return [replace(self, moment="")] if self.moment and self.slot >= 0 else []


@dataclass(frozen=True)
class Publish(Fault):
    """Another process publishes its latest complete checkpoint at the next `moment` ("listing")."""

    moment: str = ""

    def inject(self, world: World) -> None:
        def act(node: Node) -> None:
            step = world.folder.publish() if world.folder is not None else 0
            world.say(
                "fault",
                f"publishes the checkpoint of step {step}" if step else "has no newer checkpoint",
            )

        _at_moment(world, self.moment, -1, act, LIGHTHOUSE)

    def shorter(self) -> list[Fault]:
        return [Publish(self.at)] if self.moment else []


@dataclass(frozen=True)
class TakeAway(Fault):
    """Another process removes the latest checkpoint, and publishes one of that step again.

    Attributes:
        moment: "listing", "chosen" (by a rank), or "loading".
        seconds: until the next publication; 0 = never.
    """

    moment: str
    seconds: float

    def inject(self, world: World) -> None:
        folder = world.folder
        assert folder is not None, "this world has no folder of checkpoints"

        def act(node: Node) -> None:
            step = folder.take_away()
            world.say(
                "fault",
                f"removes the checkpoint of step {step}" if step else "there is no checkpoint",
            )
            if step and self.seconds:
                world.kernel.after(self.seconds, partial(folder.put_back, step))

        _at_moment(world, self.moment, -1, act, LIGHTHOUSE)

    def shorter(self) -> list[Fault]:
        return [replace(self, seconds=0.0)] if self.seconds else []


@dataclass(frozen=True)
class NotFinite(Fault):
    """The next gradients of one rank have a NaN."""

    slot: int
    rank: int
    times: int
    spoils: ClassVar[bool] = True

    def inject(self, world: World) -> None:
        group = world.groups.get(self.slot)
        if group is not None:
            group.ranks[self.rank].spoiled = self.times

    def excuses(self, error: str, rank: Rank, world: World) -> bool:
        return error == "NonFiniteError" and rank.slot == self.slot and self.times >= 3

    def shorter(self) -> list[Fault]:
        return [NotFinite(self.at, self.slot, self.rank, 1)] if self.times > 1 else []


def as_json(fault: Fault) -> dict[str, Any]:
    """Return a fault as JSON values."""
    return {"kind": type(fault).__name__} | {
        field.name: getattr(fault, field.name) for field in fields(fault)
    }


def from_json(values: dict[str, Any]) -> Fault:
    """Return the fault that `as_json` has encoded."""
    values = dict(values)
    kind: Any = Fault.kinds[values.pop("kind")]
    fault: Fault = kind(
        **{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    )
    return fault
