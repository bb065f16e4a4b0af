"""Transforms of whole batches: what they do, and that their random numbers follow the samples."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import meshfit
from meshfit.data import Source, transform
from meshfit.data.draw import Key, SampleRandom
from meshfit.data.loader import Loader
from meshfit.data.transform import CIFAR10, colour, crop, crop_any_size, crop_centre, cutout, flip, normalise, one_hot
from meshfit.data.tree import Ragged

N = 48
IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 255, (N, 3, 32, 32), dtype=np.uint8))
LABELS = torch.arange(N) % 10
IDS = np.arange(N)


def source() -> Source:
    return meshfit.data.memory((IMAGES, LABELS))


def drawn(made: Source, seed: int = 0, epoch: int = 0, ids: Any = IDS) -> Any:
    key = Key(seed, epoch)
    return made.finish(made.read(np.asarray(ids), key), np.asarray(ids), key)


# What they do


def test_random_crops_are_windows_of_the_padded_image():
    x, y = drawn(source().map(crop(32, padding=4)))
    padded = torch.nn.functional.pad(IMAGES, (4,) * 4)
    places = []
    for i in range(N):
        windows = padded[i].unfold(1, 32, 1).unfold(2, 32, 1)  # (3, 9, 9, 32, 32)
        found = (windows == x[i][:, None, None]).flatten(3).all(3).all(0).nonzero().tolist()
        assert found
        places.append(tuple(found[0]))
    assert len(set(places)) > 20
    assert torch.equal(y, LABELS)
    assert x.is_contiguous()


def test_flips_turn_half_of_the_images():
    x, _ = drawn(source().map(flip()))
    turned = [torch.equal(x[i], IMAGES[i].flip(2)) for i in range(N)]
    assert all(t or torch.equal(x[i], IMAGES[i]) for i, t in enumerate(turned))
    assert 12 < sum(turned) < 36
    assert torch.equal(IMAGES, source().arrays[0])  # the data itself is not touched
    assert torch.equal(drawn(source().map(flip(0.0)))[0], IMAGES)
    assert torch.equal(drawn(source().map(flip(1.0)))[0], IMAGES.flip(3))


def test_normalise_and_one_hot():
    x, y = drawn(source().map(normalise(*CIFAR10), one_hot(10, smooth=0.1)))
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in CIFAR10)
    torch.testing.assert_close(x, (IMAGES / 255 - mean) / std, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(y.sum(1), torch.ones(N))
    torch.testing.assert_close(y[3], torch.full((10,), 0.01) + 0.9 * torch.eye(10)[3])
    named = meshfit.data.memory({"image": IMAGES, "labels": LABELS}).map(one_hot(10)).fetch(IDS)
    assert named["labels"].shape == (N, 10)
    with pytest.raises(meshfit.DataError, match=r"one_hot\(5\) met the label 9"):
        source().map(one_hot(5)).fetch(IDS)


def test_cutout_fills_a_square():
    x, _ = drawn(meshfit.data.memory((torch.full((N, 3, 32, 32), 7, dtype=torch.uint8), LABELS)).map(cutout(8)))
    holes = (x == 0).sum((2, 3))
    assert torch.equal(holes[:, 0], holes[:, 2])
    assert holes.max() == 64
    assert holes.min() >= 16  # at a corner


def test_colour_keeps_uint8_and_the_order_of_brightness():
    x, _ = drawn(source().map(colour(0.4, 0.4, 0.4)))
    assert x.dtype == torch.uint8
    assert not torch.equal(x, IMAGES)
    torch.testing.assert_close(drawn(source().map(colour()))[0], IMAGES)


def test_images_of_many_sizes_become_one():
    class Many(Source):
        def __len__(self) -> int:
            return 6

        def fetch(self, ids: Any) -> Any:
            images = Ragged(torch.full((3, 20 + i, 40), 10 * i, dtype=torch.uint8) for i in ids.tolist())
            return images, torch.from_numpy(ids)

    six = np.arange(6)
    for change in (transform.resize((16, 24)), crop_centre((16, 24)), crop_any_size((16, 24))):
        x, _ = Many().map(change).fetch(six)
        assert x.shape == (6, 3, 16, 24)
        assert x[:, 0, 3, 3].tolist() == [0, 10, 20, 30, 40, 50]
    assert Many().map(transform.resize(10)).fetch(six[:1])[0].shape == (1, 3, 10, 20)
    with pytest.raises(meshfit.DataError, match="images of one size"):
        Many().map(flip()).fetch(six)
    with pytest.raises(meshfit.DataError, match="differ in shape"):
        Many().few()


def test_mixup_blends_each_sample_with_another_under_every_share():
    made = source().map(normalise()).mixup(0.4, classes=10)
    x, y = drawn(made)
    assert x.shape == IMAGES.shape
    torch.testing.assert_close(y.sum(1), torch.ones(N))
    assert ((y > 0.02) & (y < 0.98)).any(1).sum() > N // 4
    for part in np.array_split(IDS, 5):
        torch.testing.assert_close(drawn(made, ids=part)[0], x[part], atol=0, rtol=0)


def test_bytes_become_tensors():
    class Words(Source):
        def __len__(self) -> int:
            return 3

        def fetch(self, ids: Any) -> Any:
            raw = Ragged(np.full(4, i, np.float32).tobytes() for i in ids.tolist())
            return {"text": Ragged(["ab", "abcdef", ""][i] for i in ids.tolist()), "raw": raw}

    got = Words().map(transform.from_bytes("float32", (2, 2))).fetch(np.arange(3))
    assert got["text"] == ["ab", "abcdef", ""]
    assert got["raw"].shape == (3, 2, 2)
    assert got["raw"][2].unique().tolist() == [2.0]


def test_on_says_where():
    made = meshfit.data.memory((IMAGES, IMAGES)).map(flip(1.0, on=1))
    left, right = made.fetch(IDS)
    assert torch.equal(left, IMAGES)
    assert torch.equal(right, IMAGES.flip(3))
    with pytest.raises(meshfit.DataError, match="on='mask'"):
        source().map(flip(on="mask")).fetch(IDS)


# Random numbers follow the sample


RANDOM = {
    "crop": [crop(32, padding=4)],
    "two of a kind": [crop(32, padding=4), crop(32, padding=4), flip()],
    "colour": [colour(0.4, 0.4, 0.4), cutout(8)],
    "any size": [crop_any_size(24)],
    "own": [lambda batch, draw: (batch[0] + draw.uniform(1, 1, 1), batch[1])],
}


@pytest.mark.parametrize("name", RANDOM)
def test_a_samples_numbers_depend_on_seed_epoch_and_sample_alone(name: str):
    made = source().map(*RANDOM[name])
    whole, _ = drawn(made, seed=3, epoch=2)
    for parts in (2, 7, N):
        for part in np.array_split(np.random.default_rng(parts).permutation(N), parts):
            got, _ = drawn(made, seed=3, epoch=2, ids=part)
            assert torch.equal(got, whole[part])
    assert not torch.equal(drawn(made, seed=3, epoch=3)[0], whole)
    assert not torch.equal(drawn(made, seed=4, epoch=2)[0], whole)


def test_two_transforms_of_a_kind_draw_different_numbers():
    once = [SampleRandom(IDS, Key(0, 0, place)).uniform() for place in (1, 2)]
    assert (once[0] - once[1]).abs().min() > 0
    draw = SampleRandom(np.arange(200_000), Key(1, 2, 3))
    a, b = draw.uniform(), draw.uniform()
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.01
    assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.01
    assert abs(float(a.mean()) - 0.5) < 0.003
    assert torch.bincount(draw.integers(0, 9)).float().std() < 300  # of 22 222 each
    assert float(draw.beta(0.3).var()) == pytest.approx(1 / (4 * 1.6), rel=0.02)


def test_functions_of_a_sample_may_use_any_generator():
    import random

    def noisy(sample: Any) -> Any:
        image, label = sample
        return image.float() + torch.rand(()) + np.random.rand() + random.random(), label

    made = source().map(noisy, each=True)
    torch.manual_seed(5)
    want_after = torch.rand(2)
    torch.manual_seed(5)
    whole = drawn(made)[0]
    assert torch.equal(torch.rand(2), want_after)  # the run's own numbers are left alone
    assert torch.equal(drawn(made, ids=[7, 3])[0], whole[[7, 3]])
    assert len({float(v) for v in (whole - IMAGES)[:, 0, 0, 0]}) > N // 2

    def given(sample: Any, rng: np.random.Generator) -> Any:
        return sample[0] + rng.normal(), sample[1]

    made = source().map(given, each=True)
    assert torch.equal(drawn(made, ids=[7, 3])[0], drawn(made)[0][[7, 3]])


def test_a_batchs_function_that_draws_behind_our_back_is_refused():
    with pytest.raises(meshfit.DataError, match=r"(?s)draws random numbers.*second argument"):
        source().map(lambda batch: (batch[0] + torch.rand(1), batch[1])).fetch(IDS)


# On the device


def test_what_runs_on_the_device_runs_after_the_transfer():
    made = source().map(flip()).on_device(normalise(*CIFAR10))
    host = made.read(IDS, Key())
    assert host[0].dtype == torch.uint8
    both = source().map(flip(), normalise(*CIFAR10))
    torch.testing.assert_close(made.fetch(IDS), both.fetch(IDS), atol=0, rtol=0)
    with pytest.raises(meshfit.DataError, match="what runs on the device comes last"):
        made.map(flip())
    loader = Loader(source=made, batch_size=16, rank=0, ranks=1, device=torch.device("cpu"), shuffle=False)
    got = torch.cat([batch.microbatches[0].content[0] for batch in loader.epoch(0)])
    assert torch.equal(got, both.fetch(IDS)[0])


VISION = """
import sys, torch
library = torch.library.Library("torchvision", "DEF")  # what the CPU wheel of torch lacks
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
for name in ("roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool", "deform_conv2d"):
    library.define(f"{name}(Tensor a) -> Tensor")
    library.define(f"_{name}_backward(Tensor a) -> Tensor")
sys.path.append(sys.argv[1])
import numpy as np
from torchvision.transforms import v2
import meshfit
from meshfit.data.draw import Key
x = torch.randint(0, 255, (12, 3, 32, 32), dtype=torch.uint8)
steps = [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]
source = meshfit.data.memory((x, torch.arange(12))).map(v2.Compose(steps))
whole, labels = source.read(np.arange(12), Key(1, 1))
assert whole.shape == (12, 3, 32, 32) and whole.dtype == torch.float32 and labels.tolist() == list(range(12))
assert len({tuple(t.flatten().tolist()) for t in (whole - x / 255)}) == 12
for ids in ([3, 1], [11], [5, 6, 7]):
    assert torch.equal(source.read(np.array(ids), Key(1, 1))[0], whole[ids])
print("same")
"""


def test_torchvisions_transforms_run_on_each_sample():
    beside = Path(sys.prefix) / "torchvision"
    if not beside.is_dir():
        pytest.skip("torchvision is not there")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", VISION, str(beside)], capture_output=True, text=True)
    if "does not exist" in done.stderr or "No module named" in done.stderr:
        pytest.skip(" ".join(done.stderr.splitlines()[-3:]))
    assert done.stdout.strip() == "same", done.stderr[-2000:]


def test_what_a_function_broke_on_is_named():
    def fragile(batch: Any) -> Any:
        if (batch[1] == 7).any():
            raise ValueError("seven")
        return batch

    with pytest.raises(meshfit.data.BadSample, match=r"(?s)fragile failed on sample 7.*seven"):
        source().map(fragile).fetch(IDS)

    def one(sample: tuple[Tensor, Tensor]) -> Any:
        return fragile((sample[0], sample[1][None]))

    with pytest.raises(meshfit.data.BadSample, match=r"(?s)failed on sample 7.*seven"):
        source().map(one, each=True).fetch(IDS)
