"""A trained model in files that others open: Hugging Face's ``from_pretrained``, peft's for adapters alone.

Weights go from where they are to the file, one tensor at a time: of parts all ranks put each together, and one writes.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from meshfit.arguments import is_url
from meshfit.checkpoint.export import SHARD, Described, write
from meshfit.checkpoint.files import Files, open_files
from meshfit.checkpoint.outside import alike
from meshfit.checkpoint.parts import Parts, WholeModel
from meshfit.errors import CheckpointError
from meshfit.hugging_face import adapters_in_files, has_adapters, in_files, ties_itself

BESIDE = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "sentencepiece*",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a tokenizer or processor, which are copied from the folder that the weights came from."""


def write_weights(held: Parts | WholeModel, path: Path | str, *, here: bool = True) -> None:
    """One file of the weights under the model's own names. Of parts all ranks write together, one of them ``here``."""
    write(path, held.saved, held.chunks, ties=held.ties, as_is=True, overwrite=True, here=here)


def save(
    model: nn.Module,
    held: Parts | WholeModel,
    target: Path | str,
    *,
    sources: Sequence[Path | str] = (),
    dtype: torch.dtype | None = None,
    shard: int = SHARD,
    here: bool = True,
) -> list[Path | str]:
    """``model``, or one of its shape, with the weights that are ``held``: a file if ``target`` is called .safetensors,
    else a folder. ``sources``: where its weights came from. The files that were written; none is overwritten."""
    how: dict[str, Any] = {"dtype": dtype, "shard": shard, "here": here}
    files = open_files(target)
    if files.above()[1].endswith(".safetensors"):
        return write(target, held.saved, held.chunks, ties=held.ties, as_is=True, **how)
    folders = [each for each in sources if is_url(each) or Path(each).is_dir()]
    if has_adapters(model):
        return _save_adapters(model, held, target, folders, how)
    config = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return write(target, held.saved, held.chunks, ties=held.ties, as_is=True, **how)
    forms = _Forms(model, held)
    written = write(target, forms.described, forms.chunks, **how)
    if here:
        written += _put_all(files, lambda folder: _save_config(model, folder, dtype))
        written += _copied(folders[:1], files)
    return written


class _Forms:
    """Tensors as ``from_pretrained`` expects them: one of the model may be several there."""

    def __init__(self, model: nn.Module, held: Parts | WholeModel):
        self.model, self.held = model, held
        self.described: Described = {}
        self._of: dict[str, str] = {}
        names = {name: name for name in held.saved}
        names |= {name: kept for name, kept in held.ties.items() if kept in held.saved and not ties_itself(model, name)}
        for name, kept in names.items():
            kind, shape = held.saved[kept]
            for key, tensor in in_files(model, name, torch.empty(shape, dtype=kind, device="meta")).items():
                self.described[key] = tensor.dtype, tuple(tensor.shape)
                self._of[key] = name
        self._names = names
        self._last: tuple[str, dict[str, Tensor]] = "", {}

    def chunks(self, key: str) -> Iterator[Tensor]:
        name = self._of[key]
        if self._last[0] != name:
            self._last = "", {}
            (tensor,) = self.held.chunks(self._names[name])
            self._last = name, in_files(self.model, name, tensor)
        yield self._last[1][key]


def _put_all(files: Files, save: Callable[[Path], None]) -> list[Path | str]:
    """What ``save`` writes into a folder that it is given, into ``files``."""
    with TemporaryDirectory(prefix="meshfit-") as folder:
        save(Path(folder))
        written = sorted(path for path in Path(folder).iterdir() if path.is_file())
        for path in written:
            files.put(path.name, [path.read_bytes()])
    return [files.where(path.name) for path in written]


def _save_config(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    kind = dtype or next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", str(kind).removeprefix("torch."))
    config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        with suppress(ValueError):  # transformers refuses to write one that contradicts itself
            generation.save_pretrained(folder)


def _save_adapters(
    model: Any, held: Parts | WholeModel, target: Path | str, sources: list[Path | str], how: dict[str, Any]
) -> list[Path | str]:
    names = adapters_in_files(model, held.saved)
    lost = [name for name, p in model.named_parameters() if p.requires_grad and name not in names.values()]
    if lost:
        raise CheckpointError(
            f"a file of adapters would leave out {len(lost)} parameters that were trained: {alike(lost)}",
            "name their modules in modules_to_save= of the adapters' config",
            'or result.save("weights.safetensors"), which has all parameters under their own names',
        )
    described = {key: held.saved[name] for key, name in names.items()}
    chunks: Callable[[str], Iterator[Tensor]] = lambda key: held.chunks(names[key])
    written = write(target, described, chunks, stem="adapter_model", **{**how, "shard": 2**63})
    if how["here"]:
        config = copy.copy(model.peft_config[model.active_adapter])
        config.inference_mode = True
        if config.base_model_name_or_path is None and sources:
            config.base_model_name_or_path = str(sources[0])
        files = open_files(target)
        written += [*_put_all(files, config.save_pretrained), *_copied(sources[:1], files)]
    return written


def _copied(sources: list[Path | str], target: Files) -> list[Path | str]:
    """The files of a tokenizer."""
    copied = []
    for source in map(open_files, sources):
        names = [name for name in source.names() if any(fnmatchcase(name, each) for each in BESIDE)]
        for name in names:
            if source.size(name) >= 0 and target.size(name) < 0:
                target.put(name, [source.read(name)])
                copied.append(target.where(name))
    return copied
