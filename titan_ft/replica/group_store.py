# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What the ranks of a group write for each other in the group's store. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time


def set_for_all(store: TCPStore, key: str) -> None:
    """Set a key, and return when every rank that asks from now on finds it.

    TCPStore.set() returns when the key is sent. A sibling that asks at once, on its own connection, may be answered
    without it (in one of a hundred tries on one host), and two ranks would decide differently.
    """
    store.set(key, "1")
    store.check([key])  # the server answers after it has taken in what came before on this connection
