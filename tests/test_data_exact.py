"""Each sample once an epoch, the same bytes whatever the ranks, the workers, and wherever a run was cut."""

import functools
import io
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import meshfit
from meshfit.data import Source, mixture
from meshfit.data.chain import Skipping
from meshfit.data.datasets import SampleStream, open_source
from meshfit.data.loader import Loader
from meshfit.data.order import Ids, Windows
from meshfit.data.source import BadSample, hashed
from meshfit.data.transform import colour, crop, cutout, flip, normalise
from meshfit.data.tree import Ragged

cloudpickle.register_pickle_by_value(sys.modules[__name__])

N, BATCH = 103, 12
IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 255, (N, 3, 8, 8), dtype=np.uint8))
LABELS = torch.arange(N)


def loader(source: Source, rank: int = 0, ranks: int = 1, **asked: Any) -> Loader:
    return Loader(
        source=source,
        batch_size=BATCH,
        rank=rank,
        ranks=ranks,
        device=torch.device("cpu"),
        seed=7,
        microbatches=2,
        **asked,
    )


def augmented() -> Source:
    data = meshfit.data.memory((IMAGES, LABELS))
    return data.map(crop(8, padding=2), flip(), cutout(3)).on_device(colour(0.3), normalise())


def played(make: Any, legs: list[tuple[int, int, int]], epochs: int = 3) -> list[tuple[int, list[int], bytes]]:
    """(epoch, labels, bytes of the images) of every microbatch of all ranks; each leg is (ranks, workers, batches),
    resumed from the state of the one before in sources made anew."""
    found: list[tuple[int, list[int], bytes]] = []
    state: dict[str, Any] | None = None
    for ranks, workers, most in legs:
        held = [loader(make(), rank, ranks, workers=workers) for rank in range(ranks)]
        epoch, start = held[0].resume(state) if state else (0, 0)
        for one in held[1:]:
            assert state is None or one.resume(state) == (epoch, start)
        done = 0
        while epoch < epochs and done < most:
            for batches in zip(*(one.epoch(epoch, start) for one in held), strict=True):
                for i in range(len(batches[0].microbatches)):
                    parts = [b.microbatches[i] for b in batches if b.microbatches[i].samples]
                    labels = [int(y) for part in parts for y in part.content[1]]
                    found.append((epoch, labels, b"".join(part.content[0].numpy().tobytes() for part in parts)))
                start, done = batches[0].index + 1, done + 1
                if batches[0].last:
                    epoch, start = epoch + 1, 0
                if done == most:
                    break
        state = held[0].state(epoch, start)
        assert all(one.state(epoch, start) == state for one in held)
    return found


@pytest.mark.parametrize("cuts", [(5, 7, 4), (9, 9, 1), (1, 8, 17)])
def test_a_run_cut_and_resumed_on_other_ranks_and_workers_sees_the_same_bytes(cuts: tuple[int, int, int]):
    whole = played(augmented, [(1, 0, 999)])
    for epoch in range(3):
        assert sorted(y for e, labels, _ in whole if e == epoch for y in labels) == list(range(N))
    first, second, third = cuts
    assert played(augmented, [(2, 3, first), (4, 0, second), (3, 3, third), (1, 0, 999)]) == whole


def test_data_of_another_run_is_refused():
    state = loader(augmented()).state(1, 4)
    assert state["consumed"] == 48
    with pytest.raises(meshfit.DataError, match=r"(?s)samples was 103.*now it is 50"):
        loader(augmented().take(slice(50))).resume(state)
    with pytest.raises(meshfit.DataError, match="fingerprint"):
        loader(meshfit.data.memory((IMAGES, LABELS))).resume(state)
    with pytest.raises(meshfit.DataError, match="no whole number of batches"):
        Loader(source=augmented(), batch_size=9, rank=0, ranks=1, device=torch.device("cpu"), seed=7).resume(state)


def test_values_in_memory_changed_in_place_are_noticed_on_resume():
    images = IMAGES.clone()
    for make in (lambda: meshfit.data.memory((images, LABELS)), lambda: open_source([(x, 1) for x in images])):
        state = loader(make()).state(0, 1)
        assert loader(make()).resume(state) == (0, 1)
        images[57, 1, 2, 3] += 1
        with pytest.raises(meshfit.DataError, match="not that of the run to be resumed"):
            loader(make()).resume(state)
    wide = torch.randn(8, 9).bfloat16().T
    assert hashed([wide]) == hashed([wide.contiguous()]) != hashed([wide + 1])


# Order by windows


@pytest.mark.parametrize("sizes", [[4] * 30, [7, 1, 5, 3] * 9, [100], [3, 5], [1] * 50])
def test_windows_visit_every_sample_once_and_few_blocks_at_a_time(sizes: list[int]):
    edges = np.concatenate([[0], np.cumsum(sizes)])
    n = int(edges[-1])
    orders = [Windows(edges, seed=1, epoch=epoch)[np.arange(n)] for epoch in range(2)]
    assert all(sorted(order.tolist()) == list(range(n)) for order in orders)
    assert n < 10 or not np.array_equal(*orders)
    blocks = np.searchsorted(edges, orders[0], "right") - 1
    for start in range(n):
        assert len(set(blocks[start : start + min(sizes)].tolist())) <= 16
    by_batches = Ids(n, 7, seed=1, shuffle=True, blocks=edges)
    got = np.concatenate([by_batches(0, k) for k in range(by_batches.batches)])
    if len(sizes) > 1:
        np.testing.assert_array_equal(got, orders[0])


def test_rows_of_large_parquet_come_once_each_in_windows(tmp_path: Path):
    pq.write_table(pa.table({"y": np.arange(N)}), tmp_path / "a.parquet", row_group_size=4)
    make = lambda: meshfit.data.parquet(
        tmp_path / "a.parquet", columns=("y", "y"), cache=meshfit.data.Cache(tmp_path / "cache", most=10)
    )
    whole = played(make, [(1, 0, 999)], epochs=2)
    assert sorted(y for e, labels, _ in whole if e == 1 for y in labels) == list(range(N))
    assert played(make, [(3, 2, 4), (2, 0, 999)], epochs=2) == whole


# Mixtures


def test_mixtures_are_exact_every_epoch_and_every_source_is_seen_through():
    a, b = meshfit.data.memory((torch.arange(30),)), meshfit.data.memory((torch.arange(100, 107),))
    made = mixture([a, b], weights=[3, 1], length=40)
    counts = np.zeros(107, int)
    for epoch in range(6):
        ids = np.arange(40)
        which, inner = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        for k, at, mine in made.where(ids, epoch):
            which[at], inner[at] = k, mine
        assert (which == 0).sum() == 30
        assert sorted(inner[which == 0].tolist()) == list(range(30))
        np.add.at(counts, inner + 100 * which, 1)
    assert counts[:30].tolist() == [6] * 30
    assert counts[100:].max() - counts[100:].min() <= 1  # 60 draws of 7 samples
    third = mixture([a, b], weights=[0.5, 0.5], length=7)
    assert third.counts.tolist() == [4, 3]
    assert len(mixture([a, b])) == 37


def test_mixtures_resume_like_other_sources():
    def make() -> Source:
        small = meshfit.data.memory((IMAGES[:20], LABELS[:20])).map(flip())
        return mixture([meshfit.data.memory((IMAGES, LABELS)), small], weights=[1, 1], length=90).map(
            crop(8, padding=1)
        )

    whole = played(make, [(1, 0, 999)])
    assert played(make, [(2, 2, 5), (3, 0, 9), (1, 1, 999)]) == whole


def test_mixtures_of_what_does_not_mix_are_refused():
    a = meshfit.data.memory((IMAGES, LABELS))
    for sources, weights, words in (
        ([a, iter_of()], None, "stream"),
        ([a], [1, 2], "1 sources and 2 weights"),
        ([a, a], [0, 0], "no shares"),
        ([a, augmented()], None, "mix first"),
    ):
        with pytest.raises(meshfit.DataError, match=words):
            mixture(sources, weights)
    with pytest.raises(meshfit.DataError, match="different samples"):
        mixture([a, meshfit.data.memory({"x": IMAGES})]).fetch(np.arange(206))


def iter_of() -> Any:
    return SampleStream(lambda: iter([1, 2]))


def test_a_stream_goes_on_where_it_was_cut_by_reading_up_to_there():
    stream = open_source(lambda: iter([(image, label) for image, label in zip(IMAGES, LABELS, strict=True)]))
    for workers in (0, 1, 3):
        one = Loader(source=stream, batch_size=BATCH, rank=0, ranks=1, device=torch.device("cpu"), workers=workers)
        epoch, start = one.resume(one.state(0, 5))
        got = [int(y) for batch in one.epoch(epoch, start) for y in batch.microbatches[0].content[1]]
        assert got == list(range(60, N))


# Bad samples


def pictures(folder: Path, bad: tuple[int, ...], n: int = 200) -> Path:
    for i in range(n):
        place = folder / ("a" if i < n // 2 else "b")
        place.mkdir(parents=True, exist_ok=True)
        out = io.BytesIO()
        Image.fromarray(np.full((8, 8, 3), i, np.uint8)).save(out, "JPEG")
        data = out.getvalue()
        (place / f"{i:03}.jpg").write_bytes(data[:40] if i in bad else data)
    return folder


def test_a_run_stops_at_a_bad_sample_and_names_its_file(tmp_path: Path):
    source = meshfit.data.folder(pictures(tmp_path / "p", (17,)))
    with pytest.raises(BadSample, match=r"a/017\.jpg is no image"):
        list(loader(source).epoch(0))
    (tmp_path / "p" / "a" / "003.jpg").unlink()
    with pytest.raises(BadSample, match=r"a/003\.jpg cannot be read"):
        source.fetch(np.array([3]))


@pytest.mark.parametrize("url", ["p", "./p", "~/p", "../here/p/", "{}/p", "file://{}/p"])
def test_classes_are_the_folders_below_however_the_path_is_written(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    pictures(here / "p", (), n=4)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(here))
    source = meshfit.data.folder(url.format(here))
    assert [int(source[i][1]) for i in range(4)] == [0, 0, 1, 1]


def test_bad_samples_are_skipped_counted_and_the_same_on_resume(tmp_path: Path):
    folder = pictures(tmp_path / "p", (17, 18))
    make = lambda: meshfit.data.folder(folder, on_bad="skip").map(flip())
    held = make()
    one = loader(held)
    labels = [y for batch in one.epoch(0) for part in batch.microbatches for y in part.content[1].tolist()]
    assert len(labels) == 200
    skipping = held
    assert isinstance(skipping, Skipping)
    assert sorted(skipping.bad) == [17, 18]
    assert "a/017.jpg" in skipping.bad[17]
    assert one.state(1, 0)["source"]["bad"].keys() == {17, 18}
    again = make()
    loader(again).resume(one.state(1, 0))
    assert again.bad == skipping.bad
    whole = [batch.microbatches[0].content[0] for batch in loader(make()).epoch(1)]
    later = [batch.microbatches[0].content[0] for batch in loader(again).epoch(1, 4)]
    assert all(torch.equal(x, y) for x, y in zip(whole[4:], later, strict=True))


def test_too_many_bad_samples_stop_the_run(tmp_path: Path):
    folder = pictures(tmp_path / "p", (1, 2, 3))
    with pytest.raises(meshfit.DataError, match=r"(?s)3 of 200 samples are bad; .*allows 2 \(1%\).*001\.jpg"):
        list(loader(meshfit.data.folder(folder, on_bad="skip")).epoch(0))
    list(loader(meshfit.data.folder(folder).on_bad("skip", most=0.05)).epoch(0))


def test_a_users_own_data_set_may_have_bad_samples_too():
    class Some(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 100

        def __getitem__(self, i: int) -> Any:
            if i == 42:
                raise ValueError("cannot be parsed")
            return torch.full((2,), float(i)), i

    with pytest.raises(ValueError, match="cannot be parsed") as caught:
        open_source(Some()).fetch(np.array([41, 42]))
    assert "while reading sample 42" in "".join(caught.value.__notes__)
    source = meshfit.data.memory(Some()).on_bad("skip")
    assert source.fetch(np.array([41, 42, 43]))[1].tolist() == [41, 43, 43]

    with pytest.raises(meshfit.DataError, match="on_bad='x' is not understood"):
        source.on_bad("x")


def test_the_clock_knows_where_time_went(tmp_path: Path):
    folder = pictures(tmp_path / "p", (), n=60)
    one = loader(meshfit.data.folder(folder).map(crop(8, padding=2)), workers=2)
    list(one.epoch(0))
    assert one.clock.batches == 5
    assert all(one.clock.seconds[name] > 0 for name in ("read", "decode", "transform"))
    assert one.clock.waited > 0


class Words(Source):
    """Words, images of two sizes, and the number that both were made of."""

    def __init__(self, first: int):
        self.first = first

    def __len__(self) -> int:
        return 6

    def fetch(self, ids):
        numbers = (self.first + ids).tolist()
        images = Ragged(torch.full((3, 4 + n % 2, 4), float(n)) for n in numbers)
        return Ragged(f"w{n}" for n in numbers), images, torch.tensor(numbers)


def test_a_mixture_keeps_words_and_images_of_any_size_beside_their_labels():
    words, images, labels = mixture([Words(0), Words(100)]).fetch(np.array([7, 1, 8, 2, 0, 11]))
    assert words == [f"w{n}" for n in labels.tolist()]
    assert [int(image[0, 0, 0]) for image in images] == labels.tolist()


class Shift:
    def __init__(self, by: int):
        self.by = by

    def __call__(self, batch: Any) -> Any:
        return batch


def test_a_fingerprint_is_the_same_in_another_process():
    """Where functions are in memory is no part of it; the seed of a mixture is."""
    plain = meshfit.data.memory((IMAGES, LABELS))
    for make in (lambda: Shift(3), lambda: functools.partial(lambda by, batch: batch, 3)):
        kept = [make(), make()]
        one, other = (plain.map(function).fingerprint for function in kept)
        assert one == other
    assert mixture([plain], seed=1).fingerprint != mixture([plain], seed=2).fingerprint


def test_shares_and_classes_that_cannot_be():
    plain = meshfit.data.memory((IMAGES, LABELS))
    for wrong in (
        lambda: mixture([plain], length=0),
        lambda: mixture(3),  # type: ignore[arg-type]
        lambda: mixture([plain], weights=["a"]),  # type: ignore[list-item]
        lambda: plain.split(1.5),
        lambda: plain.take([0.5]),
        lambda: plain.mixup(0.2, classes=2).few(),
        lambda: open_source({1.0, 2.0}),
        lambda: open_source(np.array(["a"])),
    ):
        with pytest.raises(meshfit.DataError):
            wrong()
