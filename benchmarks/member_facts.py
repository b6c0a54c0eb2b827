# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Facts of a member of an exchange, without a protocol behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from titan_ft.gradients.exchange import ExchangeResult, GradientExchange
from titan_ft.protocol.member import Quorum

Tell = Callable[[Quorum], tuple[list[float], bytes]]


@dataclass(frozen=True)
class MemberFacts:
    """A member's row and message, by the quorum."""

    tell: Tell

    def complete(self, quorum: Quorum, gave: bool, came: float) -> tuple[list[float], bytes]:
        """Return row and message."""
        return self.tell(quorum)


def exchange_with(
    exchange: GradientExchange, tell: Tell, gives: bool = True, due: bool = True
) -> ExchangeResult:
    """Complete an exchange; make a whole one of the local gradients if none is under way."""
    if not exchange.is_launched:
        exchange.launch(0 if gives else None, may_update=due)
    return exchange.finish(MemberFacts(tell))
