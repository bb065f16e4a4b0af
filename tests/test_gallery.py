"""The examples of the gallery train like one device; the page lists each."""

from pathlib import Path

import pytest

from benchmarks.gallery import GALLERY, judge, train
from tests.few import few

ROOT = Path(__file__).parents[1]
OTHERS = {"anywhere", "digits"}


@pytest.mark.parametrize("name", few(GALLERY, "distillation", "gan", "contrastive"))
@pytest.mark.filterwarnings("default")  # of the libraries that examples use
def test_trains_like_one_device(name: str) -> None:
    outcome = judge(name, "shard=2", train(name, "data=1"))
    assert outcome.word.startswith("equal"), outcome.said


def test_the_page_lists_every_example() -> None:
    page = (ROOT / "docs" / "gallery.md").read_text()
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*GALLERY, *OTHERS}
    assert [name for name in GALLERY if f"../examples/{name}.py" not in page] == []
