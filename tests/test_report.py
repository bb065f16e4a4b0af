"""The page about a run, as text and as a browser shows it; the lines at the end of a run; the verb."""

import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

import meshfit
from meshfit.observe.charts import smoothed, xy
from meshfit.observe.page_data import page_data
from meshfit.observe.reading import read
from meshfit.observe.report import page, write
from meshfit.observe.summary import summary
from meshfit.units import seconds, size
from tests import command
from tests.recorded import folder

X, Y = torch.randn(64, 8), torch.randint(4, (64,))
MICRO = [("forward", 0.0, 0.03, {"microbatch": 0}), ("backward", 0.03, 0.05, {"microbatch": 0})]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def fit(**asked: Any) -> Any:
    defaults = {"loss": F.cross_entropy, "optimizer": torch.optim.SGD, "batch_size": 16, "steps": 8, "devices": "cpu"}
    return meshfit.fit(lambda: nn.Linear(8, 4), (X, Y), **{**defaults, **asked})


def test_every_run_with_a_folder_ends_with_a_report(tmp_path: Path) -> None:
    result = fit(out=tmp_path / "run", plan="data=2", valid=(X, Y))
    text = (result.folder / "report.html").read_text()
    assert "data=2" in text
    assert re.search(r'(src|href)="(https?:)?//', text) is None
    assert "@import" not in text
    assert "url(" not in text.replace("url(#", "")


def test_nothing_a_run_says_becomes_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    run = folder(tmp_path / "run", [{}], plan=evil)
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**about, "notes": [evil, "<img src=x onerror=alert(1)>"]}))
    text = page(read(run))
    assert text.count("<script") == 2
    assert "<img" not in text
    data = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["plan"] == evil
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]


def test_infinite_losses_are_gaps(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", [{}], steps=20)
    text = (run / "metrics.jsonl").read_text().splitlines()
    text[4] = re.sub(r'"loss": [\d.]+', '"loss": "nan"', text[4])
    (run / "metrics.jsonl").write_text("\n".join(text) + "\n")
    data = page_data(read(run))
    loss = next(chart for chart in data["charts"] if chart["id"] == "loss")
    assert None in loss["series"][0]["y"]
    json.dumps(data, allow_nan=False)


def test_the_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", [{"exchange": 0.005}] * 4, steps=4000, within=MICRO, step=0.1)
    assert len(page(read(run))) < 3_000_000
    points = [(float(i), float((i * 7919) % 100)) for i in range(100_000)]
    thin = xy(points, 500)
    assert len(thin["x"]) <= 502
    assert thin["x"] == sorted(thin["x"])
    assert (min(thin["y"]), max(thin["y"])) == (0.0, 99.0)  # peaks survive


def test_a_run_under_way_has_a_page(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", [{}], done=False)
    assert page_data(read(run))["state"] == "running"
    started = folder(tmp_path / "early", [], steps=0, done=False)
    assert page_data(read(started))["verdict"] is None
    write(started)


def test_the_report_of_another_place_is_written_there(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", [{}])
    assert write(run, tmp_path / "there.html") == tmp_path / "there.html"
    assert not (run / "report.html").exists()


def test_numbers_are_for_people() -> None:
    assert [seconds(s) for s in (0.0123, 1.5, 600, 10_000)] == ["12.3 ms", "1.5 s", "10 min", "2.78 h"]
    assert [size(n) for n in (12, 2048, 3 * 2**30)] == ["12 B", "2 KiB", "3 GiB"]
    assert smoothed([(0.0, 1.0)]) == [(0.0, 1.0)]


def test_the_last_lines_name_verdict_and_report(tmp_path: Path) -> None:
    result = fit(out=tmp_path / "run", plan="data=2", steps=12)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(summary(result))
    text = console.export_text()
    assert "verdict" in text
    assert "report" in text
    assert "forward and backward" in text
    assert "peak memory" in text
    assert "rank 1" in text


def test_a_run_without_a_folder_has_a_short_table(tmp_path: Path) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(summary(fit()))
    assert "forward and backward" in console.export_text()


def test_the_verb_writes_the_page(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", [{"data": 0.05, "forward_backward": 0.04}] * 2)
    done = command.meshfit(tmp_path, "report", str(run))
    assert done.returncode == 0, done.stderr
    assert "input-bound: devices waited 50 %" in done.stdout
    assert (run / "report.html").is_file()
    none = command.meshfit(tmp_path, "report", str(tmp_path))
    assert none.returncode == 2
    assert "holds no run" in none.stderr


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def opened(browser: Any, path: Path, **options: Any) -> Any:
    tab = browser.new_context(viewport={"width": 1240, "height": 900}, **options).new_page()
    said: list[str] = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: said.append(request.url) if not request.url.startswith("file:") else None)
    tab.goto(path.resolve().as_uri())
    return SimpleNamespace(tab=tab, said=said)


@pytest.fixture
def report(tmp_path: Path) -> Path:
    sample = {"cores": [50.0, 90.0], "memory": 1e9, "memory_total": 8e9, "disk_read": 1e6, "net_sent": 1e6}
    facts = {"memory": {"weights": 10**8, "gradients": 10**8, "optimizer": 2 * 10**8}}
    ranks = [{"exchange": 0.01}, {"forward_backward": 0.09}]
    return write(folder(tmp_path / "run", ranks, within=MICRO, sample=sample, facts=facts, steps=120))


def test_a_browser_draws_every_chart_from_a_file(browser: Any, report: Path) -> None:
    shown = opened(browser, report)
    assert shown.tab.title() == "run · meshfit"
    assert shown.tab.locator(".chart").count() >= 8
    paths = shown.tab.eval_on_selector_all(".chart path", "all => all.map(p => p.getAttribute('d').length)")
    assert min(paths) > 10
    inked = shown.tab.eval_on_selector(
        "canvas", "c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
    )
    assert inked > 8
    assert shown.said == []


def test_hovering_reads_a_chart_and_the_timeline(browser: Any, report: Path) -> None:
    shown = opened(browser, report)
    shown.tab.locator("#chart-loss svg").hover()
    assert shown.tab.locator(".tip").is_visible()
    assert "step" in shown.tab.locator(".tip").inner_text()
    canvas = shown.tab.locator("canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    shown.tab.mouse.move(box["x"] + 110, box["y"] + 40)
    assert "rank 0, step" in shown.tab.locator(".tip").inner_text()
    assert shown.said == []


def test_dragging_zooms_charts_of_the_same_axis_and_back(browser: Any, report: Path) -> None:
    shown = opened(browser, report)
    labels = "#chart-{} svg text"
    before = shown.tab.locator(labels.format("lr")).all_inner_texts()
    svg = shown.tab.locator("#chart-loss svg")
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    shown.tab.mouse.move(box["x"] + 200, box["y"] + 80)
    shown.tab.mouse.down()
    shown.tab.mouse.move(box["x"] + 420, box["y"] + 80, steps=4)
    shown.tab.mouse.up()
    after = shown.tab.locator(labels.format("lr")).all_inner_texts()
    assert after != before
    assert shown.tab.locator(".chart.zoomed").count() >= 3
    shown.tab.locator("#chart-loss svg").dblclick()
    assert shown.tab.locator(labels.format("lr")).all_inner_texts() == before
    assert shown.said == []


def test_the_timeline_zooms_and_switches_windows(browser: Any, report: Path) -> None:
    shown = opened(browser, report)
    aside = shown.tab.locator("#timeline .aside")
    whole = aside.inner_text()
    canvas = shown.tab.locator("canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    shown.tab.mouse.move(box["x"] + 200, box["y"] + 40)
    shown.tab.mouse.down()
    shown.tab.mouse.move(box["x"] + 400, box["y"] + 40, steps=4)
    shown.tab.mouse.up()
    assert aside.inner_text() != whole
    shown.tab.get_by_role("button", name="first steps").click()
    assert "steps 1 to 4" in aside.inner_text()
    assert shown.said == []


def test_light_dark_and_the_button_between_them(browser: Any, report: Path) -> None:
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light = opened(browser, report, color_scheme="light")
    dark = opened(browser, report, color_scheme="dark")
    seen = [shown.tab.evaluate(ground) for shown in (light, dark)]
    assert seen[0] != seen[1]
    light.tab.locator(".theme").click()
    assert light.tab.evaluate(ground) == seen[1]
    assert light.said == dark.said == []


def test_it_is_readable_on_a_phone_and_in_print(browser: Any, report: Path) -> None:
    shown = opened(browser, report)
    shown.tab.set_viewport_size({"width": 390, "height": 800})
    assert shown.tab.evaluate("document.documentElement.scrollWidth <= 390")
    shown.tab.emulate_media(media="print", color_scheme="dark")
    assert shown.tab.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    assert len(shown.tab.pdf()) > 20_000
    assert shown.said == []


def test_what_a_run_says_is_text_in_the_browser(browser: Any, tmp_path: Path) -> None:
    run = folder(tmp_path / "run", [{}], plan="<b>data</b>")
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**about, "notes": ["<img src=x onerror=document.title=1>"]}))
    shown = opened(browser, write(run))
    assert "<img src=x" in shown.tab.locator(".notes").inner_text()
    assert shown.tab.locator(".plan").inner_text() == "<b>data</b>"
    assert shown.said == []
