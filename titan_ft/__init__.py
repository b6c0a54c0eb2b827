# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Fault-tolerant data parallelism for torchtitan: any replica group may die, hang, leave or join at
any step.
"""

import functools

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Return the installed versions of this package and of its main dependencies, without loading
    any of them.
    """
    return dict(_versions())  # whoever takes one out of it has his own


@functools.cache
def _versions() -> dict[str, str]:
    from importlib import metadata  # not at import: every process of a run would pay for it

    found = {"titan_ft": __version__}
    for name in ("torchtitan", "torchft", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
