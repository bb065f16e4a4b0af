"""Tensors that others wrote: safetensors files, Hugging Face's folders, ``.pt`` state dicts, folders of torch's DCP.

Nothing in them is run. A ``.pt`` is read by torch's weights-only loader; a DCP folder keeps its index as a pickle, of
which only torch's own descriptions of tensors are let through.
"""

import fnmatch
import io
import json
import os
import pickle
import re
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshfit.arguments import check_text, is_url
from meshfit.checkpoint import manifest
from meshfit.checkpoint.box import whole
from meshfit.checkpoint.files import Files, open_files
from meshfit.checkpoint.manifest import Stored, StoredBox
from meshfit.checkpoint.read import OnDisk, Tensors
from meshfit.checkpoint.tensorfile import read_header
from meshfit.errors import CheckpointError

AS_IS = "meshfit"
"""In the metadata of a safetensors file: names and values are the model's own, and transformers changes none."""
INDEX = "model.safetensors.index.json"
DCP_INDEX = ".metadata"
SHOWN_KINDS = 6
LARGEST_INDEX = 512 * 2**20
METADATA = frozenset(
    ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata")
    + ("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")
)
"""What the index of a DCP folder is made of."""


def open_weights(path: Path | str, kind: str = "model") -> tuple[Tensors, dict[str, str]]:
    """The weights at ``path``, whatever wrote them, by their own names; and names that are tied to others.

    ``kind``: of a checkpoint of meshfit's, "model", "average" or "best".
    """
    check_text("weights", path)
    files = open_files(path)
    try:
        return _opened(files, kind)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is nothing at {files}", str(error.strerror or error)) from None
    except OSError as error:
        raise CheckpointError(f"{files} cannot be read", str(error.strerror or error)) from None


def _opened(files: Files, kind: str) -> tuple[Tensors, dict[str, str]]:
    above, name = files.above()
    if above.size(name) >= 0:  # a file
        return _safetensors(above, [name]) if name.endswith(".safetensors") else _pt(above, name)
    there = files.names()
    if not there:
        asked, hub = str(files), []
        if asked.count("/") == 1:
            hub = [f'if it is a model of the hub: weights=huggingface_hub.snapshot_download("{asked}")']
        raise CheckpointError(f"there is nothing at {asked}", *hub)
    if DCP_INDEX in there:
        return DCP(_local(files, "folders of torch's DCP")), {}
    if INDEX in there:
        try:
            listed = sorted(set(json.loads(files.read(INDEX))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise CheckpointError(f"{files.where(INDEX)} is damaged", "it is no index of safetensors files") from None
        return _safetensors(files, listed)
    if manifest.NAME in there or manifest.folders(manifest.find(files)[0]):
        return _of_meshfit(files, kind)
    if found := [each for each in there if each.endswith(".safetensors")]:
        return _safetensors(files, found)
    for pattern in ("*.pt", "*.pth", "pytorch_model*.bin"):
        for each in fnmatch.filter(there, pattern):
            return _pt(files, each)
    raise CheckpointError(
        f"there are no weights in {files}",
        "known: checkpoints of meshfit's, safetensors, Hugging Face's folders, .pt files, folders of torch's DCP",
    )


def _local(files: Files, what: str) -> Path:
    """Where ``files`` are on this machine."""
    if is_url(str(files)):
        raise CheckpointError(
            f"{files}: {what} are read from disk alone", "copy it here, or save it as safetensors: those are read there"
        )
    return files.root


def _of_meshfit(path: Any, kind: str) -> tuple[Tensors, dict[str, str]]:
    found = manifest.newest(path)
    tensors = OnDisk.of(found)
    tensors.stored = found.named(kind)
    if not tensors.stored:
        raise CheckpointError(f"{found} holds no {kind}", "it was saved by a run without it")
    tensors.as_is = True
    return tensors, dict(found.body.get("ties", {}))


def _safetensors(files: Files, names: list[str]) -> tuple[Tensors, dict[str, str]]:
    stored, ties, as_is = {}, {}, False
    for name in names:
        if files.size(name) < 0:
            raise CheckpointError(f"{files.where(name)} is missing", "the folder's index names it")
        found, metadata = read_header(files, name)
        stored |= found
        as_is |= AS_IS in metadata
        ties |= {key: kept for key, kept in metadata.items() if kept in found and key not in found}
    tensors = OnDisk(files, "", stored, {}, str(files.where(names[0]) if len(names) == 1 else files))
    tensors.as_is = as_is
    return tensors, ties


class InMemory(Tensors):
    """Tensors that are there, or are mapped from a file."""

    def __init__(self, tensors: Mapping[str, Tensor], where: str):
        self._tensors = {key: tensor.detach() for key, tensor in tensors.items()}
        described = {
            key: Stored(tensor.dtype, tuple(tensor.shape), (StoredBox(key, 0, whole(tensor.shape)),))
            for key, tensor in self._tensors.items()
        }
        super().__init__(described, where)

    def rows(self, stored: Stored, part: StoredBox, start: int, stop: int) -> Tensor:
        return self._tensors[part.file].reshape(-1)[start:stop]


def _pt(files: Files, name: str) -> tuple[Tensors, dict[str, str]]:
    path = _local(files, ".pt files") / name
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what it is about to refuse
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} holds more than weights, and is not loaded", _first_line(error)) from None
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} is no file of weights", _first_line(error)) from None
    for key in ("state_dict", "model_state_dict", "model", "module"):
        if isinstance(held, Mapping) and isinstance(held.get(key), Mapping):
            held = held[key]
    named = held.items() if isinstance(held, Mapping) else ()
    tensors = {str(key): value for key, value in named if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors under names", "a state_dict is needed: model.state_dict()")
    return InMemory(tensors, str(path)), {}


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


# torch's DCP


class _Descriptions(pickle.Unpickler):
    """Lets through what a DCP index is made of, and nothing that does anything."""

    ALLOWED: ClassVar = {
        "torch.distributed.checkpoint.metadata": METADATA,
        "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
        "torch": ["Size"],
        "torch.serialization": ["_get_layout"],
        "collections": ["OrderedDict"],
    }

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "PurePosixPath", "Path", "WindowsPath"):
            return lambda *parts: os.path.join(*parts) if parts else ""
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in self.ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(f"the index asks for {module}.{name}", "only descriptions of tensors are let through")


class DCP(Tensors):
    """A folder that ``torch.distributed.checkpoint`` wrote: its tensors. Each chunk is read whole."""

    def __init__(self, folder: Path):
        index = folder / DCP_INDEX
        if index.stat().st_size > LARGEST_INDEX:
            raise CheckpointError(f"{index} is too large", f"{index.stat().st_size} bytes")
        try:
            found = _Descriptions(io.BytesIO(index.read_bytes())).load()
            described: dict[str, Stored] = {}
            for key, about in found.state_dict_metadata.items():
                if not hasattr(about, "chunks"):
                    continue
                parts = []
                for chunk in about.chunks:
                    box = tuple((int(a), int(a) + int(n)) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
                    parts.append(StoredBox(self._name(key, box), 0, box))
                described[key] = Stored(about.properties.dtype, tuple(about.size), tuple(parts))
            self._chunks = {self._name(at.fqn, tuple(at.offset or ())): info for at, info in found.storage_data.items()}
        except CheckpointError as error:
            raise CheckpointError(f"{index} is not loaded", error.headline, *error.facts) from None
        except Exception as error:
            raise CheckpointError(f"{index} is damaged", f"{type(error).__name__}: {error}") from None
        super().__init__(_model_alone(described), str(folder))
        self.folder = folder
        self._local = threading.local()

    @staticmethod
    def _name(key: str, at: Any) -> str:
        return f"{key}@{','.join(str(int(a[0] if isinstance(a, tuple) else a)) for a in at)}"

    def rows(self, stored: Stored, part: StoredBox, start: int, stop: int) -> Tensor:
        if getattr(self._local, "name", None) != part.file:
            self._local.name, self._local.chunk = None, None  # the old one goes before the new one comes
            self._local.chunk = self._chunk(part)
            self._local.name = part.file
        return self._local.chunk.reshape(-1)[start:stop]

    def _chunk(self, part: StoredBox) -> Tensor:
        info = self._chunks.get(part.file)
        if info is None:
            raise CheckpointError(f"{self.folder} lacks {part.file}")
        path = Files(self.folder).path(info.relative_path)
        try:
            with path.open("rb") as file:
                file.seek(info.offset)
                content = file.read(info.length)
            tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            assert isinstance(tensor, Tensor)
        except Exception as error:
            raise CheckpointError(f"{path} is damaged", f"{part.file}: {_first_line(error)}") from None
        return tensor.detach().contiguous()


def _model_alone(stored: dict[str, Stored]) -> dict[str, Stored]:
    """Those under "model." where there are some: the rest is an optimizer's."""
    for prefix in ("model.", "state_dict.", "app.model."):
        inner = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
        if inner and len(inner) < len(stored):
            return inner
    return stored


def alike(names: Iterable[str]) -> str:
    """Names in short: those that differ in numbers alone, as blocks of a model do, once."""
    kinds = Counter(re.sub(r"(?<=\.)\d+(?=\.|$)", "#", name) for name in names)
    said = [kind if count == 1 else f"{kind} ({count})" for kind, count in kinds.items()]
    return ", ".join(said[:SHOWN_KINDS]) + (f" and {len(said) - SHOWN_KINDS} more" if len(said) > SHOWN_KINDS else "")
