# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A patch of torch's writer of Hugging Face's format.

A rank that fails must not leave the other ranks in a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint import _consolidate_hf_safetensors

MERGING = ("_consolidate_safetensors_files", "_write_overall_metadata_file")
"""torch's functions that may fail on one rank, between collectives, while files are merged."""


def merge_together(save: Callable[[], Any]) -> None:
    """Save in Hugging Face's format. A rank that cannot merge its files still joins collectives.

    torch/distributed/checkpoint/_consolidate_hf_safetensors.py: each rank merges its own files
    between two collectives. A rank whose merge raises leaves the other ranks waiting. Tests:
    training/test_checkpoint.py, and test_contract.py,
    `test_torch_merges_files_of_hugging_faces_format_between_collectives`.

    Raises:
        Exception: the error of the merge.
    """
    failures: list[Exception] = []

    def carry_on(act: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            try:
                return act(*args, **kwargs)
            except Exception as error:  # noqa: BLE001
                # Raised below, when this rank has joined all collectives.
                failures.append(error)
                return {}

        return wrapped

    acts = {name: getattr(_consolidate_hf_safetensors, name) for name in MERGING}
    try:
        for name, act in acts.items():
            setattr(_consolidate_hf_safetensors, name, carry_on(act))
        save()
    finally:
        for name, act in acts.items():
            setattr(_consolidate_hf_safetensors, name, act)
    if failures:
        raise failures[0]
