# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Semi-synchronous methods: their arithmetic, and the cost of failures in a round of
several steps.
"""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.events import Event, audit
from harness.job import Job
from harness.runs import STEPS, Runs, column, ends_of_rounds
from harness.trajectory import (
    by_process,
    check,
    check_finished,
    check_killed,
    check_one_trajectory,
    named,
)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

ROUNDING = 1e-5
NORM_ROUNDING = 3e-4  # see test_arithmetic
DILOCO = {"lr": 0.7, "momentum": 0.9, "nesterov": True}  # the defaults
LOCAL_SGD = {"lr": 1.0, "momentum": 0.0, "nesterov": False}
# Adam without memory and with an eps that nothing compares with is SGD of this LR, to the last bit
# but one.
EPS, SGD_LR = 1e8, 0.5
SGD = [
    "--optimizer.beta1=0.0",
    f"--optimizer.eps={EPS:g}",
    f"--optimizer.lr={EPS * SGD_LR:g}",
    "--optimizer.weight_decay=0.0",
    "--training.max_norm=1e9",
]


def difference(runs: Runs, one: str, other: str) -> tuple[float, float]:
    """Return the largest difference between the final parameters of two runs, and their largest
    change in training.
    """
    begin, ours = (torch.load(runs.parameters(moment, one)) for moment in ("begin", "end"))
    theirs = torch.load(runs.parameters("end", other))
    assert ours.keys() == theirs.keys()
    apart = max((value - theirs[name]).abs().max().item() for name, value in ours.items())
    moved = max((value - begin[name]).abs().max().item() for name, value in ours.items())
    return apart, moved


def test_rounds_of_one_step_are_synchronous_training(runs: Runs) -> None:
    """With SGD inside, the mean outside and unequal tokens, losses, LR and weights equal
    synchronous ones up to rounding.
    """
    shared: dict[str, Any] = {"flags": SGD, "mask": True, "dump": True}
    theirs = runs.groups(2, name="synchronous", **shared)["0-0"]
    ours = runs.groups(2, method="local_sgd", name="rounds", **shared)["0-0"]
    for name in ("loss", "max_loss", "lr", "tokens"):
        assert column(ours, name) == pytest.approx(column(theirs, name), rel=ROUNDING, abs=0), name
    moved = [
        lr / EPS * norm
        for lr, norm in zip(column(theirs, "lr"), column(theirs, "grad_norm"), strict=True)
    ]
    assert column(ours, "grad_norm") == pytest.approx(moved, rel=NORM_ROUNDING, abs=0)
    apart, change = difference(runs, "rounds", "synchronous")
    assert apart < ROUNDING * change


@pytest.mark.parametrize("sync_steps", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_one_group_alone_is_stock_torchtitan(runs: Runs, sync_steps: int) -> None:
    """With LocalSGD the mean of one group is its own weights, and AdamW continues as if there were
    no rounds.
    """
    ours = runs.groups(1, method="local_sgd", sync_steps=sync_steps, dump=True)["0-0"]
    (theirs,) = runs.stock(1, replicate=1, shard=1, dump=True)
    ends = ends_of_rounds(sync_steps)
    losses = column(theirs, "loss")
    means = [sum(losses[end - sync_steps : end]) / sync_steps for end in ends]
    assert column(ours, "loss") == pytest.approx(means, rel=ROUNDING, abs=0)
    for name in ("lr", "tokens"):
        assert column(ours, name) == [column(theirs, name)[end - 1] for end in ends]
    apart, change = difference(runs, "groups", "stock")
    assert apart < 1e-3 * change


def test_a_round_of_one_group_is_stock_torchtitan_bit_for_bit(runs: Runs) -> None:
    """A round adds only the rounding of the mean and of anchor - (anchor - weight) to the group's
    own steps.
    """
    runs.groups(1, method="local_sgd", sync_steps=STEPS, dump=True)
    runs.stock(1, replicate=1, shard=1, dump=True)
    begin, ours = (torch.load(runs.parameters(moment)) for moment in ("begin", "end"))
    theirs = torch.load(runs.parameters("end", "stock"))
    for name, anchor in begin.items():
        mean = (anchor - theirs[name]) * STEPS * (1 / STEPS)  # nominal tokens are those of one step
        assert torch.equal(ours[name], anchor - mean), name


NOT_QUICK = {"marks": pytest.mark.slow}
SHARDED = ["--parallelism.data_parallel_shard_degree=2"]
PIPELINE = ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=4"]
# Two stages on each rank.
INTERLEAVED = [*PIPELINE, "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"]


@pytest.mark.parametrize(
    ("method", "groups", "ranks", "shards", "microbatches", "flags"),
    [
        ("diloco", 2, 1, 1, 1, []),
        pytest.param("local_sgd", 2, 1, 1, 1, [], **NOT_QUICK),
        pytest.param("diloco", 3, 1, 1, 1, [], **NOT_QUICK),
        pytest.param("diloco", 2, 1, 1, 2, ["--training.global_batch_size=8"], **NOT_QUICK),
        pytest.param("diloco", 2, 2, 2, 1, SHARDED, **NOT_QUICK),
        pytest.param("diloco", 3, 2, 2, 1, SHARDED, **NOT_QUICK),
        pytest.param("diloco", 2, 2, 1, 1, ["--parallelism.tensor_parallel_degree=2"], **NOT_QUICK),
        pytest.param(
            "diloco", 2, 2, 1, 1, ["--parallelism.context_parallel_degree=2"], **NOT_QUICK
        ),
        pytest.param("diloco", 2, 2, 1, 1, PIPELINE, **NOT_QUICK),
        pytest.param("diloco", 2, 2, 1, 1, INTERLEAVED, **NOT_QUICK),
        pytest.param(
            "diloco",
            2,
            4,
            2,
            2,
            [*PIPELINE, *SHARDED, "--training.global_batch_size=32"],
            **NOT_QUICK,
        ),
    ],
)
def test_rounds_against_the_oracle(
    runs: Runs,
    method: str,
    groups: int,
    ranks: int,
    shards: int,
    microbatches: int,
    flags: list[str],
) -> None:
    """Each round's anchors follow from the groups' changes, weighted by unequal tokens; the last
    round is short.
    """
    sync_steps = 4
    outer = DILOCO if method == "diloco" else LOCAL_SGD
    records = runs.groups(
        groups, ranks, flags, method=method, sync_steps=sync_steps, mask=True, dump=True
    )
    rounds = runs.outer_oracle(
        sync_steps, outer, microbatches, mask=True, shards=shards, same_begin=ranks > 1
    )
    for ours in records.values():
        assert column(ours, "step") == ends_of_rounds(sync_steps)
        assert column(ours, "loss") == pytest.approx(
            [made["loss"] for made in rounds], rel=ROUNDING, abs=0
        )
        assert column(ours, "grad_norm") == pytest.approx(
            [made["norm"] for made in rounds], rel=NORM_ROUNDING, abs=0
        )
    for made in rounds:
        assert made["difference"] < 0.01 * made["change"]

    assert runs.job is not None
    for event in named(runs.job.events(), "step_committed"):
        assert event["tokens"] == rounds[event["step"] - 1]["valid_tokens"]
        assert event["inner_step"] == ends_of_rounds(sync_steps)[event["step"] - 1]
        assert event["inner_steps"] == (sync_steps if event["step"] < 3 else STEPS % sync_steps)
        assert event["forward_passes"] == microbatches * event["inner_steps"]
        assert event["participants"] == list(range(groups))
        assert event["exchanges"] == 1


# Of the tests' model, embedding and output are largest, then the layers.
HALVES = [["tok_embeddings", "layers.0", "layers.2"], ["output", "layers.1", "norm"]]
NAMED = [["layers", "norm"], ["tok_embeddings"], ["layers.1", "output"]]
MODULES = "--fault_tolerance.module_fqns_per_model_fragment"


@pytest.mark.parametrize(
    ("groups", "ranks", "sync_steps", "delay", "alpha", "fragments", "flags"),
    [
        (2, 1, 4, 1, 0.25, HALVES, ["--fault_tolerance.num_fragments=2"]),
        pytest.param(2, 1, 4, 0, 0.0, HALVES, ["--fault_tolerance.num_fragments=2"], **NOT_QUICK),
        pytest.param(3, 1, 4, 1, 0.0, HALVES, ["--fault_tolerance.num_fragments=2"], **NOT_QUICK),
        pytest.param(2, 1, 4, 2, 0.5, [[*HALVES[0], *HALVES[1]]], [], **NOT_QUICK),
        pytest.param(
            2, 2, 4, 1, 0.0, HALVES, ["--fault_tolerance.num_fragments=2", *SHARDED], **NOT_QUICK
        ),
        pytest.param(
            2,
            1,
            9,
            2,
            0.5,
            NAMED,
            [MODULES, *map(",".join, NAMED)],
            **NOT_QUICK,
        ),
        pytest.param(
            2, 2, 4, 1, 0.25, HALVES, [*PIPELINE, MODULES, *map(",".join, HALVES)], **NOT_QUICK
        ),
        pytest.param(
            2, 2, 4, 1, 0.25, HALVES, [*INTERLEAVED, MODULES, *map(",".join, HALVES)], **NOT_QUICK
        ),
    ],
)
def test_fragments_against_the_oracle(
    runs: Runs,
    groups: int,
    ranks: int,
    sync_steps: int,
    delay: int,
    alpha: float,
    fragments: list[list[str]],
    flags: list[str],
) -> None:
    """Each fragment's anchors follow from the groups' changes of it: one fragment a round, and all
    in the last round.
    """
    length = sync_steps // len(fragments)
    flags = [
        *flags,
        f"--fault_tolerance.fragment_sync_delay={delay}",
        f"--fault_tolerance.fragment_update_alpha={alpha}",
    ]
    records = runs.groups(
        groups,
        ranks,
        flags,
        method="diloco",
        sync_steps=sync_steps,
        num_fragments=len(fragments),
        ahead=delay,
        mask=True,
        dump=True,
    )
    rounds = runs.outer_oracle(
        sync_steps,
        DILOCO,
        1,
        mask=True,
        fragments=fragments,
        delay=delay,
        alpha=alpha,
        shards=1 if flags[: len(PIPELINE)] == PIPELINE else ranks,
        same_begin=ranks > 1,
    )
    for ours in records.values():
        assert column(ours, "step") == ends_of_rounds(length)
        assert column(ours, "loss") == pytest.approx(
            [made["loss"] for made in rounds], rel=ROUNDING, abs=0
        )
        assert column(ours, "grad_norm") == pytest.approx(
            [made["norm"] for made in rounds], rel=NORM_ROUNDING, abs=0
        )
    for made in rounds:
        assert made["difference"] < 0.01 * made["change"]


QUANTIZED = "--fault_tolerance.should_quantize"


@pytest.mark.slow
def test_rounds_in_8_bits_against_the_oracle(runs: Runs) -> None:
    """8 bits round a change by at most half a scale and send a quarter of fp32's bytes; the rest is
    unchanged.
    """
    sync_steps = 4
    records = runs.groups(
        2, 1, [QUANTIZED], method="diloco", sync_steps=sync_steps, mask=True, dump=True
    )
    rounds = runs.outer_oracle(sync_steps, DILOCO, 1, mask=True)
    for ours in records.values():
        assert column(ours, "loss") == pytest.approx(
            [made["loss"] for made in rounds], rel=1e-3, abs=0
        )
    off = [made["difference"] / made["change"] for made in rounds]
    assert 0 < off[0] < 0.51 / 127
    assert max(off) < 0.1, "what training makes of it"

    assert runs.job is not None
    values = [parameter.numel() for parameter in torch.load(runs.parameters("end")).values()]
    # The last blocks of two buckets, and a weight of each parameter.
    rest = 2 * (256 + 4) + 4 * len(values)
    for event in named(runs.job.events(), "step_committed"):
        assert sum(values) * 65 / 64 <= event["wire_bytes"] <= sum(values) * 65 / 64 + rest


# Failures

LENGTH, ROUNDS = 4, 6  # steps of a round, and rounds
Flags = Sequence[str]


def round_flags(*more: str, method: str = "diloco") -> list[str]:
    return [
        f"--fault_tolerance.semi_sync_method={method}",
        f"--fault_tolerance.sync_steps={LENGTH}",
        *more,
    ]


def kill(replica: int, point: str, **more: Any) -> dict[str, Any]:
    return {"replica": replica, "point": point, **more}


def gate(name: str, replica: int, step: int, rank: int = 0, **more: Any) -> dict[str, Any]:
    return {"name": name, "replica": replica, "step": step, "rank": rank, **more}


def check_data(events: list[Event]) -> None:
    """Every batch was trained once; none is lost with a group that died in a round."""
    found = audit(events)
    assert (found.verdict, found.num_lost, found.num_repeated) == ("holds", 0, 0), found


def rounds_of(events: list[Event], replica: int) -> dict[int, Event]:
    """Map each round to its commit by rank 0 of a group."""
    committed = named(events, "step_committed")
    return {
        event["step"]: event
        for event in committed
        if (event["replica"], event["rank"]) == (replica, 0)
    }


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, []),
        pytest.param(2, SHARDED, **NOT_QUICK),
        pytest.param(2, ["--parallelism.pipeline_parallel_degree=2"], **NOT_QUICK),
        pytest.param(2, ["--parallelism.tensor_parallel_degree=2"], **NOT_QUICK),
    ],
)
def test_a_group_that_comes_back_in_the_midst_of_a_round(
    make_job: Callable[..., Job], ranks: int, flags: Flags
) -> None:
    """A group killed in a round's second step fetches the state at once, and counts by its tokens
    in that round.

    The other group copies the state between two steps; it loses none, and does not wait.
    """
    length, rounds = 8, 3
    survivor = [("down-1-0", 10), ("wanted", 11), ("reached-awaited-1-1-0", 15)]
    hooks = {
        "faults": [kill(1, "forward", step=10, rank=ranks - 1)],
        "gates": [
            *(gate(name, 0, step, rank) for name, step in survivor for rank in range(ranks)),
            # The joiner's third step of the round goes on when it is waited for.
            *(gate("awaited", 1, 11, rank, attempt=1) for rank in range(ranks)),
        ],
    }
    flags = round_flags(
        f"--fault_tolerance.sync_steps={length}", "--model.converters=scales", *flags
    )
    job = make_job(
        groups=2, ranks=ranks, steps=length * rounds, flags=flags, hooks=hooks, late=False
    )
    job.run()
    events = check(job, survivors=[0], steps=rounds)
    check_killed(job, events, [(1, 0, "sigkill:forward")])
    check_data(events)
    ours, theirs = rounds_of(events, 0), rounds_of(events, 1)
    assert [ours[number]["participants"] for number in range(1, rounds + 1)] == [[0, 1]] * rounds
    assert [ours[number]["inner_steps"] for number in range(1, rounds + 1)] == [length] * rounds
    assert [theirs[number]["inner_steps"] for number in range(1, rounds + 1)] == [length, 3, length]
    assert 3 * ours[2]["own_tokens"] == length * theirs[2]["own_tokens"]
    # What it had read of the round in which it died is due again.
    assert theirs[2]["data"]["first_batch"] == length
    assert {event["exchanges"] for event in ours.values()} == {1}
    healed = named(events, "heal_finished")
    assert sorted((event["rank"], event["step"]) for event in healed) == [
        (rank, 1) for rank in range(ranks)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "flags"), [(1, []), (2, SHARDED)])
def test_a_group_that_is_offered_nothing_gets_the_state_behind_the_round(
    make_job: Callable[..., Job], ranks: int, flags: Flags
) -> None:
    """Without compared bytes no group may serve the state before the end of the round.

    The group returns before the second round ends, gets the state at the start of the third, trains
    while there is time and counts by its tokens.
    """
    # Marks, and the survivor's steps that wait for them. The joiner's second step goes on when it
    # is waited for.
    survivor = [("down-1-0", 6), ("ready-1-1", 7), ("reached-awaited-1-1-0", 10)]
    hooks = {
        "faults": [kill(1, "forward", step=6, rank=ranks - 1)],
        "gates": [
            *(gate(name, 0, step, rank) for name, step in survivor for rank in range(ranks)),
            *(gate("awaited", 1, 10, rank, attempt=1) for rank in range(ranks)),
        ],
    }
    steps = LENGTH * ROUNDS
    # The converter fails with scales of other weights.
    flags = round_flags("--model.converters=scales", "--fault_tolerance.digest_every=0", *flags)
    job = make_job(groups=2, ranks=ranks, steps=steps, flags=flags, hooks=hooks, late=False)
    job.run()
    events = check(job, survivors=[0], steps=ROUNDS)
    check_killed(job, events, [(1, 0, "sigkill:forward")])
    check_data(events)
    ours, theirs = rounds_of(events, 0), rounds_of(events, 1)
    assert [ours[number]["participants"] for number in range(1, ROUNDS + 1)] == [
        [0, 1],
        [0],
        *[[0, 1]] * 4,
    ]
    assert [ours[number]["inner_steps"] for number in range(1, ROUNDS + 1)] == [LENGTH] * ROUNDS
    assert [theirs[number]["inner_steps"] for number in (1, 3, 4, 5, 6)] == [4, 2, 4, 4, 4]
    assert ours[3]["own_tokens"] == 2 * theirs[3]["own_tokens"] == 2 / 3 * ours[3]["tokens"]
    # The first ones of the round in which it died are due again.
    assert theirs[3]["data"]["first_batch"] == LENGTH
    assert {event["exchanges"] for event in ours.values()} == {1}
    healed = named(events, "heal_finished")
    assert sorted((event["rank"], event["step"]) for event in healed) == [
        (rank, 2) for rank in range(ranks)
    ]


LOCAL = "--fault_tolerance.semi_sync_method=local_sgd"
STREAMING = [
    "--fault_tolerance.semi_sync_method=diloco",
    f"--fault_tolerance.sync_steps={2 * LENGTH}",
    "--fault_tolerance.num_fragments=2",
    "--fault_tolerance.fragment_sync_delay=2",
]


@pytest.mark.parametrize(
    ("streams", "point", "ranks", "flags"),
    [
        (False, "exchange_first", 1, [QUANTIZED]),
        (True, "exchange_first", 1, []),
        pytest.param(False, "exchange_first", 1, [], **NOT_QUICK),
        pytest.param(True, "exchange_first", 1, [QUANTIZED], **NOT_QUICK),
        pytest.param(False, "vote_before", 2, [QUANTIZED], **NOT_QUICK),
        pytest.param(True, "vote_after", 1, [QUANTIZED], **NOT_QUICK),
        pytest.param(False, "exchange_first", 1, [LOCAL], **NOT_QUICK),
        pytest.param(False, "backward", 1, [], **NOT_QUICK),
        pytest.param(False, "optimizer", 1, [], **NOT_QUICK),
        pytest.param(True, "forward", 1, [], **NOT_QUICK),
        *(
            pytest.param(streams, point, ranks, [], **NOT_QUICK)
            for streams in (False, True)
            for point, ranks in [
                ("exchange_last", 1),
                ("vote_before", 1),
                ("vote_after", 1),
                ("commit", 1),
                ("exchange_first", 2),
                ("vote_before", 2),
            ]
        ),
    ],
)
def test_kill_in_the_exchange(
    make_job: Callable[..., Job], streams: bool, point: str, ranks: int, flags: Flags
) -> None:
    """The survivor offers the same change again without repeating a step; with steps made
    meanwhile, once it is due.

    The returning group then gets the anchors of both fragments, and contributes its training from
    there.
    """
    dying = 2
    # Streaming groups make two rounds more while the joiner fetches: the job is not to end with its
    # heal.
    rounds = ROUNDS + 3 if streams else ROUNDS
    # Where steps are made during the exchange, "forward" is that of such a one.
    step = LENGTH * dying + (1 if point == "forward" else 0)
    hooks = {"faults": [kill(1, point, step=step, rank=ranks - 1)], "hold": 2}
    flags = [*(STREAMING[:-1] if streams else round_flags()), *flags]
    job = make_job(groups=2, ranks=ranks, steps=LENGTH * rounds, flags=flags, hooks=hooks)
    job.run()
    events = check(job, survivors=[0], steps=rounds, ahead=2 if streams else 0)
    check_killed(job, events, [(1, 0, f"sigkill:{point}")])
    check_data(events)
    ours = rounds_of(events, 0)
    if not streams:
        # Alone it sends nothing: what it has sent in the round of the kill, it sent to the group
        # that died.
        assert ours[dying]["wire_bytes"] <= ours[1]["wire_bytes"] == ours[rounds]["wire_bytes"] > 0
        if point != "backward":  # then it had yet to come to the exchange
            assert ours[dying]["wire_bytes"] > 0
    shared = point in ("vote_before", "vote_after", "commit", "optimizer")
    # Then all that the survivor needs may have been sent, or not.
    if point not in ("exchange_last", "forward"):
        assert ours[dying]["participants"] == ([0, 1] if shared else [0])
    assert [event["inner_steps"] for event in ours.values()] == [LENGTH] * rounds
    assert ours[rounds]["participants"] == [0, 1]
    # What the dead group had made for its last round: the other fragment's turn never came.
    last = dying if 1 in ours[dying]["participants"] else dying - 1
    assert {each.steps for each in audit(events).partial if each.slot == 1} == (
        {(last,)} if streams else set()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "ranks"), [("exchange_first", 1), ("forward", 1), ("vote_before", 2)]
)
def test_two_of_three_go_on_with_their_overlapped_exchange(
    make_job: Callable[..., Job], point: str, ranks: int
) -> None:
    """Both survivors offer the same changes again, although they have made steps of the next round
    on weights of their own.
    """
    step = 2 * LENGTH + (1 if point == "forward" else 0)
    hooks = {"faults": [kill(1, point, step=step, rank=ranks - 1)], "hold": 2}
    flags = [*STREAMING, *SHARDED] if ranks > 1 else STREAMING
    job = make_job(groups=3, ranks=ranks, steps=LENGTH * ROUNDS, flags=flags, hooks=hooks)
    job.run()
    events = check(job, survivors=[0, 2], steps=ROUNDS, ahead=2)
    check_killed(job, events, [(1, 0, f"sigkill:{point}")])
    check_data(events)
    for replica in (0, 2):
        told = rounds_of(events, replica)
        assert [event["inner_steps"] for event in told.values()] == [LENGTH] * ROUNDS
        assert told[ROUNDS]["participants"] == [0, 1, 2]
        assert {0, 2} <= set(told[2]["participants"])


@pytest.mark.parametrize(
    "point", ["exchange_first", pytest.param("vote_before", marks=pytest.mark.slow)]
)
def test_kill_in_the_round_behind_an_update(make_job: Callable[..., Job], point: str) -> None:
    """The exchange of facts after a commit, which names donors, is no update: the survivor makes
    the next one alone.
    """
    # It is back in round 3.
    hooks = {"faults": [kill(1, point, after=["trained-1-0"])], "hold": LENGTH}
    job = make_job(groups=2, steps=LENGTH * ROUNDS, flags=round_flags(), hooks=hooks)
    job.run()
    events = check(job, survivors=[0], steps=ROUNDS)
    check_killed(job, events, [(1, 0, f"sigkill:{point}")])
    check_data(events)
    ours = rounds_of(events, 0)
    assert [ours[number]["participants"] for number in (1, 2, ROUNDS)] == [[0, 1], [0], [0, 1]]
    assert [event["inner_steps"] for event in ours.values()] == [LENGTH] * ROUNDS


@pytest.mark.slow
def test_a_slow_group_sends_fewer_steps(make_job: Callable[..., Job]) -> None:
    """A slow group requests the exchange at the deadline, and trains on until the others
    are ready.
    """
    hooks = {
        "delays": [
            {"replica": 0, "seconds": 0.2, "step": None},
            {"replica": 1, "seconds": 0.6, "step": None},
        ]
    }
    flags = round_flags("--fault_tolerance.sync_deadline_seconds=0.7")
    job = make_job(groups=2, steps=3 * LENGTH, flags=flags, hooks=hooks)
    job.run()
    events = check(job, survivors=[0, 1], steps=3)
    assert not named(events, "exchange_failed", "heal_started")
    check_data(events)
    ours, theirs = rounds_of(events, 0), rounds_of(events, 1)
    for number in (2, 3):  # the first steps of a process take longer
        assert ours[number]["inner_steps"] == LENGTH
        assert 1 <= theirs[number]["inner_steps"] < LENGTH
        assert (
            theirs[number]["own_tokens"] / theirs[number]["inner_steps"]
            == ours[number]["own_tokens"] / LENGTH
        )
        # For a step of the slow one at most, which is late by 1.6 s where it makes all of them.
        assert ours[number]["exchange_seconds"] < 1.2


# Heals


SHORT = LENGTH * ROUNDS - 2  # steps of a run whose last round is shorter


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, []),
        pytest.param(2, [], **NOT_QUICK),
        pytest.param(1, [QUANTIZED], **NOT_QUICK),
    ],
)
def test_a_transfer_that_takes_longer_than_a_round(
    make_job: Callable[..., Job], ranks: int, more: Flags
) -> None:
    """The joiner replays the rounds that the others made meanwhile: one exchange each, with their
    momentum and LR.
    """
    pause = {"replica": 1, "attempt": 1, "queued": 2}
    hooks = {
        "faults": [kill(1, "forward", step=6)],
        "gates": [
            gate(name, 0, step, r)
            for name, step in (("down-1-0", 6), ("ready-1-1", 7))
            for r in range(ranks)
        ],
        "pauses": [{**pause, "rank": rank} for rank in range(ranks)],
    }
    flags = round_flags("--lr_scheduler.decay_type=cosine", *more)
    job = make_job(
        groups=2, ranks=ranks, steps=SHORT + 2 * LENGTH, flags=flags, hooks=hooks, late=False
    )
    job.run()
    events = check(job, survivors=[0], steps=ROUNDS + 2)
    check_killed(job, events, [(1, 0, "sigkill:forward")])
    check_data(events)
    ours = rounds_of(events, 0)
    assert [event["inner_steps"] for event in ours.values()] == [LENGTH] * (ROUNDS + 1) + [2]
    assert ours[ROUNDS + 2]["participants"] == [0, 1]
    (healed, *_) = named(events, "heal_finished")
    assert healed["replayed"] >= 2
    assert max(event["exchanges"] for event in ours.values()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_kill_ten_times(make_job: Callable[..., Job], seed: int) -> None:
    """Ten kills of random groups at random points, each after the previous heal, leave one
    trajectory.
    """
    dice = random.Random(seed)
    points = [
        "forward",
        "backward",
        "exchange_first",
        "exchange_last",
        "vote_before",
        "vote_after",
        "commit",
        "optimizer",
    ]
    faults: list[dict[str, Any]] = []
    attempts = [0, 0, 0]
    for _ in range(10):
        victim = dice.randrange(3)
        fault = kill(
            victim,
            dice.choice(points),
            step=LENGTH + dice.randint(1, LENGTH),
            attempt=attempts[victim],
        )
        if faults:
            fault["after"] = [f"healed-{faults[-1]['replica']}-{faults[-1]['attempt'] + 1}"]
        attempts[victim] += 1
        faults.append(fault)
    rounds = 36
    hooks = {"faults": faults, "hold": 2}
    job = make_job(
        groups=3, steps=LENGTH * rounds, flags=round_flags(), hooks=hooks, max_restarts=10
    )
    job.run(seconds=200)
    events = check(
        job, survivors=[replica for replica in range(3) if not attempts[replica]], steps=rounds
    )
    check_killed(
        job, events, [(f["replica"], f["attempt"], f"sigkill:{f['point']}") for f in faults]
    )
    check_data(events)
    assert rounds_of(events, 0)[rounds]["participants"] == [0, 1, 2]


def test_kill_in_the_last_round(make_job: Callable[..., Job]) -> None:
    """A group that returns after the others made the final state gets it from them, and trains
    nothing.
    """
    hooks = {"faults": [kill(1, "forward", step=SHORT)], "hold": 99}
    job = make_job(groups=2, steps=SHORT, flags=round_flags(), hooks=hooks)
    job.run()
    events = check(job, survivors=[0], steps=ROUNDS)
    check_killed(job, events, [(1, 0, "sigkill:forward")])
    check_data(events)
    assert rounds_of(events, 0)[ROUNDS]["participants"] == [0]
    assert [event["step"] for event in named(events, "heal_finished")] == [ROUNDS]


@pytest.mark.slow
def test_a_group_that_comes_late_to_the_job(make_job: Callable[..., Job]) -> None:
    """The others begin without an absent group, which joins in the middle of a round."""
    flags = round_flags("--fault_tolerance.start_timeout_seconds=1")
    hooks = {"gates": [gate("ready-1-0", 0, 6), gate("healed-1-0", 0, 9)]}
    job = make_job(groups=2, steps=LENGTH * ROUNDS, flags=flags, hooks=hooks)
    job.start(absent=[1])
    job.wait_for_gate("ready-1-0", 0)
    job.start_again(1)
    job.finish()
    events = check(job, survivors=[0], steps=ROUNDS)
    check_data(events)
    ours = rounds_of(events, 0)
    assert [ours[number]["participants"] for number in (1, 2, ROUNDS)] == [[0], [0], [0, 1]]


@pytest.mark.slow
def test_rounds_wait_for_min_replica_size(make_job: Callable[..., Job]) -> None:
    """The survivor keeps the change of its whole round until enough groups hold the state, and
    repeats no step.
    """
    hooks = {"faults": [kill(1, "forward", step=6)], "gates": [gate("down-1-0", 0, 6)]}
    flags = round_flags("--fault_tolerance.min_replica_size=2")
    job = make_job(groups=2, steps=LENGTH * ROUNDS, flags=flags, hooks=hooks, late=False)
    job.run()
    events = check(job, survivors=[0], steps=ROUNDS)
    check_killed(job, events, [(1, 0, "sigkill:forward")])
    check_data(events)
    assert rounds_of(events, 0)[ROUNDS]["participants"] == [0, 1]


@pytest.mark.slow
def test_rounds_of_one_step_survive_a_kill(make_job: Callable[..., Job]) -> None:
    """Rounds may be as short as steps."""
    flags = round_flags("--fault_tolerance.sync_steps=1")
    job = make_job(
        groups=2, steps=16, flags=flags, hooks={"faults": [kill(1, "backward", step=4)], "hold": 2}
    )
    job.run()
    events = check(job, survivors=[0])
    check_killed(job, events, [(1, 0, "sigkill:backward")])
    check_data(events)
    assert rounds_of(events, 0)[16]["participants"] == [0, 1]


@pytest.mark.parametrize(
    ("ahead", "ranks", "flags"),
    [
        (0, 1, round_flags()),
        pytest.param(0, 2, round_flags(), **NOT_QUICK),
        pytest.param(0, 1, STREAMING[:-1], **NOT_QUICK),
        pytest.param(2, 1, STREAMING, **NOT_QUICK),
        pytest.param(2, 2, [*STREAMING, *SHARDED], **NOT_QUICK),
    ],
)
def test_a_change_that_is_not_finite(
    make_job: Callable[..., Job], ahead: int, ranks: int, flags: Flags
) -> None:
    """A NaN corrupts a group's moments: the others make the round without it, and it heals for the
    next one.

    Steps that the group made during the exchange depend on the lost change, so they are void as
    well.
    """
    # A step of the healed group in the third round, and the step at which the other group waits for
    # it.
    trains, waits = (2 * LENGTH + 3, 3 * LENGTH - 1) if ahead else (2 * LENGTH + 1, 2 * LENGTH + 2)
    hooks = {
        # The first step of the second round.
        "chaos": [{"replica": 1, "fault": "nan_gradient", "steps": [LENGTH + 1]}],
        "gates": [
            gate("trains", 1, trains),
            *(gate("reached-trains-1-0-0", 0, waits, rank) for rank in range(ranks)),
        ],
    }
    job = make_job(groups=2, ranks=ranks, steps=LENGTH * ROUNDS, flags=flags, hooks=hooks)
    job.mark("trains")  # that gate only leaves its mark
    job.run()
    events = check(job, survivors=[0], steps=ROUNDS, ahead=ahead)
    check_data(events)
    assert {(event["step"], *event["slots"]) for event in named(events, "gradient_excluded")} == {
        (2, 1)
    }
    assert job.groups[1].attempt == 0
    assert {event["replica"] for event in named(events, "heal_finished")} == {1}
    ours, theirs = rounds_of(events, 0), rounds_of(events, 1)
    assert [ours[number]["participants"] for number in (1, 2, 3, ROUNDS)] == [
        [0, 1],
        [0],
        [0, 1],
        [0, 1],
    ]
    assert theirs[3]["inner_steps"] > 0
    assert theirs[3]["data"]["first_batch"] == LENGTH  # those that made the NaN are due again


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "flags"), [(1, []), (2, SHARDED)])
def test_moments_that_are_not_finite_come_to_no_joiner(
    make_job: Callable[..., Job], ranks: int, flags: Flags
) -> None:
    """A group returns in the round in which the only holder of the state had a NaN.

    The holder's anchors are sound, and its moments are not: the joiner starts with new moments and
    makes the round alone, and the holder heals from it.
    """
    length, rounds = 8, 3
    holder = [("down-1-0", 10), ("wanted", 11), ("reached-awaited-1-1-0", 15)]
    hooks = {
        "faults": [kill(1, "forward", step=10, rank=ranks - 1)],
        "chaos": [{"replica": 0, "fault": "nan_gradient", "steps": [length + 1]}],
        "gates": [
            *(gate(name, 0, step, rank) for name, step in holder for rank in range(ranks)),
            *(gate("awaited", 1, 11, rank, attempt=1) for rank in range(ranks)),
            # The second step of the last round waits for the other one's first.
            gate("trains", 0, 2 * length + 1),
            *(
                gate("reached-trains-0-0-0", 1, 2 * length + 2, rank, attempt=1)
                for rank in range(ranks)
            ),
        ],
    }
    flags = round_flags(f"--fault_tolerance.sync_steps={length}", *flags)
    job = make_job(
        groups=2, ranks=ranks, steps=length * rounds, flags=flags, hooks=hooks, late=False
    )
    job.mark("trains")  # that gate only leaves its mark
    job.run()
    events = check(job, survivors=[], steps=rounds)
    injected = {(event["replica"], event["fault"]) for event in named(events, "fault_injected")}
    assert injected == {(0, "nan_gradient"), (1, "sigkill:forward")}
    check_data(events)
    assert {(event["step"], *event["slots"]) for event in named(events, "gradient_excluded")} == {
        (2, 0)
    }
    assert [group.attempt for group in job.groups] == [0, 1]
    theirs = rounds_of(events, 1)
    assert [theirs[number]["participants"] for number in range(1, rounds + 1)] == [
        [0, 1],
        [1],
        [0, 1],
    ]
    assert [theirs[number]["inner_steps"] for number in range(1, rounds + 1)] == [length, 3, length]
    healed = {(event["replica"], event["step"]) for event in named(events, "heal_finished")}
    assert healed == {(1, 1), (0, 2)}


@pytest.mark.slow
def test_a_slow_group_stalls_nobody_and_counts(make_job: Callable[..., Job]) -> None:
    """The fast group waits at the lighthouse and not in a collective, however short the
    collective's timeout is.
    """
    hooks = {"delays": [{"replica": 1, "seconds": 0.3, "step": None}]}
    flags = round_flags("--fault_tolerance.process_group_timeout_ms=1000")
    job = make_job(groups=2, steps=3 * LENGTH, flags=flags, hooks=hooks)
    job.run()
    events = check(job, survivors=[0, 1], steps=3)
    assert not named(events, "exchange_failed", "heal_started")
    for event in named(events, "step_committed"):
        assert (event["participants"], event["exchanges"], event["inner_steps"]) == (
            [0, 1],
            1,
            LENGTH,
        )


# Leaving


def terminate(job: Job, replica: int) -> None:
    """Send SIGTERM to all processes of a group."""
    for worker in job.groups[replica].workers:
        assert worker.pid is not None
        os.killpg(worker.pid, signal.SIGTERM)


def leave_and_come_back(job: Job, ranks: int) -> None:
    """Run a job whose group 1 gets SIGTERM at the gate "go". Start the group again once the
    survivor trains on.
    """
    job.start()
    job.wait_for_gate("go", 1, range(ranks))
    job.mark("down-1-0")  # the survivor soon waits for the next attempt
    terminate(job, 1)
    job.mark("go")
    assert job.wait_for_end(1) == [0] * ranks
    job.wait_until(lambda: (job.markers / "waiting-1-0-0").exists(), 30, "the survivor has gone on")
    job.start_again(1)
    job.finish()


@pytest.mark.parametrize(
    ("fits", "ranks", "streams"),
    [
        (True, 1, False),
        *(pytest.param(*case, False, **NOT_QUICK) for case in ((False, 1), (True, 2), (False, 2))),
        *(pytest.param(*case, True, **NOT_QUICK) for case in ((True, 1), (False, 1), (True, 2))),
    ],
)
def test_sigterm_in_the_midst_of_a_round(
    make_job: Callable[..., Job], fits: bool, ranks: int, streams: bool
) -> None:
    """The group leaves with the round's update if drain_timeout_seconds allow; else at once, and
    its batches are void.
    """
    # The survivor has yet to come to the end of this round: the one that leaves waits for it there.
    hooks: dict[str, Any] = {
        "gates": [gate("go", 1, 6, rank) for rank in range(ranks)],
        "hold": LENGTH,
    }
    flags = [*(STREAMING[:-1] if streams else round_flags()), *(SHARDED if ranks > 1 else ())]
    if not fits:  # two steps are left, each as long as the first
        hooks["delays"] = [
            {"replica": 1, "rank": rank, "step": 5, "seconds": 2.2} for rank in range(ranks)
        ]
        flags.append("--fault_tolerance.drain_timeout_seconds=4")
    job = make_job(groups=2, ranks=ranks, steps=LENGTH * ROUNDS, flags=flags, hooks=hooks)
    leave_and_come_back(job, ranks)

    events = check(job, survivors=[0], steps=ROUNDS)
    check_data(events)
    drained = named(events, "drained")
    assert {(event["replica"], event["step"], event["in_order"]) for event in drained} == {
        (1, 2 if fits else 1, fits)
    }
    assert len(drained) == ranks
    ours = rounds_of(events, 0)
    assert ours[2]["participants"] == ([0, 1] if fits else [0])
    assert ours[ROUNDS]["participants"] == [0, 1]
    assert [event["inner_steps"] for event in ours.values()] == [LENGTH] * ROUNDS
    assert not named(events, "exchange_failed")
    if not fits:
        assert {event["reason"].split(":")[0] for event in drained} == {"SIGTERM"}
        assert all("2 steps of the round were left" in event["reason"] for event in drained)
        assert "void: 2 from batch 4 of slot 1" in job.output(1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_in_steps_that_are_made_during_an_exchange(
    make_job: Callable[..., Job], ranks: int
) -> None:
    """The group leaves in order with the update of the running exchange; the steps of the next
    round are void.
    """
    hooks: dict[str, Any] = {
        "gates": [
            gate("go", 1, LENGTH + 2, rank) for rank in range(ranks)
        ],  # the last one that it makes meanwhile
        "hold": LENGTH,
    }
    flags = [*STREAMING, *SHARDED] if ranks > 1 else STREAMING
    job = make_job(groups=2, ranks=ranks, steps=LENGTH * ROUNDS, flags=flags, hooks=hooks)
    leave_and_come_back(job, ranks)

    events = check(job, survivors=[0], steps=ROUNDS, ahead=2)
    check_data(events)
    drained = named(events, "drained")
    assert {(event["replica"], event["step"], event["in_order"]) for event in drained} == {
        (1, 1, True)
    }
    assert len(drained) == ranks
    ours, theirs = rounds_of(events, 0), rounds_of(events, 1)
    assert (ours[1]["participants"], ours[2]["participants"], ours[ROUNDS]["participants"]) == (
        [0, 1],
        [0],
        [0, 1],
    )
    assert [event["inner_steps"] for event in ours.values()] == [LENGTH] * ROUNDS
    back = min(
        number for number, event in theirs.items() if number > 1 and 1 in event["participants"]
    )
    assert theirs[back]["data"]["first_batch"] == LENGTH  # those of the steps that are void
    assert not named(events, "exchange_failed")


# Checkpoints


def saving(folder: Path, interval: int = 8) -> list[str]:
    return [
        "--checkpoint.enable",
        f"--checkpoint.folder={folder}",
        f"--checkpoint.interval={interval}",
        "--checkpoint.no-last-save-model-only",
    ]


def check_resumed(job: Job, expected: list[Event], step: int, attempt: int = 0) -> list[Event]:
    """The job's last attempt continued from the checkpoint of this step, to the results of an
    undisturbed job.
    """
    events = [event for event in job.events() if event.get("attempt") == attempt]
    for own in by_process(events).values():
        assert [event["step"] for event in named(own, "checkpoint_loaded")] == [step]
    assert not named(events, "heal_started", "started_anew")

    def facts(of: list[Event]) -> set[tuple[Any, ...]]:
        late = [event for event in named(of, "step_committed") if event["inner_step"] > step]
        made = {(e["inner_step"], e["rank"], e["digest"], e["loss"], e["lr"]) for e in late}
        return made | {
            ("end", event["rank"], event["digest"]) for event in named(of, "training_finished")
        }

    assert facts(events) == facts(expected)
    return events


@pytest.mark.parametrize(
    ("groups", "ranks", "inner"),
    [
        (2, 1, SGD),
        pytest.param(1, 1, [], **NOT_QUICK),  # with AdamW: its moments are in the checkpoint
        pytest.param(2, 2, [*SGD, *SHARDED], **NOT_QUICK),
    ],
)
def test_all_groups_killed_in_a_round(
    make_job: Callable[..., Job], tmp_path: Path, groups: int, ranks: int, inner: list[str]
) -> None:
    """The job continues from the checkpoint of a round's end; anchors and momentum end as in an
    undisturbed run.

    They are equal bit for bit with SGD. With moments they would not be, because each group
    continues with the moments of the group that saved.
    """
    shape: dict[str, Any] = {"groups": groups, "ranks": ranks, "steps": LENGTH * ROUNDS}
    flags = round_flags(*inner)
    straight = make_job(flags=flags, **shape)
    straight.run()
    expected = check(straight, survivors=range(groups), steps=ROUNDS)
    faults = [kill(replica, "forward", step=14) for replica in range(groups)]
    job = make_job(
        flags=[*flags, *saving(tmp_path / "checkpoints")], hooks={"faults": faults}, **shape
    )
    job.run()
    events = job.events()
    check_killed(job, events, [(replica, 0, "sigkill:forward") for replica in range(groups)])
    check_resumed(job, expected, 8, attempt=1)
    assert [event["step"] for event in named(events, "checkpoint_saved")] == [8, 16, 24]
    check_data(events)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, **NOT_QUICK)])
def test_what_is_saved_and_validated_is_what_the_groups_agree_on(
    make_job: Callable[..., Job], tmp_path: Path, ranks: int
) -> None:
    """Between two exchanges of a fragment each group has its own weights; saves and validations use
    the agreed ones.
    """
    record, checkpoints = tmp_path / "record", tmp_path / "checkpoints"
    record.mkdir()
    flags = [*STREAMING, *SGD, "--fault_tolerance.fragment_update_alpha=0.5", *saving(checkpoints)]
    flags += [
        "--validation.enable",
        "--validation.freq=8",
        "--validation.steps=1",
        "--validation.seq_len=32",
    ]
    flags += ["--validation.dataset=austen_validation", "--metrics.disable_color_printing"]
    shape: dict[str, Any] = {"groups": 2, "ranks": ranks, "steps": LENGTH * ROUNDS, "flags": flags}
    faults = [kill(replica, "forward", step=15) for replica in (0, 1)]
    job = make_job(hooks={"record": str(record), "dump": True, "faults": faults}, **shape)
    job.run()
    events = job.events()
    check_killed(job, events, [(replica, 0, "sigkill:forward") for replica in (0, 1)])
    # The second has not what the first had made of the other fragment since its last exchange.
    for attempt in (0, 1):
        check_one_trajectory(e for e in named(events, "step_committed") if e["attempt"] == attempt)
    check_finished(job, events, ROUNDS)
    loaded = named(events, "checkpoint_loaded")
    assert [event["step"] for event in loaded] == [8] * 2 * ranks

    saved = tmp_path / "saved.pt"
    for step, moment in ((8, "round-2"), (24, "end")):
        dcp_to_torch_save(checkpoints / f"step-{step}", saved)
        theirs = torch.load(saved, weights_only=False)
        anchors = torch.load(record / f"{moment}-0-0.pt")
        for name, anchor in anchors.items():
            assert torch.equal(theirs[name], anchor), (step, name)
    validated = [
        re.findall(r"validate step: *(\d+) .*?loss: *([\d.]+)", job.output(replica))
        for replica in (0, 1)
    ]
    assert validated[0] == validated[1]
    assert [int(step) for step, _ in validated[0]] == [4, 8]


@pytest.mark.slow
@pytest.mark.parametrize("fits", [True, False])
def test_a_preempted_job_goes_on(make_job: Callable[..., Job], tmp_path: Path, fits: bool) -> None:
    """All groups get SIGTERM in the middle of a round, finish it if there is time, and one saves
    the agreed state.

    A later job ends as an undisturbed one. Checkpoints that fall due in the middle of a round are
    made at its end. The steps of an abandoned round are void, and trained again.
    """
    steps = LENGTH * ROUNDS
    straight = make_job(groups=2, steps=steps, flags=round_flags(*SGD))
    straight.run()
    expected = check(straight, survivors=[0, 1], steps=ROUNDS)
    flags = [*round_flags(*SGD), *saving(tmp_path / "checkpoints", interval=6 if fits else 100)]
    hooks: dict[str, Any] = {"gates": [gate("go", replica, 14) for replica in (0, 1)]}
    if not fits:  # two steps are left, each as long as the first
        hooks["delays"] = [{"replica": replica, "step": 13, "seconds": 4.4} for replica in (0, 1)]
        flags.append("--fault_tolerance.drain_timeout_seconds=8")
    first = make_job(groups=2, steps=steps, flags=flags, hooks=hooks)
    first.start()
    for replica in (0, 1):
        first.wait_for_gate("go", replica)
        terminate(first, replica)
    for replica in (0, 1):
        first.wait_until(
            lambda r=replica: (first.markers / f"told-{r}-0").exists(), 30, "the group was told"
        )
    first.mark("go")
    assert [first.wait_for_end(replica) for replica in (0, 1)] == [[0], [0]]
    last, before = (4, [8, 12, 16]) if fits else (3, [12])
    drained = named(first.events(), "drained")
    assert {(event["step"], event["in_order"]) for event in drained} == {(last, fits)}
    assert [event["step"] for event in named(first.events(), "checkpoint_saved")] == before
    again = make_job(groups=2, steps=steps, flags=flags)
    again.run()
    events = check_resumed(again, expected, LENGTH * last)
    saved = [event["step"] for event in named(events, "checkpoint_saved")]
    assert saved == ([20, 24] if fits else [24])
    if not fits:
        assert [
            [(each["first_batch"], each["num_batches"]) for each in event["void"]]
            for event in drained
        ] == [
            [(12, 2)],
            [(12, 2)],
        ]
    check_data([*first.events(), *again.events()])
