# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One end of the link between two neighbours in the control tree. No clock, no socket.

A link lives longer than its connections, and no message is lost when a connection breaks: the link
numbers its messages, and keeps each one until the neighbour has acknowledged it. A new connection
sends the kept messages again, and the neighbour drops those that it has already.

After the end of a connection, the neighbour has a *grace* of some seconds. If there is no new
connection by then, the neighbour is lost.
"""

from __future__ import annotations

import math
from collections import deque

from titan_ft.protocol.control.message import Frame, Message, encode

GRACE_SECONDS = 1.0
"""Time for a new connection after the end of a connection. After this time the neighbour is
lost."""

START_SECONDS = 10.0
"""The same for the first connection. It is longer, because of thousands of connections that are
made at once, some lose their first packets."""

RETRY_SECONDS = 0.05
"""Time from one attempt to connect to the next one."""

ACKNOWLEDGE_EVERY = 16
"""Usually the next message to the neighbour acknowledges the received ones. If there is none, a
frame without a message acknowledges every so many messages. Otherwise a neighbour that sends many
notes would keep all of them."""

MAX_BAD_FRAMES = 3
"""After so many bad frames without a good message between them, the neighbour is lost. Otherwise it
would send the same bad message on each new connection, for ever."""


class TreeLink:
    """One end of a link.

    `Node` has one for each neighbour, and calls it under the lock of the node's caller.

    Args:
        peer: rank of the neighbour.
        dials: True if this end makes the connections.

    Attributes:
        host: name of the neighbour's host, for people; empty = not known.
        connected: True if there is a connection.
        peer_left: True if the neighbour has sent a `LeaveMessage`.
        ended: True if the neighbour is lost, or has ended in order.
        is_dialing: True while an attempt to connect is under way.
        deadline: time at which the grace is over; math.inf = there is a working connection, or
            there was no connection and no attempt yet.
        next_dial: time of the next attempt to connect; math.inf = none is planned.
    """

    def __init__(self, peer: int, dials: bool) -> None:
        self.peer = peer
        self.host = ""
        self.connected = False
        self.peer_left = False
        self.ended = False
        self.is_dialing = False
        self._has_been_connected = False
        self.deadline = math.inf
        self.next_dial = math.inf
        self._dials = dials
        self._dialed_at = -math.inf
        # The messages that the neighbour has not acknowledged, with their numbers.
        self._kept: deque[tuple[int, Message]] = deque()
        self._num_sent = 0  # number of the last message to the neighbour
        self._num_received = 0  # number of the last message from the neighbour
        self._num_acknowledged = 0  # number of received messages that this end has acknowledged
        self._num_bad_frames = 0  # since the last good message

    @property
    def num_kept(self) -> int:
        """Number of messages that the neighbour has not acknowledged."""
        return len(self._kept)

    @property
    def grace_seconds(self) -> float:
        """Length of the grace."""
        if self._has_been_connected:
            return GRACE_SECONDS
        return START_SECONDS

    @property
    def grace_end(self) -> float:
        """Time at which the neighbour is lost; math.inf = it cannot be lost now.

        While there is a connection, or an attempt to make one, the neighbour cannot be lost. A
        parent that is frozen, or that holds Python's lock for seconds, accepts a connection and
        answers late.
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

        The first frame shows the neighbour that this rank has accepted the connection (`accept`). A
        rank that has reported the neighbour as lost closes each new connection without a frame.
        """
        self.host = host
        self.connected = True
        self.next_dial = math.inf
        self.is_dialing = False
        self._has_been_connected = True
        if not self._kept:
            return [self._encode(0, None)]
        return [self._encode(number, message) for number, message in self._kept]

    def disconnect(self, now: float) -> None:
        """A connection, or an attempt to connect, has ended.

        The grace begins at the first of several such ends, until a connection works again.
        """
        self.connected = False
        self.is_dialing = False
        self.deadline = min(self.deadline, now + self.grace_seconds)
        if self._dials:
            self.next_dial = max(now, self._dialed_at + RETRY_SECONDS)

    def end(self) -> None:
        """End the link for good."""
        self.connected = False
        self.is_dialing = False
        self.ended = True
        self.deadline = math.inf
        self.next_dial = math.inf
        self._kept.clear()

    # Messages

    def send(self, message: Message) -> list[bytes]:
        """Number and keep a message. Returns the frames to send now, if there is a connection."""
        if self.ended:
            return []
        self._num_sent += 1
        self._kept.append((self._num_sent, message))
        if not self.connected:
            return []
        return [self._encode(self._num_sent, message)]

    def is_new(self, frame: Frame) -> bool:
        """Return True if the frame has a message that has not been received before.

        Raises:
            ValueError: the neighbour cannot have sent this frame.
        """
        if frame.acknowledged > self._num_sent:
            raise ValueError(f"acknowledges message {frame.acknowledged} of {self._num_sent}")
        if frame.number > self._num_received + 1:
            raise ValueError(f"message {frame.number} comes after message {self._num_received}")
        return frame.number == self._num_received + 1

    def accept(self, frame: Frame) -> None:
        """Take a good frame. It shows that the connection works, and acknowledges messages."""
        self.deadline = math.inf
        while self._kept and self._kept[0][0] <= frame.acknowledged:
            self._kept.popleft()
        if frame.number > self._num_received:
            self._num_received = frame.number
            self._num_bad_frames = 0

    @property
    def has_too_many_bad_frames(self) -> bool:
        """True if the neighbour has sent `MAX_BAD_FRAMES` bad frames in a row."""
        return self._num_bad_frames >= MAX_BAD_FRAMES

    def count_bad_frame(self) -> None:
        self._num_bad_frames += 1

    def acknowledge(self) -> list[bytes]:
        """Return the frames to send after a good frame.

        There are none if a later message to the neighbour can acknowledge the frame. A frame that
        only acknowledges is not acknowledged itself.
        """
        max_unacknowledged = ACKNOWLEDGE_EVERY
        if self.peer_left:
            # Acknowledge at once, because the neighbour waits for this before it exits.
            max_unacknowledged = 1
        num_unacknowledged = self._num_received - self._num_acknowledged
        if num_unacknowledged < max_unacknowledged or not self.connected:
            return []
        return [self._encode(0, None)]

    def _encode(self, number: int, message: Message | None) -> bytes:
        self._num_acknowledged = self._num_received
        return encode(Frame(number, self._num_received, message))
