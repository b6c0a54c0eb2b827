# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause

"""The packaged assets: found by name, whole, and licensed."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from titan_ft.data import assets
from titan_ft.data.documents import read_text

ROOT = Path(__file__).parents[2]


def test_the_scheme_names_the_packaged_tokenizer() -> None:
    """`titan_ft://tokenizer` becomes a folder with a tokenizer in it."""
    assert (Path(assets.resolve("titan_ft://tokenizer")) / "tokenizer.json").is_file()


@pytest.mark.parametrize("path", ["./assets/hf/Llama-3.1-8B", "/data/tokenizer", ""])
def test_other_paths_stay_as_they_are(path: str) -> None:
    """A user's own folder is never touched."""
    assert assets.resolve(path) == path


def test_an_unknown_asset_is_refused_with_the_known_ones() -> None:
    """The error names the field, its possible values, and the given value."""
    with pytest.raises(
        ValueError,
        match=r"model\.hf_assets_path must be .*titan_ft://tokenizer.*got 'titan_ft://tok'",
    ):
        assets.resolve("titan_ft://tok")


def test_the_licence_note_describes_the_packaged_texts() -> None:
    """The note names each text with its digest, and the texts together stay small."""
    note = (assets.FOLDER / "LICENSE.md").read_text(encoding="utf-8")
    noted = dict(re.findall(r"`(\w+\.txt\.gz)` \|.*`([0-9a-f]{64})`", note))
    texts = [assets.TRAIN_TEXT, assets.VALIDATION_TEXT]
    assert noted == {
        path.name: hashlib.sha256(read_text(path).encode()).hexdigest() for path in texts
    }
    assert sum(path.stat().st_size for path in texts) < 2_000_000


def test_importing_the_package_does_no_work() -> None:
    """torch, datasets and torchtitan are loaded only when data is requested."""
    code = (
        "import sys, titan_ft.data.assets, titan_ft.data.datasets;"
        "print([m for m in ('torch', 'datasets', 'torchtitan', 'tokenizers') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_wheel_holds_the_data_files(tmp_path: Path) -> None:
    """An installed package has the corpus, its licence and the tokenizer, not only the source
    tree.
    """
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
    ]
    subprocess.run([*build, str(ROOT)], check=True, timeout=120, cwd=tmp_path)
    (wheel,) = tmp_path.glob("titan_ft-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [
        assets.TRAIN_TEXT,
        assets.VALIDATION_TEXT,
        assets.FOLDER / "LICENSE.md",
        *assets.TOKENIZER.iterdir(),
    ]
    assert {path.relative_to(assets.FOLDER.parents[1]).as_posix() for path in files} <= names
    assert not {name for name in names if name.startswith(("tests/", "scripts/"))}
