# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Fault-tolerant data parallelism for torchtitan: any replica group may die, hang, leave or join at
any step.
"""

import functools

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Return the installed versions of this package and of its main dependencies.

    Loads none of them.
    """
    return dict(_versions())  # A copy: a caller may change it.


@functools.cache
def _versions() -> dict[str, str]:
    # Imported here: otherwise every process of a run would pay for the import.
    from importlib import metadata

    found = {"titan_ft": __version__}
    for name in ("torchtitan", "torchft", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
