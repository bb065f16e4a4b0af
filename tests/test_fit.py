"""``fit`` trains like a plain loop on one device, and like one device on many: real ranks, real losses."""

import copy
import functools
import json
import math
import sys
import threading
import time
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshfit
from meshfit.best import Best
from tests.few import every_other

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SAMPLES, BATCH = 22, 7  # three full batches and one of a single sample: two of three ranks then have none
SGD = lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)
ADAMW = lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(count: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(seed))


X, Y, CLASS = random(SAMPLES, 6), random(SAMPLES, 3, seed=1), classes(3, SAMPLES)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def built(make=mlp, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def losses(result: meshfit.Result) -> list[float]:
    return [step.loss for step in result.history]


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def fit(model: Any = mlp, data: Any = (X, Y), **asked: Any) -> meshfit.Result:
    asked = {"optimizer": SGD, "batch_size": BATCH, "epochs": 2, "devices": "cpu", "plan": "data=1", **asked}
    if not {"loss", "step"} & asked.keys():
        asked["loss"] = F.mse_loss
    return meshfit.fit(model, data, **asked)


def assert_same_weights(got: nn.Module | dict, want: nn.Module | dict) -> None:
    got, want = (m.state_dict() if isinstance(m, nn.Module) else m for m in (got, want))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def assert_alike(got: meshfit.Result, want: meshfit.Result) -> None:
    """The losses within 1e-5, the weights and buffers within 1e-4."""
    torch.testing.assert_close(losses(got), losses(want), atol=1e-5, rtol=1e-5)
    norms = [[step.grad_norm for step in result.history] for result in (got, want)]
    torch.testing.assert_close(*norms, atol=1e-4, rtol=1e-4)
    assert_same_weights(got.model, want.model)


def ranks_alive() -> set[psutil.Process]:
    """Children of our template: what fit started and has not ended."""
    found = [rank for child in psutil.Process().children() for rank in child.children()]
    return {rank for rank in found if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE} - left_before


left_before: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def _one_tests_leavings_are_not_anothers():
    left_before.clear()
    left_before.update(ranks_alive())


def no_rank_left(within: float = 20.0) -> bool:
    deadline = time.monotonic() + within
    while ranks_alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not ranks_alive()


both = pytest.mark.parametrize("plan", ["data=1", "data=2"])


# One device: a plain loop


def by_hand(model: nn.Module, x: Tensor, y: Tensor, loss, optimizer, *, epochs: int = 2, clip: float | None = None):
    model.train()
    seen, norms = [], []
    for _ in range(epochs):
        for first in range(0, len(x), BATCH):
            value = loss(model(x[first : first + BATCH]), y[first : first + BATCH])
            value.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(float(value.detach()))
    return seen, norms


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, foreach=False),
        lambda params: torch.optim.RMSprop(params, lr=1e-3),
    ],
    ids=["AdamW", "SGD", "RMSprop"],
)
def test_one_device_is_a_plain_loop_bit_for_bit(optimizer):
    mine = built()
    want, _ = by_hand(mine, X, CLASS, F.cross_entropy, optimizer(mine.parameters()))
    result = fit(built(), (X, CLASS), loss=F.cross_entropy, optimizer=optimizer, shuffle=False)
    assert losses(result) == want
    for name, tensor in mine.state_dict().items():
        assert torch.equal(result.model.state_dict()[name], tensor)


def test_the_fused_kernel_that_fit_chooses_gives_the_same_numbers():
    mine = built()
    want, _ = by_hand(mine, X, Y, F.mse_loss, torch.optim.AdamW(mine.parameters(), lr=1e-2))
    result = fit(built(), optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2), shuffle=False)
    torch.testing.assert_close(losses(result), want, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(result.model.state_dict(), mine.state_dict(), atol=1e-6, rtol=1e-6)


def test_an_epoch_visits_every_sample_once_in_an_order_of_its_own():
    seen: list[list[int]] = []

    def step(model, batch):
        seen.append(batch[0].tolist())
        return model(X[batch[0]]).square().mean()

    fit(data=(torch.arange(SAMPLES),), step=step)
    first, second = sum(seen[:4], []), sum(seen[4:], [])
    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    assert first != second != list(range(SAMPLES))
    assert [len(batch) for batch in seen] == [7, 7, 7, 1] * 2


# Many devices: one device


class Tagger(nn.Module):
    """Token classes: (batch, classes, tokens) as F.cross_entropy wants them."""

    def __init__(self, transposed: bool = True):
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 5)
        self.transposed = transposed

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.out(torch.tanh(self.embed(tokens)))
        return logits.transpose(1, 2) if self.transposed else logits


class Output(OrderedDict):
    """Like Hugging Face's: a dict whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class LanguageModel(nn.Module):
    """Embeddings tied to the head; its own loss, over the next token, ignoring -100."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.head(torch.tanh(self.mix(self.embed(input_ids))))
        output = Output(logits=logits)
        if labels is not None:
            output["loss"] = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return output


class Experts(nn.Module):
    """Each sample goes to the expert it names: some ranks, some steps, use an expert that others do not."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

    def forward(self, x: Tensor, to: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 3)
        for index, expert in enumerate(self.experts):
            if (to == index).any():
                out = out + expert(x) * (to == index).unsqueeze(1)
        return out


class Partly(nn.Module):
    """Frozen parameters, parameters nobody uses, a buffer, and outputs that are not tensors."""

    def __init__(self):
        super().__init__()
        self.frozen, self.used, self.unused = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"out": self.used(self.frozen(x).relu()) * self.scale, "name": "partly", "none": None}


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.coarse, self.fine = nn.Linear(6, 8), nn.Linear(8, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.fine(self.coarse(x).double()).float()


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4, momentum=None),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 4 * 4, 3),
    )


TOKENS = classes(11, SAMPLES, 6)
LENGTHS = torch.tensor([1, 6, 0, 2, 5, 1, 6, 3, 0, 1, 4] * 2)  # tokens that count, unevenly spread
PADDED = torch.where(torch.arange(6) < LENGTHS.unsqueeze(1), classes(5, SAMPLES, 6, seed=2), -100)
CLASS_WEIGHTS = torch.tensor([0.2, 3.0, 1.0, 0.5, 2.0])


def mean_by_hand(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    each = F.cross_entropy(outputs, targets, reduction="none")
    return each.sum(), (targets != -100).sum()


def distil(model: nn.Module, batch: Any) -> Tensor:
    """Calls parts of the model, one of them twice, and never the model."""
    x, y = batch
    hidden = torch.tanh(model[0](x))
    return F.mse_loss(model[2](hidden), y) + 0.1 * F.mse_loss(model[2](hidden.detach() * 0.5), y)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "weight_decay": 0.2}]
    return torch.optim.AdamW(groups, lr=0.01)


def cosine(optimizer: torch.optim.Optimizer, steps: int):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


CASES: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": ADAMW},
    "sgd": {"optimizer": SGD, "clip": 0.3},
    "batchnorm": {
        "model": convolutional,
        "data": (random(SAMPLES, 2, 4, 4), CLASS),
        "loss": F.cross_entropy,
        "optimizer": ADAMW,
    },
    "padded": {"model": Tagger, "data": (TOKENS, PADDED), "loss": F.cross_entropy},
    "padded, partial": {
        "model": Tagger,
        "data": (TOKENS, torch.where(PADDED < 0, 4, PADDED)),
        "loss": functools.partial(F.cross_entropy, ignore_index=4, label_smoothing=0.1),
    },
    "class weights": {"model": Tagger, "data": (TOKENS, PADDED), "loss": nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)},
    "reshaped": {
        "model": lambda: Tagger(transposed=False),
        "data": (TOKENS, PADDED),
        "loss": lambda outputs, targets: F.cross_entropy(outputs.reshape(-1, 5), targets.reshape(-1)),
    },
    "sum and count": {"model": Tagger, "data": (TOKENS, PADDED), "loss": mean_by_hand},
    "sum": {
        "loss": lambda outputs, targets: F.mse_loss(outputs, targets, reduction="sum"),
        "optimizer": lambda params: torch.optim.SGD(params, lr=1e-3),
    },
    "sum, module": {"loss": nn.MSELoss(reduction="sum"), "optimizer": lambda params: torch.optim.SGD(params, lr=1e-3)},
    "own loss, tied": {
        "model": LanguageModel,
        "data": {"input_ids": TOKENS, "labels": torch.where(PADDED < 0, -100, TOKENS)},
        "loss": None,
        "optimizer": ADAMW,
    },
    "step": {"step": distil},
    "soft targets": {"data": (X, Y.softmax(1)), "loss": F.cross_entropy},
    "groups, scheduler": {"optimizer": two_groups, "scheduler": cosine},
    "experts": {
        "model": Experts,
        "data": (X, torch.tensor([0, 0, 1, 1, 0, 0, 1, 2, 0, 0, 0] * 2), Y),
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.5),
        "shuffle": False,
    },
    "partly": {"model": Partly, "loss": lambda outputs, targets: F.mse_loss(outputs["out"], targets)},
    "double": {"model": lambda: mlp().double(), "data": (X.double(), Y.double())},
    "two dtypes": {"model": TwoDtypes, "clip": 0.5},
    "ema": {"ema": 0.8, "optimizer": ADAMW},
}


@functools.cache
def alone(case: str) -> meshfit.Result:
    return fit(**CASES[case])


@pytest.mark.parametrize(("case", "plan"), every_other(CASES, ["data=3 microbatches=2", "data=2"]))
def test_many_devices_train_like_one(case: str, plan: str):
    want = alone(case)
    if "microbatches" in plan and case == "batchnorm":
        plan = "data=3"  # BatchNorm sees each microbatch by itself, on one device too: compared below
    assert_alike(fit(**CASES[case], plan=plan), want)


@pytest.mark.parametrize("case", [case for case in CASES if case != "batchnorm"])
def test_microbatches_train_like_one_batch(case: str):
    assert_alike(fit(**CASES[case], plan="microbatches=3"), alone(case))


def test_batchnorm_sees_the_same_microbatches_under_every_plan():
    job = {**CASES["batchnorm"], "batch_size": 8}
    assert_alike(fit(**job, plan="data=2 microbatches=2"), fit(**job, plan="microbatches=2"))


@both
def test_a_batch_smaller_than_its_microbatches_leaves_batchnorm_alone(plan: str):
    job = {**CASES["batchnorm"], "epochs": 1}
    short = fit(**job, plan=f"{plan} microbatches=2")  # the last batch has one sample: one of two microbatches is empty
    assert all(tensor.isfinite().all() for tensor in short.model.state_dict().values())
    tracked = fit(**job, plan="microbatches=2", steps=3).model.state_dict()
    last = (random(SAMPLES, 2, 4, 4), CLASS)
    whole = built(convolutional)
    whole.load_state_dict(tracked)
    ids = meshfit.data.order.Ids(SAMPLES, BATCH, seed=0, shuffle=True)(0, 3)
    whole.train()(last[0][ids])  # one forward of the sample that is there
    assert int(short.model[1].num_batches_tracked) == int(whole[1].num_batches_tracked)
    torch.testing.assert_close(short.model[1].running_mean, whole[1].running_mean, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["padded", "reshaped"])
def test_a_rank_without_samples_may_stand_in_with_a_sample_of_padding_alone(case: str):
    tokens, labels = TOKENS[:7].clone(), PADDED[:7].clone()
    labels[0] = -100
    job = {**CASES[case], "data": (tokens, labels), "batch_size": 7, "epochs": None, "shuffle": False}
    want = fit(**{**job, "data": (tokens[:2], labels[:2])}, steps=2)
    got = fit(**{**job, "data": (tokens[:2], labels[:2])}, steps=2, plan="data=3")  # two samples for three ranks
    assert all(map(math.isfinite, losses(got)))
    assert_alike(got, want)


@both
def test_a_microbatch_of_padding_alone_weighs_nothing(plan: str):
    labels = PADDED[:8].clone()
    labels[4:] = -100
    job = {**CASES["padded"], "data": (TOKENS[:8], labels), "batch_size": 8, "shuffle": False}
    assert_alike(fit(**job, plan=f"{plan} microbatches=2"), fit(**job))


def test_a_parameter_used_in_the_first_microbatch_alone_still_learns():
    to = torch.tensor([0, 2, 0, 2, 0, 0, 1, 1])  # expert 2: in the first of two microbatches, on both ranks
    job = {**CASES["experts"], "data": (X[:8], to, Y[:8]), "batch_size": 8}
    assert_alike(fit(**job, plan="data=2 microbatches=2"), fit(**job))


@both
def test_an_optimizer_leaves_alone_what_no_rank_used(plan: str):
    result = fit(**CASES["experts"], plan=plan)
    start, end = built(Experts).state_dict(), result.model.state_dict()
    assert torch.equal(end["experts.3.weight"], start["experts.3.weight"])  # never used: no weight decay either
    assert not torch.equal(end["experts.2.weight"], start["experts.2.weight"])
    before = fit(**{**CASES["experts"], "epochs": None}, steps=1, plan=plan).model.state_dict()
    assert torch.equal(before["experts.2.weight"], start["experts.2.weight"])  # used from the second step on


@both
def test_frozen_parameters_stay_and_tied_ones_stay_tied(plan: str):
    partly = fit(**CASES["partly"], plan=plan).model
    start = built(Partly)
    assert torch.equal(partly.frozen.weight, start.frozen.weight)
    assert torch.equal(partly.unused.weight, start.unused.weight)
    assert not torch.equal(partly.used.weight, start.used.weight)
    model = built(LanguageModel)
    fit(**{**CASES["own loss, tied"], "model": model}, plan=plan)
    assert model.head.weight is model.embed.weight
    assert not torch.equal(model.embed.weight, built(LanguageModel).embed.weight)


def test_padding_in_a_stream_is_weighed_too():
    samples = list(zip(TOKENS, PADDED, strict=True))

    def produce():
        yield from samples

    job = {**CASES["padded"], "shuffle": False}
    want = fit(**job)
    assert_alike(fit(**{**job, "data": produce}, plan="data=2"), want)


def test_a_loss_that_draws_random_numbers_is_not_called_contrastive():
    def diffuse(model, batch):
        noise = torch.randn_like(batch[1])
        return F.mse_loss(model(batch[0]) + noise, batch[1])

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(step=diffuse, plan="microbatches=2")
    assert not [str(warning.message) for warning in said]


@pytest.mark.parametrize("make", [lambda params: torch.optim.SGD(params, lr=0.1), torch.optim.SparseAdam])
def test_sparse_gradients_train_as_in_torch(make):
    embed = lambda: nn.Sequential(nn.EmbeddingBag(11, 3, sparse=True))
    mine, want = built(embed), []
    optimizer = make(mine.parameters())
    for _ in range(2):
        loss = F.mse_loss(mine(TOKENS), Y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        want.append(float(loss.detach()))
    result = fit(built(embed), (TOKENS, Y), optimizer=make, batch_size=SAMPLES, steps=2, shuffle=False)
    torch.testing.assert_close(losses(result), want)


# Clipping


def test_clip_is_torchs_and_grad_norm_is_before_it():
    optimizer = lambda params: torch.optim.SGD(params, lr=0.1, fused=True)
    mine = built()
    want, norms = by_hand(mine, X, Y, F.mse_loss, optimizer(mine.parameters()), clip=0.05)
    for plan in ("data=1", "data=3"):
        result = fit(built(), optimizer=optimizer, shuffle=False, clip=0.05, plan=plan)
        torch.testing.assert_close(losses(result), want, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close([step.grad_norm for step in result.history], norms, atol=1e-6, rtol=1e-4)
        assert_same_weights(result.model, mine)
    assert max(norms) > 0.05


# Forms of model, optimizer, scheduler


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(3, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.a(a) + self.b(b)


def test_inputs_are_spread_over_the_models_arguments():
    b = random(SAMPLES, 3, seed=5)
    positional = fit(TwoInputs, (X, b, Y))
    named = fit(TwoInputs, {"b": b, "a": X, "labels": Y})
    nested = fit(TwoInputs, ((X, b), Y))
    assert losses(positional) == losses(named) == losses(nested)


def test_an_optimizer_may_be_a_class_a_function_or_an_optimizer():
    model = built()
    want = losses(fit(optimizer=lambda params: torch.optim.AdamW(params)))
    assert losses(fit(optimizer=torch.optim.AdamW)) == want
    assert losses(fit(optimizer=lambda model: torch.optim.AdamW(model.parameters()))) == want
    assert losses(fit(model, optimizer=torch.optim.AdamW(model.parameters()))) == want


def test_an_optimizer_instance_trains_on_many_devices_too():
    model = built()
    result = fit(model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1), plan="data=2")
    assert_alike(result, alone("adamw"))


def test_a_scheduler_may_ask_for_the_number_of_steps():
    halved = fit(
        optimizer=lambda params: torch.optim.SGD(params, lr=0.4),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        steps=3,
    )
    assert [step.lr for step in halved.history] == pytest.approx([0.4, 0.2, 0.1])
    asked = []

    def linear(optimizer, steps):
        asked.append(steps)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)

    fit(scheduler=linear)
    assert asked == [8]


def test_gradients_left_from_before_do_not_count():
    model = built()
    model(X).sum().backward()
    assert losses(fit(model)) == losses(fit())


# Length of a run


def test_epochs_and_steps_end_a_run():
    assert fit(epochs=2).steps == 8
    assert fit(epochs=0.5).steps == 2
    assert fit(epochs=2, steps=5).steps == 5
    assert fit(epochs=1, steps=50).steps == 4
    assert fit(epochs=None, steps=11).history[-1].epoch == 2
    history = fit(epochs=2).history
    assert [step.epoch for step in history] == [0] * 4 + [1] * 4
    assert [step.last for step in history] == [False, False, False, True] * 2
    assert history[-1].samples == 2 * SAMPLES


def test_a_fraction_of_an_epoch_is_not_rounded_up_by_its_last_bit():
    assert 0.14 * 50 > 7
    assert fit(data=(random(50, 6), random(50, 3)), batch_size=1, epochs=0.14).steps == 7


def test_a_batch_may_be_given_per_device():
    one, two = fit(batch_size="4/device"), fit(batch_size="4/device", plan="data=2")
    assert (one.batch_size, two.batch_size) == (4, 8)
    assert_alike(two, fit(batch_size=8))


# Not finite


@both
def test_a_nan_stops_the_run_and_names_the_sample(plan: str):
    x = X.clone()
    x[16, 2] = float("nan")  # in the third batch
    model = built()
    with pytest.raises(meshfit.NonFiniteError, match=r"step 3: the loss is nan") as caught:
        fit(model, (x, Y), shuffle=False, plan=plan)
    assert "sample 16" in str(caught.value)
    assert_same_weights(model, fit(shuffle=False, steps=2).model)  # "as they were before that step"
    assert no_rank_left()


def test_an_infinite_loss_names_the_rank_and_its_samples():
    target = Y.clone()
    target[12, 0] = 77.0
    infinite = lambda outputs, targets: F.mse_loss(outputs, targets) + torch.where((targets == 77).any(), math.inf, 0)
    with pytest.raises(meshfit.NonFiniteError, match=r"step 2: the loss is inf") as caught:
        fit(data=(X, target), loss=infinite, shuffle=False, plan="data=2")
    assert "rank 1, samples 10, 11, 12, 13 of epoch 0" in str(caught.value)


@both
def test_a_nan_in_the_gradient_alone_stops_the_run(plan: str):
    model = built()
    start = weights(model)
    root = lambda outputs, targets: F.mse_loss(outputs, targets) + (outputs * 0).abs().sqrt().mean()
    with pytest.raises(meshfit.NonFiniteError, match=r"step 1: the gradient's norm is nan"):
        fit(model, loss=root, plan=plan)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in start.items())


def test_skipping_goes_on_with_finite_weights():
    x = X.clone()
    x[9] = float("inf")
    one, two = (fit(data=(x, Y), shuffle=False, on_nan="skip", plan=plan) for plan in ("data=1", "data=2"))
    for result in (one, two):
        assert [step.taken for step in result.history] == [True, False, True, True] * 2
        assert all(tensor.isfinite().all() for tensor in result.model.state_dict().values())
    assert not torch.equal(one.model[0].weight, built()[0].weight)
    assert_same_weights(two.model, one.model)


@both
def test_skipping_keeps_running_statistics_finite(plan: str):
    images = random(SAMPLES, 2, 4, 4)
    images[9] = float("nan")
    job = {**CASES["batchnorm"], "data": (images, CLASS)}
    model = fit(**job, shuffle=False, on_nan="skip", plan=plan).model
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())


def test_skipping_the_first_step_does_not_upset_the_scheduler():
    x = X.clone()
    x[0] = float("nan")
    schedule = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    fit(data=(x, Y), shuffle=False, on_nan="skip", scheduler=schedule)  # a warning is an error here


# Seeds


def test_a_model_function_starts_alike_under_every_plan():
    started = {}
    for plan in ("data=1", "data=2", "data=3"):
        torch.rand(3)
        still = fit(optimizer=lambda params: torch.optim.SGD(params, lr=0.0), steps=1, plan=plan, seed=4)
        started[plan] = still.model.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(started["data=1"].values(), started["data=2"].values(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(started["data=1"].values(), started["data=3"].values(), strict=True))
    other = fit(optimizer=lambda params: torch.optim.SGD(params, lr=0.0), steps=1, seed=5).model.state_dict()
    assert not torch.equal(started["data=1"]["0.weight"], other["0.weight"])


@both
def test_the_same_run_twice_is_bit_identical(plan: str):
    dropping = lambda: nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    first, second = (fit(dropping, plan=plan, seed=3) for _ in range(2))
    assert losses(first) == losses(second)
    ends = [list(result.model.state_dict().values()) for result in (first, second)]
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert losses(fit(dropping, plan=plan, seed=4)) != losses(first)


def test_ranks_drop_out_independently():
    model = lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1, bias=False))
    seen = lambda model, x: (model[0](x) * torch.arange(64.0)).sum() + 0 * model[1].weight.sum()
    dropped = lambda model, batch: (seen(model, batch), len(batch))
    two = fit(model, torch.ones(2, 64), step=dropped, batch_size=2, steps=1, plan="data=2").history[0].loss
    one = fit(model, torch.ones(1, 64), step=dropped, batch_size=1, steps=1).history[0].loss
    assert two != pytest.approx(one)  # it would be if both had drawn what one device draws


def test_a_seed_may_be_any_number():
    assert losses(fit(seed=-1)) != losses(fit(seed=2**63 + 5)) != losses(fit())


# Callbacks


@both
def test_what_is_waited_for_runs_in_the_callers_process_and_stops_at_that_step(plan: str):
    seen: list[int] = []

    def watch(step: meshfit.Step) -> str | None:
        seen.append(step.step)
        return "stop" if step.step == 3 else None

    model = built()
    result = fit(model, each_step=[watch, lambda step: None], plan=plan)
    assert seen == [1, 2, 3]
    assert result.steps == 3
    assert_same_weights(model, fit(steps=3).model)
    assert no_rank_left()


@both
def test_a_stop_leaves_the_running_statistics_of_that_step(plan: str):
    job = {**CASES["batchnorm"], "plan": plan}
    stopped = fit(**job, each_step=lambda step: "stop" if step.step == 2 else None)
    want = fit(**job, steps=2).model.state_dict()
    assert int(stopped.model[1].num_batches_tracked) == int(want["1.num_batches_tracked"]) == 2
    assert_same_weights(stopped.model, want)


def slowly(outputs: Tensor, targets: Tensor) -> Tensor:
    time.sleep(0.01)
    return F.mse_loss(outputs, targets)


@pytest.mark.parametrize("plan", ["data=1", "data=2", "shard=2", "tensor=2", "pipeline=2", "server=1 data=2"])
def test_a_callback_stops_all_devices_after_the_same_step(plan: str):
    seen: list[int] = []

    def watch(step: meshfit.Step) -> str | None:
        seen.append(step.step)
        return "stop" if step.step >= 3 else None

    result = fit(callbacks=watch, plan=plan, loss=slowly, epochs=None, steps=2000)
    assert seen == list(range(1, result.steps + 1))
    assert 3 <= result.steps < 2000
    assert_same_weights(result.model, fit(epochs=None, steps=result.steps).model)
    assert no_rank_left()


def test_no_device_waits_for_a_callback():
    """Eight steps take longer than seven sleeps where each is waited for, and less in one of three tries where not."""
    slow = lambda step: time.sleep(0.4)
    seconds = lambda **asked: fit(**asked, plan="data=2").history[-1].seconds
    assert any(seconds(callbacks=slow) < 7 * 0.4 for _ in range(3))
    assert seconds(each_step=slow) >= 7 * 0.4


@both
def test_an_exception_in_a_callback_reaches_the_caller_and_leaves_no_process(plan: str):
    class Mine(Exception):
        pass

    def fail(step: meshfit.Step) -> None:
        if step.step == 2:
            raise Mine("enough")

    model = built()
    with pytest.raises(Mine, match="enough"):
        fit(model, callbacks=[fail], plan=plan, epochs=200)
    assert no_rank_left()  # while the traceback is still held, as a notebook holds it
    assert all(parameter.grad is None for parameter in model.parameters())


@both
def test_steps_can_be_left_and_leave_the_weights_of_that_step(plan: str):
    model = built()
    asked = {"loss": F.mse_loss, "optimizer": SGD, "batch_size": BATCH, "epochs": 2, "devices": "cpu", "plan": plan}
    seen = []
    for step in meshfit.steps(model, (X, Y), **asked):
        seen.append(step.loss)
        if step.step == 3:
            break
    want = fit(steps=3)
    torch.testing.assert_close(seen, losses(want), atol=1e-5, rtol=1e-5)
    assert_same_weights(model, want.model)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert no_rank_left()


def test_steps_to_the_end_is_fit():
    model = built()
    asked = {"loss": F.mse_loss, "optimizer": SGD, "batch_size": BATCH, "epochs": 2, "devices": "cpu"}
    seen = [step.loss for step in meshfit.steps(model, (X, Y), plan="data=2", **asked)]
    torch.testing.assert_close(seen, losses(fit()), atol=1e-5, rtol=1e-5)
    assert_same_weights(model, fit().model)


# Evaluation within a run


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float()


METRICS = {
    "mean": lambda outputs, targets: correct(outputs, targets).mean(),
    "each": correct,
    "pair": lambda outputs, targets: (correct(outputs, targets).sum(), len(targets)),
    "number": lambda outputs, targets: float(correct(outputs, targets).mean()),
}
HELD_OUT = (random(17, 6, seed=8), classes(3, 17, seed=8))


@pytest.mark.parametrize("plan", ["data=1", "data=2", "data=3"])
def test_every_held_out_sample_counts_once(plan: str):
    result = fit(data=(X, CLASS), loss=F.cross_entropy, valid=HELD_OUT, metrics=METRICS, plan=plan)
    evaluations = [step.valid for step in result.history]
    assert [bool(valid) for valid in evaluations] == [False, False, False, True] * 2
    model, (x, y) = result.model.eval(), HELD_OUT
    with torch.no_grad():
        right, loss = float(correct(model(x), y).mean()), float(F.cross_entropy(model(x), y))
    assert result.metrics == pytest.approx({"loss": loss, **dict.fromkeys(METRICS, right)}, rel=1e-5)


def test_evaluation_comes_when_asked_and_at_the_end():
    result = fit(valid=(X, Y), valid_every=3)
    assert [step.step for step in result.history if step.valid] == [3, 6, 8]


@both
def test_a_step_function_can_be_evaluated_without_calling_the_model(plan: str):
    class Parts(nn.Module):  # has no forward
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 3)

    step = lambda model, batch: F.mse_loss(model.b(model.a(batch[0])), batch[1])
    result = fit(Parts, step=step, valid=(X, Y), plan=plan)
    with torch.no_grad():
        assert result.metrics["loss"] == pytest.approx(float(step(result.model, (X, Y))), rel=1e-4)


DIVERGING = lambda params: torch.optim.SGD(params, lr=2.5)


@both
def test_the_best_weights_are_kept_and_patience_runs_out(plan: str):
    result = fit(valid=(X, Y), valid_every=1, best="-loss", patience=3, epochs=9, optimizer=DIVERGING, plan=plan)
    measured = [step.valid["loss"] for step in result.history]
    at = measured.index(min(measured))
    assert result.steps == at + 1 + 3 < 36
    assert result.best == {"loss": min(measured)}
    with torch.no_grad():
        assert float(F.mse_loss(result.model(X), Y)) == pytest.approx(min(measured), rel=1e-4)


def test_a_first_evaluation_of_nan_is_not_the_best():
    best = Best("accuracy", 2)
    best.consider({"accuracy": float("nan")}, built())
    best.consider({"accuracy": 0.5}, built())
    assert best.measured == {"accuracy": 0.5}
    for _ in range(2):
        best.consider({"accuracy": float("nan")}, built())
    assert best.given_up


def test_patience_runs_out_where_every_evaluation_is_nan():
    best = Best("-loss", 2)
    for _ in range(3):
        best.consider({"loss": float("nan")}, built())
    assert best.given_up


def test_the_best_of_a_resumed_run_is_that_of_all_of_it(tmp_path: Path):
    """What was measured before the stop counts, as its weights do."""
    how: dict[str, Any] = {"valid": (X, Y), "valid_every": 1, "best": "-loss", "checkpoint": 1, "out": tmp_path / "run"}
    first = fit(steps=1, optimizer=DIVERGING, **how)
    again = fit(steps=4, optimizer=DIVERGING, resume=True, **how)
    assert again.best == first.best
    with torch.no_grad():
        assert float(F.mse_loss(again.model(X), Y)) == pytest.approx(first.best["loss"], rel=1e-4)


@both
def test_the_average_of_the_weights_is_returned_and_evaluated(plan: str):
    raw: list[dict[str, Tensor]] = []
    model = built()
    for _ in meshfit.steps(model, (X, Y), loss=F.mse_loss, optimizer=SGD, batch_size=BATCH, steps=4, devices="cpu"):
        raw.append(weights(model))
    average = weights(built())
    for after in raw:
        average = {name: 0.7 * average[name] + 0.3 * after[name] for name in average}
    result = fit(steps=4, ema=0.7, valid=(X, Y), plan=plan)
    torch.testing.assert_close(result.model.state_dict(), average, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        assert result.metrics["loss"] == pytest.approx(float(F.mse_loss(result.model(X), Y)), rel=1e-4)


# What is written


def test_nothing_is_written_unless_asked(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fit(plan="data=2").folder is None
    fit()
    assert not list(tmp_path.iterdir())


@both
def test_a_folder_holds_the_run(tmp_path: Path, plan: str):
    result = fit(out=tmp_path / "run", valid=(X, Y), plan=plan)
    assert result.folder == tmp_path / "run"
    about = json.loads((result.folder / "run.json").read_text())
    assert about["plan"] == plan
    assert about["batch_size"] == BATCH
    assert about["steps"] == 8
    assert about["metrics"] == result.metrics
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == losses(result)
    assert [line["step"] for line in lines if "valid" in line] == [4, 8]
    for rank in range(result.plan.devices):
        events = [
            json.loads(line) for line in (result.folder / "events" / f"rank{rank}.jsonl").read_text().splitlines()
        ]
        assert {event.get("span") for event in events} >= {"data", "forward_backward", "exchange", "update"}
    saved = load_file(result.folder / "weights.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in result.model.state_dict().items())


def test_a_second_run_gets_a_folder_of_its_own(tmp_path: Path):
    first, second, third = (fit(out=tmp_path / "run", seed=seed) for seed in range(3))
    assert [r.folder.name for r in (first, second, third)] == ["run", "run-2", "run-3"]
    assert torch.equal(load_file(first.folder / "weights.safetensors")["0.weight"], first.model[0].weight)


def test_tied_weights_are_saved_once_and_load(tmp_path: Path):
    result = fit(**CASES["own loss, tied"], out=tmp_path / "run")
    fresh = LanguageModel()
    load_model(fresh, result.folder / "weights.safetensors")
    assert torch.equal(fresh.head.weight, result.model.embed.weight)
    assert len(load_file(result.folder / "weights.safetensors")) == 3


def test_steps_write_a_folder_too(tmp_path: Path):
    asked = {"loss": F.mse_loss, "optimizer": SGD, "batch_size": BATCH, "epochs": 1, "devices": "cpu"}
    for _ in meshfit.steps(built(), (X, Y), out=tmp_path / "run", **asked):
        pass
    assert (tmp_path / "run" / "metrics.jsonl").is_file()


def test_a_job_refused_leaves_no_folder(tmp_path: Path):
    with pytest.raises(meshfit.PlanError):
        fit(out=tmp_path / "run", plan="data=3", devices="cpu:2")
    assert not (tmp_path / "run").exists()


# What comes back


@both
def test_the_result_says_what_happened(plan: str):
    model = built()
    result = fit(model, plan=plan)
    assert result.model is model
    assert result.plan == meshfit.Plan.parse(plan)
    assert (result.steps, result.batch_size, result.best, result.folder) == (8, BATCH, None, None)
    assert result.metrics == {"loss": result.history[-1].loss}
    assert len(result.phases) == result.plan.data
    assert all(phase.keys() >= {"data", "forward_backward", "exchange", "update"} for phase in result.phases)
    assert 0 < result.history[-1].seconds <= result.seconds
    assert all(step.taken for step in result.history)


@both
@pytest.mark.parametrize("training", [True, False])
def test_the_model_comes_back_as_it_was_but_trained(plan: str, training: bool):
    model = built(convolutional).train(training)
    parameters = list(model.parameters())
    normalise = F.batch_norm
    fit(**{**CASES["batchnorm"], "model": model}, plan=plan)
    assert all(mine is theirs for mine, theirs in zip(parameters, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())
    assert F.batch_norm is normalise
    assert {module.training for module in model.modules()} == {training}


def test_a_model_trains_on_from_where_it_was():
    model = built()
    fit(model, epochs=1, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), plan="data=2")
    fit(model, epochs=1, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), plan="data=2")
    again = built()
    fit(again, epochs=1, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    fit(again, epochs=1, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    assert_same_weights(model, again)


# Asked wrongly: one clear error, before any process starts


class Locked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.guard = nn.Linear(6, 3), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "misspelt argument": ({"optimiser": SGD}, meshfit.JobError, "did you mean optimizer"),
    "misspelt plan": ({"plan": "dat=2"}, meshfit.PlanError, "did you mean data"),
    "auto and a degree": ({"plan": "auto data=3", "devices": "cpu:2"}, meshfit.PlanError, "data"),
    "plan without value": ({"plan": "microbatches"}, meshfit.PlanError, "no value"),
    "plan of words": ({"plan": "data=two"}, meshfit.PlanError, "not a number"),
    "plan, a number": ({"plan": 2}, meshfit.MeshfitError, "plan"),
    "too few devices": ({"plan": "data=3", "devices": "cpu:2"}, meshfit.PlanError, "needs 3 devices but there are 2"),
    "devices": ({"devices": "gpu"}, meshfit.PlanError, "is not understood"),
    "small batch": ({"plan": "data=3", "batch_size": 2}, meshfit.PlanError, "a batch of 2 samples cannot be shared"),
    "batch of words": ({"batch_size": "32 each"}, meshfit.JobError, "32/device"),
    "batch of zero": ({"batch_size": 0}, meshfit.JobError, "batch_size=0"),
    "lengths": ({"data": (X, Y[:5])}, meshfit.DataError, r"differ in length"),
    "no samples": ({"data": (X[:0], Y[:0])}, meshfit.JobError, "no sample"),
    "a loader of another batch": (
        {"data": DataLoader(TensorDataset(X, Y), batch_size=7), "batch_size": 8},
        meshfit.JobError,
        "batch_size=8 is given, and the DataLoader says 7",
    ),
    "a loader of batches": (
        {"valid": DataLoader(TensorDataset(X, Y), batch_size=None)},
        meshfit.DataError,
        "valid.*DataLoader.*batch_size=None",
    ),
    "tokens without lengths": ({"batch_tokens": 64}, meshfit.JobError, "batch_tokens= needs length="),
    "an iterator": ({"data": iter([(X[0], Y[0])])}, meshfit.DataError, "iterator"),
    "a number for data": ({"data": 3}, meshfit.DataError, "holds no samples"),
    "no optimizer": ({"optimizer": None}, meshfit.JobError, "optimizer= is missing"),
    "optimizer by name": ({"optimizer": "adam"}, meshfit.JobError, "optimizer='adam'"),
    "no end": ({"epochs": None}, meshfit.JobError, "neither epochs= nor steps="),
    "negative epochs": ({"epochs": -1}, meshfit.JobError, "epochs=-1"),
    "loss and step": ({"step": distil, "loss": F.mse_loss}, meshfit.JobError, "both given"),
    "loss by name": ({"loss": "mse"}, meshfit.JobError, "loss='mse'"),
    "reduction": ({"loss": nn.CrossEntropyLoss(reduction="none")}, meshfit.JobError, "reduction"),
    "model by name": ({"model": "resnet"}, meshfit.JobError, "model='resnet'"),
    "model function": ({"model": lambda: [1]}, meshfit.JobError, "returned something of type list"),
    "best": ({"best": "acuracy", "valid": (X, Y), "metrics": METRICS}, meshfit.JobError, "not measured"),
    "best alone": ({"best": "-loss"}, meshfit.JobError, "needs valid="),
    "patience alone": ({"patience": 2, "valid": (X, Y)}, meshfit.JobError, "needs best="),
    "ema": ({"ema": 2}, meshfit.JobError, "ema=2"),
    "on_nan": ({"on_nan": "ignore"}, meshfit.JobError, '"stop" or "skip"'),
    "precision": ({"plan": "data=1 precision=fp4"}, meshfit.PlanError, "precision=fp4"),
    "precision beside the plan": (
        {"precision": "bf16", "plan": "data=2 microbatches=2"},
        meshfit.JobError,
        'fit has no argument .precision..*plan="data=2 microbatches=2 precision=bf16"',
    ),
    "precision beside the plan's": (
        {"precision": "fp16", "plan": "data=2 precision=bf16"},
        meshfit.JobError,
        'plan="data=2 precision=fp16"',
    ),
    "microbatches beside the plan": ({"microbatches": 2}, meshfit.JobError, 'plan="data=2 microbatches=2"'),
    "batchnorm beside the plan": ({"batchnorm": "local"}, meshfit.JobError, 'plan="data=2 batchnorm=local"'),
    "compile beside the plan": ({"compile": True}, meshfit.JobError, r'plan="data=2 compile=auto.none.whole.block"'),
    "a degree beside the plan": ({"shard": 2, "plan": "auto"}, meshfit.JobError, 'plan="shard=2"'),
    "an unknown argument": ({"batchsize": 2}, meshfit.JobError, "no argument 'batchsize'.*did you mean batch_size"),
    "shuffle by word": ({"shuffle": "no"}, meshfit.JobError, "shuffle='no' is not True or False"),
    "out of a number": ({"out": 5}, meshfit.JobError, "out=5 is not a path"),
    "out in a bucket itself": ({"out": "s3://bucket"}, meshfit.JobError, "'s3://bucket' is a whole bucket"),
    "out in a path of a URL": ({"out": Path("gs://bucket/run")}, meshfit.JobError, 'as text: out="gs://bucket/run"'),
    "seed by word": ({"seed": "a"}, meshfit.JobError, "seed='a' is not a whole number"),
    "seed of a fraction": ({"seed": 1.5}, meshfit.JobError, "seed=1.5"),
    "half a step": ({"steps": 2.5}, meshfit.JobError, "steps=2.5 is not a whole number"),
    "steps by word": ({"steps": "10"}, meshfit.JobError, "steps='10'"),
    "epochs by word": ({"epochs": "1"}, meshfit.JobError, "epochs='1'"),
    "batch of a fraction": ({"batch_size": 8.0}, meshfit.JobError, "batch_size=8.0"),
    "valid_every": ({"valid": (X, Y), "valid_every": 0.5}, meshfit.JobError, "valid_every=0.5"),
    "best of a number": ({"valid": (X, Y), "best": 3}, meshfit.JobError, "best=3 is not the name of a metric"),
    "resume of a number": ({"resume": 3}, meshfit.JobError, "resume=3 is not True, False or a path"),
    "listen on a port": ({"listen": 7000}, meshfit.JobError, "listen=7000 is not an address"),
    "devices of a fraction": ({"devices": 1.5}, meshfit.PlanError, "devices=1.5 is not understood"),
    "workers by word": ({"workers": "many"}, meshfit.JobError, "workers='many'"),
    "checkpoint of a bucket": ({"checkpoint": "s3://b", "out": "x"}, meshfit.JobError, "checkpoint='s3://b'"),
    "callbacks of a number": ({"callbacks": 5}, meshfit.JobError, "callbacks=5"),
    "progress by word": ({"progress": "no"}, meshfit.JobError, "progress='no'"),
    "a callback": ({"callbacks": ["print"]}, meshfit.JobError, "callbacks"),
    "a metric": ({"metrics": {"accuracy": "accuracy"}, "valid": (X, Y)}, meshfit.JobError, "accuracy"),
    "all frozen": (
        {"model": lambda: mlp().requires_grad_(False)},
        meshfit.JobError,
        "all 4 parameters of the model are frozen",
    ),
    "unpicklable": ({"model": Locked()}, meshfit.JobError, r"model.guard.*lock.*pass a function"),
}


def test_a_model_that_cannot_be_sent_is_built_by_its_function_in_each_rank():
    normed = lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3))
    for make in (Locked, normed):
        assert_alike(fit(make, plan="data=2"), fit(make))


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_question_is_one_clear_error_before_any_process_starts(what: str, monkeypatch):
    asked, kind, words = WRONG[what]
    monkeypatch.setattr("meshfit.launch.warm.fork", lambda size: pytest.fail("ranks were started"))
    asked = {"plan": "data=2", **asked}
    with pytest.raises(kind, match=f"(?s){words}") as caught:
        fit(**asked)
    assert not isinstance(caught.value, meshfit.RankError)
    assert len(str(caught.value).splitlines()) <= 5


@both
@pytest.mark.parametrize(
    ("asked", "kind", "words"),
    [
        ({"loss": None}, meshfit.MeshfitError, "no loss"),
        ({"loss": None, "data": X}, meshfit.JobError, "returned no loss"),
        ({"loss": lambda o, t: (o - t).square()}, meshfit.DataError, r"shape \(\d, 3\), not one number"),
        ({"loss": lambda o, t: 0.5}, meshfit.DataError, "a float, not one number"),
        ({"optimizer": lambda params: 3}, meshfit.JobError, "returned something of type int, not an optimizer"),
        ({"data": lambda: 3}, meshfit.DataError, "holds no samples"),
        ({"data": lambda: (X[:0], Y[:0])}, meshfit.MeshfitError, "no sample"),
        ({"data": lambda: EmptyStream()}, meshfit.MeshfitError, "no sample"),
    ],
    ids=[
        "no loss",
        "no loss, no targets",
        "vector loss",
        "loss without gradient",
        "no optimizer",
        "no data",
        "empty",
        "empty stream",
    ],
)
def test_what_only_shows_in_training_is_as_clear(asked: dict, kind: type, words: str, plan: str):
    with pytest.raises(kind, match=words):
        fit(**asked, plan=plan)
    assert no_rank_left()


class EmptyStream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())


# A rank that fails


class Picky(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if (x == 123.0).any():
            raise ValueError("no 123 please")
        return self.linear(x)


def test_a_rank_that_raises_tells_the_caller_where():
    x = X.clone()
    x[16, 0] = 123.0
    began = time.monotonic()
    with pytest.raises(meshfit.RankError) as caught:
        fit(Picky, (x, Y), shuffle=False, plan="data=3")
    assert time.monotonic() - began < 60
    said = str(caught.value)
    assert "rank 1 raised ValueError: no 123 please" in said
    assert "test_fit.py" in said
    assert 'raise ValueError("no 123 please")' in said
    assert no_rank_left()


def test_on_one_device_the_models_own_exception_comes_through():
    x = X.clone()
    x[16, 0] = 123.0
    with pytest.raises(ValueError, match="no 123"):
        fit(Picky, (x, Y))


# Precision and compiling


@both
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains_about_as_well(precision: str, plan: str):
    job = {"epochs": 8, "optimizer": ADAMW, "data": (X, CLASS), "loss": F.cross_entropy}
    want, got = fit(**job), fit(**job, plan=f"{plan} precision={precision}")
    assert losses(got)[0] == pytest.approx(losses(want)[0], rel=0.02)
    assert losses(got)[0] != losses(want)[0]
    assert sum(losses(got)[-4:]) == pytest.approx(sum(losses(want)[-4:]), rel=0.2)
    assert all(parameter.dtype is torch.float32 for parameter in got.model.parameters())


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.more)])
def test_compiled_whole_trains_alike(backend: str, monkeypatch: pytest.MonkeyPatch):
    """By torch's own kernels; inductor takes 20 s to generate others."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        result = fit(built(), plan="compile=whole", steps=2)
    torch.testing.assert_close(losses(result), losses(fit(steps=2)), atol=1e-5, rtol=1e-5)
    assert any("compile=whole" in note for note in result.notes)


# verify


def test_verify_leaves_the_model_and_finds_the_plan_equal():
    model = built(convolutional)
    start = weights(model)
    images = (random(SAMPLES, 2, 4, 4), CLASS)
    verdict = meshfit.verify(
        model, images, loss=F.cross_entropy, optimizer=ADAMW, batch_size=8, epochs=1, plan="data=2", devices="cpu"
    )
    assert verdict.equal, verdict.rows
    assert {row.name for row in verdict.rows} >= {"loss", "gradients", "weights", "buffers", "optimizer"}
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in start.items())


def test_verify_takes_an_optimizer_instance_as_fit_does():
    model = built()
    asked = {"loss": F.mse_loss, "batch_size": 8, "epochs": 1, "plan": "data=2", "devices": "cpu"}
    verdict = meshfit.verify(model, (X, Y), optimizer=torch.optim.AdamW(model.parameters()), **asked)
    assert verdict.equal


def test_verify_names_what_differs():
    def by_rank(outputs, targets):  # a mean over samples, but another one on each rank
        return F.mse_loss(outputs, targets) * (1 + (dist.get_rank() if dist.is_initialized() else 0))

    asked = {"loss": by_rank, "optimizer": SGD, "batch_size": 8, "epochs": 1, "plan": "data=2", "devices": "cpu"}
    verdict = meshfit.verify(mlp, (X, Y), **asked)
    assert not verdict.equal
    loss = next(row for row in verdict.rows if row.name == "loss")
    assert loss.first == "step 1"


def test_a_deep_copy_of_the_model_is_not_needed():
    model = built()
    twin = copy.deepcopy(model)
    fit(model, plan="data=2")
    assert not torch.equal(model[0].weight, twin[0].weight)


def counted(count: int = SAMPLES):
    return lambda: ((X[i], Y[i]) for i in range(count))


def test_a_stream_ends_with_an_evaluation():
    """As data of a known length does, whatever valid_every is."""
    result = fit(data=counted(), epochs=2, valid=(X, Y), valid_every=1000)
    assert [bool(step.valid) for step in result.history] == [False] * 7 + [True]


def test_half_an_epoch_of_a_stream_is_refused():
    with pytest.raises(meshfit.JobError, match=r"epochs=0\.5 of a stream"):
        fit(data=counted(), epochs=0.5)


def test_a_value_logged_as_loss_does_not_hide_the_loss():
    step = lambda model, batch: (F.mse_loss(model(batch[0]), batch[1]), {"loss": 7.0})
    result = fit(step=step, loss=None, steps=1, valid=(X, Y))
    assert result.metrics["loss"] < 7


def test_a_training_that_has_given_up_takes_no_step_when_it_is_resumed(tmp_path: Path):
    how: dict[str, Any] = {"valid": (X, Y), "valid_every": 1, "best": "-loss", "patience": 1, "steps": 9}
    how |= {"checkpoint": 100, "out": tmp_path / "run", "optimizer": DIVERGING}
    assert fit(**how).steps < 9
    assert fit(**how, resume=True).steps == 0


def test_the_first_rate_of_a_resumed_run_is_not_of_all_samples(tmp_path: Path):
    how: dict[str, Any] = {"checkpoint": 2, "out": tmp_path / "run", "progress": True}
    fit(steps=4, **how)
    fit(steps=6, resume=True, **how)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert ["rate" in line for line in lines] == [True] * 4 + [False, True]
