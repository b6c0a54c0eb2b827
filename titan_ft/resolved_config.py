# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Resolve the configs of two launches, from TOML, flags and defaults.

`launch --resume` runs this program (`python -m titan_ft.resolved_config`), because the launcher
itself must not import torchtitan.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from titan_ft.config import ConfigError, flat_values


def resolve(flags: Sequence[str]) -> dict[str, Any]:
    """Return the values of a job with these torchtitan flags, by full names. Checks every rule.

    Raises:
        ConfigError: the config has a mistake.
    """
    from titan_ft.training.job_config import read_config

    return dict(flat_values(read_config(*flags).to_dict()))


def resolve_earlier(flags: Sequence[str]) -> dict[str, Any]:
    """Return the values of an earlier launch, by full names.

    The rules are not checked again: the tokenizer, for example, may have moved since.

    Raises:
        ConfigError: a name or a type is wrong.
    """
    from titan_ft.training.job_config import parse_config

    prefix = "--job.config_file="
    toml = next(flag for flag in flags if flag.startswith(prefix)).removeprefix(prefix)
    try:
        config = parse_config(flags, toml)
    except ConfigError as error:
        raise ConfigError(
            f"--resume must be able to read the config of the earlier launch, got: {error}"
        ) from error
    method = config.fault_tolerance.semi_sync_method
    if method:
        # `titan_ft.config.validate` changes the value in the same way.
        config.fault_tolerance.semi_sync_method = method.lower()
    return dict(flat_values(config.to_dict()))


def main() -> None:
    """Read the flags of two launches from stdin, and print the values of both, or the mistake.

    Both are JSON.
    """
    answers = os.dup(1)
    # Imports and the user's config module may print. Their output must not be in the answer.
    os.dup2(2, 1)
    earlier, now = json.load(sys.stdin)
    try:
        answer: dict[str, Any] = {"now": resolve(now), "earlier": resolve_earlier(earlier)}
    except ConfigError as error:
        answer = {"error": str(error)}
    with open(answers, "w") as file:
        json.dump(answer, file, default=str)


if __name__ == "__main__":
    main()
