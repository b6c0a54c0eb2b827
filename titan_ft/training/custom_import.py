# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Import the user's module, `experimental.custom_import`, from the place where workers find it."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator

from titan_ft.config import ConfigError

_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
"""Environment that torchrun gives to a group of one rank."""


def import_custom(name: str) -> None:
    """Import the module; does nothing without a name, or if the module is loaded already.

    Raises:
        ConfigError: there is no such module, or it raises an exception.
    """
    if not name:
        return
    rule = "experimental.custom_import must be a module that can be imported"
    try:
        with _as_a_rank():
            importlib.import_module(name)
    except (Exception, SystemExit) as error:
        # The user's code may raise anything.
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{rule}, got {name!r} ({why}); install or correct it") from error


@contextlib.contextmanager
def working_folder_first() -> Iterator[None]:
    """Look for modules in the working folder first, as `python -m` does for the workers.

    The console script looks in its own folder instead: it found no module of the user's beside the
    TOML, and took the installed torchtitan where workers take a checkout.
    """
    before = list(sys.path)
    folder = os.getcwd()
    if not sys.flags.safe_path and sys.path[0] not in ("", folder):
        sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path[:] = before


@contextlib.contextmanager
def _as_a_rank() -> Iterator[None]:
    """Set the variables of a rank during the import, outside of a worker.

    The user's module may read them.
    """
    missing: list[str] = []
    if "RANK" not in os.environ:
        missing = [variable for variable in _RANK if variable not in os.environ]
    os.environ.update({variable: _RANK[variable] for variable in missing})
    try:
        yield
    finally:
        for variable in missing:
            os.environ.pop(variable, None)
