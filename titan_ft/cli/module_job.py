# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Accept a job in the form of torchtitan 0.3: `--module M --config F` in place of CONFIG."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from titan_ft.config import MODULE_TOML_PREFIX, ConfigError
from titan_ft.usage import find_values

_READER = "titan_ft.training.module_config"
"""The module that prints such a job as a TOML."""


def replace_module_by_toml(args: Sequence[str]) -> list[str]:
    """Replace `--module M --config F` in the arguments of `titan-ft` by `--config TOML`.

    The TOML is a temporary file of this process. `launch` copies it into the run's folder, as it
    copies every CONFIG. A child process makes the TOML, because this process must not load torch.

    Raises:
        ConfigError: the job cannot be described in a TOML, or the command reads its CONFIG later.
    """
    words = list(args)
    module = _remove_option(words, "--module")
    if module is None:
        return words
    function = _remove_option(words, "--config")
    if function is None:
        raise ConfigError(
            f"--module must come with --config, got --module {module} alone; give both, or a TOML"
        )
    if words[:1] in (["slurm"], ["group"]):
        raise ConfigError(
            f"--module must be left out with titan-ft {words[0]}, got {module!r}: each restart "
            f"reads the TOML again; make it by python -m {_READER} {module} {function} > "
            f"{function}.toml"
        )
    made = subprocess.run(
        [sys.executable, "-m", _READER, module, function],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        errors = made.stderr.strip().splitlines()
        if not errors:
            raise ConfigError(f"{_READER} ended with status {made.returncode}")
        raise ConfigError(errors[-1].removeprefix("titan-ft: "))
    folder = Path(tempfile.mkdtemp(prefix=MODULE_TOML_PREFIX))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / f"{function}.toml"
    path.write_text(made.stdout, encoding="utf-8")
    return [*words, f"--config={path}"]


def _remove_option(words: list[str], option: str) -> str | None:
    """Remove the first occurrence of an option with its value; return the value, or None."""
    for written, value in find_values(words, [option]):
        names = [word.partition("=")[0] for word in words]
        position = names.index(written)
        length = 1 if "=" in words[position] else 2
        del words[position : position + length]
        return value
    return None
