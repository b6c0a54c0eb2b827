# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The pulse: looks for members of an exchange that fall silent, or that have left the exchange.

A process that dies closes its connections, and the other groups notice this at once. A host that is
frozen or cut off closes no connection. There are two problems with such a host:

1. The other members of the exchange would wait for the process group's whole timeout, which must be
   longer than the slowest step.
2. When the host is back, it waits in the exchange, and NCCL may not show that the other members
   have left it.

The lighthouse's *status page* shows both problems: it contains the time since each group's last
heartbeat, and the members of the last quorum. The functions at the end of this module find groups
on a page.

See docs/failures.md.
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
from typing import Any, NamedTuple

from titan_ft.protocol.member import Member, known_members, members_of_job
from titan_ft.run.lighthouse import LighthouseAddress, build_opener

logger = logging.getLogger(__name__)

SILENT_BEATS = 2
"""A member is silent after this many heartbeat timeouts. For the lighthouse, one timeout is enough.
Here it is more, because an abort costs a repetition of the exchange. With NCCL one timeout is
enough, because there may be no other sign of a death (`Membership._watch_pulse`)."""

MAX_LOOKS_PER_INTERVAL = 10
"""Limit of the number of looks at the page in one interval."""

_LOOKS_AT_A_LEAVER = 4
"""A *leaver* is a member that has left the exchange, and asks for the next quorum. So many looks in
a row must see one, a quarter of the patience apart. The reason: a member that completes the
exchange a moment before this group asks for the next quorum, too. If one look were enough, this
group would abort, and miss an update of the others."""

_PAGE_BYTES = 4 << 20
"""Limit of the bytes that are read. A group takes 200 bytes of the page. A stranger's name may have
4 MB, and stays on the page for ever."""

_HEARTBEAT = re.compile(r"^\s*(\S+): seen ([0-9.eE+-]+)s ago\s*$", re.MULTILINE)
# A member of the last quorum.
_MEMBER = re.compile(r"^\s*<b>(\S+)</b> <br/>\s*$", re.MULTILINE)
# The number of groups that have asked for the next quorum.
_ASKING = re.compile(r"\[(\d+)/\d+ participants healthy\]")


@dataclass(frozen=True)
class LighthouseStatus:
    """The content of the lighthouse's status page.

    Attributes:
        heartbeats: seconds since each member's last heartbeat, by replica id.
        quorum: replica ids of the members of the last quorum; empty before the first quorum.
        num_asking: members with heartbeats that have asked for the next quorum. The page does not
            name them.
    """

    heartbeats: dict[str, float]
    quorum: tuple[str, ...] = ()
    num_asking: int = 0

    @classmethod
    def parse(cls, page: str) -> LighthouseStatus:
        """Read the page."""
        heartbeats: dict[str, float] = {}
        for escaped, text in _HEARTBEAT.findall(page):
            name = html.unescape(escaped)
            # A stranger's name may contain line feeds, and so forge a line about another group. Use
            # the youngest heartbeat, so that no forged line makes a living group look dead.
            heartbeats[name] = min(float(text), heartbeats.get(name, math.inf))
        asking = _ASKING.search(page)
        num_asking = int(asking.group(1)) if asking is not None else 0
        quorum = tuple(html.unescape(name) for name in _MEMBER.findall(page))
        return cls(heartbeats, quorum, num_asking)


class StatusPage:
    """The lighthouse's status page. Any thread may read it.

    Args:
        lighthouse: address of the lighthouse as http://host:port, or an object that follows the
            lighthouse when it moves.
    """

    def __init__(self, lighthouse: str | LighthouseAddress) -> None:
        self._lighthouse = lighthouse
        headers = lighthouse.headers if isinstance(lighthouse, LighthouseAddress) else {}
        self._opener = build_opener(headers)

    def read(self, timeout: float) -> LighthouseStatus | None:
        """Return the present content; None = the lighthouse gave no complete answer."""
        try:
            with self._opener.open(f"{self._lighthouse}/status", timeout=timeout) as answer:
                page = answer.read(_PAGE_BYTES)
                if answer.length and len(page) < _PAGE_BYTES:
                    return None  # The lighthouse ended in the middle of its answer.
                return LighthouseStatus.parse(page.decode(errors="replace"))
        except (OSError, ValueError, http.client.HTTPException):
            return None


class Watch:
    """Looks for a problem at intervals while an exchange waits, on a thread of its own.

    The exchange's thread and the training thread enter `watching` for each exchange. If the
    exchange takes less than the first pause, the watch's thread does not run. If a look fails with
    an error of the network or the disk, the error is logged, and the watch continues.

    Args:
        name: name of the thread.
        first_pause: returns the seconds from the start of an exchange until the first look.
        growth: factor from one pause to the next in the same exchange.
        look: returns a function that handles the problem, or None if there is no problem. The
            function is called at most once in an exchange. The exchange does not end before the
            function returns, so the function must not wait for the end of the exchange.
    """

    def __init__(
        self,
        name: str,
        first_pause: Callable[[], float],
        growth: float,
        look: Callable[[], Callable[[], None] | None],
    ) -> None:
        self._name = name
        self._first_pause = first_pause
        self._growth = growth
        self._look = look
        self._condition = threading.Condition()  # the lock of the fields below
        self._exchange: object | None = None  # identifies the exchange under way
        self._pause = 0.0  # seconds before the next look
        self._next_look_at = math.inf
        self._wait_ends_at = math.inf  # time at which the thread wakes up without a notification
        self._closed = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch an exchange while the block runs."""
        self._set_exchange(object())
        try:
            yield
        finally:
            self._set_exchange(None)

    def close(self) -> None:
        """End the thread."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _set_exchange(self, exchange: object | None) -> None:
        with self._condition:
            self._exchange = exchange
            self._next_look_at = math.inf
            if exchange is not None:
                self._pause = self._first_pause()
                self._next_look_at = time.monotonic() + self._pause
            if self._next_look_at < self._wait_ends_at:
                # Notify only if the thread would wake up too late. Otherwise each step would cost a
                # switch to the watch's thread.
                self._condition.notify_all()

    def _run(self) -> None:
        while True:
            exchange = self._await_next_look()
            if exchange is None:
                return
            act = self._call_logged(self._look)
            # Hold the lock during the action, so that this exchange does not end before it.
            # Otherwise the action would abort the next exchange.
            with self._condition:
                if self._exchange is not exchange:
                    continue
                self._pause *= self._growth
                self._next_look_at = time.monotonic() + self._pause
                if act is not None:
                    self._next_look_at = math.inf
                    self._call_logged(act)

    def _await_next_look(self) -> object | None:
        """Wait for the time of the next look. Return the exchange; None = the watch is closed."""
        with self._condition:
            while not self._closed:
                remaining = self._next_look_at - time.monotonic()
                if remaining <= 0:
                    return self._exchange
                self._wait_ends_at = self._next_look_at
                self._condition.wait(None if remaining == math.inf else remaining)
            return None

    def _call_logged(self, call: Callable[[], Any]) -> Any:
        """Make a call, and log its error. A full disk, for example, must not end the watch."""
        try:
            return call()
        except (OSError, RuntimeError):
            logger.exception("%s could not do all that it should", self._name)
            return None


class Pulse(Watch):
    """Aborts an exchange if other members are silent, or have left it.

    `Membership` creates one on rank 0 of each group.

    Args:
        page: the lighthouse's page.
        first: seconds until the first look at an exchange.
        interval: limit of the pause between two looks. The pause is shorter if a member would count
            as gone before its end.
        patience: seconds without a heartbeat after which a member counts as gone.
        own: returns the name of this group.
        members: returns the names of the other members of the exchange under way; none while they
            are not known.
        on_silence: aborts the exchange. Called with the seconds of silence of the silent members,
            by name.
        on_left_out: aborts the exchange. Called with the slots of members that have left the
            exchange, and have a new quorum without this group.
        on_leaver: aborts the exchange. Called when a member has left the exchange, and asks for the
            next quorum. None = the process group itself shows that a member has left.
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
        self._page = page
        self._patience = patience
        self._own = own
        self._members = members
        self._on_silence = on_silence
        self._on_left_out = on_left_out
        self._on_leaver = on_leaver
        self._longest_pause = interval
        # The exchange of the last look, and the number of looks in a row that saw a leaver in it.
        self._leaver_exchange: object | None = None
        self._num_leaver_looks = 0
        super().__init__("titan_ft_pulse", lambda: first, 1.0, self._look_at_page)

    def _look_at_page(self) -> Callable[[], None] | None:
        exchange = self._exchange
        former_looks = 0
        if self._leaver_exchange is exchange:
            former_looks = self._num_leaver_looks
        self._leaver_exchange = exchange
        self._num_leaver_looks = 0
        members = self._members()
        if not members:
            return None
        status = self._page.read(self._patience)
        if status is None:
            return None  # Nothing is known, and the exchange has a timeout of its own.
        own = self._own()
        successors = find_successors(own, known_members(members, own.token), status.quorum)
        if successors:
            return partial(self._on_left_out, successors)
        silent = self._find_silent(own, members, status.heartbeats)
        if silent:
            return partial(self._on_silence, silent)
        if self._on_leaver is not None and has_leaver(own, members, status, self._patience):
            self._num_leaver_looks = former_looks + 1
            if self._num_leaver_looks == _LOOKS_AT_A_LEAVER:
                return self._on_leaver
            self._pause = self._patience / _LOOKS_AT_A_LEAVER
            return None
        self._pause = self._find_pause(members, status)
        return None

    def _find_pause(self, members: Collection[str], status: LighthouseStatus) -> float:
        """Return the pause after which the next member may count as gone."""
        silence = max((status.heartbeats.get(name, 0.0) for name in members), default=0.0)
        shortest_pause = self._longest_pause / MAX_LOOKS_PER_INTERVAL
        pause = max(self._patience - silence, shortest_pause)
        return min(self._longest_pause, pause)

    def _find_silent(
        self,
        own: Member,
        members: Collection[str],
        heartbeats: dict[str, float],
    ) -> dict[str, float]:
        """Return the seconds of silence of each silent member."""
        if heartbeats.get(own.replica_id, 0.0) > self._patience / 2:
            # This group is alive, so the lighthouse or the network to it is late.
            return {}
        silent = {}
        for name in members:
            # The page does not show a member that has not reached a restarted lighthouse yet. Such
            # a member is not silent.
            seconds = heartbeats.get(name, 0.0)
            if seconds > self._patience:
                silent[name] = seconds
        return silent


def find_successors(
    own: Member,
    others: Collection[Member],
    quorum: Collection[str],
) -> list[int]:
    """Return the slots of members that have left an exchange and have a new quorum without `own`.

    If `own` is not in the lighthouse's last quorum, this quorum is not that of the exchange.
    Members of the exchange that are in it have therefore left the exchange. The quorums' numbers
    are of no use here, because a restarted lighthouse numbers its quorums from the beginning.

    Args:
        others: the other members of the exchange.
        quorum: names in the lighthouse's last quorum. If none of `others` is among them, the quorum
            shows nothing: its members may be strangers, or groups that have just come.
    """
    if own.replica_id in quorum:
        return []
    left = {member.slot for member in others}
    return sorted({member.slot for member in members_of_job(own, quorum)} & left)


def has_leaver(
    own: Member,
    members: Collection[str],
    status: LighthouseStatus,
    patience: float,
) -> bool:
    """True if a member asks for the next quorum while this group still waits in the exchange.

    A group that finds another group silent aborts the exchange, perhaps by mistake. Over NCCL the
    other members do not notice its abort, and would wait for each other until their timeout.

    The page contains the number of the groups that ask, but not their names. So assume that all
    living groups outside of the exchange ask. If more groups than these ask, one of them is a
    member. As long as a living group outside of the exchange does not ask, one leaver goes
    unnoticed.

    Args:
        members: names of the other members of the exchange.
        patience: seconds without a heartbeat after which a group counts as gone.
    """
    inside = {own.replica_id, *members}
    num_outside = 0
    for name, seconds in status.heartbeats.items():
        if name not in inside and seconds < 2 * patience:
            num_outside += 1
    return status.num_asking > num_outside


def find_outsiders(
    own: Member,
    members: Collection[Member],
    status: LighthouseStatus,
    heartbeat_timeout: float,
) -> list[int]:
    """Return the slots of the job's living groups that are not among `members`.

    There may be such groups because a group asks for a quorum only between two steps. The
    lighthouse may give the other groups a quorum before that.
    """
    inside = {member.slot for member in members}
    living = find_living(own, status, heartbeat_timeout)
    return sorted({member.slot for member in living} - inside)


def find_cut_off(
    own: Member,
    members: Collection[Member],
    status: LighthouseStatus,
    step: int,
) -> list[Member]:
    """Return the groups outside of `members` whose last name reports dead links.

    Such a group may be alive: it sends no heartbeats until its links work again, or until the
    groups at the other ends are gone (see `Partition`).

    Args:
        step: only groups with more committed updates than this count.
    """
    inside = {member.slot for member in members}
    newest: dict[int, Member] = {}
    for member in sorted(members_of_job(own, status.heartbeats), key=lambda each: each.age):
        if member.slot not in inside:
            newest[member.slot] = member
    return [each for each in newest.values() if each.report is not None and each.report.step > step]


def find_living(own: Member, status: LighthouseStatus, heartbeat_timeout: float) -> list[Member]:
    """Return the job's groups with a heartbeat within the timeout, the oldest process first."""
    names = [name for name, seconds in status.heartbeats.items() if seconds < heartbeat_timeout]
    return sorted(members_of_job(own, names), key=lambda member: member.age)


class GroupAges(NamedTuple):
    """The ages of each of the job's groups on a status page, by slot.

    Attributes:
        silence: seconds since the group's last heartbeat.
        started: Unix seconds at which its newest process started.
    """

    silence: dict[int, float]
    started: dict[int, float]


def find_ages(own: Member, status: LighthouseStatus, heartbeat_timeout: float) -> GroupAges | None:
    """Return the silence and the start of each of the job's groups.

    None if this group's own heartbeats are late. Then the lighthouse does not get heartbeats, or
    this process did not run, so the silence of other groups shows nothing.
    """
    if status.heartbeats.get(own.replica_id, heartbeat_timeout) >= heartbeat_timeout:
        return None
    ages = GroupAges({}, {})
    for name, seconds in status.heartbeats.items():
        for member in members_of_job(own, [name]):
            slot = member.slot
            ages.silence[slot] = min(seconds, ages.silence.get(slot, seconds))
            ages.started[slot] = max(member.started, ages.started.get(slot, member.started))
    return ages


def expects_former(own: Member, status: LighthouseStatus) -> bool:
    """True if a former process of this group is in the last quorum."""
    for member in members_of_job(own, status.quorum):
        if member.slot == own.slot and member.process != own.process:
            return True
    return False
