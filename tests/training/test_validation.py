# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Validation to the end of the data, on ranks with shares of different lengths."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.validate import Validator
from torchtitan.hf_datasets import DatasetConfig, text_datasets
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

from titan_ft.config import ConfigError
from titan_ft.host.loader_workers import prepare_worker
from titan_ft.training.slot_loaders import enough_documents
from titan_ft.training.validation import (
    TO_THE_END,
    ValidationBatches,
    check_steps,
    share_loss,
    validate_updates,
)

WAIT_SECONDS = 60.0  # for another rank; a rank that waits for longer waits for ever
SEQ_LEN = 7


class Ranks:
    """The ranks of a group, as threads that meet in `gather`."""

    def __init__(self, count: int) -> None:
        self._values = [0] * count
        self._barrier = threading.Barrier(count, timeout=WAIT_SECONDS)
        self.count = count

    def gather(self, rank: int, value: int) -> list[int]:
        self._values[rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()  # nobody writes before all have read
        return found

    def run(self, act: Callable[[int], Any]) -> list[Any]:
        """Run `act` on each rank; return the ranks' results, or the errors that ended them."""

        def call(rank: int) -> Any:
            try:
                return act(rank)
            except ConfigError as error:
                return error

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(call, range(self.count)))


def batches(count: int, last: int = 2) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Return so many batches of two sequences, the last one of `last`."""
    sizes = [2] * (count - 1) + [last] * bool(count)
    return [
        ({"input": torch.full((size, 3), i)}, torch.zeros(size, 3)) for i, size in enumerate(sizes)
    ]


def validate(
    loaders: Sequence[Any], steps: int = TO_THE_END, passes: int = 1, **settings: Any
) -> list[Any]:
    """Let each rank go through its loader so often; return the number of batches of each pass, by
    rank.
    """
    ranks = Ranks(len(loaders))

    def act(rank: int) -> list[int]:
        read = ValidationBatches(
            loaders[rank],
            steps=steps,
            gather=lambda value: ranks.gather(rank, value),
            beat=lambda: None,
            **settings,
        )
        return [sum(1 for _ in read) for _ in range(passes)]

    return ranks.run(act)


@pytest.fixture
def dataset(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ParallelAwareDataloader]:
    """Build torchtitan's own loader of a rank's share of documents of so many characters each."""

    def build(
        documents: Iterable[int],
        rank: int,
        num_ranks: int,
        *,
        stream: bool = False,
        **settings: Any,
    ) -> ParallelAwareDataloader:
        texts = {"text": ["x" * length for length in documents]}

        def load(path: str) -> Any:
            data = Dataset.from_dict(texts)
            return data.to_iterable_dataset(num_shards=num_ranks) if stream else data

        made = DatasetConfig(path="", loader=load, sample_processor=lambda sample: sample["text"])
        monkeypatch.setitem(text_datasets.DATASETS, "documents", made)
        tokenizer: Any = SimpleNamespace(encode=lambda text, **_: [ord(letter) for letter in text])
        data = HuggingFaceTextDataset("documents", None, tokenizer, SEQ_LEN, rank, num_ranks)
        return ParallelAwareDataloader(data, rank, num_ranks, batch_size=2, **settings)

    return build


@pytest.mark.parametrize(
    ("counts", "expected"), [((5, 3), 3), ((3, 5), 3), ((4, 4), 4), ((1, 9, 2), 1), ((6,), 6)]
)
def test_all_ranks_stop_where_the_first_share_ends(counts: tuple[int, ...], expected: int) -> None:
    """Whichever rank has the shortest share, in each validation of the run."""
    found = validate([batches(count) for count in counts], passes=3)
    assert found == [[expected] * 3] * len(counts)


@pytest.mark.parametrize("counts", [(0, 4), (4, 0), (0, 0), (0,)])
def test_a_rank_without_a_batch_is_a_mistake_of_the_config(counts: tuple[int, ...]) -> None:
    """With the same words on all ranks, so that none of them waits for an ended one."""
    errors = validate([batches(count) for count in counts])
    assert {type(error) for error in errors} == {ConfigError}
    (text,) = {str(error) for error in errors}
    without = [rank for rank, count in enumerate(counts) if not count]
    named = f"rank {without[0]}" if len(without) == 1 else "ranks 0, 1"
    assert text.startswith(
        "validation.dataset must have a sequence of validation.seq_len tokens for each rank"
    )
    assert f"got none for {named} of a group; " in text
    assert "\n" not in text


@pytest.mark.parametrize(("whole", "expected"), [(None, 3), (2, 2)])
def test_a_pipeline_takes_whole_batches_only(whole: int | None, expected: int) -> None:
    """The last batch of a share may be smaller, and then does not fit the buffers of the stages."""
    assert validate([batches(3, last=1), batches(5)], whole=whole) == [[expected]] * 2


def test_a_number_of_batches_is_left_to_torchtitan() -> None:
    """torchtitan stops by itself: there is no collective, and the loader continues at its place."""

    def gather(value: int) -> list[int]:
        raise AssertionError("a collective that the other ranks do not call")

    loader = iter(batches(9))
    read = ValidationBatches(loader, steps=2, gather=gather, beat=lambda: None)
    assert [int(inputs["input"][0, 0]) for (inputs, _), _ in zip(read, range(2), strict=False)] == [
        0,
        1,
    ]
    assert int(next(iter(read))[0]["input"][0, 0]) > 1


@pytest.mark.parametrize("steps", [TO_THE_END, 2])
def test_the_watchdog_sees_each_batch(steps: int) -> None:
    """All of a large dataset takes longer than `hang_timeout_seconds`, and is no hang."""
    beats: list[None] = []
    read = ValidationBatches(
        batches(4), steps=steps, gather=lambda own: [own], beat=lambda: beats.append(None)
    )
    for number, _ in enumerate(read, start=1):
        assert len(beats) >= number
    assert len(beats) == 4


@pytest.mark.parametrize("stream", [False, True], ids=["in memory", "streamed"])
@pytest.mark.parametrize(
    "workers",
    [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}],
    ids=["no worker", "workers", "workers that stay"],
)
def test_each_validation_is_of_the_same_batches(
    dataset: Callable[..., ParallelAwareDataloader], stream: bool, workers: dict[str, Any]
) -> None:
    """torchtitan's dataset stays at its end: its second validation had no batch."""
    # One rank after the other, in this thread: a worker that is forked by another thread may crash.
    for rank in (0, 1):
        loader = dataset([30, 50, 10, 20], rank, 2, stream=stream, **workers)
        read = ValidationBatches(
            loader, steps=TO_THE_END, gather=lambda value: [value], beat=lambda: None
        )
        first, *later = [[labels.flatten().tolist() for _, labels in read] for _ in range(3)]
        assert first
        assert later == [first, first]


def test_a_share_without_a_document(dataset: Callable[..., ParallelAwareDataloader]) -> None:
    """One line in place of the library's index, which ended the ranks at each start again."""
    with enough_documents("validation.dataset", 2):
        dataset([30, 30], 1, 2)
    with pytest.raises(ConfigError) as caught, enough_documents("validation.dataset", 2):
        dataset([30], 1, 2)
    assert str(caught.value) == (
        "validation.dataset must have a document for each of the 2 ranks that read data, got fewer (Index 1 out of "
        "range for dataset of size 1.); take more data, or fewer ranks"
    )
    with pytest.raises(IndexError), enough_documents("validation.dataset", 2):
        [][1]  # of the user's own code


def test_a_validator_of_the_user_s_finds_its_loader() -> None:
    """It finds the loader's other attributes, too, and no worker process of it keeps a rank's
    sockets.
    """
    loader = SimpleNamespace(
        num_workers=2, worker_init_fn=None, dataset=SimpleNamespace(name="mine")
    )
    read = ValidationBatches(loader, steps=2, gather=lambda own: [own], beat=lambda: None)
    assert read.dataset.name == "mine"
    assert loader.worker_init_fn.func is prepare_worker


def test_an_error_of_the_loader_is_its_own() -> None:
    """The error ends this rank, and with it the group; it is not taken for the end of the data."""

    def broken() -> Iterator[Any]:
        yield batches(1)[0]
        raise OSError("disk gone")

    read = ValidationBatches(
        broken(), steps=TO_THE_END, gather=lambda own: [own], beat=lambda: None
    )
    with pytest.raises(OSError, match="disk gone"):
        list(read)


@pytest.mark.parametrize("steps", [0, -2])
@pytest.mark.parametrize("in_toml", [True, False])
def test_a_number_of_steps_that_is_none(steps: int, in_toml: bool) -> None:
    """torchtitan's own check is an assertion, whose traceback is all that a user sees."""
    values, args = (
        ({"validation": {"steps": steps}}, []) if in_toml else ({}, [f"--validation.steps={steps}"])
    )
    with pytest.raises(
        ConfigError,
        match=rf"^validation.steps must be >= 1, or -1 for all .*, got {steps}; correct it",
    ):
        check_steps(values, args)


@pytest.mark.parametrize(("toml", "flag"), [(TO_THE_END, "1"), (3, "-1"), ("many", "many")])
def test_a_number_of_steps_that_is_one(toml: object, flag: str) -> None:
    """What has the wrong type is left to the check of types."""
    check_steps({"validation": {"steps": toml}}, [f"--validation.steps={flag}"])


def test_a_pipeline_s_validation_loss_is_known_to_all_its_ranks() -> None:
    """torchtitan calls -1 / tokens the loss on ranks without the last stage."""
    logged: list[tuple[float, int]] = []
    told: list[list[float]] = []

    def make(own: Any, last_stage: bool) -> Any:
        metrics = SimpleNamespace(log_validation=lambda loss, step: logged.append((loss, step)))
        dims = SimpleNamespace(pp_enabled=True, get_optional_mesh=lambda name: None)
        trainer: Any = SimpleNamespace(
            validator=own,
            metrics_processor=metrics,
            parallel_dims=dims,
            pp_has_last_stage=last_stage,
        )
        group: Any = SimpleNamespace(
            gather_losses=lambda values: told.append(values) or torch.tensor(told)
        )
        share_loss(trainer, group)
        return metrics

    class Own(Validator):
        def validate(self, model_parts: list[torch.nn.Module], step: int) -> None:
            """Log on the ranks that it likes."""

    for last_stage, loss in ((True, 7.5), (False, -0.01)):
        make(Validator.__new__(Validator), last_stage).log_validation(loss=loss, step=3)
    assert logged == [(7.5, 3), (7.5, 3)]
    make(Own.__new__(Own), False).log_validation(loss=-0.01, step=4)
    assert logged[-1] == (-0.01, 4)
    assert len(told) == 2  # nobody is waited for


@pytest.fixture
def world() -> Iterator[None]:
    """Make this process a world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_state_after_a_validation_is_the_one_before_it(world: None) -> None:
    """A validation that falls due during a round is made after it, with the weights of the update.

    A forward without a backward leaves FSDP's root whole. A digest or a copy would be of other
    tensors.
    """
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 3))
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    before = [type(parameter) for parameter in model.parameters()]

    @torch.no_grad()
    def validate(model_parts: list[torch.nn.Module], step: int) -> None:
        model_parts[0](torch.ones(2, 4))
        assert [type(parameter) for parameter in model.parameters()] != before

    @contextlib.contextmanager
    def lend() -> Iterator[None]:
        lent.append(True)
        yield
        assert [type(parameter) for parameter in model.parameters()] == before, (
            "shards are given back"
        )
        lent.append(False)

    lent: list[bool] = []
    trainer: Any = SimpleNamespace(
        validator=SimpleNamespace(validate=validate, should_validate=lambda step: step == 3),
        model_parts=[model],
    )
    strategy: Any = SimpleNamespace(
        lend_agreed_weights=lend,
        last_step_of=lambda update: 4 * update,
        update_of=lambda step: -(-step // 4),
    )
    validate_updates(trainer, strategy)
    assert list(map(trainer.validator.should_validate, (4, 8))) == [True, False]
    trainer.validator.validate([model], 4)
    assert lent == [True, False]
    assert [type(parameter) for parameter in model.parameters()] == before
