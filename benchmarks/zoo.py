"""Small models of many makes, with data and the way one device trains them.

Most classes come from transformers, diffusers and torchvision, with few layers and small widths: nothing is
downloaded, dropout is off, and a step takes milliseconds (resnet10, at its full width: a tenth of a second).
The rest are written here for what those lack: tied weights under a user's own loss, parameters that are
frozen or at times unused, losses with a count of their own.

``train_alone`` is the reference every plan has to meet: a plain loop on one device, without meshfit.
"""

import contextlib
import copyreg
import functools
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")

IGNORED = -100
"""The label that ``cross_entropy`` leaves out."""

VOCABULARY, LENGTH, CLASSES = 96, 16, 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its data and its loss."""

    name: str

    build: Callable[[], nn.Module]
    """Seeds itself: every call returns the same weights."""

    data: Callable[[int], Any]
    """``n`` samples, the same on every call: (inputs, targets), ((a, b), targets), or a dict of tensors."""

    loss: Callable[[Any, Tensor], Any] | None = None
    """``loss(outputs, targets)``: a mean, or a pair (sum, count). None: ``model(**batch).loss``."""

    weight_of: Callable[[Any], float] = lambda batch: size(batch)
    """What the mean loss of ``batch`` is a mean over: samples, if nothing else is said."""

    dtype: torch.dtype = torch.float32
    """Of the model and of what it takes in.

    Double where many BatchNorms follow each other: they amplify rounding so much that in single
    precision one device does not agree with itself once it takes the samples of a batch in another order.
    """


# Reference


def train_alone(
    case: Case,
    *,
    samples: int,
    batch_size: int,
    steps: int = 20,
    lr: float = 1e-3,
    parts: int = 1,
    flip: bool = False,
) -> tuple[list[float], dict[str, Tensor]]:
    """Train ``case`` with AdamW in this process; the loss of each step and the weights after the last.

    Batches are consecutive slices of the data; the last of an epoch is as short as it comes out, and the
    next starts again at the first sample. ``parts`` adds the gradient up from so many microbatches, and
    ``flip`` takes the samples of each batch in reverse: both change the order of summing and nothing else, so
    what they change in the result is what rounding alone can do. (``parts`` does change BatchNorm.)
    """
    model, data, losses = case.build().train(), case.data(samples), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _, index in zip(range(steps), batches(samples, batch_size), strict=False):
        index = index.flip(0) if flip else index
        whole, loss = case.weight_of(take(data, index)), 0.0
        size, count = len(index), min(parts, len(index))
        for i in range(count):
            batch = take(data, index[size * i // count : size * (i + 1) // count])
            share = case.weight_of(batch) / whole if parts > 1 else 1.0
            if share == 0:  # nothing but ignored labels: the mean over none of them is 0/0
                continue
            mean = mean_loss(case, model, batch) * share
            mean.backward()
            loss += mean.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def mean_loss(case: Case, model: nn.Module, batch: Any) -> Tensor:
    """The loss of ``batch`` as one device computes it."""
    if case.loss is None:
        return model(**batch).loss
    inputs, targets = batch
    outputs = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    loss = case.loss(outputs, targets)
    return loss[0] / loss[1] if isinstance(loss, tuple) else loss


def batches(samples: int, batch_size: int) -> Iterator[Tensor]:
    """Indices of one batch after the other, without end."""
    while True:
        yield from torch.arange(samples).split(batch_size)


def take(data: Any, index: Tensor) -> Any:
    """The samples ``index`` of ``data``, in the form of ``data``."""
    if isinstance(data, dict):
        return {name: take(value, index) for name, value in data.items()}
    return tuple(take(value, index) for value in data) if isinstance(data, tuple) else data[index]


def size(data: Any) -> int:
    """Number of samples in ``data``."""
    while not isinstance(data, Tensor):
        data = next(iter(data.values())) if isinstance(data, dict) else data[0]
    return len(data)


# Libraries, imported by the case that needs them


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@functools.cache
def transformers() -> ModuleType:
    if importlib.util.find_spec("torchvision"):  # transformers imports it wherever it finds it
        torchvision()
    with quiet():
        import transformers

        return transformers


@functools.cache
def diffusers() -> ModuleType:
    transformers()  # diffusers imports it
    with quiet():
        import diffusers

        return diffusers


OFF_THE_PATH = os.path.join(sys.prefix, "torchvision")
"""Where torchvision may lie beside a torch that was built without CUDA.

The registry's torchvision cannot load its C library there, ``import torchvision`` raises, and so does every
model of transformers once torchvision is on the path. Off the path it harms nobody:

    pip install --no-deps --target .venv/torchvision torchvision==0.28.0
"""

_OPERATORS: list[torch.library.Library] = []  # a definition lives as long as its library


@functools.cache
def torchvision() -> ModuleType:
    """torchvision, loaded without its C library where that does not fit this torch.

    Only detection models call its operators, but importing torchvision registers shape rules for two of
    them, which therefore have to be declared.
    """
    path = list(sys.path)
    sys.path.append(OFF_THE_PATH)
    try:
        with quiet():
            try:
                import torchvision
            except RuntimeError as error:
                if "torchvision::nms does not exist" not in str(error):
                    raise
                for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
                    del sys.modules[name]
                _OPERATORS.append(torch.library.Library("torchvision", "DEF"))
                for name in ("nms", "qnms"):
                    _OPERATORS[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                import torchvision

                for model in (torchvision.models.ResNet, torchvision.models.MobileNetV3, torchvision.models.DenseNet):
                    copyreg.pickle(model, _with_torchvision)
            return torchvision
    finally:
        sys.path[:] = path


def _with_torchvision(model: nn.Module) -> tuple:
    """A pickle that has torchvision loaded, in the way above, before it names a class of its own."""
    return _blank, (type(model).__module__, type(model).__qualname__), model.__dict__


def _blank(module: str, name: str) -> nn.Module:
    torchvision()
    kind = getattr(sys.modules[module], name)
    return kind.__new__(kind)


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """``build`` with the same weights at every call."""

    @functools.wraps(build)
    def built() -> nn.Module:
        torch.manual_seed(0)
        with quiet():
            return build()

    return built


# Data


def random() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def tokens(n: int, length: int = LENGTH) -> Tensor:
    """Sequences that count up within the lower half of the vocabulary: there is something to learn."""
    start = torch.randint(0, VOCABULARY // 2, (n, 1), generator=random())
    return (start + torch.arange(length)) % (VOCABULARY // 2)


def padded(ids: Tensor) -> Tensor:
    """``ids`` as labels, each sample cut at another length: from 3 labels to all of them."""
    n, length = ids.shape
    lengths = torch.randint(3, length + 1, (n, 1), generator=random())
    lengths[::4] = 3
    return ids.masked_fill(torch.arange(length) >= lengths, IGNORED)


def text(n: int) -> dict[str, Tensor]:
    """Sequences padded on the right."""
    ids = tokens(n)
    return {"input_ids": ids, "attention_mask": (padded(ids) != IGNORED).long(), "labels": padded(ids)}


def unpadded_text(n: int) -> dict[str, Tensor]:
    ids = tokens(n)
    return {"input_ids": ids, "labels": ids.clone()}


def questions(n: int) -> dict[str, Tensor]:
    """Sequences and their padded continuations."""
    ids = tokens(n, 2 * LENGTH)
    return {"input_ids": ids[:, :LENGTH], "labels": padded(ids[:, LENGTH:])}


def masked_sentences(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Sequences with their attention masks; the class follows from the first token."""
    batch = text(n)
    return (batch["input_ids"], batch["attention_mask"]), batch["input_ids"][:, 0] % CLASSES


def images(n: int, pixels: int = 32, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Noise on a level that depends on the class."""
    targets = torch.randint(0, CLASSES, (n,), generator=random())
    noise = torch.randn(n, 3, pixels, pixels, generator=random())
    return (noise + targets.view(-1, 1, 1, 1) - 1.5).to(dtype), targets


def small_images(n: int) -> tuple[Tensor, Tensor]:
    return images(n, 16)


def double_images(n: int) -> tuple[Tensor, Tensor]:
    """36 pixels leave 2x2 after five halvings. At 1x1, BatchNorm over a batch of two is a sign function."""
    return images(n, 36, torch.float64)


def labelled_images(n: int) -> dict[str, Tensor]:
    pixels, labels = images(n)
    return {"pixel_values": pixels, "labels": labels}


def noisy_images(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Images with more or less noise, how much of it, and the noise itself."""
    clean, _ = images(n, 16)
    noise = torch.randn(clean.shape, generator=random().manual_seed(2))
    time = torch.randint(0, 1000, (n,), generator=random())
    level = (time / 1000).view(-1, 1, 1, 1)
    return (clean * (1 - level) + noise * level, time), noise


def points(n: int) -> tuple[Tensor, Tensor]:
    """Vectors of 8, and which of four directions they point to; classes of uneven size."""
    x = torch.randn(n, 8, generator=random())
    return x, (x[:, :CLASSES] + torch.tensor([1.0, 0.5, 0.0, -0.5])).argmax(1)


def point_pairs(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    x, targets = points(n)
    return (x[:, :3].contiguous(), x[:, 3:].contiguous()), targets


def masked_points(n: int) -> tuple[Tensor, Tensor]:
    """Half the samples have no label, in runs as long as a rank's whole share of a batch."""
    x, targets = points(n)
    return x, targets.masked_fill(torch.arange(n) // 4 % 2 == 0, IGNORED).index_fill(0, torch.tensor([n - 1]), 1)


def rare_points(n: int) -> tuple[Tensor, Tensor]:
    """The first feature is positive in sample 9 alone: in few batches, and there on one rank."""
    x, targets = points(n)
    x[:, 0] = -x[:, 0].abs()
    x[9:10, 0] = 1.0
    return x, targets


def next_tokens(n: int) -> tuple[Tensor, Tensor]:
    """Sequences and their padded successors."""
    ids = tokens(n, LENGTH + 1)
    return ids[:, :-1].contiguous(), padded(ids[:, 1:])


# Weights: what a mean loss is a mean over


def labels_kept(batch: Any) -> float:
    """Labels that are not ignored."""
    targets = batch["labels"] if isinstance(batch, dict) else batch[1]
    return (targets != IGNORED).sum().item()


def labels_kept_shifted(batch: dict[str, Tensor]) -> float:
    """The same for decoders, which predict the next token: the first label has no prediction."""
    return (batch["labels"][:, 1:] != IGNORED).sum().item()


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 2.0, 5.0])


def class_weights(batch: Any) -> float:
    return CLASS_WEIGHTS[batch[1]].sum().item()


# Models nobody here wrote


@seeded
def gpt2() -> nn.Module:
    hf = transformers()
    config = hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return hf.GPT2LMHeadModel(config)


@seeded
def llama() -> nn.Module:
    hf = transformers()
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,  # grouped-query attention
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
    )


@seeded
def mixtral() -> nn.Module:
    hf = transformers()
    return hf.MixtralForCausalLM(
        hf.MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=LENGTH,
            output_router_logits=False,  # its balancing loss is not a mean over samples
            use_cache=False,
        )
    )


@seeded
def bert() -> nn.Module:
    hf = transformers()
    return hf.BertForSequenceClassification(
        hf.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


@seeded
def t5() -> nn.Module:
    hf = transformers()
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )


@seeded
def vit() -> nn.Module:
    hf = transformers()
    return hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=32,
            patch_size=8,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


@seeded
def convnext() -> nn.Module:
    hf = transformers()
    return hf.ConvNextForImageClassification(
        hf.ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], num_labels=CLASSES, drop_path_rate=0.0)
    )


@seeded
def swin() -> nn.Module:
    hf = transformers()
    config = hf.SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[4, 4],
        window_size=4,
        num_labels=CLASSES,
        drop_path_rate=0.0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return hf.SwinForImageClassification(config)


@seeded
def mamba() -> nn.Module:
    hf = transformers()
    return hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=2, use_cache=False)
    )


@seeded
def unet() -> nn.Module:
    return diffusers().UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=8,
    )


@seeded
def resnet10() -> nn.Module:
    resnet = torchvision().models.resnet
    return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES).double()


@seeded
def mobilenet() -> nn.Module:
    return torchvision().models.mobilenet_v3_small(width_mult=0.25, num_classes=CLASSES, dropout=0.0).double()


@seeded
def densenet() -> nn.Module:
    models = torchvision().models
    return models.DenseNet(8, block_config=(2, 2, 2), num_init_features=16, num_classes=CLASSES).double()


# Models written for what those lack


class TiedGPT(nn.Module):
    """A decoder whose head is its embedding."""

    def __init__(self, width: int = 32, layers: int = 2):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(LENGTH, width))
        self.blocks = nn.ModuleList(
            # No biases: softmax cancels that of the keys, and AdamW would turn its gradient, which is nothing
            # but rounding, into steps of full size: 2e-4 of these small weights.
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True, bias=False)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.token.weight, std=0.1)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.token(ids) + self.position[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


class TwoInputs(nn.Module):
    """Two tensors in, each through a tower of its own."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 32), nn.Linear(5, 32)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.tanh(self.left(left)) * torch.sigmoid(self.right(right)))


class TwoHeads(nn.Module):
    """A dict out: a class, and the input again."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.GELU())
        self.heads = nn.ModuleDict({"classes": nn.Linear(32, CLASSES), "copy": nn.Linear(32, 8)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        return {"input": x} | {name: head(hidden) for name, head in self.heads.items()}


class LSTMClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, 32)
        self.lstm = nn.LSTM(32, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.token(ids))[0])


class Partial(nn.Module):
    """An MLP with a frozen layer, a parameter nothing uses, and a branch that few samples take.

    The branch runs when any sample *of those at hand* takes it, so ranks differ in whether they run it. The
    mask makes the gradient of a batch the sum over its samples all the same. In a step where no
    rank runs it the branch has no gradient, and AdamW leaves it alone, weight decay and all.
    """

    def __init__(self):
        super().__init__()
        self.frozen, self.body = nn.Linear(8, 32), nn.Linear(32, 32)
        self.branch, self.head = nn.Linear(8, 32), nn.Linear(32, CLASSES)
        self.unused = nn.Parameter(torch.randn(32, 32))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.body(torch.tanh(self.frozen(x))))
        takes_branch = x[:, :1] > 0
        if takes_branch.any():
            hidden = hidden + takes_branch * self.branch(x)
        return self.head(hidden)


@seeded
def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, CLASSES))


@seeded
def batchnorm_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


# Losses


def token_sum(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Summed over the labels that are kept, and their count."""
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, (targets != IGNORED).sum()


def both_heads(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs["classes"], targets) + F.mse_loss(outputs["copy"], outputs["input"])


CASES = (
    Case(name="gpt2", build=gpt2, data=text, weight_of=labels_kept_shifted),
    Case(name="llama", build=llama, data=unpadded_text, weight_of=labels_kept_shifted),
    Case(name="mixtral", build=mixtral, data=text, weight_of=labels_kept_shifted),
    Case(
        name="bert",
        build=bert,
        data=masked_sentences,
        loss=lambda outputs, targets: F.cross_entropy(outputs.logits, targets),
    ),
    Case(name="t5", build=t5, data=questions, weight_of=labels_kept),
    Case(name="vit", build=vit, data=labelled_images),
    Case(
        name="convnext",
        build=convnext,
        data=images,
        loss=lambda outputs, targets: F.cross_entropy(outputs.logits, targets),
    ),
    Case(name="swin", build=swin, data=labelled_images),
    Case(name="mamba", build=mamba, data=unpadded_text, weight_of=labels_kept_shifted),
    Case(
        name="unet-diffusers",
        build=unet,
        data=noisy_images,
        loss=lambda outputs, targets: F.mse_loss(outputs.sample, targets),
    ),
    Case(name="resnet10", build=resnet10, data=double_images, loss=F.cross_entropy, dtype=torch.float64),
    Case(name="mobilenet", build=mobilenet, data=double_images, loss=F.cross_entropy, dtype=torch.float64),
    Case(name="densenet", build=densenet, data=double_images, loss=F.cross_entropy, dtype=torch.float64),
    Case(
        name="tied-gpt",
        build=seeded(TiedGPT),
        data=next_tokens,
        loss=lambda out, y: F.cross_entropy(out.view(-1, VOCABULARY), y.view(-1)),
        weight_of=labels_kept,
    ),
    Case(name="token-sum", build=seeded(TiedGPT), data=next_tokens, loss=token_sum, weight_of=labels_kept),
    Case(
        name="lstm",
        build=seeded(LSTMClassifier),
        data=next_tokens,
        loss=lambda out, y: F.cross_entropy(out.transpose(1, 2), y),
        weight_of=labels_kept,
    ),
    Case(name="batchnorm-cnn", build=batchnorm_cnn, data=small_images, loss=F.cross_entropy),
    Case(name="two-inputs", build=seeded(TwoInputs), data=point_pairs, loss=F.cross_entropy),
    Case(name="dict-output", build=seeded(TwoHeads), data=points, loss=both_heads),
    Case(name="partial", build=seeded(Partial), data=rare_points, loss=F.cross_entropy),
    Case(
        name="class-weights",
        build=mlp,
        data=points,
        loss=nn.CrossEntropyLoss(weight=CLASS_WEIGHTS),
        weight_of=class_weights,
    ),
    Case(
        name="masked",
        build=mlp,
        data=masked_points,
        loss=nn.CrossEntropyLoss(ignore_index=IGNORED),
        weight_of=labels_kept,
    ),
    Case(
        name="masked-lambda",  # says nothing of its mean, and is NaN on the first samples alone
        build=mlp,
        data=masked_points,
        loss=lambda out, y: F.cross_entropy(out, y),
        weight_of=labels_kept,
    ),
)

ZOO: dict[str, Case] = {case.name: case for case in CASES}
