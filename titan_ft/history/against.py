# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Compare the loss curve of a run with that of another run without failures, at equal tokens.

`titan_ft.history.check` calls `check_against` if the user names another run (`--against`). The
other run is the *reference*: it has the same config.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean

from titan_ft.history.judgement import Judgement, count
from titan_ft.history.record.run_record import CurvePoint, RunRecord
from titan_ft.history.record.trajectory import ROOT
from titan_ft.run.events import WorkerStarted

ROUNDING_PER_STEP = 1e-4
"""With more than two groups, the order of additions may make this relative difference, times the
number of the step.
"""
MAX_ROUNDING = 0.05
"""The relative difference of one step is at most this."""
WINDOW_SHARE = 0.1
"""The means are taken over the last part of the common tokens, which has this share of them."""
MIN_STEPS_IN_WINDOW = 5
"""Steps that each run must have in the window, so that the scatter can be estimated."""
MAX_STANDARD_ERRORS = 3.0
"""A mean that is farther above the reference's is an offence."""
MIN_DIFFERENCE = 0.02
"""A smaller relative difference of two means is no difference."""


def check_against(record: RunRecord, reference: RunRecord, found: Judgement) -> None:
    """Check that a run follows the loss curve of a reference without failures.

    There are two rules.

    1. From step 1 on, while all groups took part in both runs, the steps are compared one by one.
       With up to two groups, loss, gradient norm, LR and tokens must be equal bit for bit. With
       more groups a ring adds in another order: `ROUNDING_PER_STEP` x step (relative,
       `MAX_ROUNDING` at most) is allowed for loss and gradient norm.
    2. After that, the runs are compared at equal tokens. Let T be the smaller total of both. The
       mean loss of the steps between 0.9 T and T may be above the reference's by at most the larger
       of two bounds: 3 standard errors of the difference (by the reference's own scatter between
       steps), and 2 %. A lower loss is a note and no offence: at equal tokens a run with smaller
       batches has made more steps.
    """
    ours = record.curve
    theirs = reference.curve
    noun = record.unit.noun
    if not ours or not theirs:
        run = "this run"
        if ours:
            run = "the other run"
        found.unknown.append(f"no event of {run} tells of a committed {noun}")
        return
    if not _is_comparable(record, reference, ours, theirs, found):
        return
    num_common = _count_common_steps(ours, theirs)
    prefix = _compare_prefix(ours[:num_common], theirs[:num_common], record, found)
    end = f"final loss {_format_loss(ours[-1])} after {ours[-1].tokens} tokens"
    other_end = f"without failures {_format_loss(theirs[-1])} after {theirs[-1].tokens}"
    found.statement = f"{prefix}; {end}, {other_end}"
    if num_common and num_common == min(len(ours), len(theirs)):
        return  # all that can be compared was, step by step
    total_tokens = min(ours[-1].tokens, theirs[-1].tokens)
    _compare_ends(ours, theirs, total_tokens, noun, found)


def _is_comparable(
    record: RunRecord,
    reference: RunRecord,
    ours: Sequence[CurvePoint],
    theirs: Sequence[CurvePoint],
    found: Judgement,
) -> bool:
    """Return whether both runs train the same from the beginning; note why not."""
    own_digests = _find_config_digests(record)
    other_digests = _find_config_digests(reference)
    are_known = bool(own_digests) and bool(other_digests)
    if are_known and own_digests != other_digests:
        found.unknown.append("the two runs have different configs (config_digest)")
    if ours[0].event.parent != ROOT or theirs[0].event.parent != ROOT:
        begin = f"{record.unit.noun} 1"
        found.unknown.append(f"the history of one of the runs does not begin with {begin}")
    if not all(point.whole for point in theirs):
        found.notes.append("groups were missing in the other run too")
    if not found.unknown:
        return True
    end = f"final loss {_format_loss(ours[-1])} after {ours[-1].tokens} tokens"
    other_end = f"in the other run {_format_loss(theirs[-1])} after {theirs[-1].tokens}"
    found.statement = f"not compared: {end}, {other_end}"
    return False


def _find_config_digests(record: RunRecord) -> set[str]:
    return {event.config_digest for event in record.of(WorkerStarted) if event.config_digest}


def _count_common_steps(ours: Sequence[CurvePoint], theirs: Sequence[CurvePoint]) -> int:
    """Return how many steps both runs made with all groups, from the first on."""
    number = 0
    for our, their in zip(ours, theirs, strict=False):
        if not our.whole or not their.whole:
            break
        number += 1
    return number


def _compare_prefix(
    ours: Sequence[CurvePoint], theirs: Sequence[CurvePoint], record: RunRecord, found: Judgement
) -> str:
    """Compare the first steps one by one; return what was found."""
    noun = record.unit.noun
    if not ours:
        return f"no {noun} that both runs made with all groups, from the first on"
    largest = 0.0
    for our, their in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm", "lr", "tokens"):
            mine = getattr(our.event, name)
            other = getattr(their.event, name)
            if mine is None or other is None:
                continue
            difference = abs(mine - other) / max(abs(other), 1e-30)
            largest = max(largest, difference)
            must_be_equal = record.group_size <= 2 or name in ("lr", "tokens")
            allowed = 0.0
            if not must_be_equal:
                allowed = min(ROUNDING_PER_STEP * our.step, MAX_ROUNDING)
            if difference > allowed:
                values = f"{name} {mine!r}; {other!r} without failures"
                found.object_to(f"{values}, all groups present in both", our.event)
    if found.offences:
        return f"the first {len(ours)} {noun}s differ"
    steps = f"the first {count(len(ours), noun)}"
    if largest == 0:
        return f"{steps} agree bit for bit"
    return f"{steps} agree to {largest:.1e} at most"


def _compare_ends(
    ours: Sequence[CurvePoint],
    theirs: Sequence[CurvePoint],
    total_tokens: int,
    noun: str,
    found: Judgement,
) -> None:
    """Compare the mean loss of the last window of tokens that both runs have."""
    mine = _find_losses_in_window(ours, total_tokens)
    other = _find_losses_in_window(theirs, total_tokens)
    if min(len(mine), len(other)) < MIN_STEPS_IN_WINDOW:
        numbers = f"{len(mine)} and {len(other)} {noun}s with a loss"
        text = f"{numbers} in the last {WINDOW_SHARE:.0%} of the common tokens"
        found.unknown.append(f"{text}, {MIN_STEPS_IN_WINDOW} are needed")
        return
    difference = mean(mine) - mean(other)
    # Differences of neighbours have no trend in them, and twice the variance.
    scatter = math.sqrt(mean((after - before) ** 2 for before, after in pairwise(other)) / 2)
    error = scatter * math.sqrt(1 / len(mine) + 1 / len(other))
    allowed = max(MAX_STANDARD_ERRORS * error, MIN_DIFFERENCE * abs(mean(other)))
    means = f"{mean(mine):.4f}, {mean(other):.4f} without"
    window = f"the last {WINDOW_SHARE:.0%} of {total_tokens} tokens"
    found.statement += f"; mean of {window} {means} ({difference:+.4f}, {allowed:.4f} allowed)"
    if difference > allowed:
        above = f"{difference:.4f} above that of the run without failures"
        found.object_to(f"the loss is {above} at {total_tokens} tokens")
    elif -difference > allowed:
        below = f"{-difference:.4f} below that of the run without failures"
        found.notes.append(f"the loss is {below} at equal tokens")


def _find_losses_in_window(points: Sequence[CurvePoint], total_tokens: int) -> list[float]:
    """Return the known losses of the steps in the last part of the common tokens."""
    losses = []
    for point in points:
        is_in_window = (1 - WINDOW_SHARE) * total_tokens < point.tokens <= total_tokens
        if is_in_window and point.loss is not None:
            losses.append(point.loss)
    return losses


def _format_loss(point: CurvePoint) -> str:
    if point.loss is None:
        return "unknown"
    return f"{point.loss:.4f}"
