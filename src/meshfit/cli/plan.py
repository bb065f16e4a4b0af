"""``meshfit plan``: the best plan for a model on a cluster, before anyone rents it. Nothing is trained."""

import json as json_format
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from meshfit import auto
from meshfit.cli.script import Arguments, Which, instead_of_fit
from meshfit.errors import JobError, PlanError
from meshfit.job import Job
from meshfit.observe.beside import learned
from meshfit.observe.columns import columns
from meshfit.observe.predicted import predicted_picture
from meshfit.observe.reading import read
from meshfit.planner import what_if
from meshfit.planner.calibrate import calibrated, save
from meshfit.planner.cluster import Cluster
from meshfit.planner.detect import profile_path
from meshfit.planner.explain import HEAD, SURE, WholeJob, itemised, line, reasons, row, to_dict, warnings
from meshfit.planner.hf_config import decoder_of
from meshfit.planner.predict import TracedPredictor
from meshfit.planner.search import Allowed, Found, search
from meshfit.planner.sizes import DecoderPredictor
from meshfit.units import quantity, size
from meshfit.units import seconds as in_words

SHOWN = 10  # kinds of plans
WIDE = 130
"""Columns of a screen on which plans stand in the table itself."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What is to be planned."""

    name: str
    predicting: what_if.Predicting
    batch: int
    steps: int
    allowed: Allowed
    sure: float
    decoder: Any = None


def plan(
    script: Annotated[str | None, typer.Argument(help="A script that calls meshfit.fit.", show_default=False)] = None,
    arguments: Arguments = None,
    on: Annotated[str, typer.Option(help='"8xH100", "64x8xH100", a file; here: the machine at hand.')] = "here",
    hf: Annotated[Path | None, typer.Option(help="Instead of a script: a Hugging Face config.json.")] = None,
    seq: Annotated[int, typer.Option(min=1, help="With --hf: tokens of a sequence.")] = 4096,
    batch: Annotated[
        int, typer.Option(min=0, help="Samples a step. 0: those of the script, with --hf 256.", show_default=False)
    ] = 0,
    tokens: Annotated[
        float, typer.Option(min=0, help="With --hf: tokens of the whole training, 15e12.", show_default=False)
    ] = 0,
    steps: Annotated[int, typer.Option(min=0, help="Steps of the whole training.", show_default=False)] = 0,
    plan: Annotated[str, typer.Option(help='What is said of the plan: "auto", "tensor=2 recompute=full".')] = "auto",
    precision: Annotated[
        str,
        typer.Option(help='Those allowed: "bf16,fp8". Otherwise bf16, where devices have it.', show_default=False),
    ] = "",
    by: Annotated[str, typer.Option(help='The cheapest part of the cluster that ends in "3 days".')] = "",
    scale: Annotated[bool, typer.Option("--scale", help="Throughput from one device to all.")] = False,
    largest: Annotated[str, typer.Option(help='The largest "batch" or "model" that fits.')] = "",
    picture: Annotated[Path | None, typer.Option(help="Write the predicted timeline as SVG.")] = None,
    json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    fit: Which = 1,
) -> None:
    """Find the best plan for a model on a cluster, and say what every kind of plan would take."""
    cluster = Cluster.detect() if on == "here" else Cluster.of(on)
    allowed = Allowed.of(plan, tuple(precision.split(",")) if precision else (usual_precision(cluster),))

    def answer(subject: Planned) -> int:
        return _answer(subject, cluster, by=by, scale=scale, largest=largest, picture=picture, as_json=json)

    if hf is not None and script is None:
        raise typer.Exit(answer(_described(hf, seq, batch or 256, tokens, steps, allowed)))
    if hf is not None or script is None:
        raise JobError("plan takes a script or --hf", "meshfit plan --hf config.json --on 8xH100, say")
    act = lambda asked: answer(_traced(Job(**asked).training(), script, batch, steps, allowed))
    instead_of_fit(Path(script), arguments, act, fit, quiet=json)


def usual_precision(cluster: Cluster) -> str:
    """What models are mostly trained in on such devices."""
    return next((word for word in ("bf16", "fp16") if word in cluster.accelerator.rates), "fp32")


def _traced(job: Job, name: str, batch: int, steps: int, allowed: Allowed) -> Planned:
    batch = batch or auto.samples_of(job, 1)
    model = auto.looked_at(job)

    def predicting(cluster: Cluster) -> TracedPredictor:
        device = "cpu" if cluster.accelerator.name == "cpu" else "cuda"
        return auto.predictor_of(job, cluster, device, model)

    return Planned(
        name=f"{name}: {quantity(sum(p.numel() for p in model.parameters()))} parameters",
        predicting=predicting,
        batch=batch,
        steps=steps or round(auto.steps_of(job, batch)),
        allowed=allowed,
        sure=SURE["traced"],
    )


def _described(path: Path, length: int, batch: int, tokens: float, steps: int, allowed: Allowed) -> Planned:
    model = decoder_of(path)
    return Planned(
        name=f"{path}: {model.layers} layers, {quantity(_parameters(model), 'B')} parameters",
        predicting=lambda cluster: DecoderPredictor(model, cluster, length),
        batch=batch,
        steps=steps or round(tokens / (batch * length)),
        allowed=allowed,
        sure=SURE["dense" if model.experts is None else "experts"],
        decoder=(model, lambda cluster: lambda decoder: DecoderPredictor(decoder, cluster, length)),
    )


def _parameters(model: Any) -> float:
    each = model.dense_parameters if model.experts is None else model.shared_parameters + model.expert_parameters
    return model.layers * each + model.embedding * (1 if model.tied else 2)


def _answer(
    subject: Planned, cluster: Cluster, *, by: str, scale: bool, largest: str, picture: Path | None, as_json: bool
) -> int:
    """Print it; the exit code."""
    console = Console(highlight=False)
    if by or scale:
        return _scaled(console, subject, cluster, by, as_json)
    if largest:
        return _largest(console, subject, cluster, largest, as_json)
    predictor = subject.predicting(cluster)
    found = search(predictor, subject.batch, subject.allowed)
    if found.refused:
        raise PlanError(f"no plan of {cluster.name} has these words", found.refused)
    if as_json:
        print(json_format.dumps(to_dict(found, cluster, steps=subject.steps, sure=subject.sure, batch=subject.batch)))
    else:
        show(console, subject, cluster, found)
    best = found.best
    if picture is not None and best is not None:
        picture.write_text(predicted_picture(best.plan, best.work, best.items, predictor.steps))
    return 0 if best is not None else 1


def show(console: Console, subject: Planned, cluster: Cluster, found: Found) -> None:
    console.print(f"{subject.name}, {subject.batch} samples a step")
    console.print(f"{cluster}\n", style="dim", soft_wrap=True)
    every = [row(f.best, cluster, subject.steps) for f in found.families if f.best is not None]
    fits = every[:SHOWN]
    if fits:
        speed = "tokens/s" if fits[0]["tokens_per_second"] else "samples/s"
        wide = console.width >= WIDE
        head = [f"{HEAD[0]}~" if wide else ">", *(f">{word.replace('tokens/s', speed)}" for word in HEAD[1:])]
        priced = next((word for word in ("price", "energy") if fits[0][word] is not None), None)
        table = columns(*head, *([f">{priced}"] if priced else []))
        for number, about in enumerate(fits, 1):
            table.add_row(*(line(about) if wide else [str(number), *line(about)[1:]]))
        console.print(table)
        for number, about in enumerate([] if wide else fits, 1):
            console.print(f"{number:2}  {about['plan']}", soft_wrap=True)
        if len(every) > SHOWN:
            console.print(f" and {len(every) - SHOWN} slower kinds of plans (--json has all)", style="dim")
    if found.rejected:
        console.print("\nnot possible", style="dim")
        for family in found.rejected[:SHOWN]:
            console.print(f" {family.reason}; {family.remedy}", soft_wrap=True)
    console.print()
    for text in reasons(found, cluster):
        console.print(f"[bold]{text}" if text.startswith("nothing fits") else text, soft_wrap=True)
    if found.best is None:
        console.print("more devices, or devices with more memory, or less of the model trained, would be needed")
        return
    for text in itemised(found.best):
        console.print(text, soft_wrap=True)
    low, high = (found.best.seconds * (1 + sign * subject.sure) for sign in (-1, 1))
    console.print(f"how sure: nine in ten between {in_words(low)} and {in_words(high)} a step (docs/planner.md)")
    if cluster.accelerator.name == "cpu" and not cluster.name.endswith("measured"):
        console.print("this machine is a guess: meshfit calibrate measures it, in seconds")
    for text in warnings(found.best.plan, cluster):
        console.print(text, style="yellow")
    console.print(
        "exposed: collectives waited for; bubble: ranks of a pipeline that wait; slack: what always comes on top",
        style="dim",
        soft_wrap=True,
    )
    console.print(
        f"{found.written} plans looked at, {found.fitting} fit, {found.priced} simulated: {in_words(found.seconds)}",
        style="dim",
    )


def _scaled(console: Console, subject: Planned, cluster: Cluster, by: str, as_json: bool) -> int:
    if by and not subject.steps:
        raise JobError("--by needs to know how long the training is", "--steps 100000, or --tokens 15e12 with --hf")
    within = what_if.time_of(by) if by else 0.0
    ask = (subject.predicting, cluster, subject.batch, subject.allowed)
    if by:
        chosen, tried = what_if.cheapest(*ask, steps=subject.steps, within=within)
    else:
        chosen, tried = None, list(what_if.scale(*ask))
    if as_json:
        rows = [_scaled_row(one, subject.steps) | {"chosen": one is chosen} for one in tried]
        print(json_format.dumps({"within": within or None, "sizes": rows}))
        return 0
    head = ("devices", "plan~", ">step", ">samples/s", ">speedup", ">whole job", ">price")
    table = columns(*(f">{head[0]}", *head[1:]))
    first = next((s for s in tried if s.found.best is not None), None)
    for one in tried:
        best, whole = one.found.best, one.whole(subject.steps)
        if best is None or whole is None or first is None or first.found.best is None:
            table.add_row(str(one.cluster.devices), "nothing fits")
            continue
        each = first.found.best.samples_per_second / first.cluster.devices
        table.add_row(
            *(f"{one.cluster.devices}{' *' if one is chosen else ''}", str(best.plan), in_words(best.seconds)),
            *(f"{best.samples_per_second:.4g}", f"{best.samples_per_second / each:.1f}"),
            *(_time(whole), _price(whole)),
        )
    console.print(f"{subject.name}, {subject.batch} samples a step\n")
    console.print(table)
    if by:
        console.print(f"\n* the cheapest that ends in {by}" if chosen else f"\nnone of these ends in {by}")
    return 1 if by and chosen is None else 0


def _scaled_row(one: what_if.Scaled, steps: int) -> dict[str, Any]:
    best = one.found.best
    return {"devices": one.cluster.devices} | ({} if best is None else row(best, one.cluster, steps))


def _time(whole: WholeJob) -> str:
    days = whole.seconds / 86400
    return "" if not whole.steps else f"{days:.3g} days" if days > 2 else in_words(whole.seconds)


def _price(whole: WholeJob) -> str:
    if whole.price is not None:
        return f"{whole.price:,.0f} $"
    return f"{whole.seconds / 3600 * whole.cluster.devices:,.0f} device h" if whole.steps else ""


def _largest(console: Console, subject: Planned, cluster: Cluster, what: str, as_json: bool) -> int:
    if what == "batch":
        found = what_if.largest_batch(subject.predicting(cluster), subject.batch, subject.allowed)
        about: dict[str, Any] = {} if found is None else {"batch": found.batch, **row(found, cluster)}
        said = "" if found is None else f"{found.batch} samples in one pass of all devices"
    elif what == "model" and subject.decoder is not None:
        model, predicting = subject.decoder
        most = what_if.largest_model(model, predicting(cluster), subject.batch, subject.allowed)
        found = None if most is None else most[1]
        about = {} if most is None else {"layers": most[0].layers, "parameters": _parameters(most[0])}
        said = "" if most is None else f"{most[0].layers} such layers, {quantity(_parameters(most[0]), 'B')} parameters"
    else:
        raise PlanError(f"--largest {what} is not known", "batch, or with --hf model")
    if as_json:
        print(json_format.dumps(about | ({} if found is None else {"plan": str(found.plan)})))
    elif found is not None:
        console.print(f"{said}: {found.plan}, {in_words(found.seconds)} a step, {size(found.memory.device[1])}")
    if found is None:
        console.print("nothing fits")
    return 0 if found is not None else 1


def calibrate(
    run: Annotated[
        Path | None, typer.Argument(help="A run's folder: learn from it instead.", show_default=False)
    ] = None,
    ranks: Annotated[int, typer.Option(help="CPU ranks, or GPUs; by default all.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Measure this machine in seconds: kernels, copies, collectives. Plans are predicted with it from then on. Or take
    how fast its devices were from a run."""
    if run is None:
        found, kind, said = calibrated(ranks or None), None, ""
    else:
        recorded = read(run)
        found, times = learned(recorded)
        kind = "cuda" if recorded.on_gpu else "cpu"
        said = f"its devices computed {times:.2f} times as long as predicted\n"
    path = profile_path(kind)
    if path is not None:
        save(found, path)
    if json:
        print(json_format.dumps(found.to_dict()))
        return
    print(f"{said}{found}")
    print(f"kept in {path}" if path is not None else "not kept: MESHFIT_CACHE=0")
