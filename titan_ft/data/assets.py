# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause

"""Paths of the packaged assets: configs by name, the corpus, and ``titan_ft://tokenizer``."""

from __future__ import annotations

from pathlib import Path

from titan_ft.config import ConfigError, suggest_name

SCHEME = "titan_ft://"
FOLDER = Path(__file__).parent
TRAIN_TEXT = FOLDER / "austen_train.txt.gz"
VALIDATION_TEXT = FOLDER / "austen_validation.txt.gz"
TOKENIZER = FOLDER / "tokenizer"

_ASSETS = {"tokenizer": TOKENIZER}


def _configs_folder() -> Path:
    """Return the folder of the packaged configs."""
    # In a wheel it is titan_ft/configs. In the source tree that is a link to configs, which a copy
    # of the tree may lack.
    for parent in (FOLDER.parent, FOLDER.parents[1]):
        if (parent / "configs").is_dir():
            return parent / "configs"
    return FOLDER


_CONFIGS = _configs_folder()


def resolve(path: str) -> str:
    """Return the folder of the packaged asset ``titan_ft://NAME``.

    Other paths are returned unchanged.

    Raises:
        ConfigError: no packaged asset has this name.
    """
    if not path.startswith(SCHEME):
        return path
    name = path.removeprefix(SCHEME).strip("/")
    if name not in _ASSETS:
        known = ", ".join(SCHEME + known_name for known_name in _ASSETS)
        raise ConfigError(
            f"model.hf_assets_path must be a folder or one of {known}, got {path!r}; correct it"
        )
    return str(_ASSETS[name])


def find_config(given: Path, folder: str = "") -> Path:
    """Return the path of a TOML file.

    Args:
        given: path of a TOML file, or name of a packaged one.
        folder: folder of the packaged TOML files; "chaos" for plans of faults.

    Raises:
        ConfigError: no packaged file has this name. A path is not checked.
    """
    is_path = given.exists() or len(given.parts) != 1
    if is_path:
        return given
    known = {path.stem: path for path in sorted((_CONFIGS / folder).glob("*.toml"))}
    name = given.name.removesuffix(".toml")
    if name in known:
        return known[name]
    kind = f"{folder} plan" if folder else "config"
    raise ConfigError(
        f"{kind} must be the path of a TOML file or one of {', '.join(known) or 'none'}, got "
        f"{given}; {suggest_name(name, known)}there is no such file"
    )
