"""``evaluate`` and ``predict``: every sample once, in order, the same under every plan."""

import sys
from dataclasses import dataclass
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

import meshfit
from tests.few import every_other

cloudpickle.register_pickle_by_value(sys.modules[__name__])

N, BATCH = 22, 7  # in three ranks: two of them have no part in the last batch


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, Y = random(N, 6), torch.randint(3, (N,), generator=torch.Generator().manual_seed(0))
every_plan = pytest.mark.parametrize("plan", ["data=1", "data=2", "data=3"])
both = pytest.mark.parametrize("plan", ["data=1", "data=2"])


class Net(nn.Module):
    """Dropout and BatchNorm: in training mode its outputs would be others."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def net() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net()


def want(model: nn.Module, x: Tensor) -> Tensor:
    mode = model.training
    with torch.no_grad():
        out = model.eval()(x)
    model.train(mode)
    return out


def evaluate(model: Any, data: Any, **asked: Any) -> dict[str, float]:
    return meshfit.evaluate(model, data, **{"batch_size": BATCH, "devices": "cpu", **asked})


def predict(model: Any, data: Any, **asked: Any) -> Any:
    return meshfit.predict(model, data, **{"batch_size": BATCH, "devices": "cpu", **asked})


def right(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float()


# evaluate


@every_plan
def test_losses_and_metrics_count_every_sample_once(plan: str):
    model = net()
    metrics = {
        "each": right,
        "flags": lambda outputs, targets: outputs.argmax(1) == targets,
        "mean": lambda outputs, targets: right(outputs, targets).mean(),
        "number": lambda outputs, targets: right(outputs, targets).mean().item(),
        "pair": lambda outputs, targets: (right(outputs, targets).sum(), len(targets)),
        "some": lambda outputs, targets: (right(outputs, targets)[targets == 1].sum(), (targets == 1).sum()),
    }
    found = evaluate(model, (X, Y), loss=F.cross_entropy, metrics=metrics, plan=plan)
    outputs = want(model, X)
    accuracy = float(right(outputs, Y).mean())
    assert found == pytest.approx(
        {
            "loss": float(F.cross_entropy(outputs, Y)),
            **dict.fromkeys(("each", "flags", "mean", "number", "pair"), accuracy),
            "some": float(right(outputs, Y)[Y == 1].mean()),
        },
        rel=1e-5,
    )


LOSSES = {
    "function": F.cross_entropy,
    "class weights": nn.CrossEntropyLoss(weight=torch.tensor([0.1, 2.0, 1.0])),
    "reshaped": lambda outputs, targets: F.cross_entropy(outputs.view(-1, 3), targets.view(-1)),
    "sum and count": lambda out, targets: (F.cross_entropy(out, targets, reduction="sum"), (targets >= 0).sum()),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
}


@pytest.mark.parametrize(("name", "plan"), every_other(LOSSES, ["data=1", "data=3", "data=2"]))
def test_ignored_targets_weigh_nothing(name: str, plan: str):
    model, targets, loss = net(), Y.clone(), LOSSES[name]
    targets[2:19:2] = -100
    targets[-1] = -100  # the last batch, of one sample, counts for nothing
    whole = loss(want(model, X), targets)
    whole = whole[0] / whole[1] if isinstance(whole, tuple) else whole
    assert evaluate(model, (X, targets), loss=loss, plan=plan)["loss"] == pytest.approx(float(whole), rel=1e-5)


class Streamed(IterableDataset):
    def __init__(self, targets: Tensor):
        self.targets = targets

    def __iter__(self):
        return iter(zip(X, self.targets, strict=True))


@both
def test_a_stream_is_evaluated_like_tensors(plan: str):
    targets = Y.clone()
    targets[2:15] = -100
    model = net()
    found = evaluate(model, Streamed(targets), loss=F.cross_entropy, metrics={"pair": right}, plan=plan)
    whole = evaluate(model, (X, targets), loss=F.cross_entropy, metrics={"pair": right})
    assert found == pytest.approx(whole, rel=1e-5)


@both
def test_metrics_need_no_loss(plan: str):
    found = evaluate(net(), (X, Y), metrics={"accuracy": right}, plan=plan)
    assert found == pytest.approx({"accuracy": float(right(want(net(), X), Y).mean())})


@both
def test_a_step_function_gives_the_loss(plan: str):
    step = lambda model, batch: F.cross_entropy(model.body(batch[0]), batch[1])
    found = evaluate(net(), (X, Y), step=step, plan=plan)
    assert found["loss"] == pytest.approx(float(F.cross_entropy(want(net(), X), Y)), rel=1e-5)


class Own(nn.Module):
    """Gives its own loss when it is given labels, as Hugging Face's models do."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.net(x)
        return {"logits": logits, "loss": None if labels is None else F.cross_entropy(logits, labels)}


@both
def test_a_models_own_loss_is_evaluated(plan: str):
    accuracy = lambda outputs, labels: right(outputs["logits"], labels)
    found = evaluate(Own(), {"x": X, "labels": Y}, metrics={"accuracy": accuracy}, plan=plan)
    outputs = want(net(), X)
    assert found["loss"] == pytest.approx(float(F.cross_entropy(outputs, Y)), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float(right(outputs, Y).mean()))


@both
def test_a_model_is_left_as_it_was(plan: str):
    model = net()
    model.body[1].eval()
    modes = [module.training for module in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    evaluate(model, (X, Y), loss=F.cross_entropy, plan=plan)
    predict(model, X, plan=plan)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"metrics": {"m": lambda outputs, targets: outputs}}, r"metric 'm'.*\(7, 3\)"),
        ({"loss": lambda outputs, targets: outputs}, "not one number"),
        ({"plan": "data=9"}, "a batch of 7 samples cannot be shared"),
        ({"metric": {}}, "evaluate has no argument 'metric'.*did you mean metrics"),
        ({}, "loss=|metrics="),
    ],
    ids=["metric", "loss", "batch", "argument", "nothing to measure"],
)
def test_evaluating_wrongly_is_one_clear_error(asked: dict, words: str):
    with pytest.raises(meshfit.MeshfitError, match=f"(?s){words}"):
        evaluate(net(), (X, Y), **asked)


def test_a_metric_may_be_a_list_of_one_number_a_sample():
    each = {"list": lambda outputs, targets: right(outputs, targets).tolist()}
    array = {"array": lambda outputs, targets: right(outputs, targets).numpy()}
    found = evaluate(net(), (X, Y), metrics={**each, **array}, batch_size=2)  # two numbers: not (sum, count)
    accuracy = float(right(want(net(), X), Y).mean())
    assert found == pytest.approx({"list": accuracy, "array": accuracy})


def test_a_metric_over_nothing_is_not_zero():
    found = evaluate(net(), (X, Y), metrics={"rare": lambda outputs, targets: (torch.tensor(0.0), 0)})
    assert found["rare"] != found["rare"]


# predict


@every_plan
def test_outputs_come_in_the_order_of_the_samples(plan: str):
    torch.testing.assert_close(predict(net(), X, plan=plan), want(net(), X), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(predict(net(), (X, Y), plan=plan), want(net(), X), atol=1e-6, rtol=1e-5)


class Pairs(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, i: int):
        return X[i], Y[i]


@pytest.mark.parametrize("data", [Pairs(), Streamed(Y), {"x": X, "labels": Y}, (X.numpy(),), lambda: (X, Y)])
def test_data_is_given_as_to_fit(data: Any):
    torch.testing.assert_close(predict(net(), data, plan="data=2"), want(net(), X), atol=1e-6, rtol=1e-5)


class TwoInputs(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + 2 * b


class PerhapsTwo(nn.Module):
    def forward(self, a: Tensor, b: Tensor | None = None, scale: float = 1.0) -> Tensor:
        return (a if b is None else a + 2 * b) * scale


class WithOptions(nn.Module):
    def forward(self, a: Tensor, flag: bool = False) -> Tensor:
        return a


def test_no_input_is_dropped_as_a_target():
    """The last of a tuple was left out, though the model takes it."""
    a, b = X, X.flip(0)
    assert torch.equal(predict(TwoInputs(), (a, b), plan="data=2"), a + 2 * b)
    assert torch.equal(predict(TwoInputs(), (a, b, Y)), a + 2 * b)
    assert torch.equal(predict(WithOptions(), (a, Y)), a)
    with pytest.raises(meshfit.JobError, match="PerhapsTwo may be called with 1 or 2 of them"):
        predict(PerhapsTwo(), (a, b))
    assert torch.equal(predict(PerhapsTwo(), ((a, b),)), a + 2 * b)
    assert torch.equal(predict(PerhapsTwo(), a), a)
    assert torch.equal(predict(PerhapsTwo(), (a, b, Y)), a + 2 * b)


@dataclass
class Found:
    logits: Tensor
    best: tuple[Tensor, Tensor]
    missing: None = None


class Rich(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.net, self.kind = net(), kind

    def forward(self, x: Tensor) -> Any:
        logits = self.net(x)
        if self.kind == "dict":
            return {"logits": logits, "classes": logits.argmax(1), "none": None}
        return Found(logits, tuple(logits.max(1)))


@every_plan
def test_outputs_keep_their_structure(plan: str):
    outputs = want(net(), X)
    found = predict(Rich("dict"), X, plan=plan)
    assert list(found) == ["logits", "classes", "none"]
    torch.testing.assert_close(found["logits"], outputs, atol=1e-6, rtol=1e-5)
    assert torch.equal(found["classes"], outputs.argmax(1))
    assert found["none"] is None
    rich = predict(Rich("dataclass"), X, plan=plan)
    assert isinstance(rich, Found)
    assert torch.equal(rich.best[1], outputs.argmax(1))


@both
def test_outputs_that_are_no_tensors_do_not_depend_on_the_plan(plan: str):
    class Named(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"out": x, "names": [f"{value:.3f}" for value in x[:, 0].tolist()], "model": "named"}

    found = predict(Named(), X, plan=plan)
    assert torch.equal(found["out"], X)
    assert found["names"] == [f"{value:.3f}" for value in X[:, 0].tolist()]
    assert found["model"] == predict(Named(), X, batch_size=N)["model"]


def test_outputs_keep_their_precision():
    assert predict(nn.Identity(), X.double()).dtype is torch.float64
    assert predict(nn.Identity(), X.bfloat16()).dtype in (torch.bfloat16, torch.float32)
    assert torch.equal(predict(nn.Identity(), torch.arange(N)), torch.arange(N))


def test_a_models_function_is_built_under_the_seed():
    one, two = predict(Net, X, seed=3), predict(Net, X, seed=3, plan="data=2")
    torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-5)


def test_trained_then_evaluated():
    model = net()
    result = meshfit.fit(
        model,
        (X, Y),
        loss=F.cross_entropy,
        optimizer=torch.optim.AdamW,
        batch_size=8,
        epochs=2,
        valid=(X, Y),
        metrics={"accuracy": right},
        plan="data=2",
        devices="cpu",
    )
    again = evaluate(model, (X, Y), loss=F.cross_entropy, metrics={"accuracy": right}, plan="data=3")
    assert again == pytest.approx(result.metrics, rel=1e-5)


def test_low_precision_is_near():
    low = predict(net(), X, plan="data=2 precision=bf16")
    assert low.dtype is torch.float32
    torch.testing.assert_close(low, want(net(), X), atol=0.05, rtol=0.05)
    assert not torch.equal(low, want(net(), X))


@pytest.mark.parametrize("verb", [evaluate, predict])
def test_a_rank_that_raises_tells_the_caller(verb):
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("not today")

    with pytest.raises(meshfit.RankError, match="not today"):
        verb(Broken(), (X, Y), plan="data=2", **({"metrics": {"m": right}} if verb is evaluate else {}))


class Encoder(nn.Module):
    """torch's own encoder: in eval mode it has a fast path that skips its submodules."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.unflatten(1, (1, 6))).flatten(1))


@pytest.mark.parametrize("plan", ["pipeline=2", "tensor=2", "shard=2"])
def test_torchs_fast_path_is_not_taken_where_ranks_hold_parts(plan: str):
    torch.manual_seed(0)
    model = Encoder()
    found = evaluate(model, (X, Y), loss=F.cross_entropy, plan=plan)
    assert found["loss"] == pytest.approx(float(F.cross_entropy(want(model, X), Y)), rel=1e-5)
    assert torch.backends.mha.get_fastpath_enabled()


@both
def test_every_sample_of_a_loader_that_drops_some_in_training(plan: str):
    """drop_last is for training steps: an evaluation leaves no sample out."""
    model, counts = net(), {"count": lambda outputs, targets: (len(outputs), 1)}
    loader = DataLoader(TensorDataset(X, Y), batch_size=BATCH, drop_last=True)
    torch.testing.assert_close(predict(model, loader, batch_size=None, plan=plan), want(model, X))
    some = DataLoader(TensorDataset(X, Y), batch_size=BATCH, sampler=SubsetRandomSampler(range(9)), drop_last=True)
    for data, samples in ((loader, N), (some, 9)):
        assert evaluate(model, data, batch_size=None, metrics=counts, plan=plan)["count"] == samples


def test_a_mean_near_zero_is_one_on_every_batch():
    """Where it nearly cancels, rounding is as large as itself."""
    x, y = random(4000, 6), random(4000, 3, seed=1)
    error = {"error": lambda outputs, targets: (outputs - targets).mean()}
    found = evaluate(net(), (x, y), metrics=error, batch_size=16)["error"]
    assert found == pytest.approx(float((want(net(), x) - y).mean()), rel=1e-4)


def test_what_no_metric_may_return_or_be_called():
    for value in (None, "high", {"a": 1.0}, (1, 2, 3), 1j):
        with pytest.raises(meshfit.DataError, match="the metric 'm' returned a"):
            evaluate(net(), (X, Y), metrics={"m": lambda outputs, targets, value=value: value})
    with pytest.raises(meshfit.JobError, match="named 'loss'"):
        evaluate(net(), (X, Y), loss=F.cross_entropy, metrics={"loss": lambda outputs, targets: 1.0})
