"""Events, their reader, metrics, and the timeline."""

import gzip
import json
import threading
import time
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshfit
from meshfit import events as events_module
from meshfit.errors import JobError
from meshfit.event_detail import in_depth, in_detail, stands_for
from meshfit.events import Events
from meshfit.observe.page_data import page_data, tiles
from meshfit.observe.rank import tokens_of
from meshfit.observe.reading import Reader, read
from meshfit.observe.sampler import Sampler
from meshfit.observe.svg import nice
from meshfit.observe.tensorboard import Scalars
from meshfit.observe.timeline import chrome_trace, drawn, picture, windows
from tests.recorded import folder

X, Y = torch.randn(64, 8), torch.randint(4, (64,))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fit(**asked):
    defaults = {"loss": F.cross_entropy, "optimizer": torch.optim.SGD, "batch_size": 16, "steps": 8, "devices": "cpu"}
    return meshfit.fit(lambda: nn.Linear(8, 4), (X, Y), **{**defaults, **asked})


def test_spans_scalars_and_instants_become_lines(tmp_path: Path) -> None:
    events = Events(tmp_path, rank=3)
    events.step = 5
    with events.span("forward", microbatch=2, stage="a"):
        time.sleep(0.002)
    events.scalar("scale", 8)
    events.instant("compiled")
    events.moved("all_reduce", 100)
    events.moved("all_reduce", 50)
    events.close()
    first, span, scalar, instant, totals = lines(tmp_path / "rank3.jsonl")
    assert first["rank"] == 3
    assert abs(first["time"] - time.time()) < 60
    assert (span["span"], span["step"], span["microbatch"], span["stage"]) == ("forward", 5, 2, "a")
    assert 0.002 <= span["for"] < 1
    assert (scalar["scalar"], scalar["value"], scalar["step"]) == ("scale", 8.0, 5)
    assert instant["instant"] == "compiled"
    assert totals["totals"]["forward"] == pytest.approx(span["for"], abs=1e-5)
    assert totals["moved"] == {"all_reduce": [2, 150]}
    assert events.phases()["forward"] >= 0.002


def test_without_a_folder_only_totals_are_kept(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    events = Events()
    for _ in range(3):
        with events.span("data"):
            pass
    events.close()
    assert set(events.seconds) == {"data"}
    assert not list(tmp_path.iterdir())


def test_parts_find_the_events_of_the_run_under_way(tmp_path: Path) -> None:
    events = Events(tmp_path)
    assert events_module.current() is events
    with events_module.current().span("gather"):
        pass
    events.close()
    assert events.seconds["gather"] > 0
    assert events_module.current() is not events


def test_a_long_run_writes_windows_of_steps_and_exact_totals(tmp_path: Path) -> None:
    events, steps = Events(tmp_path), 20_000
    for step in range(1, steps + 1):
        events.step = step
        events.add("data", events.start + step, events.start + step + 0.001)
    events.add("evaluate", 0.0, 0.5)  # long ones are never left out
    events.close()
    written = lines(tmp_path / "rank0.jsonl")
    seen = {line["step"] for line in written if line.get("span") == "data"}
    assert len(seen) < 2200
    assert set(range(1, 257)) <= seen
    assert max(seen) > 0.95 * steps
    assert any({step, step + 1, step + 2} <= seen for step in range(17_000, steps))
    total = sum(line["totals"].get("data", 0.0) for line in written if "totals" in line)
    assert total == pytest.approx(0.001 * steps, rel=1e-3)
    assert [line["span"] for line in written if line.get("span") == "evaluate"] == ["evaluate"]
    assert in_detail(10**9) == in_detail(10**9)  # of the step alone: all ranks choose alike


def test_steps_marked_in_depth_stand_for_all() -> None:
    for first, last in ((1, 256), (256, 511), (1024, 2047), (65536, 131071)):
        deep = [step for step in range(first, last + 1) if in_depth(step)]
        assert sum(map(stands_for, deep)) == pytest.approx(last - first + 1, rel=0.02)
        assert all(map(in_detail, deep))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_marks_phases_in_every_step_and_the_rest_in_some(tmp_path: Path) -> None:
    device = torch.device("cuda")
    events, work = Events(tmp_path), torch.randn(1024, 1024, device=device)
    torch.linalg.vector_norm(work @ work).item()  # the first product takes long, and would stand for several steps
    events.on(device)
    for step in range(1, 257):
        events.step = step
        with events.span("forward_backward"), events.span("forward", microbatch=0):
            for _ in range(8):
                work @ work
    took = events.phases()
    events.close()
    spans = [line for line in lines(tmp_path / "rank0.jsonl") if "span" in line]
    marked = {name: {s["step"] for s in spans if s["span"] == name and "gpu_for" in s} for name in took}
    assert marked["forward_backward"] == set(range(1, 257))
    assert marked["forward"] == {step for step in range(1, 257) if in_depth(step)}
    assert took["forward"] == pytest.approx(took["forward_backward"], rel=0.3)


def test_many_threads_add_while_one_writes(tmp_path: Path) -> None:
    events = Events(tmp_path)
    events.own_flushes = False

    def work() -> None:
        for _ in range(2000):
            with events.span("data"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        events.flush()
    events.close()
    assert len([line for line in lines(tmp_path / "rank0.jsonl") if line.get("span")]) == 8000


def test_a_half_written_line_waits_until_it_is_whole(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", [{}], steps=5)
    path = run / "events" / "rank0.jsonl"
    text = path.read_text()
    path.write_text(text + '{"span": "data", "step": 6, "at"')
    reader = Reader(run)
    before = len(reader.read().ranks[0].spans)
    path.write_text(text + '{"span": "data", "step": 6, "at": 0.7, "for": 0.1}\nnot json\n')
    assert len(reader.read().ranks[0].spans) == before + 1


def test_clocks_of_other_machines_are_moved_to_the_first(tmp_path: Path) -> None:
    phases = {"exchange": 0.01}
    run = read(folder(tmp_path / "a", [phases, phases], hosts=["a", "b"], skew=[0.0, 37.5]))
    ends = [[s.end for s in rank.spans if s.name == "exchange"] for rank in run.ranks]
    assert ends[0] == pytest.approx(ends[1], abs=1e-6)
    same = read(folder(tmp_path / "b", [phases, phases], hosts=["a", "a"], skew=[0.0, 0.25]))
    starts = [rank.spans[0].at for rank in same.ranks]
    assert starts[1] - starts[0] == pytest.approx(0.25)  # one machine, one clock: that was so


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="holds no run"):
        read(tmp_path)


def test_a_run_is_read_back(tmp_path: Path) -> None:
    result = fit(out=tmp_path / "run", plan="data=2", valid=(X, Y), steps=12)
    run = read(result.folder)
    assert run.plan == "data=2"
    assert run.state == "finished"
    assert len(run.steps) == 12
    assert len(run.ranks) == 2
    assert run.rate > 0
    assert run.step_seconds > 0
    assert run.traffic == {"all_reduce": (32 + 16 + 3 + 2 + 2) * 4}  # each tensor begins at a multiple of 64 bytes
    for rank in run.ranks:
        assert sum(rank.phase_shares.values()) == pytest.approx(1.0)
        assert rank.facts["memory"]["weights"] == 36 * 4
        assert rank.facts["device"] == "cpu"
    assert run.machines[0]["cores"] >= 1


def test_a_run_that_fails_says_so(tmp_path: Path) -> None:
    def step(model, batch):
        raise ValueError("a batch of the wrong kind")

    with pytest.raises(ValueError, match="wrong kind"):
        fit(out=tmp_path / "run", loss=None, step=step)
    run = read(tmp_path / "run")
    assert run.state == "failed"
    assert run.error == "rank 0: ValueError: a batch of the wrong kind"
    assert "a batch of the wrong kind" in (tmp_path / "run" / "report.html").read_text()


def test_the_sampler_looks_at_process_and_machine(tmp_path: Path) -> None:
    events = Events(tmp_path)
    sampler = Sampler(events, torch.device("cpu"), first=True, seconds=0.05)
    sampler.start()
    until = time.perf_counter() + 0.4
    while time.perf_counter() < until:
        sum(range(1000))
    sampler.stop()
    events.close()
    samples = [line["sample"] for line in lines(tmp_path / "rank0.jsonl") if "sample" in line]
    assert len(samples) >= 3
    assert samples[-1]["rss"] > 1e6
    assert max(sample["cpu"] for sample in samples) > 5
    assert samples[-1]["cores"]
    assert samples[-1]["memory_total"] > samples[-1]["memory"]


def test_tokens_are_counted_where_there_are_any() -> None:
    assert tokens_of((torch.zeros(4, 128, dtype=torch.int64), torch.zeros(4))) == 128
    assert tokens_of(torch.zeros(4, 3, 8, 8)) == 0
    assert tokens_of(torch.zeros(4, dtype=torch.int64)) == 0


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars = Scalars(tmp_path)
    scalars.add([(1, 1000.0, {"loss": 2.5, "lr": 1e-3}), (300, 1001.0, {"loss": 1.25})])
    found = EventAccumulator(str(tmp_path)).Reload()
    assert found.Tags()["scalars"] == ["loss", "lr"]
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(1, 2.5), (300, 1.25)]


@pytest.mark.filterwarnings("ignore")
def test_a_run_with_a_folder_writes_for_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = fit(out=tmp_path / "run", valid=(X, Y))
    found = EventAccumulator(str(result.folder / "tensorboard")).Reload()
    assert [event.value for event in found.Scalars("loss")] == pytest.approx([step.loss for step in result.history])
    assert {"valid/loss", "lr", "grad_norm", "rate"} <= set(found.Tags()["scalars"])


MICRO = [
    ("forward", 0.0, 0.02, {"microbatch": 0}),
    ("backward", 0.02, 0.03, {"microbatch": 0}),
    ("forward", 0.055, 0.02, {"microbatch": 1}),
]


def test_the_trace_is_one_perfetto_opens(tmp_path: Path) -> None:
    run = read(folder(tmp_path / "run", [{"exchange": 0.01}, {}], within=MICRO, steps=6))
    trace = json.loads(json.dumps(chrome_trace(run)))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    assert {event["name"] for event in spans} >= {"forward 0", "backward 0", "forward 1", "exchange", "update"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 and {"tid", "cat"} <= event.keys() for event in spans)
    for rank in (0, 1):  # on one thread spans may not cross
        for thread in (0, 1):
            mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["pid"] == rank and e["tid"] == thread)
            assert all(b[0] >= a[1] - 1e-3 for a, b in pairwise(mine))
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 0  cpu here", "rank 1  cpu here"]


def test_servers_and_traffic_under_way_are_in_trace_and_page(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", [{}, {}], within=[("collective", 0.01, 0.02, {})])
    (run / "events" / "server0.jsonl").write_text(
        '{"rank": 0, "time": 1000.0}\n{"span": "sum", "step": 1, "at": 0.5, "for": 0.1}\n'
    )
    trace = chrome_trace(read(run))["traceEvents"]
    names = {e["pid"]: e["args"]["name"].split("  ")[0] for e in trace if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "server 0"}
    assert [e["pid"] for e in trace if e.get("cat") == "sum"] == [2]
    shown = page_data(read(run))["timeline"]
    kinds = [kind["name"] for kind in shown["kinds"]]
    for lane in shown["lanes"][:2]:
        assert {kinds[row[0]] for row in lane["beside"]} == {"collective"}
        assert kinds.index("collective") not in {row[0] for row in lane["spans"]}
    assert shown["lanes"][2]["label"] == "server 0"


def test_waits_within_an_evaluation_are_not_those_of_steps(tmp_path: Path) -> None:
    events = Events(tmp_path)
    with events.aside(), events.waiting("meet"):
        pass
    assert "meet" not in events.seconds
    with events.waiting("meet"):
        pass
    assert "meet" in events.seconds
    events.close()


def test_a_lane_shows_what_lies_within_a_phase_in_its_place(tmp_path: Path) -> None:
    run = read(folder(tmp_path / "run", [{}], within=MICRO, steps=6))
    spans = drawn(run.ranks[0])
    assert "forward_backward" not in {span.name for span in spans}
    assert all(b.at >= a.end - 1e-6 for a, b in pairwise(spans))


def test_the_picture_is_a_drawing_with_numbered_microbatches(tmp_path: Path) -> None:
    run = read(folder(tmp_path / "run", [{"exchange": 0.01}, {}], within=MICRO, plan="<data&2>"))
    tree = ElementTree.fromstring(picture(run))
    texts = ["".join(e.itertext()) for e in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert {"rank 0", "rank 1", "0", "1", "forward", "waiting for other ranks"} <= set(texts)
    assert any(text.startswith("<data&2>") for text in texts)
    heights = {
        e.get("class"): float(e.get("height") or 0)
        for e in tree.iter("{http://www.w3.org/2000/svg}rect")
        if (e.get("class") or "").startswith("k-") and e.get("height") != "12"
    }
    assert heights["k-exchange"] < heights["k-forward"]  # waiting is lower than work


def test_usual_and_slow_steps_are_found(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", [{}], steps=40)
    path = run / "events" / "rank0.jsonl"
    written = lines(path)
    for line in written:
        if line.get("span") == "forward_backward" and line["step"] == 23:
            line["for"] = 0.9
    path.write_text("".join(json.dumps(line) + "\n" for line in written))
    found = {window.name: window for window in windows(read(run))}
    assert found["slowest"].first == found["slowest"].last == 23
    assert found["first"].first == 1
    assert found["usual"].last - found["usual"].first == 3


@pytest.mark.parametrize(("step", "wanted"), [(0.003, 0.005), (0.02, 0.02), (0.35, 0.5), (1.2, 2.0), (7.0, 10.0)])
def test_axes_have_round_steps(step: float, wanted: float) -> None:
    assert nice(step) == pytest.approx(wanted)


def test_a_run_writes_trace_and_picture(tmp_path: Path) -> None:
    result = fit(out=tmp_path / "run", plan="data=2")
    trace = json.loads(gzip.decompress((result.folder / "trace.json.gz").read_bytes()))
    assert {e["pid"] for e in trace["traceEvents"]} == {0, 1}
    ElementTree.parse(result.folder / "timeline.svg")


def test_arithmetic_is_what_the_products_of_a_step_take(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 128, bias=False), torch.nn.Linear(128, 8, bias=False))
    data = torch.randn(32, 64), torch.randn(32, 8)
    meshfit.fit(model, data, loss=F.mse_loss, optimizer=torch.optim.SGD, batch_size=8, steps=4, out=tmp_path / "run")
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    products = 2 * (64 * 128 + 128 * 8)  # forward; as much for the weights, and for the inputs of the second
    assert about["flops_a_sample"] == 2 * products + 2 * 128 * 8
    run = read(tmp_path / "run")
    assert run.flops == pytest.approx(about["flops_a_sample"] * run.rate)
    assert run.of_peak is None
    for rank in run.ranks:
        rank.facts["device_name"] = "NVIDIA H200"
    assert run.of_peak == pytest.approx(run.flops / 67e12)
    assert any(tile["label"].endswith("FLOP / s") for tile in tiles(run))
