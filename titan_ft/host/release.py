# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The release of torchtitan that Python finds, and a check that this package can train with it.

`python -m` looks in the working folder first. In a checkout of torchtitan it finds the checkout. A
checkout of another version made workers end with ImportErrors, and restart for half a minute.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from titan_ft.config import ConfigError

RELEASES = ("0.2.2", "0.3.0")
"""The releases of torchtitan that this package supports. The last one belongs to `titan_0_3`."""
_INSTALL = f"pip install torchtitan=={RELEASES[0]}"
_OFFERED = {
    "0.2": {
        "torchtitan.config": ("ConfigManager", "JobConfig", "TORCH_DTYPE_MAP"),
        "torchtitan.protocols.train_spec": ("TrainSpec", "get_train_spec", "register_train_spec"),
        "torchtitan.models": ("_supported_models",),
        "torchtitan.experiments": ("_supported_experiments",),
    },
    "0.3": {
        "torchtitan.config": ("ConfigManager", "TORCH_DTYPE_MAP", "TrainingConfig"),
        "torchtitan.components.checkpoint": ("CheckpointManager",),
        "torchtitan.components.dataloader": ("ParallelAwareDataloader",),
        "torchtitan.protocols.model_spec": ("ModelSpec",),
        "torchtitan.trainer": ("Trainer",),
    },
}
"""Modules and names that a supported torchtitan has.

A checkout is judged by them. Its version says too little, because later commits share it.
"""


def series() -> str:
    """Return the series of the installed torchtitan, "0.2" or "0.3", without importing it.

    Without torchtitan, "0.2".
    """
    found = importlib.util.find_spec("torchtitan")
    folders = found.submodule_search_locations if found is not None else None
    for folder in folders or ():
        # Only 0.3 has its Trainer in a module of its own.
        if Path(folder, "trainer.py").exists():
            return "0.3"
    return "0.2"


def check_torchtitan() -> None:
    """Import the parts of torchtitan that are needed first.

    Raises:
        ConfigError: torchtitan is missing, or lacks these parts, or torch is too old for it.
    """
    if series() == "0.3":
        # Imported here: an agent loads this module, and most agents need no torch.
        import torch.distributed

        # 0.3.0 calls this function after its first step.
        if not hasattr(torch.distributed, "set_timeout"):
            raise ConfigError(
                f"torch must be release 2.14 with torchtitan {RELEASES[1]}, got "
                f"{torch.__version__}; pip install torch==2.14.1"
            )
    with expect_torchtitan():
        for name, attributes in _OFFERED[series()].items():
            module = importlib.import_module(name)
            for attribute in attributes:
                getattr(module, attribute)


@contextlib.contextmanager
def expect_torchtitan() -> Iterator[None]:
    """Turn a failed import of torchtitan inside the block into one line.

    Raises:
        ConfigError: an import failed.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise _explain(error) from error


def _explain(error: Exception) -> ConfigError:
    found = importlib.util.find_spec("torchtitan")
    if found is None:
        return ConfigError(f"torchtitan must be installed, got none; {_INSTALL}")
    if found.origin:
        folder = Path(found.origin).parent
    else:
        folder = Path(next(iter(found.submodule_search_locations or ["?"])))
    # The text of an ImportError ends with the path of a module. The line names `folder` already.
    why = " ".join(str(error).partition(" (/")[0].split())
    remedy = _INSTALL
    if folder.absolute().is_relative_to(Path.cwd()) and "site-packages" not in folder.parts:
        remedy = "start from another folder: Python looks in the working folder first"
    return ConfigError(
        f"torchtitan must be release {' or '.join(RELEASES)}, got that in {folder} ({why}); "
        f"{remedy}"
    )
