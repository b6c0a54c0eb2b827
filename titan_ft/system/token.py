# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The run's token: a secret that all processes of the run share, and prove on each connection."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from titan_ft.config import ConfigError
from titan_ft.system.ownership import ROOT, find_own_users

TOKEN_ENV = "TITAN_FT_TOKEN"
TOKEN_FILE_ENV = "TITAN_FT_TOKEN_FILE"
"""Variable with the name of a file that contains the token. The value of a variable is shown in the
description of a pod, the content of a file is not."""
MIN_BYTES = 16
"""A stranger who poses as a donor sees an HMAC with the token, and can try short tokens offline."""
_MAX_BYTES = 4096  # of the file


def read_token(environ: Mapping[str, str]) -> str:
    """Return the token; empty = none is set.

    Raises:
        ConfigError: the token's file cannot be read, or another user can read it.
    """
    token = environ.get(TOKEN_ENV, "")
    name = environ.get(TOKEN_FILE_ENV, "")
    if token or not name:
        return token
    return read_token_file(Path(name), TOKEN_FILE_ENV)


def read_token_file(path: Path, option: str) -> str:
    """Return the token in a file.

    Args:
        option: names the file's option in an error.

    Raises:
        ConfigError: the file cannot be read, or another user can read it.
    """
    try:
        with path.open(encoding="utf-8") as file:
            check_private(path, os.fstat(file.fileno()), option)
            return file.read(_MAX_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(
            f"{option} must name a file with the token, got {path} ({reason})"
        ) from error


def check_token(token: str, *, is_local: bool) -> None:
    """Refuse a token that does not keep other hosts out.

    Args:
        is_local: all connections that the token protects stay on this host.

    Raises:
        ConfigError: the token is missing or short.
    """
    if is_local or len(token.encode()) >= MIN_BYTES:
        return
    got = f"got {len(token.encode())} bytes" if token else "got nothing"
    raise ConfigError(
        f"{TOKEN_ENV} must be set to the same secret for the lighthouse and all groups, at least "
        f"{MIN_BYTES} bytes, {got}; any host on the network could hand out weights, or guess it: "
        "take the output of openssl rand -hex 32"
    )


def check_private(path: Path, found: os.stat_result, option: str) -> None:
    """Refuse a secret's file that another user can read or change.

    The group may read a file of root: Kubernetes provides a Secret in that way to other users.

    Args:
        found: status of the open file.
        option: names the file's option in the error.

    Raises:
        ConfigError: another user can.
    """
    rule = f"{option} must be readable by you alone, got"
    if found.st_uid not in find_own_users(path.parent, found.st_uid):
        raise ConfigError(
            f"{rule} {path}, which belongs to user {found.st_uid}; copy it to a file of yours",
        )
    mode = stat.S_IMODE(found.st_mode)
    forbidden = stat.S_IRWXO | stat.S_IWGRP
    is_mine = found.st_uid != ROOT or os.geteuid() == ROOT
    if is_mine:
        forbidden |= stat.S_IRGRP
    if mode & forbidden:
        raise ConfigError(f"{rule} mode {mode:o} of {path}; chmod 600 it")
