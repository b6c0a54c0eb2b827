# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The pulse: looks for members of an exchange that fall silent, or that have left the exchange.

A process that dies closes its connections, and the other groups notice at once. A host that is
frozen or cut off closes nothing. An exchange with it would wait for the process group's whole
timeout, which must be longer than the slowest step. When such a host is back, NCCL may not show it
that the others have left the exchange. The lighthouse's *status page* shows both: it has the time
since each member's last heartbeat, and the members of the last quorum.

The functions at the end read a page: which groups live, are outside, or have gone on.

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
"""A member is silent after this many heartbeat timeouts. The lighthouse needs only one, but
breaking off an exchange costs a repetition.

With NCCL between the groups there may be no other sign of a death, so there one is enough."""

CLOSEST = 10
"""Largest number of looks at the page in one interval."""

_LOOKS_AT_A_LEAVER = 4
"""Looks in a row that must see a leaver, a quarter of the patience apart. A member that completes
the exchange a moment before this group also asks for the next quorum. If the first look broke the
exchange off, this group would miss an update of the others."""

_PAGE_BYTES = 4 << 20
"""Longest part of the page that is read; a group has 200 bytes. A stranger's name may have 4 MB,
and stays on the page for ever."""

_HEARTBEAT = re.compile(r"^\s*(\S+): seen ([0-9.eE+-]+)s ago\s*$", re.MULTILINE)
_MEMBER = re.compile(r"^\s*<b>(\S+)</b> <br/>\s*$", re.MULTILINE)  # of the last quorum
_ASKING = re.compile(r"\[(\d+)/\d+ participants healthy\]")  # of the next quorum


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
            # A stranger's name may contain line feeds, and so hold a line about another group. The
            # lighthouse's own line about a living group is the youngest one.
            heartbeats[name] = min(float(text), heartbeats.get(name, math.inf))
        asking = _ASKING.search(page)
        num_asking = int(asking.group(1)) if asking is not None else 0
        quorum = tuple(html.unescape(name) for name in _MEMBER.findall(page))
        return cls(heartbeats, quorum, num_asking)


class StatusPage:
    """The lighthouse's status page. Any thread may read it.

    Args:
        lighthouse: its address as http://host:port, or an object that follows the lighthouse.
    """

    def __init__(self, lighthouse: str | LighthouseAddress) -> None:
        self._lighthouse = lighthouse
        headers = lighthouse.headers if isinstance(lighthouse, LighthouseAddress) else {}
        self._opener = build_opener(headers)

    def read(self, timeout: float) -> LighthouseStatus | None:
        """Return the present content; None if the lighthouse does not answer completely."""
        try:
            with self._opener.open(f"{self._lighthouse}/status", timeout=timeout) as answer:
                page = answer.read(_PAGE_BYTES)
                if answer.length and len(page) < _PAGE_BYTES:
                    return None  # the lighthouse ended in the middle of its answer
                return LighthouseStatus.parse(page.decode(errors="replace"))
        except (OSError, ValueError, http.client.HTTPException):
            return None


class Watch:
    """Looks for a problem while an exchange waits, on a thread of its own.

    A watch costs nothing while exchanges take less than the first pause. The exchange's thread and
    the training thread enter `watching`. If a look fails with an error of the network or the disk,
    the error is logged, and the watch goes on.

    Args:
        name: name of the thread.
        first_pause: returns the seconds from the start of an exchange until the first look.
        growth: factor from one pause to the next in the same exchange.
        look: returns an action if there is a problem, else None. The action runs once in an
            exchange. The exchange does not end before the action returns, so the action must not
            wait for its end.
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
        self._changed = threading.Condition()  # guards the fields below
        self._exchange: object | None = None  # the exchange under way
        self._pause = 0.0  # before the next look at it
        self._due = math.inf  # time of the next look
        self._wakes_at = math.inf  # when the thread's wait ends without a notification
        self._closed = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch an exchange during the block."""
        self._set_exchange(object())
        try:
            yield
        finally:
            self._set_exchange(None)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _set_exchange(self, exchange: object | None) -> None:
        with self._changed:
            self._exchange = exchange
            self._due = math.inf
            if exchange is not None:
                self._pause = self._first_pause()
                self._due = time.monotonic() + self._pause
            if self._due < self._wakes_at:
                # Otherwise the thread sees the new time when it wakes. So an ordinary step does not
                # have to switch to this thread.
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            exchange = self._await_due()
            if exchange is None:
                return
            act = self._call_logged(self._look)
            # The lock keeps this exchange from ending before the action. Otherwise the action would
            # break off the next exchange.
            with self._changed:
                if self._exchange is not exchange:
                    continue
                self._pause *= self._growth
                self._due = time.monotonic() + self._pause
                if act is not None:
                    self._due = math.inf
                    self._call_logged(act)

    def _await_due(self) -> object | None:
        """Wait for the time of the next look. Return the exchange; None = the watch is closed."""
        with self._changed:
            while not self._closed:
                remaining = self._due - time.monotonic()
                if remaining <= 0:
                    return self._exchange
                self._wakes_at = self._due
                self._changed.wait(None if remaining == math.inf else remaining)
            return None

    def _call_logged(self, call: Callable[[], Any]) -> Any:
        """Make a call, and log its error. A store that is gone, or a full disk, ends no watch."""
        try:
            return call()
        except (OSError, RuntimeError):
            logger.exception("%s could not do all that it should", self._name)
            return None


class Pulse(Watch):
    """Breaks off an exchange whose members are silent, or have left it.

    `Membership` creates one on rank 0 of each group.

    Args:
        page: the lighthouse's page.
        first: seconds until the first look at an exchange.
        interval: longest pause between two looks. The pulse looks earlier if a member would be
            silent for long enough.
        patience: seconds of silence after which a member counts as gone.
        own: returns the name of this group.
        members: returns the replica ids of the other members in the exchange under way; none as
            long as they are not known.
        on_silence: called with the silent members and their seconds, to break the exchange off.
        on_left_out: called with the slots of the groups that have gone on without this group, to
            break the exchange off.
        on_leaver: called when a member has broken the exchange off, to break it off here too. None
            = the process group itself shows that.
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
        self._leaver_exchange: object | None = None  # the exchange in which the last look saw one
        self._num_leaver_looks = 0  # in a row, in that exchange
        super().__init__("titan_ft_pulse", lambda: first, 1.0, self._look_at_page)

    def _look_at_page(self) -> Callable[[], None] | None:
        exchange = self._exchange
        former_looks = self._num_leaver_looks if self._leaver_exchange is exchange else 0
        self._leaver_exchange = exchange
        self._num_leaver_looks = 0
        members = self._members()
        if not members:
            return None
        status = self._page.read(self._patience)
        if status is None:
            return None  # nothing is known; the exchange has a timeout of its own
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
        """Return the pause until the member that has been silent longest would count as gone."""
        silence = max((status.heartbeats.get(name, 0.0) for name in members), default=0.0)
        shortest_pause = self._longest_pause / CLOSEST
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
            # This group lives, so the lighthouse or the network to it is late.
            return {}
        silent = {}
        for name in members:
            # A member without a line may not have reached a lighthouse that was just started again.
            seconds = heartbeats.get(name, 0.0)
            if seconds > self._patience:
                silent[name] = seconds
        return silent


def find_successors(
    own: Member,
    others: Collection[Member],
    quorum: Collection[str],
) -> list[int]:
    """Return the slots of groups that have left an exchange of `own` with `others`, and gone on.

    These groups are in the lighthouse's last quorum, and this group is not. So that quorum is later
    than the quorum of the exchange, whatever the ids are: a lighthouse that was started again
    counts from the beginning. A quorum without any of `others` shows nothing. Its members may be
    strangers, or groups that have come meanwhile, while `others` still wait in the exchange for a
    long step.
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

    A group that has found another group silent breaks the exchange off, and may be wrong. Over NCCL
    nobody notices its abort, and the living members would wait for each other until their timeout.
    The page counts the groups that ask, but does not name them. So all groups outside the exchange,
    of any job, are assumed to ask as well. While one of these sends heartbeats and does not ask, a
    leaver is not seen.

    Args:
        members: replica ids of the other members of the exchange.
        patience: seconds of silence after which a group counts as gone.
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

    A group asks for a quorum only between two steps. Until then, the groups that ask may be given a
    quorum without it.
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
    """Return the job's groups outside `members` whose last name reports dead links.

    Only groups with more than `step` updates. If they live, they are outside (see `Partition`):
    they send no heartbeats until the links work again, or the groups at the other ends are gone.
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

    None if this group's own heartbeats are late. Then the lighthouse does not hear, or this process
    did not run, and the silence of other groups shows nothing.
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
