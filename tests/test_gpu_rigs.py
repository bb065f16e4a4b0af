"""The benchmarks that need a GPU: what they would run, what they say where there is none, and their rig."""

import sys
from typing import Any

import pytest
import torch

from benchmarks import nccl_speed, one_of_eight, syncs
from benchmarks.delayed import LINK, DelayedGroup
from benchmarks.nccl_ranks import NOT_RUN
from meshfit.plan import DEGREES, Plan


@pytest.mark.parametrize("script", [nccl_speed, one_of_eight, syncs])
def test_without_a_gpu_nothing_passes(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(script, "gpu", lambda: False)
    monkeypatch.setattr(sys, "argv", ["script"])
    assert script.main() == NOT_RUN
    assert capsys.readouterr().out.startswith("NOT RUN")


def test_every_row_of_meshfit_has_a_peer_to_beat() -> None:
    names = {row.name for row in nccl_speed.ROWS}
    for row in nccl_speed.ROWS:
        assert bool(row.goals) == bool(row.meshfit) or row.family == "context"  # compared with each other
        assert all(peer in names for peer, _, _ in row.goals)
        assert row.meshfit or row.name in nccl_speed.PEERS
        assert not row.meshfit or Plan.parse(row.meshfit.format(n=2)).devices == 2
    assert all(Plan.parse(row.plan).devices == row.ranks for row in one_of_eight.ROWS if row.plan)
    assert all(row.plan or row.name in one_of_eight.PEERS for row in one_of_eight.ROWS)


def test_a_goal_that_is_missed_or_cannot_be_judged_is_no_success() -> None:
    rows = [row for row in nccl_speed.ROWS if row.name in ("FSDP2 autocast", "meshfit shard compile=none")]
    found: dict[str, dict[str, Any]] = {"FSDP2 autocast": {"ms": [100.0, 101.0, 90.0]}}
    assert nccl_speed.shown(rows, {**found, rows[1].name: {"ms": [90.0, 97.0, 99.0]}})[1]
    assert not nccl_speed.shown(rows, {**found, rows[1].name: {"ms": [90.0, 99.0, 99.0]}})[1]
    assert not nccl_speed.shown(rows, {**found, rows[1].name: {"ms": []}})[1]
    assert not nccl_speed.shown(rows, {rows[0].name: {"ms": []}, rows[1].name: {"ms": [90.0]}})[1]


def test_every_axis_is_looked_at_for_waits() -> None:
    plans = [Plan.parse(case.plan) for case in syncs.CASES]
    assert all(plan.devices == case.ranks for plan, case in zip(plans, syncs.CASES, strict=True))
    assert all(any(getattr(plan, axis) > 1 for plan in plans) for axis in DEGREES)
    assert {plan.zero for plan in plans if plan.shard > 1} == {1, 2, 3}
    waits = {"warned": ["exchange/allreduce.py:1"], "traced": [], "communicators": [2, 2], "held": [5, 9], "loss": 1.0}
    fine = {**waits, "warned": []}
    assert syncs.shown(syncs.CASES[0], [fine, fine])[1]
    assert not syncs.shown(syncs.CASES[0], [fine, waits])[1]
    assert not syncs.shown(syncs.CASES[0], [fine, {**fine, "communicators": [2, 3]}])[1]
    assert not syncs.shown(syncs.CASES[0], [fine, {**fine, "held": [5, 5 + 2**20]}])[1]


def test_a_rank_alone_receives_what_ranks_like_it_would_send() -> None:
    group, own = DelayedGroup(0, 4), torch.arange(3.0)
    LINK.bytes = 0.0
    every = torch.empty(12)
    group._allgather_base(every, own).wait()
    assert torch.equal(every, own.repeat(4))
    part = torch.empty(3)
    group._reduce_scatter_base(part, every).wait()
    assert torch.equal(part, own)
    group.allreduce([part]).wait()
    assert LINK.bytes == pytest.approx(3 / 4 * 48 + 3 / 4 * 48 + 2 * 3 / 4 * 12)
