"""Weights of files into a model, whatever wrote them: straight into place, one tensor at a time. While the function
that builds the model is recorded nothing is read; each rank reads its part later (initial.py).

A file may have other names than the model: those of its base (``model.`` before each, or not), those that transformers
changes as it loads (hugging_face.py), those without adapters. What is tied in the model needs to be there once.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from meshfit.checkpoint.box import Box, whole
from meshfit.checkpoint.outside import alike, open_weights
from meshfit.checkpoint.read import Tensors
from meshfit.checkpoint.state import saved_tensors
from meshfit.deferred import TensorSource, put_off, unrecorded
from meshfit.errors import CheckpointError
from meshfit.hugging_face import Conversion, FileNames, file_names, has_adapters, is_adapter, names_in_files

SHOWN = 6


class FromFile(TensorSource):
    """A tensor of a file."""

    def __init__(self, tensors: Tensors, key: str):
        self.tensors, self.key = tensors, key
        self.shape = tensors.stored[key].shape

    def part(self, box: Box, room: Tensor) -> None:
        self.tensors.fill(room, box, self.tensors.stored[self.key])


class Converted(TensorSource):
    """A tensor that is made of several of a file, whole whatever part is needed."""

    def __init__(self, tensors: Tensors, name: str, conversion: Conversion):
        self.tensors, self.name, self.conversion = tensors, name, conversion
        described = lambda key: torch.empty(tensors.stored[key].shape, dtype=tensors.stored[key].dtype, device="meta")
        made = conversion.of(name, described)
        if made is None:
            raise CheckpointError(
                f"{tensors.where}: transformers makes {name} of others as it loads, and not by itself",
                f"of {', '.join(key for key, _ in conversion.sources[:3])}",
                "build the model by from_pretrained: every process then has all of it",
            )
        self.shape = tuple(made.shape)

    def _read(self, key: str) -> Tensor:
        stored = self.tensors.stored[key]
        room = torch.empty(stored.shape, dtype=stored.dtype)
        self.tensors.fill(room, whole(stored.shape), stored)
        return room

    def part(self, box: Box, room: Tensor) -> None:
        made = self.conversion.of(self.name, self._read)
        assert made is not None
        room.copy_(made[tuple(slice(*each) for each in box)])


def load_weights(
    model: nn.Module, path: Path | str | Sequence[Path | str], *, partial: bool = False, kind: str = "model"
) -> list[str]:
    """Load weights that anything wrote into ``model``. Of several paths later ones count: a base, then its adapters.
    Another dtype is cast. Every name and shape must fit, or nothing is loaded; with ``partial`` what fits is loaded,
    and what was skipped is returned."""
    paths = [path] if isinstance(path, Path | str) else list(path)
    fitting = Fitting(model)
    with unrecorded():
        for each in paths:
            fitting.add(*open_weights(each, kind))
    differences = fitting.differences()
    if differences and (not partial or not fitting.sources):
        raise fitting.refused(", ".join(map(str, paths)))
    for name, source in fitting.sources.items():
        tensor = fitting.held[name].detach()
        if not put_off(source, tensor):
            with torch.no_grad():
                source(tensor)
    return differences


class Fitting:
    """Which tensor of some files is which of a model."""

    def __init__(self, model: nn.Module):
        self.model = model
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self.held = saved_tensors(model)
        tied: dict[Tensor, list[str]] = {}
        for name, p in parameters.items():
            tied.setdefault(p, []).append(name)
        self.names: dict[str, list[str]] = {}
        """By tensor: its names in files."""
        for name, tensor in self.held.items():
            own = [name, *tied.get(tensor, ())]
            theirs = [other for each in own for other in names_in_files(model, each)]
            self.names[name] = list(dict.fromkeys([*own, *theirs]))
        self.sources: dict[str, TensorSource] = {}
        self.wrong: dict[str, str] = {}
        """Of tensors whose shape is another one: what it is."""
        self.extra: list[str] = []

    def add(self, tensors: Tensors, ties: dict[str, str]) -> None:
        """``ties``: names that a file knows under another one."""
        found, used = self._names_of(tensors), set[str]()
        for name, tensor in self.held.items():
            known = [*self.names[name], *(ties[each] for each in self.names[name] if each in ties)]
            keys = [found.keys[each] for each in known if each in found.keys]
            made = next((each for each in known if each in found.conversions), None)
            used |= {*keys, *known}
            if keys:
                source = FromFile(tensors, keys[0])
            elif made is not None:
                source = Converted(tensors, made, found.conversions[made])
                used |= {key for key, _ in source.conversion.sources}
            else:
                continue
            if source.shape == tuple(tensor.shape):
                self.sources[name] = source
                self.wrong.pop(name, None)
            else:
                self.wrong[name] = f"{list(tensor.shape)} here, {list(source.shape)} in the checkpoint"
        self.extra += [key for key in tensors.stored if key not in used | found.ignored]

    def _names_of(self, tensors: Tensors) -> FileNames:
        own = {each for names in self.names.values() for each in names}
        if tensors.as_is or (has_adapters(self.model) and not tensors.stored.keys().isdisjoint(self.held)):
            return FileNames({key: key for key in tensors.stored})
        return file_names(self.model, own, tensors.stored)

    @property
    def missing(self) -> list[str]:
        """Adapters that no file has are as they were made; all of them, or none."""
        there = any(is_adapter(self.model, name) for name in self.sources)
        lacking = [name for name in self.held if name not in self.sources and name not in self.wrong]
        return [name for name in lacking if there or not is_adapter(self.model, name)]

    def differences(self) -> list[str]:
        missing = [f"{name} is not in the checkpoint" for name in self.missing]
        wrong = [f"{name} has shape {shapes}" for name, shapes in self._misshapen().items()]
        return [*missing, *wrong, *(f"{key} is in the checkpoint, and not in the model" for key in self.extra)]

    def refused(self, where: str) -> CheckpointError:
        missing, wrong, extra = self.missing, self._misshapen(), self.extra
        facts = [f"missing, {len(missing)} of the model's: {alike(missing)}"] if missing else []
        facts += [f"of another shape: {name}, {shapes}" for name, shapes in list(wrong.items())[:SHOWN]]
        facts += [f"and {len(wrong) - SHOWN} more of another shape"] if len(wrong) > SHOWN else []
        facts += [f"extra, {len(extra)} that the model has not: {alike(extra)}"] if extra else []
        count = len(missing) + len(wrong) + len(extra)
        last = "nothing was loaded; partial=True loads what fits, and leaves the rest as the model has it"
        if not self.sources:
            last = "not one tensor fits: is it the weights of this model?"
        headline = f"{where} does not fit the model: {count} difference{'s' * (count != 1)}"
        return CheckpointError(headline, *facts, last)

    def _misshapen(self) -> dict[str, str]:
        return {name: shapes for name, shapes in self.wrong.items() if name not in self.sources}
