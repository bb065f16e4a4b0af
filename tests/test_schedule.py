"""Schedules as data: what they hold, that they can run, what they would take."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed.pipelining.schedules as theirs

from benchmarks.gantt import gantt
from meshfit.errors import PlanError
from meshfit.plan import SCHEDULES
from meshfit.schedule.actions import Action, check, rank_of, stages_of
from meshfit.schedule.orders import schedule, short
from meshfit.schedule.simulate import simulate

KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def of_torch(kind: type, rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """The order of one of torch's schedules, without the stages it usually is built of."""
    rounds = max(1, microbatches // ranks)
    stand_in = SimpleNamespace(
        pp_group_size=ranks,
        _n_microbatches=microbatches,
        num_stages=ranks * chunks,
        n_local_stages=chunks,
        microbatches_per_round=microbatches // rounds,
    )
    found = []
    for action in kind._calculate_single_rank_operations(stand_in, rank):  # type: ignore[attr-defined]
        for one in () if action is None else action.sub_actions or (action,):
            found.append(Action(KINDS[one.computation_type.name], one.stage_index, one.microbatch_index))
    return found


@pytest.mark.parametrize(
    ("word", "kind", "chunks"),
    [
        ("interleaved", theirs.ScheduleInterleaved1F1B, 2),
        ("interleaved", theirs.ScheduleInterleaved1F1B, 3),
        ("zbv", theirs.ScheduleZBVZeroBubble, 2),
        ("dualpipev", theirs.ScheduleDualPipeV, 2),
    ],
)
def test_orders_are_those_of_torch(word: str, kind: type, chunks: int) -> None:
    compared = 0
    for ranks in (1, 2, 3, 4, 8):
        for microbatches in range(1, 18):
            try:
                ours = schedule(word, ranks, microbatches, chunks)
            except PlanError:
                continue
            for rank in range(ranks):
                assert list(ours.orders[rank]) == of_torch(kind, rank, ranks, microbatches, chunks)
            compared += 1
    assert compared > 40


@pytest.mark.parametrize("word", SCHEDULES)
def test_every_schedule_is_whole_and_ends(word: str) -> None:
    for ranks in (1, 2, 3, 4, 6, 8):
        for microbatches in (1, 2, 3, 4, 5, 8, 12, 16, 17):
            try:
                check(schedule(word, ranks, microbatches))
            except PlanError as error:
                fit = int(error.facts[-1].split("=")[1].split()[0])
                check(schedule(word, ranks, fit))


def test_what_a_schedule_cannot_take_is_refused() -> None:
    with pytest.raises(PlanError, match=r"dualpipev on 4 ranks cannot take microbatches=5(.|\n)*microbatches=8 works"):
        schedule("dualpipev", 4, 5)
    with pytest.raises(PlanError, match=r"interleaved on 4 ranks cannot take microbatches=9(.|\n)*microbatches=10"):
        schedule("interleaved", 4, 9)
    with pytest.raises(PlanError, match=r"microbatches=0(.|\n)*microbatches=1 works"):
        schedule("gpipe", 2, 0)
    with pytest.raises(PlanError, match="chunks=2 works"):
        schedule("zbv", 2, 4, chunks=3)
    with pytest.raises(PlanError, match="known: sequential, gpipe"):
        schedule("pipedream", 2, 4)


def test_a_broken_schedule_is_refused() -> None:
    good = schedule("1f1b", 2, 2)
    first, second = good.orders
    with pytest.raises(PlanError, match=r"not whole(.|\n)*stage 0, microbatch 1: F"):
        check(replace(good, orders=(first[:-1], second)))
    with pytest.raises(PlanError, match="which lacks that stage"):
        check(replace(good, orders=(second, first)))
    backward_first = (first[-1], *first[:-1])
    with pytest.raises(PlanError, match=r"wait for each other(.|\n)*rank 0 at 0B1 waits for 0F1"):
        check(replace(good, orders=(backward_first, second)))


def test_a_short_batch_keeps_the_stages_where_they_are() -> None:
    for word in SCHEDULES:
        usual = schedule(word, 2, 4)
        for microbatches in (1, 2, 3):
            made = short(usual, microbatches)
            check(made)
            assert made.microbatches == microbatches
            assert [made.rank_of(stage) for stage in range(made.stages)] == [
                usual.rank_of(stage) for stage in range(usual.stages)
            ]


def test_where_stages_live() -> None:
    assert stages_of("1f1b", 4, 1, 2) == (2,)
    assert stages_of("interleaved", 2, 3, 1) == (1, 3, 5)
    assert [stages_of("zbv", 4, 2, rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert rank_of("dualpipev", 4, 4) == 3


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8, 16])
def test_bubbles_are_as_textbooks_say(ranks: int, microbatches: int) -> None:
    idle = lambda chunks: (ranks - 1) / (chunks * microbatches + ranks - 1)
    textbook = {"sequential": (ranks - 1) / ranks, "gpipe": idle(1), "1f1b": idle(1)}
    textbook |= {"interleaved": idle(2)} if microbatches % ranks == 0 else {}
    for word, bubble in textbook.items():
        assert simulate(schedule(word, ranks, microbatches)).bubble == pytest.approx(bubble)


def test_activations_kept() -> None:
    assert simulate(schedule("sequential", 4, 8)).kept == (1, 1, 1, 1)
    assert simulate(schedule("gpipe", 4, 8)).kept == (8, 8, 8, 8)
    assert simulate(schedule("1f1b", 4, 8)).kept == (4, 3, 2, 1)
    assert simulate(schedule("zbv", 4, 8)).kept == (8, 8, 8, 8)  # of half a stage each


def test_zero_bubble_is_better_than_1f1b() -> None:
    plain = simulate(schedule("1f1b", 4, 8)).bubble
    assert simulate(schedule("interleaved", 4, 8)).bubble < plain
    for word in ("zbv", "dualpipev"):
        assert simulate(schedule(word, 4, 8)).bubble < plain / 3


def test_transfers_delay() -> None:
    plan = schedule("gpipe", 2, 1)
    assert simulate(plan).seconds == 6
    assert simulate(plan, transfer=0.5).seconds == 7
    assert simulate(plan, lambda action: 3.0 if action.stage else 1.0).seconds == 8


def test_a_schedule_prints_as_a_grid() -> None:
    assert str(schedule("gpipe", 2, 2)).splitlines() == [
        "rank 0 |F0 F1          B0 -- B1 --",
        "rank 1 |   F0 F1 B0 -- B1 --",
    ]


def test_the_picture_holds_every_action() -> None:
    plan = schedule("zbv", 2, 4)
    ideal = simulate(plan)
    picture = ElementTree.fromstring(gantt("zbv & co", ("ideal", ideal), ("measured", ideal), note="a <note>"))
    titles = [node.text or "" for node in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(title.startswith("stage") for title in titles) == 2 * sum(map(len, plan.orders))
