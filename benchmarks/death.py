# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Kill one attempt of a group by SIGKILL in the set-up of its process group with the other groups.

Workers load this module as their `experimental.custom_import`. The attempt dies when the other
groups already wait for its connections.
"""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

from benchmarks.gpu_plan import DEADLY_ATTEMPT
from benchmarks.run import VICTIM
from titan_ft.membership.process_group import AbortableNccl, BreakableGloo


def _die_in_set_up(owner: type) -> None:
    configure = owner.configure  # type: ignore[attr-defined]  # both process groups have it

    @functools.wraps(configure)
    def wrapped(
        self: Any,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None,
        group_rank: int,
        group_world_size: int,
        global_ranks: list[int],
    ) -> None:
        attempt = int(os.environ.get("TITAN_FT_ATTEMPT", "0"))
        if (
            world_size > 1
            and attempt == DEADLY_ATTEMPT
            and global_ranks[rank] // group_world_size == VICTIM
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        configure(
            self,
            store_addr,
            replica_id,
            rank,
            world_size,
            quorum_id,
            group_rank,
            group_world_size,
            global_ranks,
        )

    owner.configure = wrapped  # type: ignore[attr-defined]


_die_in_set_up(BreakableGloo)
_die_in_set_up(AbortableNccl)
