"""``meshfit checkpoint``: list, show, verify, compare, export and prune checkpoints.

Needs no GPU, and reads some MiB at a time.
"""

import json as json_text
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from meshfit.axes.precision import DTYPES
from meshfit.checkpoint import manifest
from meshfit.checkpoint.compare import differences
from meshfit.checkpoint.export import SHARD
from meshfit.checkpoint.files import Files, open_files
from meshfit.checkpoint.keep import Keep
from meshfit.checkpoint.keep import prune as remove_old
from meshfit.checkpoint.manifest import Manifest
from meshfit.checkpoint.outside import open_weights
from meshfit.checkpoint.read import verify as verify_bytes
from meshfit.checkpoint.state import short_kind
from meshfit.errors import CheckpointError, JobError, NoCheckpoint
from meshfit.observe.columns import columns
from meshfit.units import size

checkpoint = typer.Typer(
    help="List, show, verify, compare, export and prune checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

Where = Annotated[str, typer.Argument(help="A run's folder, a folder of checkpoints, or one.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="For machines.")]
console = Console()


@checkpoint.command("list")
def list_(where: Where, json: Json = False) -> None:
    """Every checkpoint in a folder, newest first, and those that are not complete."""
    files, found, skipped = _found(where)
    if json:
        whole = [{"name": each.name, **_about(each)} for each in found]
        print(json_text.dumps(whole + [{"name": each.name, "wrong": each.why} for each in skipped], indent=2))
        return
    if not found and not skipped:
        raise NoCheckpoint(f"there is no checkpoint in {files}")
    table = columns("checkpoint", ">step", ">epoch", "plan~", ">ranks", ">size", "saved")
    for each in found:
        body, saved = each.body, each.body["time"][:16].replace("T", " ")
        cells = each.name, body["step"], f"{body['epoch']:.2f}", body["plan"], body["world"], size(each.nbytes), saved
        table.add_row(*map(str, cells))
    console.print(table)
    for each in skipped:
        console.print(f"  [red]{each.name}[/]  {each.why}", highlight=False)


def _found(where: str) -> tuple[Files, list[Manifest], list[manifest.Skipped]]:
    """The folder at ``where``, its complete checkpoints (or the one that ``where`` is), and what was skipped."""
    files, name = manifest.find(where)
    skipped: list[manifest.Skipped] = []
    return files, [manifest.read(files, name)] if name else list(manifest.complete(files, skipped)), skipped


def _about(found: Manifest) -> dict[str, object]:
    keys = ("step", "samples", "epoch", "plan", "world", "batch_size", "seed", "time", "versions", "fingerprint")
    return {**{key: found.body[key] for key in keys}, "bytes": found.nbytes}


@checkpoint.command()
def show(
    where: Where,
    tensors: Annotated[bool, typer.Option("--tensors", help="Every tensor, too.")] = False,
    json: Json = False,
) -> None:
    """Show a checkpoint: the newest of a folder."""
    found = manifest.newest(where)
    body, state = found.body, found.body["state"]
    if json:
        listed = {key: [str(t.dtype), list(t.shape)] for key, t in found.tensors.items()} if tensors else {}
        print(json_text.dumps({**_about(found), "state": state, "ties": body["ties"], "tensors": listed}, indent=2))
        return
    console.print(f"[bold]{found}[/]  {size(found.nbytes)} in {len(body['files'])} files")
    table = columns("", "~", header=False)
    optimizer = state["optimizer"]
    lrs = [f"{group['lr']:.3g}" for group in optimizer["settings"] if isinstance(group.get("lr"), float)]
    rows = {
        "step": f"{body['step']}, {body['samples']} samples, epoch {body['epoch']:.2f}",
        "plan": f"{body['plan']} on {body['world']} ranks, batches of {body['batch_size']}, seed {body['seed']}",
        "saved": body["time"],
        "versions": ", ".join(f"{name} {version}" for name, version in body["versions"].items()),
        "optimizer": f"{short_kind(optimizer['kind'])}, {len(state['groups'])} groups, lr {', '.join(lrs)}",
        "scheduler": short_kind(state["scheduler"]["kind"]) if state["scheduler"] else "none",
        "ties": ", ".join(f"{name} = {kept}" for name, kept in body["ties"].items()) or "none",
        "data": str(body["fingerprint"]["data"]),
        "model": body["fingerprint"]["model"][:16],
    }
    for key in sorted({key.split("/")[0] for key in found.tensors}):
        kinds = found.named(key)
        count = sum(prod(t.shape) for t in kinds.values())
        rows[f"{key}/"] = f"{len(kinds)} tensors, {count:,} numbers, {size(sum(t.nbytes for t in kinds.values()))}"
    for name, value in rows.items():
        table.add_row(f"[dim]{name}", value)
    console.print(table)
    if tensors:
        listed = columns("tensor", "dtype", "shape", ">parts")
        for key, each in found.tensors.items():
            listed.add_row(key, str(each.dtype).removeprefix("torch."), str(list(each.shape)), str(len(each.parts)))
        console.print(listed)


@checkpoint.command()
def verify(
    where: Where, every: Annotated[bool, typer.Option("--all", help="All, not the newest alone.")] = False
) -> None:
    """Check every byte against its SHA-256: exit code 0 if all are as they were written, 1 if not."""
    files, found, skipped = _found(where)
    if not found:
        why = [f"{each.name}: {each.why}" for each in skipped[:5]]
        raise NoCheckpoint(f"there is no complete checkpoint in {files}", *why)
    bad = 0
    for each in skipped if every else ():
        console.print(f"{each.name}  [red]{each.why}")
    for each in found if every else found[:1]:
        with _progress(each.name, each.nbytes) as told:
            wrong = verify_bytes(each, told)
        bad += bool(wrong)
        console.print(f"{each.name}  " + ("[green]intact" if not wrong else "[red]damaged"), highlight=False)
        for line in wrong:
            console.print(f"  {line}", highlight=False)
    raise typer.Exit(1 if bad else 0)


@checkpoint.command()
def diff(a: Where, b: Where, most: Annotated[int, typer.Option(help="Tensors to show.")] = 20) -> None:
    """What differs between two checkpoints: exit code 0 if nothing, 1 if something."""
    one, other = manifest.newest(a), manifest.newest(b)
    with _progress("compared", one.nbytes + other.nbytes) as told:
        found = list(differences(one, other, told))
    if not found:
        console.print("no difference", style="green")
        raise typer.Exit(0)
    table = columns("", "", f"A  {one.name}", f"B  {other.name}")
    for each in found[:most]:
        table.add_row(each.name, each.what, each.first, each.second)
    console.print(table)
    if len(found) > most:
        console.print(f"and {len(found) - most} more", style="dim")
    raise typer.Exit(1)


@checkpoint.command()
def export(
    source: Annotated[str, typer.Argument(help="A checkpoint, or weights that others wrote.", show_default=False)],
    target: Annotated[str, typer.Argument(help="A .safetensors file, or a folder.", show_default=False)],
    what: Annotated[str, typer.Option(help='"model", "average" (ema=) or "best".')] = "model",
    dtype: Annotated[str | None, typer.Option(help='Cast to "bf16", "fp16" or "fp32".')] = None,
    shard: Annotated[float, typer.Option(help="GB of a file in a folder.")] = SHARD / 1e9,
) -> None:
    """Write the weights as one safetensors file, or in Hugging Face's layout, under the model's own names."""
    from meshfit.checkpoint.export import export

    dtypes = {**DTYPES, "fp32": torch.float32}
    if dtype is not None and dtype not in dtypes:
        raise JobError(f"--dtype {dtype} is not known", f"known: {', '.join(dtypes)}")
    total = sum(each.nbytes for each in open_weights(source, what)[0].stored.values())
    cast = None if dtype is None else dtypes[dtype]
    with _progress("exported", total) as told:
        written = export(source, target, kind=what, dtype=cast, shard=round(shard * 1e9), told=told)
    for path in written:
        above, name = open_files(path).above()
        console.print(f"{path}  {size(above.size(name))}", highlight=False)


@checkpoint.command()
def prune(
    where: Where,
    keep: Annotated[int, typer.Option(help="Complete checkpoints that stay.")] = 2,
    keep_best: Annotated[str | None, typer.Option(help="And the best by this metric: accuracy, -loss.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; else only say what would go.")] = False,
) -> None:
    """Remove old checkpoints, and incomplete ones. The newest one is verified first."""
    files, name = manifest.find(where)
    if name is not None:
        raise JobError(f"{where} is one checkpoint", "prune takes the folder that holds them")
    whole = list(manifest.complete(files))
    if not whole:
        raise NoCheckpoint(f"there is no complete checkpoint in {files}", "nothing was removed")
    stay = Keep(newest=max(1, keep), best=keep_best)
    if not yes:
        gone = stay.gone(whole)
        unfinished = [n for n in manifest.folders(files) if n not in {each.name for each in whole}]
        console.print("\n".join([*gone, *(f"{n} (not complete)" for n in unfinished)]) or "nothing to remove")
        console.print("--yes removes them", style="dim")
        return
    lock = files.lock()
    lock.take()
    try:
        with _progress(whole[0].name, whole[0].nbytes) as told:
            wrong = verify_bytes(whole[0], told)
        if wrong:
            raise CheckpointError(f"{whole[0]} is damaged", *wrong[:3], "nothing was removed")
        for gone in remove_old(files, stay):
            console.print(f"removed {gone}", highlight=False)
    finally:
        lock.release()


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar while bytes are read, on a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)
