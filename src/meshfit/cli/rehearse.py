"""``meshfit rehearse``: how a plan would begin on a cluster, printed."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from meshfit.cli.inspect import built, config_of
from meshfit.cli.script import FAILED, Arguments, PlanText, Which, given, instead_of_fit
from meshfit.errors import JobError, PlanError
from meshfit.job import Job
from meshfit.observe.columns import columns
from meshfit.planner.cluster import Cluster
from meshfit.planner.hf_config import decoder_of
from meshfit.planner.narrow import narrow_config
from meshfit.planner.sizes import DecoderPredictor
from meshfit.rehearsal.memory import too_large
from meshfit.rehearsal.places import Places
from meshfit.rehearsal.problems import Problem, ranged
from meshfit.rehearse import Rehearsal, rehearse_job
from meshfit.units import size

KINDS = ("weights", "gradients", "optimizer", "activations")
MOST_SHARES, MOST_SAMPLES = 8, 6
"""Of the data that are printed."""
SHORT = 32
"""Tokens of the sequences on which a narrow model runs."""


def rehearse(
    on: Annotated[str, typer.Option(help="The cluster: 16x8xH100, or a file.", show_default=False)],
    script: Annotated[Path | None, typer.Argument(help="A script that calls meshfit.fit.", show_default=False)] = None,
    arguments: Arguments = None,
    plan: PlanText = None,
    hf: Annotated[Path | None, typer.Option(help="Instead of a script: a Hugging Face config.json.")] = None,
    seq: Annotated[int, typer.Option(help="With --hf: tokens of a sequence.")] = 4096,
    batch: Annotated[int, typer.Option(help="With --hf: samples a step.")] = 256,
    timeline: Annotated[Path | None, typer.Option(help="A file for the picture of a step, as SVG.")] = None,
    fit: Which = 1,
) -> None:
    """Run the first steps of a plan's ranks here, as on a cluster: exit code 0 if it would start there, 1 if not."""
    if hf is not None and script is None:
        raise typer.Exit(rehearse_config(hf, seq, batch, plan, on, timeline))
    if hf is not None or script is None:
        raise JobError("rehearse takes a script or --hf", "meshfit rehearse --hf config.json --on 8xH100, say")

    def act(asked: dict[str, Any]) -> int:
        job = Job(**{**asked, **given(plan=plan)}).training()
        return _show(rehearse_job(job, Cluster.of(on)), timeline)

    instead_of_fit(script, arguments, act, fit, failed=FAILED)


def rehearse_config(config: Path, length: int, batch: int, plan: str | None, on: str, timeline: Path | None) -> int:
    """The same for a decoder of Hugging Face that nobody here has the weights of. Its ranks run a narrow one, of as
    many layers and heads, on short sequences; memory is that of the wide one."""
    decoder, wide = decoder_of(config), config_of(config)
    narrow = narrow_config(wide)
    if narrow is None:
        raise JobError(f"{config}: its widths cannot be divided", "meshfit rehearse train.py takes any model")
    small, factor = narrow
    ids = torch.randint(small.vocab_size, (batch, min(length, SHORT)), generator=torch.Generator().manual_seed(0))
    how = {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4), "batch_size": batch, "steps": 1}
    asked = {"model": lambda: built(small), "data": {"input_ids": ids, "labels": ids}, "plan": plan or "auto", **how}
    cluster = Cluster.of(on)
    found = rehearse_job(Job(**asked).training(), cluster)
    memory = DecoderPredictor(decoder, cluster, length).memory(found.plan, batch)
    problems = list(found.problems)
    if why := too_large(memory, cluster):
        ranks = tuple(Places(found.plan).stage(memory.stage))
        problems.append(Problem(f"stage {memory.stage} does not fit: {ranged(ranks)}", (why,), ranks))
    note = f"ranks run a model {factor} times narrower, on {ids.shape[1]} tokens; memory is that of {config}"
    found = replace(found, memory=[memory], problems=problems, notes=[note, *found.notes])
    return _show(found, timeline)


def _show(found: Rehearsal, timeline: Path | None) -> int:
    """Print it, and draw its timeline; the exit code."""
    show(found)
    if timeline is not None:
        try:
            timeline.write_text(found.timeline)
            print(f" timeline of a step: {timeline}")
        except PlanError as error:
            print(f" {error}")
    return found.exit_code


def show(found: Rehearsal) -> None:
    console, places = Console(highlight=False), Places(found.plan)
    how = "with values" if found.values else "by shapes, without values"
    ran = "all of them" if len(found.ran) == len(places.all) else f"{len(found.ran)} of them"
    console.print(f" {found.plan} on {found.cluster.name}: {len(places.all)} ranks, {ran} run {how}\n", soft_wrap=True)
    if found.memory:
        console.print(_memory(found, places))
    if found.samples:
        console.print(_samples(found, places))
    for note in found.notes:
        console.print(f" {note}", style="dim", markup=False, soft_wrap=True)
    if found.ok:
        counted = f"{found.operations:,} operations of all ranks on {found.communicators} communicators"
        console.print(f"\n {counted} match, and complete if each blocks in its order", soft_wrap=True)
        console.print(" the plan would start, and take its first steps", style="green", soft_wrap=True)
    for problem in found.problems:
        console.print(f"\n {problem.headline}", style="bold red", markup=False, soft_wrap=True)
        for fact in problem.facts:
            console.print(f"   {fact}", markup=False, soft_wrap=True)
    console.print(f" {found.seconds:.1f} s", style="dim")


def _memory(found: Rehearsal, places: Places) -> Any:
    limit = found.cluster.accelerator.memory
    table = columns("memory", "ranks~", *(f">{kind}" for kind in KINDS), ">other", f">of {size(limit)}")
    for each in found.memory:
        ranks = places.stage(each.stage, each.branch)
        name = f"stage {each.stage}" if found.plan.pipeline > 1 else "each rank"
        name += f", branch {each.branch}" if found.plan.branch > 1 else ""
        kinds = [each.held.get(kind, 0) for kind in KINDS]
        least = each.device[0]
        style = "[red]" if least > limit else ""
        table.add_row(name, ranged(ranks), *map(size, kinds), size(least - sum(kinds)), f"{style}{size(least)}")
    return table


def _samples(found: Rehearsal, places: Places) -> Any:
    table = columns("data", "ranks~", "samples of the first step~")
    for share, ids in list(found.samples.items())[:MOST_SHARES]:
        ranks = [rank for rank in range(len(places.all)) if places.share(rank) == share]
        more = f", ... ({len(ids)})" if len(ids) > MOST_SAMPLES else ""
        table.add_row(f"share {share}", ranged(ranks), ", ".join(map(str, ids[:MOST_SAMPLES])) + more)
    if (left := len(found.samples) - MOST_SHARES) > 0:
        table.add_row(f"and {left} more", "", "")
    return table
