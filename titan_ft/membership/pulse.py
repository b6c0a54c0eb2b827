# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Look, while an exchange waits, whether all of its members still send heartbeats, and have not gone on without it.

A process that dies closes its connections, and the others see it at once. A host that is frozen or has lost its network
closes nothing: an exchange with it waits for the process group's whole timeout, which must be longer than the slowest
step. And when it is back it may not be told (NCCL) that the others have left that exchange. The lighthouse knows more:
its status page has the time since each member's last heartbeat, and the members of the last quorum.
"""

from __future__ import annotations

import contextlib
import html
import http.client
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from titan_ft.protocol.member import Member, known_members, members_of_job
from titan_ft.run.lighthouse import LighthouseAddress, build_opener

logger = logging.getLogger(__name__)

SILENT_BEATS = 2
"""Heartbeat timeouts; one would be enough for the lighthouse, but breaking off costs a repetition.

With NCCL between the groups nothing else may tell of a member that has died, and one is all that is waited."""

CLOSEST = 10  # looks within an interval at most

_LOOKS_AT_A_LEAVER = 4
"""In succession, a quarter of the patience apart. A member that completes the exchange a moment before this one
asks for the next quorum too. Breaking off at the first look would leave this group without an update of the others."""

_HEARTBEAT = re.compile(r"^\s*(\S+): seen ([0-9.eE+-]+)s ago\s*$", re.MULTILINE)


_PAGE_BYTES = 4 << 20
"""Of the page at most; a group has 200. A stranger's name may have 4 MB, and stays on the page for ever."""


_MEMBER = re.compile(r"^\s*<b>(\S+)</b> <br/>\s*$", re.MULTILINE)  # of the last quorum
_ASKING = re.compile(r"\[(\d+)/\d+ participants healthy\]")  # of the next quorum


@dataclass(frozen=True)
class Status:
    """What the lighthouse's status page says.

    Attributes:
        heartbeats: seconds since each member's last heartbeat, by replica id.
        quorum: replica ids of the members of the last quorum; none = the lighthouse has yet to form one.
        num_asking: members with heartbeats that have asked for the next quorum. The page does not name them.
    """

    heartbeats: dict[str, float]
    quorum: tuple[str, ...] = ()
    num_asking: int = 0

    @classmethod
    def parse(cls, page: str) -> Status:
        """Read the page."""
        asking = _ASKING.search(page)
        heartbeats: dict[str, float] = {}
        for escaped, seconds in _HEARTBEAT.findall(page):
            name = html.unescape(escaped)
            # A name may have line feeds in it, and so hold a line about another group. The lighthouse's own line about
            # a group that lives is the youngest.
            heartbeats[name] = min(float(seconds), heartbeats.get(name, math.inf))
        return cls(
            heartbeats,
            tuple(html.unescape(name) for name in _MEMBER.findall(page)),
            int(asking.group(1)) if asking else 0,
        )


class StatusPage:
    """The lighthouse's status page.

    Args:
        lighthouse: its address, http://host:port, or what tells it anew each time.
    """

    def __init__(self, lighthouse: str | LighthouseAddress) -> None:
        self._lighthouse = lighthouse
        self._opener = build_opener(lighthouse.headers if isinstance(lighthouse, LighthouseAddress) else {})

    def read(self, timeout: float) -> Status | None:
        """Return what it says now; None if there is no answer."""
        try:
            with self._opener.open(f"{self._lighthouse}/status", timeout=timeout) as answer:
                page = answer.read(_PAGE_BYTES)
                if answer.length and len(page) < _PAGE_BYTES:  # the lighthouse ended in the midst of its answer
                    return None
                return Status.parse(page.decode(errors="replace"))
        except (OSError, ValueError, http.client.HTTPException):  # it is away, or went while it answered
            return None


class Watch:
    """Looks at something while an exchange is waited for. Costs nothing while one takes less than `interval` seconds.

    Args:
        name: of its thread.
        interval: returns the seconds until the first look.
        growth: how many times longer each pause between two looks at the same exchange is.
        look: returns what is to be done because something is wrong; None = nothing is. It is done once in an exchange,
            which does not end before it is: it must not wait for that.
    """

    def __init__(
        self,
        name: str,
        interval: Callable[[], float],
        growth: float,
        look: Callable[[], Callable[[], None] | None],
    ) -> None:
        self._name, self._interval, self._growth, self._look = name, interval, growth, look
        self._changed = threading.Condition()
        self._exchange: object | None = None  # the one under way
        self._pause = 0.0  # before the next look at it
        self._due = self._wakes = math.inf  # when to look next; when the thread does, unless it is notified
        self._closed = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while an exchange is waited for."""
        self._set(object())
        try:
            yield
        finally:
            self._set(None)

    def close(self) -> None:
        """Watch no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _set(self, exchange: object | None) -> None:
        with self._changed:
            self._exchange, self._due = exchange, math.inf
            if exchange is not None:
                self._pause = self._interval()
                self._due = time.monotonic() + self._pause
            if self._due < self._wakes:  # else the thread finds it when it wakes: no step has to switch to it
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (rest := self._due - time.monotonic()) > 0:
                    self._wakes = self._due
                    self._changed.wait(None if rest == math.inf else rest)
                if self._closed:
                    return
                exchange = self._exchange
            act = self._try(self._look)
            # The lock keeps this exchange from ending before it is acted on: the next one would be broken off.
            with self._changed:
                if self._exchange is exchange:
                    self._pause *= self._growth
                    self._due = math.inf if act else time.monotonic() + self._pause  # it is broken off once
                    if act:
                        self._try(act)

    def _try(self, do: Callable[[], Any]) -> Any:
        """Call it; a store that is gone or a full disk is not the end of all watching."""
        try:
            return do()
        except (OSError, RuntimeError):
            logger.exception("%s could not do all that it should", self._name)
            return None


class Pulse(Watch):
    """Watches whether the members of an exchange heartbeat, and whether they are still in it.

    Args:
        page: the lighthouse's.
        first: seconds until the first look.
        interval: the most between two: when a member would be silent long enough, it looks again.
        patience: seconds of silence after which a member counts as gone.
        own: returns the name of this group.
        members: returns the replica ids of the others in the exchange under way; none as long as they are not known.
        on_silence: called with the silent ones and their seconds, to break the exchange off.
        on_left_out: called with the slots of the groups that have gone on without this one, to break it off.
        on_leaver: called when a member has broken the exchange off and nothing else tells, to break it off here too;
            None = something else does.
    """

    def __init__(
        self,
        page: StatusPage,
        first: float,
        interval: float,
        patience: float,
        own: Callable[[], Member],
        members: Callable[[], Collection[str]],
        on_silence: Callable[[dict[str, float]], None],
        on_left_out: Callable[[list[int]], None],
        on_leaver: Callable[[], None] | None,
    ) -> None:
        self._page, self._patience, self._own, self._members = page, patience, own, members
        self._on_silence, self._on_left_out, self._on_leaver = on_silence, on_left_out, on_leaver
        self._longest = interval
        self._leaver: tuple[object, int] = (None, 0)  # an exchange, and the looks in succession that found one there
        super().__init__("titan_ft_pulse", lambda: first, 1.0, self._look_at_page)

    def _look_at_page(self) -> Callable[[], None] | None:
        exchange, (seen_in, looks) = self._exchange, self._leaver
        self._leaver = (exchange, 0)
        members = self._members()
        if not members:
            return None
        status = self._page.read(self._patience)
        if status is None:
            return None  # nothing is known, the exchange has its timeout
        own = self._own()
        if slots := find_successors(own, known_members(members, own.token), status.quorum):
            return partial(self._on_left_out, slots)
        if silent := self._find_silent(own, members, status.heartbeats):
            return partial(self._on_silence, silent)
        if self._on_leaver is not None and has_leaver(own, members, status, self._patience):
            self._leaver = (exchange, looks + 1 if exchange is seen_in else 1)
            if self._leaver[1] == _LOOKS_AT_A_LEAVER:
                return self._on_leaver
            self._pause = self._patience / _LOOKS_AT_A_LEAVER
            return None
        rest = self._patience - max((status.heartbeats.get(name, 0.0) for name in members), default=0.0)
        self._pause = min(self._longest, max(rest, self._longest / CLOSEST))
        return None

    def _find_silent(self, own: Member, members: Collection[str], heartbeats: dict[str, float]) -> dict[str, float]:
        if heartbeats.get(own.replica_id, 0.0) > self._patience / 2:
            return {}  # this group is alive, so it is the lighthouse, or the network to it, that is late
        # A member that is not listed may not have reached a lighthouse that was just started again: it gets time.
        return {name: heartbeats[name] for name in members if heartbeats.get(name, 0.0) > self._patience}


def find_successors(own: Member, others: Collection[Member], quorum: Collection[str]) -> list[int]:
    """Return the slots of the groups that have left an exchange of `own` with `others`, and gone on; none if not.

    The lighthouse's last quorum is then a later one than that of the exchange, whatever their ids (a lighthouse that
    was started again counts anew). One of strangers says nothing, nor does one of groups that have come meanwhile: they
    have met without any of `others`, who are in the exchange as before, in the midst of a long step.
    """
    left = {member.slot for member in others}
    if own.replica_id in quorum:
        return []
    return sorted({member.slot for member in members_of_job(own, quorum)} & left)


def has_leaver(own: Member, members: Collection[str], status: Status, patience: float) -> bool:
    """Say whether a member of an exchange has left it: it asks for the next quorum while this group still waits.

    A group that has found another one silent breaks the exchange off, and may be wrong. Over NCCL its abort reaches
    nobody, and the members that live would wait for each other until their timeout. The page counts those that ask and
    does not name them, so that all groups outside of the exchange, of any job, are taken to ask as well. While one of
    those heartbeats and does not ask, a leaver is not seen.

    Args:
        members: replica ids of the other members of the exchange.
        patience: seconds of silence after which a group asks no more.
    """
    inside = {own.replica_id, *members}
    outside = [name for name, seconds in status.heartbeats.items() if name not in inside and seconds < 2 * patience]
    return status.num_asking > len(outside)


def find_outsiders(own: Member, members: Collection[Member], status: Status, beat: float) -> list[int]:
    """Return the slots of the job's groups that have been heard of for the last `beat` seconds, and are no `members`.

    A group asks for a quorum between two steps only: until then those who ask may be given one without it.
    """
    inside = {member.slot for member in members}
    return sorted({member.slot for member in find_living(own, status, beat)} - inside)


def find_cut_off(own: Member, members: Collection[Member], status: Status, step: int) -> list[Member]:
    """Return the job's groups that were last heard of with a report of dead links and more than `step` updates.

    No `members`. If they live they are outside (see `Partition`): they send no heartbeats until the links are back, or
    the groups at the other ends are gone.
    """
    inside = {member.slot for member in members}
    known = sorted(members_of_job(own, status.heartbeats), key=lambda member: member.age)
    newest = {member.slot: member for member in known if member.slot not in inside}
    return [member for member in newest.values() if member.report is not None and member.report.step > step]


def find_living(own: Member, status: Status, beat: float) -> list[Member]:
    """Return the job's groups that have been heard of for the last `beat` seconds, the oldest process first."""
    living = [name for name, seconds in status.heartbeats.items() if seconds < beat]
    return sorted(members_of_job(own, living), key=lambda member: member.age)


def find_ages(own: Member, status: Status, beat: float) -> tuple[dict[int, float], dict[int, float]] | None:
    """Return the seconds since each of the job's groups was last heard of, and when its newest process began; by slot.

    None if this group's own heartbeats are late: then it is the lighthouse that does not hear, or this process did not
    run, and the silence of others says nothing.
    """
    if status.heartbeats.get(own.replica_id, beat) >= beat:
        return None
    ages: dict[int, float] = {}
    started: dict[int, float] = {}
    for name, seconds in status.heartbeats.items():
        for member in members_of_job(own, [name]):
            ages[member.slot] = min(seconds, ages.get(member.slot, seconds))
            started[member.slot] = max(member.started, started.get(member.slot, member.started))
    return ages, started


def expects_former(own: Member, status: Status) -> bool:
    """Say whether a former process of this group is in the last quorum."""
    return any(
        member.slot == own.slot and member.process != own.process for member in members_of_job(own, status.quorum)
    )
