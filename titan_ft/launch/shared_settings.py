# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Settings of `[fault_tolerance]` that not only the workers need, but the launcher and the
lighthouse as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from titan_ft.config import TABLE, ConfigError, FaultTolerance, read_flags
from titan_ft.launch.lighthouse import check_settings
from titan_ft.options import LighthouseSettings
from titan_ft.round_settings import ROUND_JOIN_TIMEOUT_MS

SHARED_FIELDS: dict[str, type] = {
    **{setting.name: int for setting in fields(LighthouseSettings)},
    "min_replica_size": int,
    "drain_timeout_seconds": float,
    "lighthouse": str,
    "job_id": str,
    "process_group": str,
    "semi_sync_method": str,
}
"""Fields of the table that the launcher reads too, with the types of their values in flags."""


def table_overrides(worker_args: Sequence[str]) -> dict[str, Any]:
    """Return the values of `SHARED_FIELDS` that the workers' flags set.

    Raises:
        ConfigError: a value is not of its field's type.
    """
    found: dict[str, Any] = {}
    for name, value in read_flags(worker_args):
        section, _, key = name.partition(".")
        if section != TABLE or key not in SHARED_FIELDS:
            continue
        try:
            found[key] = SHARED_FIELDS[key](value)
        except ValueError as error:
            kind = "a whole number" if SHARED_FIELDS[key] is int else "a number"
            raise ConfigError(
                f"--{TABLE}.{key} must be {kind}, got {value!r}; correct it"
            ) from error
    return found


def lighthouse_settings(table: Mapping[str, Any]) -> LighthouseSettings:
    """Return the lighthouse's settings from the [fault_tolerance] table and its defaults.

    Raises:
        ConfigError: a setting is not > 0.
    """
    defaults = FaultTolerance()
    join_timeout_ms = table.get("join_timeout_ms", defaults.join_timeout_ms)
    if table.get("semi_sync_method") and join_timeout_ms > 0:
        join_timeout_ms = max(join_timeout_ms, ROUND_JOIN_TIMEOUT_MS)
    settings = LighthouseSettings(
        # Not min_replica_size, which the groups check themselves. If the lighthouse waited for more
        # groups, the last group at the end of a run would wait for a quorum for ever.
        min_replicas=1,
        heartbeat_timeout_ms=table.get("heartbeat_timeout_ms", defaults.heartbeat_timeout_ms),
        join_timeout_ms=join_timeout_ms,
    )
    check_settings(settings)
    return settings
