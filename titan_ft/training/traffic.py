# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The time of an exchange and of a heal over given links: numbers only, without torch."""

from __future__ import annotations

from dataclasses import dataclass

LINK_GBPS = 25.0
HOST_LINK_GBPS = 200.0


@dataclass(frozen=True)
class Traffic:
    """The traffic of the largest rank, by the sizes of its parts in bytes, and its time.

    Attributes:
        moved: bytes of an exchange, before they are sent.
        sent: bytes sent to other groups in an exchange; as many are received.
        staged: bytes copied between GPU and host memory in an exchange.
        state: bytes of a heal.
        link_gbps: gigabits per second from rank to rank between groups.
        host_link_gbps: gigabits per second between a GPU and its host's memory.
        served_gbps: gigabits per second that the donors serve to a joiner's rank.
    """

    moved: int
    sent: int
    staged: int
    state: int
    link_gbps: float
    host_link_gbps: float
    served_gbps: float

    @property
    def exchange_seconds(self) -> float:
        return transfer_seconds(self.sent, self.link_gbps) + transfer_seconds(
            self.staged, self.host_link_gbps
        )

    @property
    def copy_seconds(self) -> float:
        """Return for how long donors copy their state, and a joiner loads it."""
        return transfer_seconds(self.state, self.host_link_gbps)

    @property
    def fetch_seconds(self) -> float:
        return transfer_seconds(self.state, self.served_gbps)


def transfer_seconds(num_bytes: int, gbps: float) -> float:
    return num_bytes * 8 / (gbps * 1e9)


def served_gbps(link_gbps: float, donors: int, limit_mbps: float) -> float:
    """Return the gigabits per second that donors send to a rank, at most its link's. A limit of 0
    is none.
    """
    return min(link_gbps, donors * limit_mbps / 1000) if limit_mbps else link_gbps
