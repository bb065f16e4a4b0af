"""A recorded forward, replayed, is the model's own: outputs, gradients, buffers, random numbers."""

import copy
import random
import time
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn

from benchmarks import zoo
from meshfit import generators
from meshfit.anatomy.record import Recording, TraceError, record
from meshfit.anatomy.record_program import tensors
from meshfit.anatomy.replay import Environment, bind, replay, replay_steps
from meshfit.anatomy.trace import EventCost
from meshfit.data import tree
from meshfit.loss.objective import call
from tests import hostile
from tests.few import few

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries and of torch.jit, not ours


@pytest.fixture(autouse=True)
def one_thread():
    """Threads only wait for each other over such small tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def inputs_of(case: zoo.Case, samples: int = 4) -> Any:
    data = case.data(samples)
    return data if case.loss is None else data[0]


def trained_once(model: nn.Module, run, inputs: Any, seed: int = 5) -> list[Tensor | None]:
    """Outputs, gradients and buffers after ``run`` and a backward."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    outputs = run(model, tree.map_tensors(torch.clone, inputs))
    found = list(tree.tensors(outputs))
    sum(t.double().square().mean() for t in found if t.requires_grad).backward()  # type: ignore[union-attr]
    return [*(t.detach() for t in found), *(p.grad for p in model.parameters()), *model.buffers(), torch.rand(1)]


def same(one: list[Tensor | None], other: list[Tensor | None], exact: bool = True) -> bool:
    def equal(a: Tensor | None, b: Tensor | None) -> bool:
        if a is None or b is None:
            return a is b
        return torch.equal(a, b) if exact else bool((a - b).abs().max() <= 1e-4 * a.abs().max())

    return len(one) == len(other) and all(map(equal, one, other))


def agree(recording: Recording, model: nn.Module, inputs: Any, *, exact: bool = True, steps: int = 1) -> bool:
    alone, again = copy.deepcopy(model), copy.deepcopy(model)
    return all(
        same(
            trained_once(alone, call, inputs, seed),
            trained_once(again, lambda model, inputs: replay(recording, model, inputs), inputs, seed),
            exact,
        )
        for seed in range(steps)
    )


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "name", few([name for name in zoo.ZOO if name != "resnet10"], "gpt2", "mixtral", "t5", "batchnorm-cnn", "lstm")
)
def test_zoo_replays_bit_for_bit(name: str, training: bool) -> None:
    case = zoo.ZOO[name]
    model, inputs = case.build().train(training), inputs_of(case)
    recording = record(model, inputs, training=training)
    assert recording.trace.notes[0] == "meta tensors"
    assert agree(recording, model, inputs, steps=2)
    outputs = call(copy.deepcopy(model), inputs)
    assert type(replay(recording, model, inputs)) is type(outputs)


@pytest.mark.parametrize("share", [0.05, 0.3], ids=["opened", "blocks"])
@pytest.mark.parametrize("kind", hostile.EXPECTED, ids=lambda kind: kind.__name__)
def test_hostile_forwards_are_exact_or_refused(kind: type[nn.Module], share: float) -> None:
    torch.manual_seed(0)
    model, x = kind().train(), torch.randn(8, 3)
    expected = hostile.EXPECTED[kind]
    if expected == "refused":
        with pytest.raises(TraceError, match=r"the forward of .* cannot be recorded: (.|\n)*hostile.py:\d+"):
            record(model, x, share=share)
        return
    recording = record(model, x, share=share)
    assert agree(recording, model, x, exact=expected != "close", steps=2)
    guards = [step for step in recording.steps if step.kind == "guard"]
    assert bool(guards) == (expected == "guarded") or kind is hostile.DrawsForNothing
    if expected != "guarded":
        assert agree(recording, model, torch.randn(8, 3), exact=expected != "close")


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (hostile.LooksAtInput, lambda model, x: x.neg_()),
        (hostile.LooksAtBuffer, lambda model, x: model.depth.fill_(2)),
        (hostile.SearchesInput, lambda model, x: x.fill_(0)),
        (hostile.CountsSelected, lambda model, x: x.fill_(0).add_(torch.arange(8)[:, None] - 4).mul_(10)),
    ],
)
def test_another_branch_is_refused_at_replay(kind: type[nn.Module], change) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(8, 3)
    recording = record(model, x)
    replay(recording, model, x)
    change(model, x)
    with pytest.raises(TraceError, match=r"another branch: (.|\n)*hostile.py:\d+"):
        replay(recording, model, x)


def test_reads_are_reported() -> None:
    model, x = hostile.LooksAtInput(), torch.randn(8, 3)
    (read,) = record(model, x).trace.dynamic
    assert (read.module, read.what, read.depends_on) == ("", ".item()", "inputs")
    assert "hostile.py:" in read.line
    reads = record(hostile.LooksAtConstant(), x).trace.dynamic
    assert {read.depends_on for read in reads} == {"nothing"}
    reads = record(hostile.LooksAtActivationInBlock(), x).trace.dynamic
    assert {(read.module, read.depends_on) for read in reads} == {(f"blocks.{i}", "activations") for i in range(6)}


class Faulty(hostile.OwnCall):
    def __call__(self, x):
        return super().__call__(x) + torch.zeros(3, 3)


def test_a_model_that_cannot_run_says_so() -> None:
    with pytest.raises(TraceError, match=r"RuntimeError: .*size(.|\n)*test_record.py:\d+"):
        record(Faulty(), torch.randn(8, 3))
    with pytest.raises(TraceError, match=r"RuntimeError: .*mat1(.|\n)*hostile.py:\d+"):
        record(hostile.Plain(), torch.randn(8, 4))


def test_the_whole_model_can_be_one_event() -> None:
    model, x = hostile.DrawsInPython(), torch.randn(8, 3)
    recording = record(model, x, atoms=[""])
    assert [event.kind for event in recording.trace.events] == ["module"]
    assert agree(recording, model, x)


def test_refusal_names_module_file_and_line() -> None:
    with pytest.raises(TraceError) as caught:
        record(hostile.LooksAtActivation(), torch.randn(8, 3))
    assert "the model itself" in caught.value.headline
    assert ".item() looks at a value that depends on activations" in caught.value.headline
    assert "tests/hostile.py:" in caught.value.facts[0]


class Noisy(hostile.Plain):
    """Everything that a forward can leave behind; and a real forward is needed."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(hostile.WIDTH), nn.Dropout(0.5)
        self.calls = []
        self.blocks[0].register_forward_hook(lambda module, args, output: None)

    def forward(self, x):
        self.calls.append(len(self.calls))
        x = self.dropout(self.norm(self.first(x)))
        self.kept = x[x[:, 0] > 0]
        return self.last(x) + random.random() * 0 + np.random.rand() * 0


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = Noisy(), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.inner(x))


def test_nothing_changes() -> None:
    model, x = Wrapped().train(), torch.randn(8, 3, requires_grad=True)
    model.inner.blocks[2].eval()

    def facts() -> Any:
        hooks = [list(module._forward_hooks.items()) for module in model.modules()]
        modes = [module.training for module in model.modules()]
        rng = torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())
        names = [sorted(vars(module)) for module in model.modules()]
        tensors = [(id(t), t.tolist(), t._version) for t in (*model.parameters(), *model.buffers(), x)]
        patched = nn.Module.__call__, nn.Module.__setattr__, torch.autograd.Function.__dict__["apply"]
        return hooks, modes, rng, names, tensors, model.inner.calls[:], patched, torch.compiler.is_compiling, x.grad

    before = facts()
    recording = record(model, x)
    assert "inner taken as a whole" in " ".join(recording.trace.notes)
    assert facts() == before
    with pytest.raises(TraceError):
        record(model.inner, x)
    assert facts() == before
    # and the recorded program leaves behind what the model's own forward does
    replay(recording, model, x)
    assert model.inner.calls == [0]
    assert model.inner.norm.num_batches_tracked == 1


def test_the_trace_is_plain_and_whole() -> None:
    case = zoo.ZOO["tied-gpt"]
    model, inputs = case.build(), inputs_of(case)
    trace = record(model, inputs).trace
    assert trace.ties == {"head.weight": "token.weight"}
    assert set(trace.parameters) == {name for name, _ in model.named_parameters()}
    assert trace.parameter_bytes == sum(p.numel() * 4 for p in model.parameters())
    assert {name for event in trace.events for name in event.parameters} == set(trace.parameters)
    assert trace.kinds["blocks.0"] == "TransformerEncoderLayer"
    (first,) = trace.inputs
    assert trace.values[first].made_by == -1
    assert trace.values[first].shape == tuple(inputs.shape)
    for event in trace.events:
        assert all(event.index in trace.values[id].used_by for id in event.reads)
        assert all(trace.values[id].made_by == event.index for id in event.writes)
        assert event.line.rpartition(":")[2].isdigit()
    (mask,) = (trace.values[e.writes[0]] for e in trace.events if e.name == "triu")
    assert mask.constant
    assert not mask.needs_grad
    assert all(trace.values[id].needs_grad and not trace.values[id].constant for id in trace.outputs)
    modules = [event.name for event in trace.events if event.kind == "module"]
    assert modules == ["token", "blocks.0", "blocks.1", "norm", "head"]
    assert cloudpickle.loads(cloudpickle.dumps(trace)) == trace


def test_writes_in_place_are_told() -> None:
    trace = record(hostile.WritesInPlace(), torch.randn(8, 3)).trace
    writes = [event for event in trace.events if event.mutates]
    assert [event.name for event in writes[:4]] == ["add_", "setitem", "mul_", "relu_"]
    added, scaled = writes[0], writes[2]
    assert trace.values[added.mutates[0]].storage == trace.values[scaled.mutates[0]].storage
    trace = record(hostile.WritesBuffers(), torch.randn(8, 3)).trace
    assert [event.changes for event in trace.events if event.changes][:1] == [("count",)]
    trace = record(hostile.AssignsBuffer(), torch.randn(8, 3)).trace
    assert [event.name for event in trace.events if event.changes] == ["assign average"]


def test_a_program_runs_in_parts() -> None:
    case = zoo.ZOO["gpt2"]
    model, inputs = case.build(), inputs_of(case)
    recording = record(model, inputs)
    whole = replay(recording, model, inputs)
    env = Environment(model, bind(recording, inputs))
    for start in range(0, len(recording.steps), 7):
        stop = min(start + 7, len(recording.steps))
        live = {id for id, value in recording.trace.values.items() if value.made_by < stop}
        live = {
            id for id in live if id in recording.trace.outputs or recording.trace.values[id].used_by[-1:] >= (stop,)
        }
        replay_steps(recording.steps[start:stop], env)
        assert live <= set(env.values)
        env = Environment(model, {id: env.values[id] for id in live})  # nothing else crosses
    assert all(
        torch.equal(env.values[id], want) for id, want in zip(recording.trace.outputs, tensors(whole), strict=True)
    )


def test_a_recording_travels() -> None:
    for kind in (hostile.OwnGradient, hostile.PassesDataclass, hostile.LooksAtInput, hostile.WritesBuffers):
        model, x = kind(), torch.randn(8, 3)
        travelled = cloudpickle.loads(cloudpickle.dumps(record(model, x)))
        assert agree(travelled, model, x)


def test_recordings_hold_for_what_they_were_made_for() -> None:
    model, x = hostile.Plain().train(), torch.randn(8, 3)
    recording = record(model, x)
    with pytest.raises(TraceError, match="not like those recorded"):
        replay(recording, model, torch.randn(9, 3))
    with pytest.raises(TraceError, match="training mode"):
        replay(recording, model.eval(), x)
    with pytest.raises(TraceError, match="no module of the model: nothing"):
        record(model, x, atoms=["nothing"])


def test_atoms_can_be_forced() -> None:
    model, x = hostile.Plain(), torch.randn(8, 3)
    trace = record(model, x, atoms=["blocks.2"]).trace
    names = [event.name for event in trace.events if event.kind == "module"]
    assert "blocks.2" in names
    assert "blocks.1.up" in names
    assert "blocks.1.up" in [e.name for e in record(model, x, share=1.0, atoms=["blocks.1.up"]).trace.events]


class Stopwatch:
    def __init__(self, known: list[torch.Tensor]):
        self.running: int | None = None
        self.costs: dict[int, EventCost] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None: ...

    def reach(self, outputs: object) -> None: ...

    def know(self, tensors: object) -> None: ...

    def start(self, key: int) -> None:
        assert self.running is None
        self.running = key

    def stop(self) -> None:
        assert self.running is not None
        self.costs[self.running] = EventCost(flops=self.running + 1)
        self.running = None


def test_a_meter_is_told_of_every_event() -> None:
    model, x = hostile.AssignsBuffer(), torch.randn(8, 3)
    trace = record(model, x, meter=Stopwatch).trace
    costs = [event.cost.flops for event in trace.events]
    assert costs == [0 if event.name.startswith("assign") else event.index + 1 for event in trace.events]


def test_a_mixture_of_experts_that_routes_in_python() -> None:
    """Its blocks look at activations, and are taken as a whole."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x):
            chosen, out = self.gate(x).argmax(-1), torch.zeros_like(x)
            for i in chosen.unique().tolist():
                out[chosen == i] = self.experts[i](x[chosen == i])
            return x + out

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), *(Experts() for _ in range(4)), nn.Linear(16, 2))
    recording = record(model, torch.randn(8, 3))
    assert [event.name for event in recording.trace.events] == [str(i) for i in range(6)]
    for seed in range(3):
        torch.manual_seed(seed)
        assert agree(recording, model, torch.randn(8, 3))


def test_llama_70b_without_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    hf = zoo.transformers()
    config = hf.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    process = psutil.Process()
    before = process.memory_info().rss
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config)
    ids = torch.zeros(4, 4096, dtype=torch.long)
    started = time.perf_counter()
    trace = record(model, {"input_ids": ids, "labels": ids}).trace
    seconds, grown = time.perf_counter() - started, process.memory_info().rss - before
    with capsys.disabled():
        print(f"\n70B: {seconds:.1f} s, {grown / 2**20:.0f} MiB, {len(trace.events)} events")
    assert sum(e.name.startswith("model.layers.") and e.kind == "module" for e in trace.events) == 80
    assert trace.parameter_bytes > 70e9 * 4
    assert grown < 1.5 * 2**30


class Router(nn.Module):
    """Returns how many rows go to each of two experts: numbers, not a tensor."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, list[int]]:
        choice = self.gate(x).argmax(1)
        return choice.argsort(stable=True), torch.bincount(choice, minlength=2).tolist()


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.router, self.last = nn.Linear(8, 8), Router(), nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        order, sizes = self.router(x)
        parts = [expert(part) for expert, part in zip(self.experts, x[order].split(sizes), strict=True)]
        return self.last(torch.cat(parts)[order.argsort()])


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList(Routed() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.body:
            x = x + block(x)
        return x


def test_numbers_that_a_module_reads_from_tensors_are_not_taken_for_constants():
    torch.manual_seed(0)
    model = Around()
    recording = record(model, torch.randn(6, 8))
    assert [e.name for e in recording.trace.events if e.kind == "module"] == ["body.0", "body.1"]
    other = torch.randn(6, 8)
    torch.testing.assert_close(replay(recording, model, other), model(other))


class Importing(nn.Module):
    """Imports in its forward a file that makes a constant."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        from constants_of_a_forward import SCALE  # pyright: ignore

        return self.linear(x) * SCALE


def test_a_file_that_a_forward_imports_makes_its_constants_for_everybody(tmp_path, monkeypatch):
    (tmp_path / "constants_of_a_forward.py").write_text("import torch\nSCALE = torch.full((4,), 2.0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    model = Importing()
    record(model, torch.randn(2, 4))
    assert not model(torch.randn(2, 4)).is_meta


def test_the_second_of_two_normal_numbers_is_a_draw() -> None:
    """NumPy makes two at a time, and the second moves nothing but a flag."""
    np.random.seed(0)
    np.random.randn()
    before, held = generators.places(), generators.Generators(torch.device("cpu"))
    assert generators.places() == before
    np.random.randn()
    assert generators.places() != before
    assert held.moved_others
