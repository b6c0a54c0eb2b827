# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The flavors that titan_ft brings."""

from __future__ import annotations

import pytest

from titan_ft.host import cpu
from titan_ft.host.release import series

if series() != "0.2":
    pytest.skip("torchtitan 0.3 has flavors of its own", allow_module_level=True)
cpu.prepare()

from torchtitan.models.llama3 import llama3_args  # noqa: E402  # after the seam

from titan_ft.host.titan import register_flavors  # noqa: E402


def test_flavors_come_beside_torchtitans_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flavor of the same name that is there already stays; other models get none."""
    own = dict(llama3_args)
    own.pop("debugmodel_half", None)
    own["1B"] = own["8B"]
    monkeypatch.setattr("titan_ft.host.titan_0_2.llama3_args", own)
    register_flavors("qwen3")
    assert "debugmodel_half" not in own
    register_flavors("llama3")
    assert own["1B"] is own["8B"]
    half, whole = own["debugmodel_half"], own["debugmodel"]
    assert (2 * half.dim, 2 * half.n_layers, 2 * half.n_heads) == (
        whole.dim,
        whole.n_layers,
        whole.n_heads,
    )
    assert half.vocab_size == whole.vocab_size
