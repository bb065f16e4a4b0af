"""What a loss is a mean over: found rightly, or said that it cannot be."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshfit.axes.precision import Precision
from meshfit.data import tree
from meshfit.errors import JobError
from meshfit.loss import probe, trial
from meshfit.loss.objective import LossDenominator, Objective, call, split
from meshfit.loss.probe import find_denominator
from meshfit.loss.running_on import running_on

CPU = torch.device("cpu")
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, -100, 2, 2, -100, -100, 0])


class Labelled(nn.Module):
    """Returns its own loss, as Hugging Face's language models do: each position predicts the next label."""

    def __init__(self, shift: int):
        super().__init__()
        self.embed, self.head, self.shift = nn.Embedding(11, 5), nn.Linear(5, 11), shift

    def forward(self, ids, labels):
        logits = self.head(self.embed(ids))
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return {"loss": F.cross_entropy(logits.reshape(-1, 11), labels.reshape(-1)), "logits": logits}


def classes(x: torch.Tensor = X) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 3)


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (F.cross_entropy, "targets"),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0])), "targets"),
        (partial(F.cross_entropy, label_smoothing=0.1), "targets"),
        (lambda out, y: F.cross_entropy(out.reshape(-1, 3), y.reshape(-1)), "targets"),
        (lambda out, y: F.nll_loss(out.log_softmax(-1), y), "targets"),
        (lambda out, y: (out.square().sum(), out.numel()), "pair"),
        (lambda out, y: nn.MSELoss()(out, torch.ones_like(out)), "samples"),
        (lambda out, y: out.square().mean(), "samples"),
        (lambda out, y: out.square().sum(), "sum"),
        (nn.CrossEntropyLoss(reduction="sum"), "sum"),
    ],
)
def test_found(loss, kind: str) -> None:
    assert find_denominator(Objective(loss), classes(), (X, Y), CPU).kind == kind


@pytest.mark.parametrize(
    "loss", [F.cross_entropy, lambda o, y: F.cross_entropy(o, y), nn.CrossEntropyLoss(torch.rand(3))]
)
def test_counted_parts_make_the_whole(loss) -> None:
    """The weighted mean of the parts' losses is the loss of the whole."""
    model, objective = classes(), Objective(loss)
    over = find_denominator(objective, model, (X, Y), CPU)
    whole = objective(model, (X, Y))
    parts = [(X[:3], Y[:3]), (X[3:5], Y[3:5]), (X[5:], Y[5:])]
    counts = [over.count(part) for part in parts]
    total = sum(objective(model, part) * count for part, count in zip(parts, counts, strict=True) if count > 0)
    torch.testing.assert_close(total / sum(counts), whole)


@pytest.mark.parametrize("shift", [0, 1])
def test_a_models_own_loss(shift: int) -> None:
    torch.manual_seed(1)
    ids = torch.randint(0, 11, (8, 7))
    labels = ids.masked_fill(torch.rand(8, 7) < 0.4, -100)
    over = find_denominator(Objective(), Labelled(shift), {"ids": ids, "labels": labels}, CPU)
    assert over.kind == "targets"
    assert over.count({"ids": ids, "labels": labels}) == (labels[:, shift:] != -100).sum()


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("first", [False, True])
def test_targets_that_are_the_tokens_in_the_samples_on_trial(shift: int, first: bool) -> None:
    """Which of two tensors that hold the same the loss reads: others of a batch may have labels that are ignored."""
    ids = torch.randint(0, 11, (8, 7), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[:, 0] = labels[0, 0] if first else -100
    ids[:, 0] = labels[0, 0] if first else ids[:, 0]
    over = find_denominator(Objective(), Labelled(shift), {"ids": ids, "labels": labels}, CPU)
    other = torch.full((8, 7), -100)
    other[3:, :4] = 1
    assert over.kind == "targets"
    assert int(over.count({"ids": ids, "labels": other})) == int((other[:, shift:] != -100).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_class_weights_are_as_exact_as_the_training(dtype: torch.dtype) -> None:
    """0.2 has no exact binary form: what it is rounded to in single precision would weigh ranks otherwise."""
    weight = torch.tensor([0.2, 1.0, 0.7], dtype=dtype)
    loss = lambda out, y: F.cross_entropy(out, y, weight=weight.to(out.dtype))
    model, x = classes(X).to(dtype), X.to(dtype)
    over = find_denominator(Objective(loss), model, (x, Y), CPU)
    assert over.weight is not None
    assert over.weight.dtype == dtype
    assert torch.equal(over.weight, weight)


def contrastive(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out @ out.T, torch.arange(len(out)))


def statistics(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.relu(1 - out.std(0)).mean() + out.square().mean()


def ranking(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    score = out[:, 0]
    return F.softplus(score[None] - score[:, None]).mean()


def slightly(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Depends on the other samples by 1 in 10,000."""
    return out.square().mean() * (1 + 1e-4 * out.mean(0).square().sum())


def normalised(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Always 1: only its gradient depends on the batch."""
    each = out.square().mean(-1)
    return (each / each.mean().detach()).mean()


def broadcast(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Every output against every target, by mistake: one device does so too."""
    return (out[:, :1] - y.to(out)).square().mean()


WHOLE = [contrastive, statistics, ranking, slightly, normalised, broadcast]


@pytest.mark.parametrize("loss", WHOLE)
def test_a_loss_of_the_whole_batch_is_found(loss) -> None:
    over = find_denominator(Objective(loss), classes(), (X, Y), CPU)
    assert over.kind == "batch"
    assert over.dims == (0,)
    assert "samples it is" in over.why


@pytest.mark.parametrize("loss", WHOLE)
def test_as_a_step_too(loss) -> None:
    assert find_denominator(Objective(step=lambda m, b: loss(m(b[0]), b[1])), classes(), (X, Y), CPU).kind == "batch"


def test_ignored_targets_in_a_mixed_loss() -> None:
    """No one weight is right for both."""
    mixed = lambda out, y: F.cross_entropy(out, y) + out.square().mean()
    assert find_denominator(Objective(mixed), classes(), (X, Y), CPU).kind == "batch"


def noisy(model: nn.Module, batch):
    """Noise and a time for each sample, a weight for all of them, pairs of samples: as diffusion and mixup draw."""
    x, _ = batch
    weight, order = torch.rand(()), torch.randperm(len(x))
    x = weight * x + (1 - weight) * x[order]
    time = torch.randint(0, 10, (len(x), 1))
    return (model(x + torch.randn_like(x) * time) * torch.rand(())).square().mean()


def one_by_one(model: nn.Module, batch):
    return torch.stack([(model(x) * torch.rand(())).square().mean() for x in batch[0]]).mean()


@pytest.mark.parametrize("step", [noisy, one_by_one])
def test_a_mean_that_draws_random_numbers(step) -> None:
    assert find_denominator(Objective(step=step), classes(), (X, Y), CPU).kind == "samples"


def test_random_numbers_do_not_hide_a_loss_of_the_whole_batch() -> None:
    step = lambda model, batch: contrastive(model(batch[0] + torch.randn_like(batch[0])), batch[1])
    assert find_denominator(Objective(step=step), classes(), (X, Y), CPU).kind == "batch"
    loss = lambda out, y: contrastive(out * torch.rand(()), y)
    over = find_denominator(Objective(loss), classes(), (X, Y), CPU)
    assert over.kind == "batch"
    assert over.draws


def test_a_pair_that_does_not_add_up() -> None:
    assert (
        find_denominator(Objective(lambda o, y: (contrastive(o, y) * len(o), len(o))), classes(), (X, Y), CPU).kind
        == "batch"
    )


def test_a_loss_that_needs_gradients() -> None:
    """A penalty on a gradient was never tried before: it cannot be computed without a graph."""

    def step(model: nn.Module, batch):
        x = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return gradient.square().sum(-1).mean()

    assert find_denominator(Objective(step=step), classes(), (X, Y), CPU).kind == "samples"


def test_what_the_user_did_wrong_is_said_as_torch_says_it() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        find_denominator(Objective(lambda o, y: o.mean()), classes(), (X[:, :4], Y), CPU)
    with pytest.raises(KeyError, match="nowhere"):
        find_denominator(Objective(step=lambda m, b: {}["nowhere"]), classes(), (X, Y), CPU)
    floats = find_denominator(Objective(F.cross_entropy), classes(), (X, Y.float()), CPU)  # which training then says
    assert floats.kind == "targets"


def test_outputs_that_cannot_be_gathered_are_told() -> None:
    class Matrix(nn.Module):
        def forward(self, x):
            return x @ x.T

    over = find_denominator(Objective(lambda o, y: F.cross_entropy(o, torch.arange(len(o)))), Matrix(), (X, Y), CPU)
    assert over.kind == "batch"
    assert "(8, 8)" in over.unfit


def test_a_part_whose_loss_is_infinite_makes_no_whole() -> None:
    class Spread(nn.Module):
        """A single sample has no spread."""

        def __init__(self):
            super().__init__()
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            out = self.head(x)
            return out / out.std(0, unbiased=False).norm() if self.training else out

    over = find_denominator(Objective(lambda o, y: o.square().mean()), Spread(), (X, Y), CPU)
    assert over.kind == "batch"
    assert "the mean over parts of 2 is" in over.why


def test_samples_without_a_loss_are_left_out_of_the_trial() -> None:
    broken = X.clone()
    broken[2] = torch.nan
    assert (
        find_denominator(Objective(step=lambda m, b: m(b[0]).square().mean()), classes(), (broken, Y), CPU).kind
        == "samples"
    )
    assert find_denominator(Objective(contrastive), classes(), (broken, Y), CPU).kind == "batch"


def test_a_model_that_has_a_loss_only_in_training() -> None:
    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            return {"loss": self.head(x).square().mean()} if self.training else [self.head(x)]

    assert find_denominator(Objective(step=lambda m, b: m(b[0])["loss"]), Detector(), (X, Y), CPU).kind == "samples"


CALLS: list[tuple[int, bool, bool]] = []


class _Seen(nn.Module):
    """Notes how it is called; not in itself, which a trial leaves as it was."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(6, 3)
        CALLS.clear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS.append((len(x), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return self.head(x)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is too large to be copied."""
    monkeypatch.setattr(probe, "LARGEST", 0)


LARGE = {"precision": Precision("bf16"), "microbatch": 1}


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("alone", [True, False])
def test_a_large_model_is_tried_as_it_is_trained(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the plan's precision, without a graph, two samples at a time; also where its outputs are too large to try the
    loss by itself."""
    monkeypatch.setattr(trial, "LARGEST_OUTPUTS", 2**28 if alone else 1)
    model = _Seen()
    loss = lambda out, y: F.cross_entropy(out.reshape(-1, 3), y.reshape(-1))
    assert find_denominator(Objective(loss), model, (X, Y), CPU, **LARGE).kind == "targets"
    assert {size for size, _, _ in CALLS} == {1, 2}
    assert all(rounded and not graph for _, rounded, graph in CALLS)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    ("loss", "alone"),
    [(loss, True) for loss in WHOLE if loss is not slightly]  # rounding hides it
    + [(loss, False) for loss in WHOLE if loss not in (slightly, normalised)],  # no gradients through the model
)
def test_a_loss_of_the_whole_batch_is_found_on_few_samples(loss, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "LARGEST_OUTPUTS", 2**28 if alone else 1)
    over = find_denominator(Objective(loss), classes(), (X, Y), CPU, **LARGE)
    assert over.kind == "batch"
    assert over.dims == (0,)


@pytest.mark.usefixtures("large")
def test_what_two_samples_do_not_tell_the_next_two_do() -> None:
    """A mean over what a mask leaves, written by hand: the first samples have all of it."""
    mask = torch.tensor([1.0, 1, 1, 1, 1, 0, 1, 1])

    def step(model: nn.Module, batch):
        each = model(batch[0]).square().mean(-1)
        return (each * batch[1]).sum() / batch[1].sum().clamp(min=1)

    assert find_denominator(Objective(step=step), classes(), (X, mask), CPU, **LARGE).kind == "batch"


def over_a_sum(each: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (each * mask).sum() / mask.sum().clamp(min=1)


@pytest.mark.parametrize(
    "mean",
    [
        over_a_sum,
        lambda each, mask: each[mask > 0].mean(),
        lambda each, mask: torch.masked_select(each, mask > 0).mean(),
    ],
)
def test_a_mask_that_is_all_ones_in_the_samples_tried_may_not_be_in_others(mean) -> None:
    def step(model: nn.Module, batch):
        return mean(model(batch[0]).square().mean(-1), batch[1])

    over = find_denominator(Objective(step=step), classes(), (X, torch.ones(8)), CPU)
    assert over.kind == "batch"
    assert "mask that is all ones" in over.why
    pair = lambda model, batch: ((model(batch[0]).square().mean(-1) * batch[1]).sum(), batch[1].sum())
    assert find_denominator(Objective(step=pair), classes(), (X, torch.ones(8)), CPU).kind == "pair"
    summed = lambda model, batch: model(batch[0]).square().mean(-1)[batch[1] > 0].sum()
    assert find_denominator(Objective(step=summed), classes(), (X, torch.ones(8)), CPU).kind == "sum"


def test_all_samples_are_looked_at_not_the_first_eight_alone() -> None:
    """Weights that are alike in the first eight and not in the others: the loss mixes samples, not the model."""
    weights = torch.cat([torch.full((8,), 2.0), torch.tensor([2.0, 1, 3, 2, 0, 2, 5, 2])])
    loss = lambda out, w: (out.square().mean(-1) * w).sum() / w.sum()
    over = find_denominator(Objective(loss), classes(), (torch.cat([X, X]), weights), CPU)
    assert over.kind == "batch"
    assert not over.mixes


def test_a_model_in_host_memory_runs_on_a_device() -> None:
    """All of it, or a module at a time, tied weights too; and it is as it was."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), nn.Linear(6, 6)).eval()
    model[2].weight = model[0].weight
    tensors = [*model.parameters(), *model.buffers()]
    meta = torch.device("meta")
    for room in (2**20, 300, 0):
        with running_on(meta, model, room):
            assert model(X.to(meta)).is_meta
            assert model[0].weight.is_meta == (room == 2**20)
        assert all(a is b for a, b in zip(tensors, [*model.parameters(), *model.buffers()], strict=True))
        with running_on(CPU, model, room):
            assert not model(X).is_meta
    with pytest.raises(RuntimeError), running_on(meta, model, 0):
        model(X[:, :4].to(meta))
    assert model(X).shape == X.shape


def test_a_model_that_did_not_fit_on_the_device_is_as_it_was() -> None:
    class Large(nn.Parameter):
        def detach(self):
            raise torch.OutOfMemoryError

    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = Large(torch.ones(6, 6))
    with pytest.raises(torch.OutOfMemoryError), running_on(torch.device("meta"), model, 2**20):
        pass
    assert not any(p.is_meta for p in model.parameters())


def test_nothing_changes() -> None:
    """The trial leaves modes, buffers and random numbers alone."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    model[2].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    want = torch.rand(1)
    torch.manual_seed(3)
    find_denominator(Objective(lambda o, y: F.cross_entropy(o, y)), model, (X, Y), CPU)
    assert torch.equal(torch.rand(1), want)
    assert model.training
    assert not model[2].training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_unreduced_is_refused() -> None:
    with pytest.raises(JobError, match="reduction"):
        find_denominator(Objective(nn.CrossEntropyLoss(reduction="none")), classes(), (X, Y), CPU)


def test_inputs_and_targets() -> None:
    a, b, y = torch.zeros(2), torch.ones(2), torch.tensor(3)
    assert split((a, y))[1] is y
    assert split(((a, b), y))[0] == (a, b)
    assert split((a, b, y))[0] == (a, b)
    assert split({"x": a, "labels": y}) == ({"x": a}, y)
    assert split(a) == (a, a)
    seen = []
    model = lambda *args, **kwargs: seen.append((args, kwargs))
    call(model, a), call(model, (a, b)), call(model, {"x": a})  # type: ignore[arg-type]
    assert [(len(args), list(kwargs)) for args, kwargs in seen] == [(1, []), (2, []), (0, ["x"])]


def test_over_probabilities_counts_positions() -> None:
    targets = torch.rand(4, 3, 5)
    assert LossDenominator(kind="targets").count((X[:4], targets)) == 20


def test_trees_keep_their_types() -> None:
    batch = {"a": (torch.ones(2), [torch.zeros(2)]), "b": "word"}
    doubled = tree.map_tensors(lambda t: t * 2, batch)
    assert type(doubled["a"]) is tuple
    assert type(doubled["a"][1]) is list
    assert doubled["b"] == "word"
    joined = tree.concatenate([batch, batch])
    assert joined["a"][0].shape == (4,)
