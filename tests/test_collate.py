"""Samples of any shape: what makes a batch of them is called so that every plan trains on the batches of one device."""

import dataclasses
import sys
from typing import Any

import cloudpickle
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import meshfit
from meshfit.data.datasets import Recipe, open_source
from meshfit.data.loader import Loader
from tests.distributed import distributed
from tests.few import more
from tests.ranked import assert_alike

cloudpickle.register_pickle_by_value(sys.modules[__name__])

VOCABULARY = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=2, use_cache=False))


class Texts(torch.utils.data.Dataset):
    """Tokens of 3 to 12, as lists; some of the labels are ignored."""

    def __len__(self) -> int:
        return 18

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        length = 3 + (i * 7) % 10
        tokens = [(i * 31 + k * 17) % (VOCABULARY - 1) + 1 for k in range(length)]
        labels = [-100 if k < i % 3 else token for k, token in enumerate(tokens)]
        return {"input_ids": tokens, "attention_mask": [1] * length, "labels": labels}


def longest(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """As Hugging Face's collators pad."""
    length = max(len(sample["input_ids"]) for sample in samples)
    pads = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    padded = lambda sample, key: sample[key] + [pads[key]] * (length - len(sample[key]))
    return {key: torch.tensor([padded(sample, key) for sample in samples]) for key in pads}


OWN = {"loss": None, "data": Texts()}


@pytest.mark.parametrize(
    "plan",
    [
        *("data=2", "pipeline=2 microbatches=3", "context=2"),
        *map(more, ("shard=2", "tensor=2", "data=2 microbatches=2")),
    ],
)
@distributed(world=2)
def test_padded_by_the_users_function_like_one_device(plan: str) -> None:
    run = assert_alike(llama, plan, **OWN, collate=longest)
    whole = any("whole batches" in note for note in run.notes)
    assert whole == (plan.startswith(("data", "shard")) or "microbatches" in plan)


@pytest.mark.parametrize("plan", ["data=3", "shard=3 microbatches=2"])
@distributed(world=3)
def test_padded_unasked_like_one_device(plan: str) -> None:
    assert_alike(llama, plan, **OWN)


class Masking:
    """Hugging Face's masked language modelling: draws over the padded batch."""

    def __call__(self, samples: list[Any]) -> dict[str, Tensor]:
        batch = longest(samples)
        hidden = torch.bernoulli(torch.full(batch["input_ids"].shape, 0.4)).bool() & batch["attention_mask"].bool()
        labels = batch["input_ids"].masked_fill(~hidden, -100)
        labels[:, 0] = batch["input_ids"][:, 0]
        return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, 1), "labels": labels}


def contents(data: Any, *, ranks: int = 1, epoch: int = 0, start: int = 0, **how: Any) -> list[Any]:
    """What each rank is given, batch by batch."""
    source, made = open_source(Recipe(data, **how.pop("recipe", {}))), []
    for rank in range(ranks):
        place = {"rank": rank, "ranks": ranks, "device": torch.device("cpu")}
        loader = Loader(source=source, batch_size=8, seed=5, **place, **how)
        made.append([batch.microbatches for batch in loader.epoch(epoch, start)])
        loader.close()
    return made


def rows(data: Any, **how: Any) -> list[dict[str, Tensor]]:
    """The batches that all ranks together are given."""
    made = contents(data, **how)
    batches = []
    for parts in zip(*made, strict=True):
        each = [part for i in range(len(parts[0])) for part in (rank[i] for rank in parts) if part.samples]
        batches.append({key: torch.cat([part.content[key] for part in each]) for key in each[0].content})
    return batches


READ_BY_PROCESSES = {"workers": 1, "kind": "processes"}  # a fresh interpreter: 3 s


@pytest.mark.parametrize(
    ("collate", "how"),
    [
        *((collate, how) for collate in (longest, Masking()) for how in ({"ranks": 3}, {"microbatches": 3})),
        more(longest, READ_BY_PROCESSES),
        (Masking(), READ_BY_PROCESSES),
    ],
)
def test_the_batches_of_one_device_on_any_number_of_ranks(collate: Any, how: dict[str, Any]) -> None:
    want = rows(Texts(), recipe={"collate": collate})
    got = rows(Texts(), recipe={"collate": collate}, **how)
    assert len(want) == 3
    assert all(torch.equal(a[key], b[key]) for a, b in zip(want, got, strict=True) for key in a)
    if "kind" not in how:
        again = rows(Texts(), recipe={"collate": collate}, start=2, **how)
        assert all(torch.equal(want[2][key], again[0][key]) for key in again[0])
    later = rows(Texts(), recipe={"collate": collate}, epoch=1)
    assert not torch.equal(want[0]["labels"], later[0]["labels"])


class TextStream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return (Texts()[i] for i in range(18))


@pytest.mark.parametrize("collate", [longest, Masking(), None])
def test_a_streams_batches_are_those_of_one_device(collate: Any) -> None:
    want = rows(TextStream(), recipe={"collate": collate})
    got = rows(TextStream(), recipe={"collate": collate}, ranks=3, microbatches=2)
    assert all(torch.equal(a[key], b[key]) for a, b in zip(want, got, strict=True) for key in a)
    assert want[0]["input_ids"].shape == (8, 12)


def test_what_each_rank_collates_alone_reads_its_share_alone() -> None:
    seen: list[int] = []

    class Counting(Texts):
        def __getitem__(self, i: int) -> Any:
            seen.append(i)
            return super().__getitem__(i)

    fixed = lambda samples: {"x": torch.tensor([sample["input_ids"][:3] for sample in samples])}
    loader = Loader(
        source=open_source(Recipe(Counting(), fixed)),
        batch_size=8,
        rank=0,
        ranks=2,
        device=torch.device("cpu"),
        workers=0,
    )
    _ = loader.notes
    seen.clear()
    next(loader.epoch(0))
    assert len(seen) == 4
    assert not any("whole batches" in note for note in loader.notes)


class Boxes(torch.utils.data.Dataset):
    """Images of any size with any number of boxes."""

    def __len__(self) -> int:
        return 18

    def __getitem__(self, i: int) -> tuple[Tensor, dict[str, Tensor]]:
        image = torch.sin(torch.arange(3.0 * (4 + i % 3) * 5) * (i + 1)).view(3, 4 + i % 3, 5)
        return image, {"boxes": torch.cos(torch.arange(4.0 * (i % 4)) + i).view(-1, 4)}


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        assert isinstance(images, list)
        boxes = [self.body(image[None]).mean((0, 2, 3)) for image in images]
        if targets is None:
            return [{"boxes": box[None].repeat(image.shape[1], 1)} for box, image in zip(boxes, images, strict=True)]
        off = [((box - t["boxes"]) ** 2).sum() for box, t in zip(boxes, targets, strict=True)]
        return {"box": torch.stack(off).mean()}


def zipped(samples: list[Any]) -> tuple[Any, ...]:
    """torchvision's, for detection."""
    return tuple(zip(*samples, strict=True))


@pytest.mark.parametrize("plan", ["data=2", "shard=2 microbatches=2"])
@distributed(world=2)
def test_boxes_of_any_number_like_one_device(plan: str) -> None:
    step = lambda model, batch: sum(model(*batch).values())
    run = assert_alike(Detector, plan, data=Boxes(), step=step, collate=zipped)
    assert not any("whole batches" in note for note in run.notes)


def test_predictions_of_any_shape_come_in_order() -> None:
    model = Detector()
    images = [Boxes()[i][0] for i in range(18)]
    found = meshfit.predict(model, images, collate=tuple, batch_size=4, plan="data=2", devices="cpu")
    assert len(found) == 18
    for image, each in zip(images, found, strict=True):
        torch.testing.assert_close(each["boxes"], model([image])[0]["boxes"])
    lengths = meshfit.predict(llama(), Texts(), batch_size=4, plan="data=2", devices="cpu")["logits"]
    assert [len(row) for row in lengths[:4]] == [10] * 4
    assert len(lengths) == 18


def test_evaluated_with_padding_like_one_device() -> None:
    torch.manual_seed(0)
    model, how = llama(), {"data": Texts(), "batch_size": 8, "devices": "cpu"}
    want = meshfit.evaluate(model, **how, collate=longest, plan="data=1")["loss"]
    assert want == pytest.approx(meshfit.evaluate(model, **how, plan="data=2")["loss"], rel=1e-6)
    assert want == pytest.approx(meshfit.evaluate(model, **how, collate=longest, plan="pipeline=2")["loss"], rel=1e-6)


FIT = {"optimizer": torch.optim.SGD, "steps": 1, "batch_size": 6, "devices": "cpu", "progress": False}
RAGGED = [(torch.zeros(3 + i % 2), 0) for i in range(8)]
UNMASKED = [{"input_ids": [1] * (1 + i), "labels": [1] * (1 + i)} for i in range(8)]
SCORES = [{"input_ids": [1, 2], "attention_mask": [1, 1], "scores": [0.5] * (1 + i % 3)} for i in range(8)]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (RAGGED, r"differ in shape: \[0\] is \(3,\) and \(4,\).*collate="),
        (UNMASKED, r"'input_ids' is \(1,\) and \(\d,\).*'attention_mask'"),
        (SCORES, r"'scores' is \(1,\) and \(3,\)"),
    ],
)
def test_samples_that_differ_in_shape_are_refused_with_the_remedy(data: Any, words: str) -> None:
    with pytest.raises(meshfit.DataError, match=f"(?s){words}"):
        meshfit.fit(llama(), data, **FIT)


def flattened(samples: list[Any]) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor([[token for sample in samples for token in sample["input_ids"]]])}


@dataclasses.dataclass
class Pair:
    x: Tensor
    y: Tensor


def test_batches_that_are_dataclasses_are_shared() -> None:
    made = lambda samples: Pair(torch.stack([s["x"] for s in samples]), torch.tensor([s["y"] for s in samples]))
    samples = [{"x": torch.randn(3, generator=torch.Generator().manual_seed(i)), "y": i % 2} for i in range(8)]
    step = lambda model, batch: nn.functional.cross_entropy(model(batch.x), batch.y)
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)
    asked = {"optimizer": sgd, "epochs": 1, "batch_size": 3, "devices": "cpu", "progress": False, "collate": made}
    ends = []
    for plan in ("data=1", "data=2"):
        torch.manual_seed(0)
        ends.append(meshfit.fit(nn.Linear(3, 2), samples, step=step, plan=plan, **asked).model.state_dict())
    torch.testing.assert_close(*ends)


class Opaque:
    def __init__(self, samples: list[Any]):
        self.samples = samples


def test_what_cannot_be_shared_is_refused_with_the_reason() -> None:
    with pytest.raises(
        meshfit.DataError, match=r"(?s)cannot be shared: 'input_ids': of 16 samples it gives a tensor of \(1, "
    ):
        meshfit.fit(llama(), Texts(), collate=flattened, plan="data=2", **FIT)
    with pytest.raises(meshfit.DataError, match="'n': it gives 16 for 16 samples and 7 for 7"):
        meshfit.fit(llama(), Texts(), collate=lambda s: {**longest(s), "n": len(s)}, plan="data=2", **FIT)
    with pytest.raises(meshfit.DataError, match="it gives a Opaque, an object of its own"):
        meshfit.fit(llama(), Texts(), collate=Opaque, plan="data=2", **FIT)


def test_a_length_that_comes_late_is_refused_where_ranks_would_pad_differently() -> None:
    long = [{"x": [1.0] * (5 if i == 1 else 3)} for i in range(400)]
    pad = lambda samples: {
        "x": nn.utils.rnn.pad_sequence([torch.tensor(sample["x"]) for sample in samples], batch_first=True)
    }
    with pytest.raises(meshfit.DataError, match=r"(?s)rows of \(5,\) here and gave \(3,\).*length="):
        contents(long, ranks=2, shuffle=False, recipe={"collate": pad})


def test_the_padding_token_is_the_models_own() -> None:
    """A classifier of texts looks for the last token that is not padding."""
    how: dict[str, Any] = {**SIZES, "pad_token_id": 7, "num_labels": 3}
    config = hf.LlamaConfig(**how, num_key_value_heads=2, use_cache=False)
    data = [{**{key: Texts()[i][key] for key in ("input_ids", "attention_mask")}, "labels": i % 3} for i in range(18)]
    build = lambda: hf.LlamaForSequenceClassification(config)
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        want = sum(
            float(model(torch.tensor([sample["input_ids"]]), labels=torch.tensor([sample["labels"]])).loss) / 18
            for sample in data
        )
    assert meshfit.evaluate(model, data, batch_size=8, devices="cpu")["loss"] == pytest.approx(want, rel=1e-5)
    losses = [[step.loss for step in meshfit.fit(given, data, **FIT).history] for given in (build, model)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # a function's model tells it, too


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    words = {"[PAD]": 0, "[MASK]": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    made = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", mask_token="[MASK]")


@pytest.mark.parametrize("kind", ["padding", "masking", "tokens"])
def test_hugging_faces_collators_as_they_are(kind: str) -> None:
    given: Any = Texts()
    if kind == "padding":
        collate: Any = hf.DataCollatorWithPadding(tokenizer())
        given = [{**{k: Texts()[i][k] for k in ("input_ids", "attention_mask")}, "label": i % 3} for i in range(18)]
    elif kind == "masking":
        collate = hf.DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.4)
        given = [{k: Texts()[i][k] for k in ("input_ids", "attention_mask")} for i in range(18)]
    else:
        collate = hf.DataCollatorForTokenClassification(tokenizer())
    want = rows(given, recipe={"collate": collate})
    got = rows(given, recipe={"collate": collate}, ranks=3, microbatches=2)
    assert all(torch.equal(a[key], b[key]) for a, b in zip(want, got, strict=True) for key in a)
    assert want[0]["labels"].shape[0] == 8
