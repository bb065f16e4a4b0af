"""The CPU's side: source (where samples are) -> transform -> order (which come next) -> loader (this rank's share, on
its device). Random numbers are keyed by the sample, never by the worker that reads it.

    import meshfit
    from meshfit.data import transform

    train = meshfit.data.parquet("s3://bucket/train/*.parquet", columns=("image", "label"))
    train = train.map(transform.crop(32, padding=4), transform.flip()).on_device(transform.normalise())
    meshfit.fit(model, train, ...)
"""

from meshfit.data import transform
from meshfit.data.arrays import arrays
from meshfit.data.cache import Cache
from meshfit.data.classics import cifar, mnist
from meshfit.data.datasets import SampleStream
from meshfit.data.datasets import open_source as memory
from meshfit.data.hf_datasets import hf_dataset
from meshfit.data.images import folder
from meshfit.data.lakes import delta, lance
from meshfit.data.mds import mds
from meshfit.data.mixture import mixture
from meshfit.data.opening import open
from meshfit.data.source import BadSample, Source
from meshfit.data.sql import sql
from meshfit.data.table import arrow, csv, jsonl, parquet
from meshfit.data.tars import tars
from meshfit.data.tokens import text, tokens, vocabulary

__all__ = [
    "BadSample",
    "Cache",
    "SampleStream",
    "Source",
    "arrays",
    "arrow",
    "cifar",
    "csv",
    "delta",
    "folder",
    "hf_dataset",
    "jsonl",
    "lance",
    "mds",
    "memory",
    "mixture",
    "mnist",
    "open",
    "parquet",
    "sql",
    "tars",
    "text",
    "tokens",
    "transform",
    "vocabulary",
]
