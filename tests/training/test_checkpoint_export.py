# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Exports in Hugging Face's format: every file can be read, or the weights are saved in another
way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_run import EXPORT, Exporter, Run, assert_equal
from titan_ft.host import cpu

cpu.prepare()

import safetensors  # noqa: E402
import safetensors.torch  # noqa: E402
from torch.distributed.checkpoint import _consolidate_hf_safetensors  # noqa: E402
from torchtitan.models.llama3 import llama3_args  # noqa: E402
from torchtitan.models.llama3.model.model import Transformer  # noqa: E402
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter  # noqa: E402

from titan_ft.training.checkpoint.export import (  # noqa: E402
    Converted,
    ExportError,
    Tensor,
    describe_tensors,
    gather_tensors,
)
from titan_ft.training.checkpoint.manager import SaveError  # noqa: E402

MakeRun = Callable[..., Run]
INDEX = "model.safetensors.index.json"


def export(make_run: MakeRun, index: Mapping[str, int] | None, **more: Any) -> Run:
    """Train a group that ends with an export by a table of names and file numbers."""
    exporter = Exporter()
    exporter.fqn_to_index_mapping = None if index is None else dict(index)
    run = make_run(adapter=exporter, **{**EXPORT, **more}).train(6)
    run.checkpoints.save(6, last_step=True)
    return run


def read(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of each file; raises where one cannot be read."""
    return {
        path.name: safetensors.torch.load_file(path)
        for path in sorted(folder.glob("*.safetensors"))
    }


def names(files: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, list[str]]:
    return {file: sorted(tensors) for file, tensors in files.items()}


WEIGHT, BIAS = "model.weight", "model.bias"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
ONLY = "model-00001-of-00001.safetensors"


@pytest.mark.parametrize(
    ("index", "files"),
    [
        (None, {ONLY: [BIAS, WEIGHT]}),
        ({}, {ONLY: [BIAS, WEIGHT]}),
        ({WEIGHT: 1, BIAS: 2}, {ONE: [WEIGHT], TWO: [BIAS]}),
        # A name that the model lacks: in a file with others, and as a file of its own, first,
        # between and last.
        ({WEIGHT: 1, BIAS: 1, "model.rotary_emb.inv_freq": 1}, {ONLY: [BIAS, WEIGHT]}),
        ({WEIGHT: 1, BIAS: 2, "model.rotary_emb.inv_freq": 2}, {ONE: [WEIGHT], TWO: [BIAS]}),
        ({"model.rotary_emb.inv_freq": 1, WEIGHT: 2, BIAS: 3}, {ONE: [WEIGHT], TWO: [BIAS]}),
        ({WEIGHT: 1, "model.rotary_emb.inv_freq": 2, BIAS: 3}, {ONE: [WEIGHT], TWO: [BIAS]}),
        ({WEIGHT: 1, BIAS: 2, "model.rotary_emb.inv_freq": 3}, {ONE: [WEIGHT], TWO: [BIAS]}),
        # A tensor that the table lacks, such as a head that it ties to the embedding.
        ({WEIGHT: 1}, {ONLY: [BIAS, WEIGHT]}),
        ({"another.weight": 1, WEIGHT: 2, "one.more": 3}, {ONLY: [BIAS, WEIGHT]}),
        ({"another.weight": 1, "one.more": 2}, {ONLY: [BIAS, WEIGHT]}),
        # Numbers from 0 on, and with gaps.
        ({WEIGHT: 0, BIAS: 1}, {ONE: [WEIGHT], TWO: [BIAS]}),
        ({WEIGHT: 3, BIAS: 17}, {ONE: [WEIGHT], TWO: [BIAS]}),
    ],
)
def test_every_file_of_an_export_can_be_read(
    make_run: MakeRun, index: dict[str, int] | None, files: dict[str, list[str]]
) -> None:
    """It holds the tensors of the model, whatever the table names; the index of the export names
    the same ones.
    """
    run = export(make_run, index)
    run.checkpoints.raise_error_of_last_step()
    found = read(run.folder / "step-6")
    assert names(found) == files
    weights = {name: tensor for tensors in found.values() for name, tensor in tensors.items()}
    assert_equal(weights[WEIGHT], run.model.weight.detach())
    assert_equal(weights[BIAS], run.model.bias.detach())
    written = json.loads((run.folder / "step-6" / INDEX).read_text())["weight_map"]
    assert written == {name: file for file, tensors in files.items() for name in tensors}


def test_what_the_table_lacks_or_has_too_much_is_said(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user may have given the table of another model."""
    said: list[str] = []
    monkeypatch.setattr("titan_ft.training.checkpoint.export.logger.warning", said.append)
    export(make_run, {WEIGHT: 1, **{f"layers.{number}.inv_freq": 1 for number in range(5)}})
    absent, unnamed = said
    assert "names tensors that the model lacks" in absent
    assert absent.endswith("layers.0.inv_freq, layers.1.inv_freq, layers.2.inv_freq and 2 more")
    assert unnamed.endswith(f"the last file gets them: {BIAS}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_export_in_another_dtype_is_compared_in_that(make_run: MakeRun, dtype: str) -> None:
    """checkpoint.export_dtype."""
    run = export(make_run, {WEIGHT: 1, BIAS: 2}, export_dtype=dtype)
    run.checkpoints.raise_error_of_last_step()
    found = read(run.folder / "step-6")
    assert {str(tensor.dtype) for tensors in found.values() for tensor in tensors.values()} == {
        f"torch.{dtype}"
    }


def _patch(monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]) -> None:
    """Change the files of an export when torch has written them."""
    write = _consolidate_hf_safetensors._write_overall_metadata_file

    def write_and_change(output_dir: str, *args: Any) -> None:
        write(output_dir, *args)
        change(Path(output_dir))

    monkeypatch.setattr(
        _consolidate_hf_safetensors, "_write_overall_metadata_file", write_and_change
    )


def _cut(folder: Path) -> None:
    (folder / TWO).write_bytes((folder / TWO).read_bytes()[:-1])


def _empty(folder: Path) -> None:
    (folder / TWO).write_bytes(b"")


def _lose(folder: Path) -> None:
    (folder / TWO).unlink()


def _rename(folder: Path) -> None:
    safetensors.torch.save_file({"model.offset": torch.zeros(3)}, folder / TWO)


def _reshape(folder: Path) -> None:
    safetensors.torch.save_file({BIAS: torch.zeros(4)}, folder / TWO)


def _convert(folder: Path) -> None:
    safetensors.torch.save_file({BIAS: torch.zeros(3, dtype=torch.float16)}, folder / TWO)


def _add_a_file(folder: Path) -> None:
    safetensors.torch.save_file(
        {"more": torch.zeros(3)}, folder / "model-00003-of-00002.safetensors"
    )


def _change_index(change: Callable[[dict[str, str]], None]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return act


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "a file is cut": (_cut, f"{TWO} cannot be read"),
    "a file is empty": (_empty, f"{TWO} cannot be read"),
    "a file is missing": (_lose, f"the folder lacks {TWO}"),
    "a file too many": (_add_a_file, "the folder has model-00003-of-00002.safetensors"),
    "another tensor": (_rename, f"{TWO} lacks {BIAS}"),
    "another shape": (_reshape, f"{TWO} holds {BIAS} as float32 [4], which is float32 [3]"),
    "another dtype": (_convert, f"{TWO} holds {BIAS} as float16 [3], which is float32 [3]"),
    "the index names a tensor too many": (
        _change_index(lambda index: index.update(more=ONE)),
        f"{INDEX} has more",
    ),
    "the index lacks a tensor": (
        _change_index(lambda index: index.pop(BIAS) and None),
        f"{INDEX} lacks {BIAS}",
    ),
    "the index names another file": (
        _change_index(lambda index: index.update({BIAS: "x"})),
        "the folder lacks x",
    ),
    "no index": (lambda folder: (folder / INDEX).unlink(), f"{INDEX} was not written"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_export_that_is_not_the_model_is_a_failed_save(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The failure is reported, the run does not end as a success, and the whole training state is
    saved instead.
    """
    change, reason = WRONG[name]
    _patch(monkeypatch, change)
    run = export(make_run, {WEIGHT: 1, BIAS: 2})
    run.checkpoints.finish(6)
    (failed,) = run.events.named("checkpoint_failed")
    assert reason in failed["error"]
    with pytest.raises(
        SaveError, match=r"step 6 could not be saved as asked: .*training state.*step-6"
    ) as raised:
        run.checkpoints.raise_error_of_last_step()
    assert reason in str(raised.value)
    assert run.names() == ["step-5", "step-6"]
    other = make_run()
    assert other.load()
    assert_equal(other.values(), run.values())


def test_a_tensor_that_torch_would_write_as_zero_is_not_exported(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch leaves out tensors without dimensions when it merges files, and their place is filled
    with zeros.
    """

    def to_hf(exporter: Exporter, state: dict[str, Any]) -> dict[str, Any]:
        return {
            "scale": torch.tensor(0.5),
            **{f"model.{name}": value for name, value in state.items()},
        }

    monkeypatch.setattr(Exporter, "to_hf", to_hf)
    run = export(make_run, None)
    with pytest.raises(SaveError, match=r"torch would write scale as 0"):
        run.checkpoints.raise_error_of_last_step()


def test_tensors_of_all_stages_of_a_pipeline_are_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank knows its own part of the model; the table names those of all."""
    first, second = {"a": Tensor((2,), "float32")}, {"b": Tensor((3,), "float32")}

    def gather_objects(every: list[Any], own: Any) -> None:
        every[:] = [first, second]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather_objects)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert gather_tensors(first, lambda value: [value, value + 1]) == {**first, **second}
    # Without a collective of objects.
    assert gather_tensors(first, lambda value: [value, value]) == first


def test_shapes_are_those_of_the_whole() -> None:
    """As the adapter gives them."""
    assert describe_tensors({"a": torch.zeros(2, 3, dtype=torch.bfloat16)}) == {
        "a": Tensor((2, 3), "bfloat16")
    }


def test_a_folder_without_an_index_is_no_export(tmp_path: Path) -> None:
    """Nothing in it can be found."""
    with pytest.raises(ExportError, match="was not written"):
        Converted({}, None, {"a": Tensor((2,), "float32")}).check(tmp_path)


def test_transformers_loads_an_export(make_run: MakeRun, tmp_path: Path) -> None:
    """The model of configs/llama3_debug.toml: it computes the same there. By an index with names of
    old exports.
    """
    transformers = pytest.importorskip("transformers")
    args = llama3_args["debugmodel"]
    model = Transformer(args)
    with torch.no_grad():
        model.init_weights(torch.device("cpu"))
    weights = _names_of_llama(args.n_layers)
    old = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(args.n_layers)]
    files = {
        name: f"model-0000{1 + place % 2}-of-00003.safetensors"
        for place, name in enumerate([*weights, *old])
    }
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / INDEX).write_text(
        json.dumps({"weight_map": {**files, "gone": "model-00003-of-00003"}})
    )
    adapter = Llama3StateDictAdapter(args, str(tmp_path / "assets"))
    run = make_run(adapter=adapter, model=model, **EXPORT)
    run.position.set_step(6)
    run.progress.step = 6
    run.checkpoints.save(6, last_step=True)
    run.checkpoints.raise_error_of_last_step()
    config = transformers.LlamaConfig(
        hidden_size=args.dim,
        intermediate_size=model.layers["0"].feed_forward.w1.weight.shape[0],
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        vocab_size=args.vocab_size,
        rms_norm_eps=args.norm_eps,
        max_position_embeddings=args.max_seq_len,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": args.rope_theta,
            "factor": args.rope_scaling_args.scaling_factor,
            "low_freq_factor": args.rope_scaling_args.low_freq_factor,
            "high_freq_factor": args.rope_scaling_args.high_freq_factor,
            "original_max_position_embeddings": args.rope_scaling_args.original_max_position_embeddings,
        },
    )
    # A user copies the one of the model that was begun with.
    config.save_pretrained(run.folder / "step-6")
    loaded, report = transformers.LlamaForCausalLM.from_pretrained(
        run.folder / "step-6", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    tokens = torch.arange(48).reshape(2, 24) % args.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens), rtol=1e-4, atol=1e-5)


def _names_of_llama(num_layers: int) -> list[str]:
    parts = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
    ]
    parts += ["mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    layers = [
        f"model.layers.{layer}.{part}.weight" for layer in range(num_layers) for part in parts
    ]
    return ["model.embed_tokens.weight", *layers, "model.norm.weight", "lm_head.weight"]
