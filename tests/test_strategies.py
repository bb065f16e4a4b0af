"""The maker of docs/strategies: pages and pictures out of a real run."""

import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from meshfit.observe.reading import RecordedSpan
from meshfit.observe.timeline import flat

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "docs" / "strategies"))
    import make

    yield make
    for name in ("make", "explained", "models", "placement"):
        sys.modules.pop(name, None)


def texts(path: Path) -> list[str]:
    return ["".join(e.itertext()) for e in ElementTree.parse(path).iter(f"{SVG}text")]


def test_a_page_and_a_moving_picture_out_of_a_real_run(maker, tmp_path: Path) -> None:
    strategy = next(s for s in maker.STRATEGIES if s.file == "model-server")
    made = maker.make(strategy, tmp_path / "runs", {}, steps=6)
    maker.write(made, tmp_path)
    picture, page = tmp_path / "model-server.svg", (tmp_path / "model-server.md").read_text()
    assert {"rank 0", "rank 1", "server 0", "forward", "backward", "adding gradients"} <= set(texts(picture))
    tree = ElementTree.parse(picture)
    moved = {e.get("attributeName") for e in tree.iter() if e.tag in (f"{SVG}animate", f"{SVG}animateTransform")}
    assert moved == {"width", "transform"}
    whole = next(tree.iter(f"{SVG}clipPath"))[0]
    assert float(whole.get("width", 0)) > 900  # all is seen where nothing moves
    assert picture.stat().st_size < 60_000
    assert "| losses against one device | equal |" in page
    where = texts(tmp_path / "model-server-placement.svg")
    assert where.count("7.21 MiB") == 4  # weights and gradients of two workers
    assert where.count("none") == 3  # workers have no optimizer, the server no samples
    assert where.count("gradients up") == 2
    assert "model-server-placement.svg" in page
    assert "staleness=4" in texts(tmp_path / "model-server-beside.svg")[0]
    assert "| optimizer state on a device | none |" in page
    assert "server 0 " in page
    (server,) = made.run.servers
    for rank in made.run.ranks:  # a server steps when all have gone back, and before any goes on
        for before, after in pairwise(s for s in rank.spans if s.name == "forward_backward"):
            (step,) = [s for s in server.spans if s.name == "update" and s.step == before.step]
            assert before.end <= step.at
            assert step.end <= after.at


def test_every_page_is_there_and_says_what_the_words_say(maker) -> None:
    folder = Path(maker.__file__).parent
    index = (folder / "README.md").read_text()
    for strategy in maker.STRATEGIES:
        page = (folder / f"{strategy.file}.md").read_text()
        assert strategy.does in page
        assert strategy.choose in page
        assert f"]({strategy.file}.md) | `{strategy.plan}` |" in index
        assert (folder.parent / strategy.more).is_file()
        assert texts(folder / f"{strategy.file}.svg")[0].startswith(strategy.plan.split()[0])
        assert (folder / f"{strategy.file}.svg").stat().st_size < 60_000
        for other in re.findall(r"]\(([\w-]+\.svg)\)", page):
            assert texts(folder / other)
    assert {"rank 0", "gradients, summed"} <= set(texts(folder.parent / "pictures" / "strategies.svg"))


def test_a_pipeline_is_drawn_beside_its_schedule(maker, tmp_path: Path) -> None:
    strategy = next(s for s in maker.STRATEGIES if s.file == "pipeline")
    made = maker.make(strategy, tmp_path / "runs", {}, steps=8)
    window = maker.quickest(made.run, 2)
    best = maker.without_waiting(made.run, window)
    for rank, ideal in zip(made.run.ranks, best.ranks, strict=True):
        took = lambda spans: sorted((s.step, s.about["microbatch"], s.name, s.seconds) for s in spans)
        actions = [s for s in rank.spans if "microbatch" in s.about and window.first <= s.step <= window.last]
        shown = [s for s in ideal.spans if "microbatch" in s.about]
        assert [(*a[:3], pytest.approx(a[3])) for a in took(actions)] == took(shown)  # the same work
        last = lambda spans: max(s.end for s in spans if s.step == window.first)
        assert last(shown) <= last(actions) + 1e-6  # and done earlier


def test_spans_within_spans_become_a_row() -> None:
    outer = RecordedSpan("forward", 1, 0.0, 10.0, {"microbatch": 3})
    inner = [RecordedSpan("meet", 1, 2.0, 1.0), RecordedSpan("branch", 1, 5.0, 4.0), RecordedSpan("join", 1, 6.0, 1.0)]
    found = sorted(flat([*inner, outer]), key=lambda span: span.at)
    assert [(s.name, s.at, s.end) for s in found] == [
        ("forward", 0.0, 2.0),
        ("meet", 2.0, 3.0),
        ("forward", 3.0, 5.0),
        ("branch", 5.0, 6.0),
        ("join", 6.0, 7.0),
        ("branch", 7.0, 9.0),
        ("forward", 9.0, 10.0),
    ]
    assert [s.about for s in found if s.about] == [{"microbatch": 3}]
    alone = replace(outer, about={})
    assert flat([alone]) == [alone]
