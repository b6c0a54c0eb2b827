# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A worker's report about itself at its start."""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace
from typing import Any

from titan_ft import __version__, device
from titan_ft.host import cpu

cpu.prepare()
from torchtitan.config.job_config import Parallelism  # noqa: E402  # after the seam

from titan_ft.training.worker import describe  # noqa: E402


def test_setup_tells_model_data_machine_and_versions() -> None:
    """A reader of the history finds the model, the data, the machine and the software, without the
    config.
    """
    config: Any = SimpleNamespace(
        model=SimpleNamespace(name="llama3", flavor="8B"),
        training=SimpleNamespace(
            dataset="c4", seq_len=8192, local_batch_size=2, global_batch_size=64
        ),
        parallelism=Parallelism(tensor_parallel_degree=4),
    )
    setup = describe(config)
    assert (setup.model, setup.dataset, setup.seq_len) == ("llama3 8B", "c4", 8192)
    assert (setup.local_batch_size, setup.global_batch_size) == (2, 64)
    # What is 1, or whatever is left, is no choice.
    assert setup.parallelism == {"tensor_parallel_degree": 4}
    assert setup.device == device.name()
    assert setup.num_cpus >= 1
    assert setup.versions.keys() == {"titan_ft", "torchtitan", "torchft", "torch", "python"}
    assert (setup.versions["titan_ft"], setup.versions["torch"]) == (
        __version__,
        metadata.version("torch"),
    )
