"""What fuzz.py trains: models composed of blocks, data, losses, steps and optimizers, each by its name in a draw.

Everything is a function of the draw, in double precision, and uses no meshfit: what is built here is trained by
``fuzz_alone.py`` in a plain loop, and by meshfit.
"""

import dataclasses
import shlex
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from benchmarks.fuzz_blocks import BATCH_NORMS, BLOCKS, COUNTING, LENGTH, SINGLE, WIDTH
from benchmarks.matrix_optimizers import LAMB, SOAP, Muon, Shampoo
from benchmarks.zoo import quiet

CLASSES, VOCABULARY, FIELDS, IGNORED = 5, 24, 6, -100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """One training, in words; ``str`` of it is what ``--draw`` takes. A word that is not said is the plainest one."""

    stem: str = "features"
    blocks: tuple[str, ...] = ("MLP",)
    wiring: str = "plain"
    head: str = "classes"
    form: str = "tensor"
    given: str = "object"

    loss: str = "ce"
    how: str = "loss"
    data: str = "tensors"
    samples: int = 8
    batch: int = 4
    shuffle: int = 0
    steps: int = 3

    plan: str = "data=2"
    optimizer: str = "adamw"
    scheduler: str = ""
    clip: float = 0.0
    ema: float = 0.0
    valid: int = 0
    metrics: str = ""
    resume: str = ""
    after: int = 0
    verb: str = "fit"
    seed: int = 0

    def __str__(self) -> str:
        words = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default or field.name == "plan":
                text = ",".join(value) if isinstance(value, tuple) else str(value)
                words.append(f"{field.name}={shlex.quote(text)}")
        return " ".join(words)

    @classmethod
    def parse(cls, text: str) -> Self:
        given: dict[str, Any] = {}
        kinds = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        for word in shlex.split(text):
            name, _, value = word.partition("=")
            given[name] = tuple(filter(None, value.split(","))) if kinds[name] is tuple else kinds[name](value)
        return cls(**given)

    def degree(self, word: str) -> int:
        """The largest of the plans that the training runs under."""
        return max(
            (
                int(each.partition("=")[2])
                for each in f"{self.plan} {self.resume}".split()
                if each.startswith(f"{word}=")
            ),
            default=1,
        )

    @property
    def batch_norms(self) -> bool:
        return any(name in BATCH_NORMS for name in self.blocks)

    @property
    def counts(self) -> bool:
        return any(name in COUNTING for name in self.blocks)

    @property
    def single(self) -> bool:
        return any(name in SINGLE for name in self.blocks)


# Models


@dataclasses.dataclass
class Outputs:
    logits: Tensor
    hidden: Tensor
    aux: Tensor | None = None


class Composed(nn.Module):
    def __init__(self, draw: Draw):
        super().__init__()
        self.stem, self.wiring, self.head_kind, self.form, self.loss = (
            draw.stem,
            draw.wiring,
            draw.head,
            draw.form,
            draw.loss,
        )
        self.own_loss = draw.how == "own"
        if draw.stem in ("tokens", "fields"):
            self.token = nn.Embedding(VOCABULARY, WIDTH)
        elif draw.stem == "pair":
            self.left, self.right = nn.Linear(2, WIDTH), nn.Linear(FIELDS - 2, WIDTH)
        else:
            self.enter = nn.Linear(FIELDS, WIDTH)
        self.blocks = nn.ModuleList(BLOCKS[name]() for name in draw.blocks)
        if draw.wiring == "albert":
            self.blocks.append(self.blocks[0])
        if draw.wiring in ("pre", "post"):
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in self.blocks)
        if draw.wiring in ("shared", "dense"):
            self.norm = nn.LayerNorm(WIDTH)
        if draw.wiring == "scaled":
            self.scale = nn.Parameter(torch.tensor(0.5))
        if draw.wiring == "frozen":
            self.blocks[0].requires_grad_(False)
        out = {"classes": CLASSES, "words": VOCABULARY, "tied": VOCABULARY, "numbers": 3}[draw.head]
        self.head = nn.Linear(WIDTH, out, bias=draw.head != "tied")
        if draw.head == "tied":
            self.head.weight = self.token.weight
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.unused = nn.Linear(2, 3)

    def body(self, x: Tensor) -> Tensor:
        ins = [x]
        for i, block in enumerate(self.blocks):
            if self.wiring == "pre":
                x = x + block(self.norms[i](x))
            elif self.wiring == "post":
                x = self.norms[i](x + block(x))
            elif self.wiring == "shared":
                x = x + block(self.norm(x))
            elif self.wiring == "dense":
                x = self.norm(block(sum(ins)))
                ins.append(x)
            elif self.wiring == "scaled":
                x = x + block(x) * self.scale
            elif self.wiring == "twice":
                x = block(block(x) * 0.5)
            else:
                x = x + block(x)
        return x

    def enters(self, *inputs: Tensor) -> Tensor:
        if self.stem == "pair":
            return torch.tanh(self.left(inputs[0]) * self.right(inputs[1]))
        return self.token(inputs[0]) if self.stem == "tokens" else self.enter(inputs[0])

    def forward(self, *inputs: Tensor, **fields: Tensor) -> Any:
        if self.stem == "fields":
            x = self.body(self.token(fields["ids"]) * fields["mask"].unsqueeze(-1))
        else:
            x = self.body(self.enters(*(inputs or (fields["x"],))))
        hidden = x.mean(1)
        logits = self.head(hidden if self.head_kind in ("classes", "numbers") else x)
        aux = hidden.square().mean() if "aux" in self.loss else None
        if self.own_loss:
            loss = LOSSES[self.loss](logits, fields["labels"])
            return {"loss": loss, "logits": logits}
        if self.form == "dict" or aux is not None:
            return {"logits": logits, "hidden": hidden, "aux": aux}
        return {"tuple": (logits, hidden), "dataclass": Outputs(logits, hidden), "tensor": logits}[self.form]


def build(draw: Draw) -> nn.Module:
    torch.manual_seed(draw.seed)
    torch.set_default_dtype(torch.float64)
    try:
        with quiet():
            return Composed(draw).train()
    finally:
        torch.set_default_dtype(torch.float32)


# Data


def inputs_and_targets(draw: Draw, samples: int, seed: int) -> tuple[Any, Any]:
    """Tensors of so many samples."""
    random = torch.Generator().manual_seed(1000 * draw.seed + seed)
    x = torch.randn(samples, LENGTH, FIELDS, generator=random, dtype=torch.float64)
    ids = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=random)
    mask = (torch.rand(samples, LENGTH, generator=random) > 0.3).double()
    inputs: Any = {
        "features": x,
        "pair": (x[..., :2].contiguous(), x[..., 2:].contiguous()),
        "tokens": ids,
        "fields": {"ids": ids, "mask": mask},
    }[draw.stem]
    if draw.head == "numbers":
        targets: Any = torch.randn(samples, 3, generator=random, dtype=torch.float64)
    elif draw.head == "classes":
        targets = torch.randint(0, CLASSES, (samples,), generator=random)
    else:
        targets = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=random)
    hides = torch.rand(targets.shape, generator=random) < 0.5
    if "ignore" in draw.loss:
        targets = targets.masked_fill(hides, IGNORED)
        targets.view(samples, -1)[-1, 0] = 1  # of the last sample, which may be a batch by itself
        targets.view(samples, -1)[::3, 0] = 2
    if "each" in draw.loss:
        targets = {"y": targets, "weight": torch.rand(samples, generator=random, dtype=torch.float64) + 0.1}
    if draw.how == "own":
        inputs = inputs if isinstance(inputs, dict) else {"x": inputs}
        return {**inputs, "labels": targets}, None
    return inputs, targets


def taken(tree: Any, index: Any) -> Any:
    if isinstance(tree, dict):
        return {name: taken(value, index) for name, value in tree.items()}
    return tuple(taken(value, index) for value in tree) if isinstance(tree, tuple) else tree[index]


def size_of(tree: Any) -> int:
    while not isinstance(tree, Tensor):
        tree = next(iter(tree.values())) if isinstance(tree, dict) else tree[0]
    return len(tree)


class Samples(Dataset):
    def __init__(self, tree: Any):
        self.tree = tree

    def __len__(self) -> int:
        return size_of(self.tree)

    def __getitem__(self, i: int) -> Any:
        return taken(self.tree, i)


class Stream(IterableDataset):
    def __init__(self, tree: Any):
        self.tree = tree

    def __iter__(self) -> Iterator[Any]:
        for i in range(size_of(self.tree)):
            yield taken(self.tree, i)


def whole(draw: Draw, samples: int, seed: int) -> Any:
    """All samples as one batch."""
    inputs, targets = inputs_and_targets(draw, samples, seed)
    return inputs if targets is None else (inputs, targets)


def as_data(draw: Draw, tree: Any) -> Any:
    """In the form in which ``fit`` is given it."""
    samples = Samples(tree)
    return {
        "tensors": lambda: tree,
        "dataset": lambda: samples,
        "list": lambda: [samples[i] for i in range(len(samples))],
        "loader": lambda: DataLoader(samples, draw.batch),
        "drops": lambda: DataLoader(samples, draw.batch, drop_last=True),
        "stream": lambda: Stream(tree),
        "function": lambda: lambda: tree,
    }[draw.data]()


# Losses


WEIGHTS = torch.tensor([0.2, 1.0, 2.0, 5.0, 0.7], dtype=torch.float64)


def logits_of(outputs: Any) -> Tensor:
    if isinstance(outputs, dict):
        return outputs["logits"]
    return outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "logits", outputs)


def ce(outputs: Any, targets: Any, **how: Any) -> Tensor:
    logits = logits_of(outputs)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), **how)


def focal(outputs: Any, targets: Tensor) -> Tensor:
    losses = ce(outputs, targets, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def each(outputs: Any, targets: dict[str, Tensor]) -> Tensor:
    """A mean by weights of samples."""
    losses = ce(outputs, targets["y"], reduction="none").view(len(targets["weight"]), -1).mean(1)
    return (losses * targets["weight"]).sum() / targets["weight"].sum()


def of_sequences(outputs: Any, targets: Tensor) -> Tensor:
    """Of each sequence the mean over its labels, and of these the mean."""
    losses = ce(outputs, targets, reduction="none", ignore_index=IGNORED).view(targets.shape)
    kept = (targets != IGNORED).sum(1).clamp(min=1)
    return (losses.sum(1) / kept).mean()


def contrastive(outputs: Any, targets: Any) -> Tensor:
    z = F.normalize(logits_of(outputs).flatten(1), dim=-1)
    return F.cross_entropy(z @ z.T / 0.5, torch.arange(len(z), device=z.device))


def number(loss: Callable[..., Tensor], **how: Any) -> Callable[..., Tensor]:
    return lambda outputs, targets: loss(logits_of(outputs), targets, **how)


def pair(loss: Callable[..., Tensor], kept: Callable[[Tensor], Any]) -> Callable[..., tuple[Tensor, Any]]:
    return lambda outputs, targets: (loss(outputs, targets), kept(targets))


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "ce": lambda outputs, targets: ce(outputs, targets),
    "ce smooth": lambda outputs, targets: ce(outputs, targets, label_smoothing=0.1),
    "ce ignore": lambda outputs, targets: ce(outputs, targets),
    "ce ignore smooth": lambda outputs, targets: ce(outputs, targets, label_smoothing=0.2),
    "ce sum": lambda outputs, targets: ce(outputs, targets, reduction="sum"),
    "ce ignore pair": pair(lambda o, t: ce(o, t, reduction="sum"), lambda t: (t != IGNORED).sum()),
    "ce ignore own": lambda o, t: ce(o, t, reduction="sum") / (t != IGNORED).sum(),
    "ce ignore halves": lambda o, t: 0.5 * ce(o, t) + 0.5 * of_sequences(o, t.view(len(t), -1)),
    "sequences ignore": lambda o, t: of_sequences(o, t.view(len(t), -1)),
    "focal": focal,
    "each": each,
    "ce aux": lambda outputs, targets: ce(outputs, targets) + 0.1 * outputs["aux"],
    "ce ignore aux": lambda outputs, targets: ce(outputs, targets) + 0.1 * outputs["aux"],
    "contrastive": contrastive,
}
CLASS_LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "ce weights": lambda outputs, targets: ce(outputs, targets, weight=WEIGHTS),
    "ce ignore weights": lambda outputs, targets: ce(outputs, targets, weight=WEIGHTS),
    "ce module": nn.CrossEntropyLoss(),
    "ce ignore module": nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1),
    "margin": number(F.multi_margin_loss),
    "nll": lambda outputs, targets: F.nll_loss(logits_of(outputs).log_softmax(-1), targets),
}
NUMBER_LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "mse": number(F.mse_loss),
    "l1": number(F.l1_loss),
    "huber": number(F.huber_loss, delta=0.5),
    "mse sum": number(F.mse_loss, reduction="sum"),
    "mse module": nn.MSELoss(),
    "rmse": lambda outputs, targets: F.mse_loss(logits_of(outputs), targets).sqrt(),
    "cosine": lambda outputs, targets: 1 - F.cosine_similarity(logits_of(outputs), targets).mean(),
    "cosine all": lambda outputs, targets: 1 - F.cosine_similarity(logits_of(outputs), targets, dim=0).mean(),
    "mse pair": pair(number(F.mse_loss, reduction="sum"), lambda t: t.numel()),
    "mse aux": lambda outputs, targets: F.mse_loss(outputs["logits"], targets) + outputs["aux"],
    "variance": lambda outputs, targets: F.mse_loss(logits_of(outputs), targets) + logits_of(outputs).var(0).mean(),
}
LOSSES_OF = {
    "classes": {**LOSSES, **CLASS_LOSSES},
    "words": {name: loss for name, loss in LOSSES.items() if name != "contrastive"},
    "numbers": NUMBER_LOSSES,
}
LOSSES_OF["tied"] = LOSSES_OF["words"]
LOSSES = {**LOSSES, **CLASS_LOSSES, **NUMBER_LOSSES}


def weights_of(name: str, targets: Any) -> list[float]:
    """What a batch may weigh by in the mean of an evaluation: its samples, or what its loss is a mean over."""
    weights = [float(size_of(targets))]
    if isinstance(targets, Tensor) and not targets.is_floating_point():
        kept = targets[targets != IGNORED]
        weights += (
            [float(len(kept)), WEIGHTS[kept].sum().item()]
            if "weights" in name or "module" in name
            else [float(len(kept))]
        )
    return weights


# Steps


def called(model: Any, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def make_step(draw: Draw) -> Callable[[Any, Any], Any]:
    """``step(model, batch)``, by the draw's ``how``."""
    loss, how = LOSSES[draw.loss], draw.how

    def plain(model: Any, batch: Any) -> Any:
        return loss(called(model, batch[0]), batch[1])

    def logs(model: Any, batch: Any) -> Any:
        outputs = called(model, batch[0])
        return loss(outputs, batch[1]), {"size": logits_of(outputs).square().mean(), "mean": logits_of(outputs).mean()}

    def decay(model: Any, batch: Any) -> Any:
        return plain(model, batch) + 0.01 * sum(p.square().sum() for p in model.parameters() if p.is_floating_point())

    def temperature(model: Any, batch: Any) -> Any:
        return loss(logits_of(called(model, batch[0])) * model.temperature.exp(), batch[1])

    def twice(model: Any, batch: Any) -> Any:
        first, second = called(model, batch[0]), called(model, batch[0])
        return 0.5 * loss(first, batch[1]) + 0.5 * loss(logits_of(second) * 0.5, batch[1])

    def parts(model: Any, batch: Any) -> Any:
        inputs = batch[0] if isinstance(batch[0], tuple | list) else (batch[0],)
        x = model.body(model.enters(*inputs))
        return loss(model.head(x.mean(1) if draw.head in ("classes", "numbers") else x), batch[1])

    return {"step": plain, "logs": logs, "decay": decay, "temperature": temperature, "twice": twice, "parts": parts}[
        how
    ]


STEPS = ("step", "logs", "decay", "temperature", "twice", "parts")


# Optimizers


def groups(model: nn.Module) -> list[dict[str, Any]]:
    ours = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in ours if p.dim() >= 2], "lr": 3e-3, "weight_decay": 0.1},
        {"params": [p for p in ours if p.dim() < 2], "lr": 1e-2, "weight_decay": 0.0},
    ]


def matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    ours = [p for p in model.parameters() if p.requires_grad]
    square = [p for p in ours if p.dim() == 2 and not p.is_complex()]
    return square, [p for p in ours if not (p.dim() == 2 and not p.is_complex())]


def both(make: Callable[..., Any], lr: float) -> Callable[[nn.Module], Any]:
    def made(model: nn.Module) -> Any:
        square, rest = matrices(model)
        return [make(square, lr=lr), torch.optim.AdamW(rest, lr=3e-3)]

    return made


o = torch.optim
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "sgd": lambda model: o.SGD(model.parameters(), lr=0.02),
    "momentum": lambda model: o.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampened": lambda model: o.SGD(model.parameters(), lr=0.02, momentum=0.9, dampening=0.3),
    "maximize": lambda model: o.SGD(model.parameters(), lr=0.01, maximize=True),
    "adamw": lambda model: o.AdamW(model.parameters(), lr=3e-3),
    "amsgrad": lambda model: o.Adam(model.parameters(), lr=3e-3, amsgrad=True, weight_decay=0.01),
    "foreach": lambda model: o.Adam(model.parameters(), lr=3e-3, foreach=True),
    "adagrad": lambda model: o.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.1),
    "rmsprop": lambda model: o.RMSprop(model.parameters(), lr=1e-3, momentum=0.5, centered=True, eps=1e-3),
    "adadelta": lambda model: o.Adadelta(model.parameters(), lr=0.5),
    "nadam": lambda model: o.NAdam(model.parameters(), lr=2e-3),
    "radam": lambda model: o.RAdam(model.parameters(), lr=2e-3),
    "adamax": lambda model: o.Adamax(model.parameters(), lr=2e-3),
    "asgd": lambda model: o.ASGD(model.parameters(), lr=1e-2),
    "adafactor": lambda model: o.Adafactor(model.parameters(), lr=1e-2),
    "lbfgs": lambda model: o.LBFGS(model.parameters(), lr=0.1, max_iter=3),
    "groups": lambda model: o.AdamW(groups(model)),
    "groups sgd": lambda model: o.SGD(groups(model), momentum=0.9),
    "head": lambda model: o.AdamW(model.head.parameters(), lr=1e-2),
    "trained": lambda model: o.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3),
    "muon": both(Muon, 0.01),
    "torch muon": both(o.Muon, 0.01),
    "shampoo": both(Shampoo, 0.01),
    "soap": both(SOAP, 3e-3),
    "lamb": lambda model: LAMB([p for p in model.parameters() if not p.is_complex()], lr=1e-2),
    "two": lambda model: [
        o.SGD([p for p in model.parameters() if p.dim() >= 2], lr=0.02, momentum=0.5),
        o.AdamW([p for p in model.parameters() if p.dim() < 2], lr=1e-2),
    ],
}

s = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[..., Any]] = {
    "step": lambda optimizer: s.StepLR(optimizer, 2, 0.5),
    "cosine": lambda optimizer, steps: s.CosineAnnealingLR(optimizer, steps),
    "once": lambda optimizer, steps: s.OneCycleLR(optimizer, 0.01, total_steps=steps + 1, cycle_momentum=False),
    "warm": lambda optimizer: s.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3)),
    "chain": lambda optimizer: s.SequentialLR(
        optimizer, [s.LinearLR(optimizer, 0.3, total_iters=2), s.ExponentialLR(optimizer, 0.8)], [2]
    ),
    "plateau": lambda optimizer: s.ReduceLROnPlateau(optimizer, factor=0.3, patience=0),
}


# Metrics


def accuracy(outputs: Any, targets: Tensor) -> Tensor:
    return (logits_of(outputs).argmax(-1) == targets).double().mean()


def kept_accuracy(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    kept = targets != IGNORED
    return ((logits_of(outputs).argmax(-1) == targets) & kept).sum(), kept.sum()


def error(outputs: Any, targets: Tensor) -> Tensor:
    return (logits_of(outputs) - targets).abs().mean()


def spread(outputs: Any, targets: Any) -> Tensor:
    """No mean over samples."""
    return logits_of(outputs).std()


class Top:
    """An object: the largest output, and how many there were."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.top, self.count = -float("inf"), 0

    def update(self, outputs: Any, targets: Any) -> None:
        self.top, self.count = max(self.top, logits_of(outputs).max().item()), self.count + logits_of(outputs).numel()

    def compute(self) -> dict[str, float]:
        return {"top": self.top, "count": self.count}


METRICS: dict[str, Any] = {"accuracy": accuracy, "kept": kept_accuracy, "error": error, "spread": spread, "top": Top()}
