# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Resolve the configs of two launches, from TOML, flags and defaults.

A program (`python -m titan_ft.resolved_config`) for `launch --resume`, which must not import
torchtitan.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from titan_ft.config import ConfigError, flat_values


def resolve(flags: Sequence[str]) -> dict[str, Any]:
    """Return the values of a job with these torchtitan flags, by full names; every rule is checked.

    Raises:
        ConfigError: there is a mistake in the config.
    """
    from titan_ft.training.job_config import read_config

    return dict(flat_values(read_config(*flags).to_dict()))


def resolve_earlier(flags: Sequence[str]) -> dict[str, Any]:
    """Return the values of an earlier launch, which has trained with them.

    The rules are not checked again: the tokenizer, for example, may have moved since.

    Raises:
        ConfigError: a name or a type is wrong.
    """
    from titan_ft.training.job_config import parse_config

    toml = next(flag for flag in flags if flag.startswith("--job.config_file=")).partition("=")[2]
    try:
        config = parse_config(flags, toml)
    except ConfigError as error:
        raise ConfigError(
            f"--resume must be able to read the config of the earlier launch, got: {error}"
        ) from error
    method = config.fault_tolerance.semi_sync_method
    config.fault_tolerance.semi_sync_method = method and method.lower()  # as the check does
    return dict(flat_values(config.to_dict()))


def main() -> None:
    """Read the flags of two launches from stdin, as JSON, and print the values of both, or their
    mistake.
    """
    answers = os.dup(1)
    os.dup2(2, 1)  # what imports and the user's config module print is no answer
    earlier, now = json.load(sys.stdin)
    try:
        answer: dict[str, Any] = {"now": resolve(now), "earlier": resolve_earlier(earlier)}
    except ConfigError as error:
        answer = {"error": str(error)}
    with open(answers, "w") as file:
        json.dump(answer, file, default=str)


if __name__ == "__main__":
    main()
