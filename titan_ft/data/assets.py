# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause

"""Where the packaged assets are: the corpus, and the tokenizer that ``titan_ft://tokenizer`` names."""

from __future__ import annotations

from pathlib import Path

SCHEME = "titan_ft://"
FOLDER = Path(__file__).parent
TRAIN_TEXT = FOLDER / "austen_train.txt.gz"
VALIDATION_TEXT = FOLDER / "austen_validation.txt.gz"
TOKENIZER = FOLDER / "tokenizer"

_ASSETS = {"tokenizer": TOKENIZER}


def resolve(path: str) -> str:
    """Turn ``titan_ft://NAME`` into the folder of that packaged asset; return any other path as it is.

    Raises:
        ValueError: no packaged asset has this name.
    """
    if not path.startswith(SCHEME):
        return path
    name = path.removeprefix(SCHEME).strip("/")
    if name not in _ASSETS:
        known = ", ".join(SCHEME + known_name for known_name in _ASSETS)
        raise ValueError(f"model.hf_assets_path must be a folder or one of {known}, got {path!r}")
    return str(_ASSETS[name])
