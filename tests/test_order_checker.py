"""Nothing hangs on GPUs: every rank issues what it does with others in one order, which blocks nowhere."""

from collections.abc import Iterator

import pytest

from meshfit.comm.order_check import Operation, check
from meshfit.errors import PlanError
from meshfit.plan import SCHEDULES
from meshfit.schedule.actions import Schedule
from meshfit.schedule.issue import Transfer, issued, line, pairs, sent_by
from meshfit.schedule.orders import schedule, short


def schedules() -> Iterator[Schedule]:
    for word in SCHEDULES:
        for ranks in range(2, 9):
            for microbatches in (*range(1, 9), 11, 16):
                for chunks in (2, 3) if word == "interleaved" else (None,):
                    try:
                        yield schedule(word, ranks, microbatches, chunks)
                    except PlanError:  # what the plan cannot take, and what a short batch then does
                        if ranks < 5:
                            yield short(schedule(word, ranks, 4 * ranks, chunks), microbatches)


def log_of(plan: Schedule, rank: int) -> list[Operation]:
    """What ``rank`` issues: work on its own, and messages."""
    found = []
    for entry in issued(plan, rank):
        if isinstance(entry, Transfer):
            low, high = sorted((entry.source, entry.target))
            found.append(Operation(f"{low}:{high}", str(entry), (entry.source, entry.target), 0, ""))
        else:
            found.append(Operation(f"kernels of {rank}", str(entry), (rank,), 0, ""))
    return found


def test_pipelines_complete_if_every_message_blocks_both_its_ranks() -> None:
    """Messages and kernels in one queue a rank, as with CUDA_DEVICE_MAX_CONNECTIONS=1."""
    tried = 0
    for plan in schedules():
        assert check([log_of(plan, rank) for rank in range(plan.ranks)]) == [], plan
        tried += 1
    assert tried > 400


@pytest.mark.parametrize("word", SCHEDULES)
def test_every_message_is_issued_once_at_both_ends_and_in_time(word: str) -> None:
    plan = schedule(word, 4, 8)
    place = {entry: i for i, entry in enumerate(line(plan))}
    assert len(place) == len(line(plan))
    for rank, order in enumerate(plan.orders):
        own = issued(plan, rank)
        assert tuple(entry for entry in own if not isinstance(entry, Transfer)) == order
        for action in order:
            transfer = sent_by(plan, action)
            if transfer is not None:
                assert own[own.index(action) + 1] == transfer  # sent as soon as it is made
                assert transfer in issued(plan, transfer.target)
                assert (min(transfer.source, transfer.target), max(transfer.source, transfer.target)) in pairs(plan)
            for need in plan.needs(action):  # and posted before it is needed, after its sender has begun to make it
                if plan.rank_of(need.stage) != rank:
                    sent = sent_by(plan, need)
                    assert sent is not None
                    assert place[need] < place[sent] < place[action]


def test_a_rank_receives_forward_before_it_goes_backward_in_1f1b() -> None:
    """What travels while the rank works: the receive of the next forward is posted before the backward."""
    got = [str(entry) for entry in issued(schedule("1f1b", 2, 4), 1)]
    assert got[:6] == ["0F0:0>1", "0F1:0>1", "1F0", "1B0", "1B0:1>0", "1F1"]


def test_pairs() -> None:
    assert pairs(schedule("1f1b", 4, 4)) == ((0, 1), (1, 2), (2, 3))
    assert pairs(schedule("zbv", 4, 8)) == ((0, 1), (1, 2), (2, 3))
    assert pairs(schedule("interleaved", 4, 4)) == ((0, 1), (0, 3), (1, 2), (2, 3))
    assert pairs(schedule("interleaved", 2, 4)) == ((0, 1),)


def test_the_checker_finds_what_hangs() -> None:
    """As a pipeline did that posted sends and receives as each rank came to them: both send first."""
    forward, backward = Operation("0:1", "send", (0, 1), 4, "f"), Operation("0:1", "send", (1, 0), 4, "f")
    assert check([[forward, backward], [forward, backward]]) == []
    assert "number 0" in str(check([[forward, backward], [backward, forward]])[0])
    data, line = Operation("data", "all_reduce", (0, 1), 4, "f"), Operation("line", "all_reduce", (0, 1), 4, "f")
    assert "waits for ever" in str(check([[data, line], [line, data]])[0])
    assert "number 0" in str(check([[data], [Operation("data", "all_reduce", (0, 1), 8, "f")]])[0])
    assert "nothing" in str(check([[data, data], [data]])[0])
