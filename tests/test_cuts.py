"""Cuts, stages, branches, blocks and axes of traces written by hand, against answers known or searched for."""

import random
import time
from copy import deepcopy
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from torch import Tensor, nn

from meshfit.anatomy.axes import AXES, axes
from meshfit.anatomy.blocks import blocks, folded
from meshfit.anatomy.branches import branches
from meshfit.anatomy.cuts import BAND, FLOPS_PER_BYTE, Stages, cuts, stages, work
from meshfit.anatomy.record import record
from meshfit.anatomy.record_program import decode
from meshfit.anatomy.replay import Environment, Recording, bind, run
from meshfit.anatomy.trace import Dynamic, Event, EventCost, Parameter, Trace, Value
from meshfit.errors import PlanError


class Model:
    """A trace in the making."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.values: dict[int, Value] = {}
        self.inputs: list[int] = []
        self.parameters: dict[str, Parameter] = {}
        self.buffers: dict[str, Parameter] = {}
        self.kinds: dict[str, str] = {"": "Model"}

    def value(self, size: int, made_by: int, *, constant: bool = False, storage: int | None = None) -> int:
        new = len(self.values)
        self.values[new] = Value(
            id=new,
            shape=(size,),
            dtype="uint8",
            bytes=size,
            made_by=made_by,
            constant=constant,
            storage=new if storage is None else self.values[storage].storage,
        )
        return new

    def input(self, size: int = 1) -> int:
        self.inputs.append(self.value(size, -1))
        return self.inputs[-1]

    def __call__(
        self,
        *reads: int,
        name: str = "glue",
        inside: str = "",
        flops: int = 1,
        size: int = 1,
        kind: str | None = None,
        parameters: dict[str, int] | None = None,
        buffers: tuple[str, ...] = (),
        changes: tuple[str, ...] = (),
        mutates: tuple[int, ...] = (),
        constant: bool = False,
        view_of: int | None = None,
        kept: int = 0,
    ) -> int:
        """One more event; the value it makes. ``parameters``: bytes by name."""
        index = len(self.events)
        if kind is not None:
            self.kinds[name] = kind
        for key, count in (parameters or {}).items():
            self.parameters.setdefault(key, Parameter(key, (count,), "uint8", count, True))
        for key in buffers:
            self.buffers.setdefault(key, Parameter(key, (1,), "uint8", 1, False))
        made = self.value(size, index, constant=constant, storage=view_of)
        for read in dict.fromkeys(reads):
            self.values[read] = replace(self.values[read], used_by=(*self.values[read].used_by, index))
        self.events.append(
            Event(
                index=index,
                kind="glue" if kind is None else "module",
                name=name,
                inside=inside or (name.rpartition(".")[0] if kind else ""),
                reads=tuple(dict.fromkeys(reads)),
                writes=(made,),
                mutates=mutates,
                parameters=tuple(parameters or ()),
                buffers=buffers,
                changes=changes,
                cost=EventCost(flops=flops, kept=kept),
            )
        )
        return made

    def trace(self, *outputs: int, **more: object) -> Trace:
        return Trace(
            events=tuple(self.events),
            values=self.values,
            inputs=tuple(self.inputs),
            outputs=outputs,
            parameters=self.parameters,
            buffers=self.buffers,
            ties={},
            kinds=self.kinds,
            **more,  # type: ignore[arg-type]
        )


def chain(*flops: int, size: int = 1) -> Trace:
    model = Model()
    x = model.input()
    for i, count in enumerate(flops):
        x = model(
            x, name=f"layers.{i}", kind="Linear", flops=count, size=size, parameters={f"layers.{i}.weight": count}
        )
    return model.trace(x)


def flops(event: Event) -> float:
    return event.cost.flops


# Cuts


def test_a_chain_is_cut_between_any_two_events():
    found = cuts(chain(1, 2, 3, size=5))
    assert [(cut.after, cut.crossing, cut.bytes) for cut in found] == [(0, (1,), 5), (1, (2,), 5)]


def test_a_skip_crosses_every_cut_it_spans():
    model = Model()
    x = model(model.input(), size=10)
    y = model(model(x, size=1), size=2)
    trace = model.trace(model(y, x, size=1))
    assert [(cut.after, cut.bytes) for cut in cuts(trace)] == [(0, 10), (1, 11), (2, 12)]


def test_inputs_are_given_not_sent_unless_changed():
    model = Model()
    a, b = model.input(100), model.input(100)
    x = model(a)
    x = model(x, b, mutates=(b,))
    trace = model.trace(model(x, a, b))
    assert [cut.crossing for cut in cuts(trace)] == [(x - 1,), (b, x)]
    split = stages(trace, 3, flops)
    assert split.inputs == ((a,), (b,), (a,))


def test_constants_are_computed_again_not_sent():
    model = Model()
    x = model.input()
    mask = model(constant=True, size=1000, name="ones")
    band = model(mask, constant=True, size=1000, name="triu", mutates=(mask,), view_of=mask)
    y = model(model(x, band), band)
    trace = model.trace(y)
    assert [cut.after for cut in cuts(trace)] == [2]  # the constants stand for nothing by themselves
    assert cuts(trace)[0].bytes == 1
    assert stages(trace, 2, flops).recomputed == ((), (0, 1))


def test_a_constant_that_results_are_written_into_is_sent():
    model = Model()
    x = model.input()
    pad = model(constant=True, size=50, name="zeros")
    filled = model(pad, x, mutates=(pad,), view_of=pad, size=50)
    later = model(x)
    trace = model.trace(model(later, filled))
    assert all(pad in cut.crossing or filled in cut.crossing for cut in cuts(trace))
    assert all(cut.bytes >= 50 for cut in cuts(trace))


def test_no_cut_parts_two_aliases_of_what_is_changed_later():
    model = Model()
    x = model(model.input(), size=8)
    view = model(x, view_of=x, size=4)
    z = model(view, view, name="add_", mutates=(view,), view_of=x, size=4)
    out = model(x, z)
    trace = model.trace(model(out))
    assert [cut.after for cut in cuts(trace)] == [0, 2, 3]  # after 1, x and its view live and the view is changed
    unchanged = replace(trace, events=tuple(replace(event, mutates=()) for event in trace.events))
    assert [cut.after for cut in cuts(unchanged)] == [0, 1, 2, 3]


def test_a_view_of_an_input_that_is_changed_later():
    model = Model()
    x = model.input(8)
    view = model(x, view_of=x, size=8)
    z = model(view, name="add_", mutates=(view,), view_of=x)
    trace = model.trace(model(z, x))
    assert [cut.after for cut in cuts(trace)] == [1]  # the stage would be given x anew, and change its copy of the view
    assert set(cuts(trace)[0].crossing) >= {x}


def test_users_of_a_buffer_that_is_written_stay_together():
    model = Model()
    x = model(model.input())
    for _ in range(2):
        mean = ("norm.running_mean",)
        x = model(x, name="norm", kind="BatchNorm1d", parameters={"norm.weight": 1}, buffers=mean, changes=mean)
        x = model(x)
    trace = model.trace(x)
    assert [cut.after for cut in cuts(trace)] == [0, 3]
    still = replace(trace, events=tuple(replace(event, changes=()) for event in trace.events))
    assert [cut.after for cut in cuts(still)] == [0, 1, 2, 3]
    with pytest.raises(PlanError, match=r"norm\.running_mean is written in the forward and used 2 times") as error:
        stages(trace, 4)
    assert "pipeline=3 is the most it can take" in str(error.value)


def test_a_gradient_taken_in_the_forward_stays_with_its_graph():
    model = Model()
    x = model(model.input())
    y = model(model(x))
    trace = model.trace(model(model(y, x, name="grad")))
    assert [cut.after for cut in cuts(trace)] == [0, 3]


def test_early_outputs_are_handed_on_to_the_last_stage():
    model = Model()
    early = model(model.input(), size=7)
    trace = model.trace(early, model(model(early)))
    assert [cut.bytes for cut in cuts(trace)] == [7, 8]


# Stages


def test_stages_of_a_chain():
    split = stages(chain(4, 1, 1, 1, 1, 4), 3, flops)
    assert [list(events) for events in split.ranges] == [[0], [1, 2, 3, 4], [5]]
    assert split.costs == (4, 4, 4)
    assert split.imbalance == 0
    assert split.parameters[0] == ("layers.0.weight",)
    assert split.parameter_bytes == (4, 4, 4)
    assert not split.indivisible
    assert not split.ties


def test_one_stage_is_a_split():
    split = stages(chain(1, 2), 1)
    assert split.cuts == ()
    assert split.imbalance == 0


def test_what_cannot_be_divided_is_named():
    split = stages(chain(1, 1, 10, 1, 1), 2, flops)
    assert split.indivisible == (range(2, 3),)
    assert split.imbalance == pytest.approx(12 / 7 - 1)


def test_fewer_bytes_within_the_band():
    model = Model()
    x = model.input()
    for i in range(200):
        x = model(x, flops=10, size=1 if i in (98, 150) else 100)
    trace = model.trace(x)
    assert stages(trace, 2, flops).cuts[0].after == 98
    assert stages(trace, 2, flops, band=0).cuts[0].after == 99


def test_whole_modules_where_bytes_are_even():
    model = Model()
    x = model.input()
    for i in range(40):
        for j in range(5):
            x = model(x, inside=f"layers.{i}.mlp", flops=10 + (i == 0 and j == 0) * 20)
    assert stages(model.trace(x), 2, flops).cuts[0].after == 99


def test_ties_and_unused_parameters():
    model = Model()
    x = model(model.input(), name="embed", kind="Embedding", parameters={"embed.weight": 5}, flops=3)
    x = model(x, name="body", kind="Linear", parameters={"body.weight": 1}, flops=3)
    x = model(x, name="head", kind="Linear", parameters={"embed.weight": 5}, flops=3)
    model.parameters["spare"] = Parameter("spare", (1,), "uint8", 1, True)
    split = stages(model.trace(x), 3, flops)
    assert split.ties == {"embed.weight": (0, 2)}
    assert split.parameter_bytes == (5, 1, 5)
    assert split.unused == ("spare",)


def test_too_many_stages_say_why():
    with pytest.raises(PlanError) as error:
        stages(chain(1, 2, 3), 4)
    assert "cannot be cut into 4 stages" in str(error.value)
    assert "2 legal cuts among 3 events" in str(error.value)
    with pytest.raises(PlanError, match="all of it is one event: layers"):
        stages(chain(5), 2)
    with pytest.raises(PlanError, match="0 stages"):
        stages(chain(5), 0)


def best(trace: Trace, k: int) -> tuple[float, int]:
    """(smallest largest cost, fewest bytes within the band), by trying every split."""
    tried = []
    for chosen in combinations(cuts(trace), k - 1):
        bounds = [0, *(cut.after + 1 for cut in chosen), len(trace.events)]
        largest = max(sum(flops(trace.events[i]) for i in range(a, b)) for a, b in pairwise(bounds))
        tried.append((largest, sum(cut.bytes for cut in chosen)))
    least = min(largest for largest, _ in tried)
    return least, min(size for largest, size in tried if largest <= least * (1 + BAND))


def noise(seed: int, events: int) -> Trace:
    """Events that read a few of the values before them, some in place."""
    draw = random.Random(seed)
    model = Model()
    values = [model.input(draw.randint(1, 9)) for _ in range(2)]
    for _ in range(events):
        reads = draw.sample(values[-5:], k=min(len(values), draw.randint(1, 2)))
        change = (reads[0],) if draw.random() < 0.15 else ()
        view = reads[0] if change or draw.random() < 0.1 else None
        flops = draw.choice((0, 1, 1, 2, 5, 40, 100))
        values.append(model(*reads, flops=flops, size=draw.randint(0, 9), mutates=change, view_of=view))
    return model.trace(values[-1])


@pytest.mark.parametrize("seed", range(60))
def test_stages_find_the_best_of_all_splits(seed: int):
    trace = noise(seed, 14)
    for k in range(2, 6):
        if len(cuts(trace)) < k - 1:
            with pytest.raises(PlanError):
                stages(trace, k, flops)
            continue
        split = stages(trace, k, flops)
        least, size = best(trace, k)
        assert max(split.costs) <= least * (1 + BAND) + 1e-9
        assert split.bytes == size
        assert_covers(trace, split)


def assert_covers(trace: Trace, split: Stages) -> None:
    assert [i for events in split.ranges for i in events] == list(range(len(trace.events)))
    have = [set(split.inputs[i]) | (set(split.cuts[i - 1].crossing) if i else set()) for i in range(len(split.ranges))]
    for held, events in zip(have, split.ranges, strict=True):
        for i in events:  # every stage has what it reads
            assert held.issuperset(trace.events[i].reads)
            held.update(trace.events[i].writes)


class Knotty(nn.Module):
    """Skips, a mask, writes in place into views, a buffer that is written, a parameter used twice, a gradient."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(9, 8), nn.BatchNorm1d(8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        mask = torch.ones(ids.shape[1], ids.shape[1]).tril_()
        first = x = self.embed(ids) * scale
        for i, layer in enumerate(self.layers):
            x = x + mask @ torch.relu(layer(x)) * scale
            if i == 1:
                rows = x[:, :2]
                rows.mul_(2)
            if i == 2:
                self.seen.add_(x.detach().mean((0, 1)))
                x = x - torch.autograd.grad(x.square().sum(), x, create_graph=True)[0] / 9
        x = self.norm((x + first + self.seen).mean(1))
        return x @ self.embed.weight.T


def staged(recording: Recording, model: nn.Module, inputs: tuple[Tensor, ...], k: int) -> Tensor:
    """The model's outputs by ``k`` stages that share nothing but what ``stages`` says."""
    split, given = stages(recording.trace, k), bind(recording, inputs)
    sent: dict[int, Tensor] = {}
    for i, events in enumerate(split.ranges):
        env = Environment(model, {v: given[v].clone() for v in split.inputs[i]} | sent)
        run([replace(recording.steps[j], frees=()) for j in (*split.recomputed[i], *events)], env)
        if i < len(split.cuts):
            sent = {v: env.values[v].clone() for v in split.cuts[i].crossing}
    return decode(recording.outputs, env.resolve)


def test_stages_of_a_recorded_model_compute_what_it_does():
    torch.manual_seed(0)
    model, inputs = Knotty(), (torch.randint(9, (3, 5)), torch.rand(3, 5, 1))
    recording = record(model, inputs, share=0)
    most = len(cuts(recording.trace)) + 1
    assert most > 8
    for k in (1, 2, 4, most):
        alone, spread = deepcopy(model), deepcopy(model)
        want, got = alone(*inputs), staged(recording, spread, inputs, k)
        assert torch.equal(want, got)
        for outputs in (want, got):
            outputs.square().sum().backward()
        for one, other in zip(alone.parameters(), spread.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        for one, other in zip(alone.buffers(), spread.buffers(), strict=True):
            assert torch.equal(one, other)


def test_thousands_of_events_in_half_a_second():
    model = Model()
    x = model.input()
    positions = model(constant=True, size=100)
    for i in range(800):
        y = x
        for j in range(5):
            weight = {f"layers.{i}.{j}": 8}
            y = model(y, positions, inside=f"layers.{i}", flops=100 + (7 * i + j) % 13, size=64, parameters=weight)
        x = model(x, y, inside=f"layers.{i}", flops=1, size=64)
    trace = model.trace(x)
    start = time.process_time()
    split = stages(trace, 16)
    assert time.process_time() - start < 0.5
    assert split.imbalance < BAND
    assert all(cut.bytes == 64 for cut in split.cuts)
    start = time.process_time()
    assert branches(trace) == ()
    assert len(blocks(trace)) == 1
    assert time.process_time() - start < 1


def test_work_weighs_bytes():
    event = Event(
        0, "glue", "add", "", (), (), cost=EventCost(flops=1, flops_backward=2, bytes_read=10, bytes_written=5)
    )
    assert work(event) == 3 + 3 * 15 * FLOPS_PER_BYTE
    assert work(replace(event, cost=EventCost(flops=1, bytes_read=1))) == 1 + FLOPS_PER_BYTE


# Branches


def test_two_towers():
    model = Model()
    left, right = model.input(), model.input()
    for i in range(3):
        left = model(left, parameters={f"left.{i}": 1}, flops=10)
    for i in range(2):
        right = model(right, parameters={f"right.{i}": 1}, flops=10)
    joined = model(left, right)
    found = branches(model.trace(model(joined, flops=20)))
    assert [(b.events, b.fork, b.join, b.shared) for b in found] == [((0, 1, 2), -1, 5, ()), ((3, 4), -1, 5, ())]
    assert [b.cost for b in found] == [30, 20]
    assert found[0].share == pytest.approx(30 / 71)


def test_arms_between_a_fork_and_a_join():
    model = Model()
    stem = model(model.input(), flops=10)
    time_of_day = model(model.input())
    arms = []
    for i in range(4):
        arm = model(stem, flops=0 if i == 3 else 10, name=f"arm{i}")
        arms.append(model(arm, time_of_day))
    joined = model(*arms, flops=10)
    x = model(joined, flops=10)
    trace = model.trace(model(x, joined))
    found = branches(trace)
    assert [b.events for b in found] == [(2, 3), (4, 5), (6, 7)]  # the fourth is too small
    assert {(b.fork, b.join) for b in found} == {(1, 10)}


def test_residuals_and_dense_skips_are_no_branches():
    model = Model()
    x = model(model.input(), flops=10)
    for _ in range(3):
        x = model(x, model(x, flops=10), flops=10)
    values = [x]
    for _ in range(4):
        values.append(model(*values, flops=10))
    assert branches(model.trace(values[-1])) == ()


def test_heads_that_meet_in_the_outputs_and_what_they_share():
    model = Model()
    body = model(model.input(), flops=10)
    one = model(body, parameters={"head": 1, "a": 1}, flops=10)
    two = model(body, parameters={"head": 1}, flops=10)
    model(body, flops=100)  # leads nowhere
    found = branches(model.trace(one, two))
    assert [(b.events, b.fork, b.join, b.shared) for b in found] == [((1,), 0, 4, ("head",)), ((2,), 0, 4, ("head",))]


def test_branches_within_a_branch():
    model = Model()
    x = model.input()
    stem = model(x, flops=10)
    inner = model(model(stem, flops=10), model(stem, flops=10), flops=10)
    other = model(x, flops=30)
    found = branches(model.trace(model(inner, other)))
    assert [(b.group, b.events) for b in found] == [(0, (0, 1, 2, 3)), (0, (4,)), (1, (1,)), (1, (2,))]


def test_changes_in_place_order_what_would_be_branches():
    model = Model()
    x = model(model.input(), flops=10)
    one = model(x, flops=10, mutates=(x,))
    two = model(x, flops=10)
    assert branches(model.trace(model(one, two, flops=10))) == ()


@pytest.mark.parametrize("seed", range(40))
def test_branches_are_independent(seed: int):
    trace = noise(seed, 30)
    before: list[set[int]] = []
    for event in trace.events:
        makers = {trace.values[value].made_by for value in event.reads} - {-1}
        before.append(set().union(makers, *(before[maker] for maker in makers)))
    for a, b in combinations(branches(trace), 2):
        if a.group == b.group:
            assert not set(a.events) & set(b.events)
            assert not any(before[i] & set(b.events) for i in a.events)
            assert not any(before[i] & set(a.events) for i in b.events)
            assert a.fork not in a.events
            assert a.join > max(a.events)


# Blocks


def layered(layers: int) -> Model:
    model = Model()
    model.kinds |= {"model": "Body", "model.layers": "ModuleList"}
    x = model(model.input(), name="model.embed", kind="Embedding", parameters={"model.embed.weight": 50}, flops=1)
    for i in range(layers):
        path = f"model.layers.{i}"
        model.kinds[path] = "Layer"
        y = model(x, name=f"{path}.norm", kind="Norm", parameters={f"{path}.norm.weight": 4}, flops=1)
        y = model(y, name=f"{path}.mlp", kind="MLP", parameters={f"{path}.mlp.weight": 40}, flops=100, kept=10)
        x = model(x, y, name="add", inside=path)
    return model


def test_layers_that_repeat_are_one_block():
    model = layered(5)
    x = model(len(model.values) - 1, name="head", kind="Linear", parameters={"model.embed.weight": 50}, flops=50)
    found = blocks(model.trace(x))
    assert [(folded(b.paths), b.kind, len(b.paths), b.parameters) for b in found] == [
        ("model.embed", "Embedding", 1, 50),
        ("model.layers.0-4", "Layer", 5, 44),
        ("head", "Linear", 1, 50),
    ]
    assert found[1].cost.flops == 102


def test_a_layer_of_another_shape_is_a_block_of_its_own():
    model = layered(4)
    name = "model.layers.2.mlp.weight"
    model.parameters[name] = Parameter(name, (99,), "uint8", 99, True)
    found = blocks(model.trace(len(model.values) - 1))
    assert [folded(b.paths) for b in found] == [
        "model.embed",
        "model.layers.0-1",
        "model.layers.2.norm",
        "model.layers.2.mlp",
        "model.layers.3.norm",
        "model.layers.3.mlp",
    ]


def test_paths_in_short():
    assert folded(("a.0", "a.1", "a.2")) == "a.0-2"
    assert folded(("0", "2")) == "0,2"
    assert folded(tuple(f"b{i}" for i in range(0, 20, 2))) == "b0..18"
    assert folded(("head",)) == "head"


# Axes


def test_every_axis_has_a_verdict():
    trace = layered(8).trace(24)
    verdicts = axes(trace)
    assert tuple(verdicts) == AXES
    assert all(verdict.why for verdict in verdicts.values())
    assert verdicts["data"].takes
    assert verdicts["shard"].takes
    assert (verdicts["pipeline"].takes, verdicts["pipeline"].most) == (True, 8)
    assert verdicts["branch"].takes is False
    assert verdicts["tensor"].takes is None
    assert verdicts["context"].takes is False  # inputs of one dim
    assert verdicts["recompute"].takes


def test_control_flow_over_activations_refuses_a_pipeline():
    model = layered(8)
    what = Dynamic("model", "net.py:12", "bool(tensor)", "activations")
    verdict = axes(model.trace(24, dynamic=(what,)))["pipeline"]
    assert (verdict.takes, verdict.why) == (False, "bool(tensor) at net.py:12 decides on activations")
    whole = replace(what, module="model.layers.3.mlp")
    assert axes(model.trace(24, dynamic=(whole,)))["pipeline"].takes
    assert axes(model.trace(24, dynamic=(replace(what, depends_on="nothing"),)))["pipeline"].takes


def test_batchnorm_is_remarked_on():
    model = Model()
    x = model(model.input(), name="norm", kind="BatchNorm1d", parameters={"norm.w": 1}, buffers=("norm.running_mean",))
    assert "BatchNorm" in axes(model.trace(x))["data"].why


def test_nothing_to_train_takes_no_axis():
    model = Model()
    assert not any(verdict.takes for verdict in axes(model.trace(model(model.input()))).values())
