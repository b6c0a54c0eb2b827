# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The phases of a heal: the result of each transition, and the reasons for a void attempt."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from titan_ft.protocol.healing import (
    MAX_PAUSE_SECONDS,
    NO_OFFER,
    AttemptError,
    Healing,
    Offer,
    OutdatedError,
    Phase,
    choose_offer,
    rotate,
)
from titan_ft.protocol.row import Standing

FROM_STEP, LINEAGE, DIGEST = 5, 100, 77
OFFER = Offer((0, 1, 3), FROM_STEP, LINEAGE, 0)


def asking(**changes: int) -> Healing:
    """Return a heal of group 2 that has just begun."""
    return replace(Healing(max_queued=4, last_donor=2), **changes)


def fetching(**changes: int) -> Healing:
    """Return a heal whose offered state is on its way."""
    return replace(asking().start_fetch(OFFER, 8), **changes)


def replaying(updates: int = 0) -> Healing:
    """Return a heal with a confirmed and loaded state, and `updates` queued updates."""
    healing = replace(fetching(), digest=DIGEST).finish_fetch().mark_loaded()
    for number in range(updates):
        healing = healing.queue_update(
            FROM_STEP + 1 + number, LINEAGE + number, LINEAGE + number + 1
        )
    return healing


# The way to READY


def test_the_way_in() -> None:
    """Ask, fetch, compare, load, replay the queue, and hold the job's state."""
    healing = asking()
    assert (healing.phase, healing.standing, healing.donor) == (Phase.ASKING, Standing.BEHIND, -1)
    healing = healing.start_fetch(OFFER, 8)
    assert (healing.phase, healing.standing, healing.donors) == (
        Phase.FETCHING,
        Standing.CATCHING_UP,
        (3, 0, 1),
    )
    healing = healing.confirm(FROM_STEP, LINEAGE, DIGEST, own_digest=0)
    healing = healing.queue_update(6, LINEAGE, 101).queue_update(7, 101, 102)
    assert healing.target_step == 7
    healing = healing.finish_fetch()
    assert (healing.phase, healing.standing) == (Phase.REPLAYING, Standing.CATCHING_UP)
    assert not healing.may_finish
    healing = healing.mark_loaded()
    assert not healing.may_finish, "two updates are left, and the holders apply one now"
    healing = healing.mark_replayed()
    assert healing.may_finish
    healing = healing.mark_replayed().finish()
    assert (healing.phase, healing.standing, healing.donor) == (Phase.READY, Standing.READY, -1)


@pytest.mark.parametrize(
    "transition",
    [
        lambda: fetching().start_fetch(OFFER, 8),
        lambda: asking().finish_fetch(),
        lambda: asking().queue_update(6, LINEAGE, 101),
        lambda: asking().let_others_wait(),
        lambda: asking().drop_failed(),
        lambda: fetching().mark_loaded(),
        lambda: fetching().mark_replayed(),
        lambda: replaying().mark_replayed(),
        lambda: replaying().finish_fetch(),
        lambda: replaying(1).finish(),
        lambda: fetching().finish(),
        lambda: replace(replaying(), digest=0).finish(),
        lambda: replace(replaying(1), is_loaded=False).mark_replayed(),
        lambda: Healing(Phase.READY).drop_failed(),
    ],
)
def test_transitions_that_are_refused(transition: Callable[[], Healing]) -> None:
    """No phase is skipped: the job's state is fetched, confirmed, loaded and replayed."""
    with pytest.raises(AssertionError):
        transition()


@pytest.mark.parametrize(
    ("confirmed", "loaded", "queued", "may"),
    [
        (True, True, 1, True),
        (True, True, 0, True),
        (True, True, 2, False),
        (True, False, 0, False),
        (False, True, 0, False),
    ],
)
def test_a_ready_group_has_a_confirmed_state(
    confirmed: bool, loaded: bool, queued: int, may: bool
) -> None:
    """The state is loaded, with at most one update left, which the holders apply now."""
    healing = replace(replaying(queued), digest=DIGEST if confirmed else 0, is_loaded=loaded)
    assert healing.may_finish is may


# The bytes


def test_a_round_with_all_digests_confirms_the_state() -> None:
    """It does so before or after the state is loaded."""
    assert fetching().confirm(FROM_STEP, LINEAGE, DIGEST, 0).digest == DIGEST
    loaded = fetching().finish_fetch().mark_loaded()
    assert loaded.confirm(FROM_STEP, LINEAGE, DIGEST, DIGEST).digest == DIGEST


@pytest.mark.parametrize(
    ("step", "lineage", "digest"),
    [(6, LINEAGE, DIGEST), (FROM_STEP, 99, DIGEST), (FROM_STEP, LINEAGE, 0)],
)
def test_a_state_that_no_round_confirms_is_void(step: int, lineage: int, digest: int) -> None:
    """The holders have another state, or not all of them have shown a digest.

    No donor is at fault.
    """
    with pytest.raises(OutdatedError):
        fetching().confirm(step, lineage, digest, 0)


def test_bytes_that_the_holders_do_not_show_are_void() -> None:
    """A donor served these bytes, so the attempt is a failure."""
    with pytest.raises(AttemptError) as caught:
        fetching().finish_fetch().mark_loaded().confirm(FROM_STEP, LINEAGE, DIGEST, DIGEST + 1)
    assert not isinstance(caught.value, OutdatedError)


def test_a_confirmed_state_is_void_when_the_holders_have_a_later_one() -> None:
    """The queue does not lead to their state."""
    healing = replaying(2)
    assert healing.confirm(FROM_STEP + 2, LINEAGE, 0, 0) is healing
    with pytest.raises(OutdatedError, match="have made an update since"):
        healing.confirm(FROM_STEP + 3, LINEAGE, 0, 0)


def test_a_group_that_asks_has_nothing_to_compare() -> None:
    """A round changes nothing for this group."""
    assert asking().confirm(9, 9, 9, 9) == asking()


# The queue


def test_updates_queue_in_order() -> None:
    """Each update continues the one before, and the first one the fetched state."""
    healing = fetching().queue_update(6, LINEAGE, 101).queue_update(7, 101, 102)
    assert (healing.queued, healing.target_step, healing.is_queue_full) == ((101, 102), 7, False)
    assert healing.queue_update(8, 102, 103).queue_update(9, 103, 104).is_queue_full


@pytest.mark.parametrize(
    ("step", "base"),
    [
        (9, 102),  # an update was missed
        (8, 302),  # the number follows, and the state does not
        (5, 99),  # the fetched step was made again
    ],
)
def test_an_update_that_does_not_follow_is_void(step: int, base: int) -> None:
    """A replay would make bytes that no other group has."""
    with pytest.raises(OutdatedError, match=f"missed an update before update {step}"):
        fetching().queue_update(6, LINEAGE, 101).queue_update(7, 101, 102).queue_update(
            step, base, 1
        )


@pytest.mark.parametrize(("step", "base"), [(7, 101), (6, 99)])
def test_the_first_update_follows_the_fetched_state(step: int, base: int) -> None:
    """This holds after the fetch, too."""
    for healing in (fetching(), replaying()):
        with pytest.raises(OutdatedError):
            healing.queue_update(step, base, 1)


def test_an_update_that_no_other_group_committed_is_replaced() -> None:
    """The others made the update again. Updates queued after it are void."""
    healing = (
        fetching().queue_update(6, LINEAGE, 101).queue_update(7, 101, 102).queue_update(8, 102, 103)
    )
    again = healing.queue_update(7, 101, 202)
    assert (again.queued, again.target_step) == ((101, 202), 7)
    assert again.queue_update(8, 202, 203).queued == (101, 202, 203)


def test_a_replayed_update_cannot_be_replaced() -> None:
    """The update is in the state."""
    healing = replaying(3).mark_replayed().mark_replayed()
    assert healing.num_remaining == 1
    assert healing.queue_update(8, 102, 203).queued == (101, 102, 203)
    with pytest.raises(OutdatedError):
        healing.queue_update(7, 101, 202)


def test_waiting_groups_go_on() -> None:
    """They go on when the state is fetched, or when one update is left to replay."""
    assert fetching().let_others_wait().others_wait
    assert not fetching().let_others_wait().finish_fetch().others_wait
    assert not replaying(2).let_others_wait().let_others_go_on().others_wait


# Another attempt


def test_an_outdated_state_counts_as_no_failure() -> None:
    """All donors may serve the next one at once."""
    healing = fetching().queue_update(6, LINEAGE, 101).drop_outdated()
    assert (healing.phase, healing.failures, healing.pause_seconds) == (Phase.ASKING, 0, 0.0)
    assert (healing.queued, healing.from_step, healing.digest, healing.donor) == ((), 0, 0, -1)
    assert healing.max_queued == 4
    assert len(healing.start_fetch(OFFER, 8).donors) == 3


def test_a_state_is_renewed_once() -> None:
    """Later failures do not change this."""
    assert fetching().drop_for_newer().has_dropped_for_newer
    assert fetching().drop_for_newer().start_fetch(OFFER, 8).drop_failed().has_dropped_for_newer
    assert not fetching().drop_failed().has_dropped_for_newer


def test_after_a_failure_one_donor_serves_and_then_the_next() -> None:
    """If several donors served wrong bytes together, nothing would show which one did."""
    healing, named = fetching(), []
    for _ in range(4):
        healing = healing.drop_failed().start_fetch(OFFER, 8)
        named.append(healing.donors)
    assert named == [(0,), (1,), (3,), (0,)]


def test_pauses_between_attempts_double_in_seconds() -> None:
    """Each attempt costs its donors a copy. The second one follows at once."""
    healing, pauses = fetching(), []
    for _ in range(10):
        healing = healing.drop_failed()
        pauses.append(healing.pause_seconds)
        healing = healing.start_fetch(OFFER, 8)
    assert pauses == [
        0.0,
        1.0,
        2.0,
        4.0,
        8.0,
        16.0,
        32.0,
        MAX_PAUSE_SECONDS,
        MAX_PAUSE_SECONDS,
        MAX_PAUSE_SECONDS,
    ]


@pytest.mark.parametrize(("most", "donors"), [(1, (3,)), (2, (3, 0)), (8, (3, 0, 1))])
def test_as_many_donors_serve_a_part_as_allowed(most: int, donors: tuple[int, ...]) -> None:
    """Each joiner begins with the first slot above its own, so joiners are spread over the
    donors.
    """
    assert asking().start_fetch(OFFER, most).donors == donors
    assert asking(last_donor=0).start_fetch(OFFER, 1).donors == (1,)


def test_another_donor_is_named_when_the_named_one_is_gone() -> None:
    """The next attempt begins after that donor."""
    healing = fetching().replace_first_donor(1)
    assert (healing.donor, healing.donors) == (1, (1, 3, 0))
    assert healing.drop_failed().start_fetch(OFFER, 8).donors == (3,)


# Offers


def test_the_state_that_most_offer_is_chosen() -> None:
    """Of equally frequent states, the later one is chosen, with all groups that offer it."""
    offers = [
        Offer((0,), 5, 1, 0),
        Offer((1,), 6, 2, 0, 40),
        Offer((2,), 6, 2, 0),
        Offer((3,), 7, 3, 0),
    ]
    assert choose_offer(offers) == Offer((1, 2), 6, 2, 0, 40)
    assert choose_offer([offers[0], offers[3]]).step == 7
    assert choose_offer([]) == NO_OFFER


def test_slots_go_around() -> None:
    """The order begins with the first slot above the given one."""
    assert rotate([3, 0, 1], after=0) == (1, 3, 0)
    assert rotate([3, 0, 1], after=3) == (0, 1, 3)
    assert rotate([], after=3) == ()


# Any order of events


@pytest.mark.parametrize("seed", range(100))
def test_no_order_of_events_makes_another_state_the_jobs(seed: int) -> None:
    """Holders commit and repeat updates, rounds break, transfers fail or bring wrong bytes, donors
    die.

    This holds for any order of these events. A ready group holds the holders' bytes. Its queue is
    bounded while no group waits. The replay has every update after the fetched state once and in
    order.
    """
    draw = random.Random(seed)
    history = [1000]  # the holders' lineage after each update
    shows = True  # all holders show their digest in the next round
    healing = Healing(max_queued=draw.randint(1, 5), last_donor=2)
    state: list[int] = []  # lineages of the group's own state over time
    bytes_right = True
    for _ in range(200):
        if healing.phase is Phase.READY:
            break
        try:
            if healing.phase is Phase.ASKING and draw.random() < 0.7:
                step = len(history) - 1
                lineage = history[-1] if draw.random() < 0.9 else 7
                healing = healing.start_fetch(Offer((0, 1, 3), step, lineage, 0), 2)
                bytes_right = draw.random() < 0.8
            elif healing.phase is Phase.FETCHING and draw.random() < 0.4:
                healing = healing.drop_failed() if draw.random() < 0.3 else healing.finish_fetch()
            if healing.phase is Phase.REPLAYING and not healing.is_loaded and draw.random() < 0.5:
                healing, state = healing.mark_loaded(), [healing.lineage]
                if healing.digest and not bytes_right:
                    raise AttemptError
            if healing.phase is Phase.REPLAYING and healing.is_loaded and healing.num_remaining > 1:
                state.append(healing.queued[healing.num_replayed])
                healing = healing.mark_replayed()
            # A round
            is_broken, shows = draw.random() < 0.1, draw.random() < 0.8
            if not is_broken:
                step, digest = len(history) - 1, 10_000 + history[-1]
                own = digest if bytes_right and state[-1:] == history[-1:] else 1
                healing = healing.confirm(step, history[-1], digest if shows else 0, own)
            if not healing.others_wait and draw.random() < 0.8:
                base, lineage = history[-1], draw.randint(1001, 10**6)
                history.append(lineage)
                if healing.phase in (Phase.FETCHING, Phase.REPLAYING) and not is_broken:
                    healing = healing.queue_update(len(history) - 1, base, lineage)
                    if healing.is_queue_full and healing.phase is Phase.FETCHING:
                        healing = healing.let_others_wait()
            if healing.may_finish:
                if healing.num_remaining:
                    state.append(healing.queued[healing.num_replayed])
                    healing = healing.mark_replayed()
                assert healing.target_step <= len(history) - 1
                assert healing.digest == 10_000 + healing.lineage
                assert bytes_right, "no group is ready with bytes that no round has shown"
                first = healing.from_step
                assert state == history[first : healing.target_step + 1]
                healing = healing.finish()
        except OutdatedError:
            healing = healing.drop_outdated()
        except AttemptError:
            healing = healing.drop_failed()
        if healing.phase is Phase.FETCHING:
            assert len(healing.queued) <= healing.max_queued
