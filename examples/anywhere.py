"""The same images from a folder, Parquet, a tar and SQLite, and, if given, from the cloud and a server: the same
weights.

    python examples/anywhere.py --data cifar10-train.parquet
    python examples/anywhere.py --data cifar10-train.parquet --postgres postgresql://user:password@host/name
"""

import argparse
import hashlib
import io
import sqlite3
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import nn

import meshfit
from meshfit.data import transform

Images = list[tuple[bytes, int]]
"""(an image file's bytes, its class), ordered by class."""


def write_all(folder: Path, images: Images) -> dict[str, Any]:
    """``images`` in every form, and the source that reads each."""
    numbers, files, labels = range(len(images)), [data for data, _ in images], [label for _, label in images]
    for number, (data, label) in enumerate(images):
        (folder / "images" / str(label)).mkdir(parents=True, exist_ok=True)
        (folder / "images" / str(label) / f"{number:06}.jpg").write_bytes(data)
    pq.write_table(pa.table({"id": list(numbers), "image": files, "label": labels}), folder / "train.parquet")
    with tarfile.open(folder / "train.tar", "w") as tar:
        for number, (data, label) in enumerate(images):
            for ending, content in (("jpg", data), ("cls", str(label).encode())):
                about = tarfile.TarInfo(f"{number:06}.{ending}")
                about.size = len(content)
                tar.addfile(about, io.BytesIO(content))
    link = sqlite3.connect(folder / "train.db")
    link.execute("create table train (id integer primary key, image blob, label integer)")
    link.executemany("insert into train values (?, ?, ?)", zip(numbers, files, labels, strict=True))
    link.commit()
    link.close()
    query, rows, cache = "select id, image, label from train", ("image", "label"), folder / "cache"
    return {
        "folder": meshfit.data.folder(folder / "images"),
        "parquet": meshfit.data.parquet(folder / "train.parquet", columns=rows, cache=cache),
        "tar": meshfit.data.tars(folder / "train.tar", columns=("jpg", "cls"), cache=cache),
        "sqlite": meshfit.data.sql(f"sqlite:///{folder}/train.db", query, key="id", columns=rows),
    }


def write_postgres(url: str, images: Images) -> Any:
    import psycopg

    with psycopg.connect(url, autocommit=True) as link, link.cursor() as cursor:
        cursor.execute("create table if not exists meshfit_train (id integer primary key, image bytea, label integer)")
        cursor.execute("truncate meshfit_train")
        with cursor.copy("copy meshfit_train from stdin") as copy:
            for number, (data, label) in enumerate(images):
                copy.write_row((number, data, label))
    return meshfit.data.sql(url, "select * from meshfit_train", key="id", columns=("image", "label"))


def trained(source: meshfit.data.Source, plan: str) -> str:
    """A hash of the weights after an epoch."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    torch.manual_seed(0)
    model(torch.zeros(1, 3, 32, 32))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    meshfit.fit(
        model,
        source.map(transform.crop(32, padding=4), transform.flip()).on_device(transform.normalise(*transform.CIFAR10)),
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        batch_size=64,
        epochs=1,
        plan=plan,
        devices="cpu",
    )
    held = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(held).hexdigest()[:16]


def main() -> None:
    asked = argparse.ArgumentParser(description="The same images from anywhere train the same weights.")
    asked.add_argument("--data", type=Path, required=True, help="Parquet with the columns image (bytes) and label")
    asked.add_argument("--samples", type=int, default=2000)
    asked.add_argument("--plan", default="data=2")
    asked.add_argument("--postgres", help="URL of a database in which a table meshfit_train may be made")
    asked.add_argument("--s3", help="URL of a Parquet file with the same rows, ordered by class")
    args = asked.parse_args()
    table = pq.read_table(args.data).slice(0, args.samples)
    pairs = zip(table.column("image").to_pylist(), table.column("label").to_pylist(), strict=True)
    images = sorted(pairs, key=lambda pair: pair[1])
    with tempfile.TemporaryDirectory() as folder:
        sources = write_all(Path(folder), images)
        if args.postgres:
            sources["postgres"] = write_postgres(args.postgres, images)
        if args.s3:
            sources["s3"] = meshfit.data.parquet(args.s3, columns=("image", "label"))
        for name, source in sources.items():
            print(f"{name:10s} {trained(source, args.plan)}", flush=True)


if __name__ == "__main__":
    main()
