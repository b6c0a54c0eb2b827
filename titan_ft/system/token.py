# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The run's token: a secret that all its processes share, and that each connection proves."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from titan_ft.config import ConfigError
from titan_ft.system.ownership import ROOT, find_own_users

TOKEN_ENV = "TITAN_FT_TOKEN"
TOKEN_FILE_ENV = "TITAN_FT_TOKEN_FILE"
"""Names a file with the token. A variable is in the description of a pod; a file is not."""
MIN_BYTES = 16
"""A donor that does not know the token sees an HMAC of it, and can try short ones offline."""
_MAX_BYTES = 4096


def read_token(environ: Mapping[str, str]) -> str:
    """Return the token; empty = none is set.

    Raises:
        ConfigError: its file cannot be read, or another user can.
    """
    token = environ.get(TOKEN_ENV, "")
    name = environ.get(TOKEN_FILE_ENV, "")
    if token or not name:
        return token
    try:
        with Path(name).open(encoding="utf-8") as file:
            check_private(Path(name), os.fstat(file.fileno()), TOKEN_FILE_ENV)
            return file.read(_MAX_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"{TOKEN_FILE_ENV} must name a file with the token, got {name} ({reason})") from error


def check_token(token: str, *, is_local: bool) -> None:
    """Refuse a token that does not keep other hosts out.

    Args:
        is_local: everything that the token protects is at addresses of this host only.

    Raises:
        ConfigError: it is missing or short.
    """
    if is_local or len(token.encode()) >= MIN_BYTES:
        return
    got = f"got {len(token.encode())} bytes" if token else "got nothing"
    raise ConfigError(
        f"{TOKEN_ENV} must be set to the same secret for the lighthouse and all groups, at least {MIN_BYTES} bytes, "
        f"{got}; any host on the network could hand out weights, or guess it: take the output of openssl rand -hex 32"
    )


def check_private(path: Path, found: os.stat_result, option: str) -> None:
    """Refuse a secret's file that another user can read or change.

    The group may read it: so Kubernetes hands a Secret to a user other than root.

    Raises:
        ConfigError: one can.
    """
    rule = f"{option} must be readable by you alone, got"
    if found.st_uid not in find_own_users(path.parent, found.st_uid):
        raise ConfigError(f"{rule} {path}, which belongs to user {found.st_uid}; copy it to a file of yours")
    mode = stat.S_IMODE(found.st_mode)
    is_mine = found.st_uid != ROOT or os.geteuid() == ROOT
    if mode & (stat.S_IRWXO | stat.S_IWGRP) or (is_mine and mode & stat.S_IRGRP):
        raise ConfigError(f"{rule} mode {mode:o} of {path}; chmod 600 it")
