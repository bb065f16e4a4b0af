"""Ideal beside measured: what a schedule would have done with the same work, and what a step is without its waits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshfit
from meshfit.observe.ideal import ideal, ideal_table, working
from meshfit.observe.page_data import page_data
from meshfit.observe.reading import Rank, RecordedRun, RecordedSpan, Total, read
from meshfit.schedule.actions import SPANS
from meshfit.schedule.orders import schedule
from meshfit.schedule.simulate import simulate


def recording(plan: str, late: float, *, word: str = "1f1b", lines: int = 1) -> RecordedRun:
    """Ten steps of a pipeline over two ranks, simulated with transfers that take ``late`` seconds."""
    made = simulate(schedule(word, 2, 4), transfer=late)
    ranks = []
    for number in range(2 * lines):
        spans = []
        for step in range(1, 11):
            zero = step * 100.0
            acts = [
                RecordedSpan(
                    SPANS[t.action.kind],
                    step,
                    zero + t.start,
                    t.end - t.start,
                    {"stage": t.action.stage, "microbatch": t.action.microbatch},
                )
                for t in made.spans[number // lines]
            ]
            spans += [RecordedSpan("forward_backward", step, zero, made.seconds), *acts]
        ranks.append(Rank(number, {}, spans, [], [], [], []))
    steps = [{"step": i, "seconds": 100.0 * i, "samples": i} for i in range(1, 11)]
    return RecordedRun(Path("run"), {"plan": plan}, steps, ranks, [])


@pytest.mark.parametrize("word", ["1f1b", "gpipe", "zbv"])
def test_the_ideal_of_a_schedule_is_the_schedule_without_transfers(word: str) -> None:
    run = recording(f"pipeline=2 microbatches=4 schedule={word}", 0.5, word=word)
    found = ideal(run, [4, 5])
    assert found is not None
    best, real = simulate(schedule(word, 2, 4)), simulate(schedule(word, 2, 4), transfer=0.5)
    assert found.bubble == pytest.approx(best.bubble)
    assert found.measured == pytest.approx(real.bubble)
    assert found.lost == pytest.approx(real.seconds - best.seconds)
    assert {rank: len(spans) for rank, spans in found.lanes.items()} == {
        0: 2 * len(best.spans[0]),
        1: 2 * len(best.spans[1]),
    }
    first = min(found.lanes[0], key=lambda span: span.at)
    assert (first.at, first.step) == (400.0, 4)


def test_every_line_of_ranks_has_its_own_ideal() -> None:
    found = ideal(recording("data=2 pipeline=2 microbatches=4", 0.5, lines=2), [5])
    assert found is not None
    assert sorted(found.lanes) == [0, 1, 2, 3]


def test_steps_that_are_not_whole_have_none() -> None:
    run = recording("pipeline=2 microbatches=4", 0.0)
    cut = [replace(rank, spans=[s for s in rank.spans if s.about.get("microbatch") != 3]) for rank in run.ranks]
    assert ideal(replace(run, ranks=cut), [5]) is None
    assert ideal(replace(run, about={"plan": "pipeline=2 microbatches=8"}), [5]) is None
    assert ideal(replace(run, about={"plan": "words of another version"}), [5]) is None


def test_elsewhere_the_ideal_is_work_alone() -> None:
    by = {"data": 1.0, "forward_backward": 6.0, "meet": 2.0, "exchange": 2.0, "update": 1.0, "evaluate": 5.0}
    ranks = [Rank(i, {}, [], [Total(0.0, 15.0, 1, 10, by)], [], [], []) for i in range(2)]
    steps = [{"step": i, "seconds": float(i), "samples": i} for i in range(1, 11)]
    run = RecordedRun(Path("run"), {"plan": "data=2"}, steps, ranks, [])
    assert working(run) == pytest.approx(
        0.5
    )  # of ten seconds of steps three waited for others, two within, one for data
    table = ideal_table(run, None)
    assert table is not None
    assert table["rows"][0] == ["at work", "100.0%", "50.0%"]


def test_the_page_of_a_pipeline_has_both(tmp_path: Path) -> None:
    X, Y = torch.randn(64, 8), torch.randint(4, (64,))
    result = meshfit.fit(
        lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)),
        (X, Y),
        loss=F.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        batch_size=16,
        steps=12,
        plan="pipeline=2 microbatches=4",
        devices="cpu",
        out=tmp_path / "run",
    )
    assert result.folder is not None
    data = page_data(read(result.folder))
    assert [lane["label"] for lane in data["timeline"]["ideal"]] == ["rank 0", "rank 1"]
    without, measured = data["timeline"]["idle"]
    assert 0 < without < measured < 1
    assert data["tables"][0]["title"] == "Ideal and measured"
