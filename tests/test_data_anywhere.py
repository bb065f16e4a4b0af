"""The example: the same images from a folder, Parquet, a tar, SQLite, S3 and PostgreSQL train the same weights."""

import importlib.util
import io
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from PIL import Image

import meshfit
from tests.servers import S3, Postgres, postgres_folder, storage

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def example() -> Any:
    path = Path(__file__).parents[1] / "examples" / "anywhere.py"
    spec = importlib.util.spec_from_file_location("anywhere", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def jpeg(seed: int) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "JPEG", quality=90)
    return out.getvalue()


def test_the_same_images_from_anywhere_train_the_same_weights(tmp_path: Path):
    obs: Any = pytest.importorskip("obstore")
    if postgres_folder() is None:
        pytest.skip("no PostgreSQL on this machine")
    anywhere = example()
    images = [(jpeg(i), i // 20) for i in range(200)]
    (tmp_path / "files").mkdir()
    sources = anywhere.write_all(tmp_path / "files", images)
    cloud, base = S3(tmp_path / "s3"), Postgres()
    try:
        cloud.create_bucket("bucket")
        how = {**storage(cloud.port), "region": "us-east-1"}
        store = obs.store.S3Store("bucket", config=how, client_options={"allow_http": True})
        for name in ("train.parquet", "train.tar"):
            obs.put(store, name, (tmp_path / "files" / name).read_bytes())
        far: dict[str, Any] = {"storage": storage(cloud.port), "cache": tmp_path / "cache"}
        sources["s3 parquet"] = meshfit.data.parquet("s3://bucket/train.parquet", columns=("image", "label"), **far)
        sources["s3 tar"] = meshfit.data.tars("s3://bucket/train.tar", columns=("jpg", "cls"), **far)
        sources["postgres"] = anywhere.write_postgres(base.url, images)
        weights = {name: anywhere.trained(source, "data=1") for name, source in sources.items()}
        shared = {name: anywhere.trained(sources[name], "data=2") for name in ("folder", "s3 parquet", "postgres")}
    finally:
        cloud.stop()
        base.close()
    assert len(set(weights.values())) == 1, weights
    assert len(set(shared.values())) == 1, shared
