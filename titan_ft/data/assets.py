# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause

"""Where the packaged assets are: configs by name, the corpus, the tokenizer that ``titan_ft://tokenizer`` names."""

from __future__ import annotations

from pathlib import Path

from titan_ft.config import ConfigError, closest

SCHEME = "titan_ft://"
FOLDER = Path(__file__).parent
TRAIN_TEXT = FOLDER / "austen_train.txt.gz"
VALIDATION_TEXT = FOLDER / "austen_validation.txt.gz"
TOKENIZER = FOLDER / "tokenizer"

_ASSETS = {"tokenizer": TOKENIZER}
# A link in the source tree, which a copy of it may have lost; a folder in a wheel.
_CONFIGS = next((path for path in (FOLDER.parent / "configs", FOLDER.parents[1] / "configs") if path.is_dir()), FOLDER)


def resolve(path: str) -> str:
    """Turn ``titan_ft://NAME`` into the folder of that packaged asset; return any other path as it is.

    Raises:
        ConfigError: no packaged asset has this name.
    """
    if not path.startswith(SCHEME):
        return path
    name = path.removeprefix(SCHEME).strip("/")
    if name not in _ASSETS:
        known = ", ".join(SCHEME + known_name for known_name in _ASSETS)
        raise ConfigError(f"model.hf_assets_path must be a folder or one of {known}, got {path!r}; correct it")
    return str(_ASSETS[name])


def find_config(given: Path, folder: str = "") -> Path:
    """Return the TOML that is meant: a path, or the name of one that comes with this package.

    Args:
        folder: of those that come with the package; "chaos" for plans of faults.

    Raises:
        ConfigError: it is a name, and there is none of that name; whether a path can be read shows when it is.
    """
    if given.exists() or len(given.parts) != 1:
        return given
    known = {path.stem: path for path in sorted((_CONFIGS / folder).glob("*.toml"))}
    name = given.name.removesuffix(".toml")
    if name in known:
        return known[name]
    kind = f"{folder} plan" if folder else "config"
    raise ConfigError(
        f"{kind} must be the path of a TOML file or one of {', '.join(known) or 'none'}, got {given}; "
        f"{closest(name, known)}there is no such file"
    )
