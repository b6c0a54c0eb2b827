# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One end of the link between two neighbours in the control tree.

A broken connection costs no message. The link numbers its messages and keeps each one until the
neighbour has acknowledged it. A new connection sends the kept messages again, and the neighbour
drops the ones that it has.
"""

from __future__ import annotations

import math
from collections import deque

from titan_ft.protocol.control.message import Frame, Message, encode

GRACE_SECONDS = 1.0
"""A closed connection may be made again for this time. Then the neighbour is lost."""

START_SECONDS = 10.0
"""The same before the first connection. Of thousands of links that are made at once, some lose
their first packets."""

RETRY_SECONDS = 0.05
"""From one attempt to connect until the next one."""

ACKNOWLEDGE_EVERY = 16
"""After so many messages without an answer, a frame acknowledges them. Else the sender of many
notes would keep all of them."""

MAX_BAD_FRAMES = 3
"""After so many bad frames without a good message the neighbour is lost. It would send the same
message for ever."""


class TreeLink:
    """One end of a link.

    `Node` has one for each neighbour, and calls it under the node's lock. After a broken connection
    it keeps the messages that the neighbour has not acknowledged.

    Args:
        peer: rank of the neighbour.
        dials: True if this end makes the connections.

    Attributes:
        host: of the neighbour, for people; empty = not known.
        connected: a connection is there.
        peer_left: the neighbour has announced its end.
        ended: the neighbour is lost, or has ended in order.
        is_dialing: an attempt to connect is under way.
        deadline: time at which the grace is over; math.inf = the link works, or never did.
        next_dial: time of the next attempt to connect; math.inf = none is due.
    """

    def __init__(self, peer: int, dials: bool) -> None:
        self.peer = peer
        self.host = ""
        self.connected = False
        self.peer_left = False
        self.ended = False
        self.is_dialing = False
        self._has_met = False  # a connection was there
        self.deadline = math.inf
        self.next_dial = math.inf
        self._dials = dials
        self._dialed_at = -math.inf
        self._kept: deque[tuple[int, Message]] = deque()  # by number
        self._num_sent = 0
        self._num_received = 0
        self._num_acknowledged = 0  # of the received messages
        self._num_bad_frames = 0

    @property
    def num_kept(self) -> int:
        """Number of messages that the neighbour has not acknowledged."""
        return len(self._kept)

    @property
    def grace_seconds(self) -> float:
        """Time for which the neighbour may be without a connection."""
        if self._has_met:
            return GRACE_SECONDS
        return START_SECONDS

    @property
    def grace_end(self) -> float:
        """Time at which the neighbour is lost; math.inf = it is not to be given up.

        A connection, or an attempt to make one, must end first. A parent that is frozen, or that
        holds Python's lock for seconds, accepts a connection and answers late.
        """
        if self.connected or self.is_dialing:
            return math.inf
        return self.deadline

    # Connections

    def note_dial(self, now: float) -> None:
        """Note that an attempt to connect begins."""
        self._dialed_at = now
        self.next_dial = math.inf
        self.is_dialing = True

    def resume(self, host: str) -> list[bytes]:
        """Use a new connection from now on. Returns the frames to send on it, at least one.

        The neighbour trusts a connection at its first frame. A rank that has given the neighbour
        up closes each connection at once, and sends no frame.
        """
        self.host = host
        self.connected = True
        self.next_dial = math.inf
        self.is_dialing = False
        self._has_met = True
        if not self._kept:
            return [self._encode(0, None)]
        return [self._encode(number, message) for number, message in self._kept]

    def disconnect(self, now: float) -> None:
        """End a connection or an attempt to connect. The grace runs from the first end."""
        self.connected = False
        self.is_dialing = False
        self.deadline = min(self.deadline, now + self.grace_seconds)
        if self._dials:
            self.next_dial = max(now, self._dialed_at + RETRY_SECONDS)

    def end(self) -> None:
        """End the link."""
        self.connected = False
        self.is_dialing = False
        self.ended = True
        self.deadline = math.inf
        self.next_dial = math.inf
        self._kept.clear()

    # Messages

    def send(self, message: Message) -> list[bytes]:
        """Number and keep a message. Returns the frames to send now."""
        if self.ended:
            return []
        self._num_sent += 1
        self._kept.append((self._num_sent, message))
        if not self.connected:
            return []
        return [self._encode(self._num_sent, message)]

    def is_new(self, frame: Frame) -> bool:
        """Return True if the frame has a message that has not come before.

        Raises:
            ValueError: the neighbour cannot have sent this frame.
        """
        if frame.acknowledged > self._num_sent:
            raise ValueError(f"acknowledges message {frame.acknowledged} of {self._num_sent}")
        if frame.number > self._num_received + 1:
            raise ValueError(f"message {frame.number} comes after message {self._num_received}")
        return frame.number == self._num_received + 1

    def accept(self, frame: Frame) -> None:
        """Take a good frame: the link works."""
        self.deadline = math.inf
        while self._kept and self._kept[0][0] <= frame.acknowledged:
            self._kept.popleft()
        if frame.number > self._num_received:
            self._num_received = frame.number
            self._num_bad_frames = 0

    @property
    def has_too_many_bad_frames(self) -> bool:
        """True if the neighbour sends one bad frame after the other."""
        return self._num_bad_frames >= MAX_BAD_FRAMES

    def count_bad_frame(self) -> None:
        self._num_bad_frames += 1

    def acknowledge(self) -> list[bytes]:
        """Return the frames to send after a good one: none if a later message can acknowledge it.

        A frame that only acknowledges is not acknowledged.

        A neighbour that leaves ends at the acknowledgement of its last message.
        """
        enough = ACKNOWLEDGE_EVERY
        if self.peer_left:
            enough = 1
        num_unacknowledged = self._num_received - self._num_acknowledged
        if num_unacknowledged < enough or not self.connected:
            return []
        return [self._encode(0, None)]

    def _encode(self, number: int, message: Message | None) -> bytes:
        self._num_acknowledged = self._num_received
        return encode(Frame(number, self._num_received, message))
