"""Writes down what a function does to tensors, and runs it on meta."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshfit.deferred.program import CPU, META, BuildProgram, Draws, RecordedOp, StorageView, Unfollowable
from meshfit.errors import in_short
from meshfit.torch_private.kernels import aten
from meshfit.torch_private.modules import own_buffers, own_parameters
from meshfit.torch_private.operators import (
    OpOverload,
    TorchDispatchMode,
    packet_of,
    schema_of,
    without_torch_function,
    written,
)
from meshfit.torch_private.tensors import holders, storage_id, version
from meshfit.torch_private.trees import tree_leaves, tree_map

SMALL = 2**20
"""Bytes up to which a tensor that comes from elsewhere is copied, since it might be changed later."""

OVERWRITE = {aten.uniform_, aten.normal_, aten.fill_, aten.zero_, aten.copy_, aten.random_, aten.exponential_}
OVERWRITE |= {aten.bernoulli_, aten.cauchy_, aten.log_normal_, aten.geometric_}
"""Write every element of a tensor, and read none."""

OTHER_MEMORY = {aten.set_, aten.resize_, aten.resize_as_}


class BuildRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[RecordedOp] = []
        self.sizes: dict[int, int] = {}
        """Bytes of each storage that was made here."""
        self.number: dict[int, int] = {}
        """Of storages, by the id that torch has for them."""
        self.kept: list[torch.UntypedStorage] = []  # so that no id is given twice
        self.constants: list[tuple[Tensor, int]] = []
        self.draws: dict[int, Draws] = {}
        self.written: dict[int, int] = {}
        """By storage, the last operation that changed it."""
        self._read: dict[int, tuple[int, torch.UntypedStorage]] = {}
        self._is_aside = False

    def knows(self, t: Tensor) -> bool:
        return t.device.type == "meta" and storage_id(t) in self.number

    def view(self, t: Tensor) -> StorageView:
        return StorageView.of(t, self.number[storage_id(t)])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_aside:
            return func(*args, **(kwargs or {}))
        with self.aside():
            return self._run(func, args, kwargs or {})

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within it nothing is recorded."""
        before, self._is_aside = self._is_aside, True
        try:
            with without_torch_function():
                yield
        finally:
            self._is_aside = before

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        mine = [t for t in given if self.knows(t)]
        device = kwargs.get("device")
        random = torch.Tag.nondeterministic_seeded in func.tags
        to_meta = device is not None and device.type == "meta"
        if any(t.is_meta for t in given if not self.knows(t)):
            raise Unfollowable(f"{func} is given a tensor on meta, which has no values")
        if given and not mine and not to_meta:  # made elsewhere, or read: it has its values
            if random:
                raise Unfollowable(f"{func} on a tensor that was not made empty")
            return func(*args, **kwargs)
        if device is not None and device.type not in ("cpu", "meta"):
            raise Unfollowable(f"tensors are made on {device}")
        if not given and to_meta:
            return func(*args, **kwargs)
        if func is aten.set_.source_Tensor and len(mine) == 2:
            return func(*args, **kwargs)  # as where ``.data`` is set
        if packet_of(func) in OTHER_MEMORY:
            raise Unfollowable(f"{func}")
        others = [t for t in given if not self.knows(t) and t.device.type == "cpu"]
        stands = {id(t): torch.empty_like(t, device=META) for t in others}
        on_meta = lambda x: stands.get(id(x), x) if isinstance(x, Tensor) else x
        there = tree_map(on_meta, args), tree_map(on_meta, kwargs)
        if "device" in kwargs or (not given and "device" in {a.name for a in schema_of(func).arguments}):
            there[1]["device"] = META
        there[1].pop("pin_memory", None)
        changed = written(func, args, kwargs)
        if any(not self.knows(t) for t in changed):
            raise Unfollowable(f"{func} changes a tensor that was not made empty")
        try:
            made = func(*there[0], **there[1])
        except (NotImplementedError, RuntimeError) as error:
            if changed:
                raise Unfollowable(f"{func}: {in_short(error)}") from error
            return self._now(func, args, kwargs)
        outs = [t for t in tree_leaves(made) if isinstance(t, Tensor)]
        if not outs and not changed:
            return self._now(func, args, kwargs)
        if any(t.device.type != "meta" for t in outs) or {*map(storage_id, outs)} & {*map(storage_id, stands.values())}:
            raise Unfollowable(f"{func} returns what it was given")
        new = [t for t in outs if storage_id(t) not in self.number]
        if not new and not changed:
            return made  # a view
        self._write_down(func, args, kwargs, outs, changed, random=random)
        return made

    def _write_down(
        self, func: Any, args: Any, kwargs: dict[str, Any], outs: list[Tensor], changed: list[Tensor], *, random: bool
    ) -> None:
        created = set()
        for t in outs:
            if storage_id(t) not in self.number:
                self.kept.append(t.untyped_storage())
                number = self.number[storage_id(t)] = len(self.kept)
                self.sizes[number] = t.untyped_storage().nbytes()
                created.add(number)
        changes = {self.view(t).storage for t in changed}
        whole = {v.storage for v in map(self.view, changed) if v.covers(self.sizes[v.storage])}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and self.knows(t)]
        read = [self.view(t).storage for t in given]
        overwritten = set()
        if not isinstance(func, OpOverload) or packet_of(func) in OVERWRITE:
            overwritten = {s for s in whole if read.count(s) == 1}
        op = RecordedOp(
            func,
            tree_map(self._argument, args),
            {key: tree_map(self._argument, value) for key, value in kwargs.items()},
            tuple(self.view(t) for t in outs),
            frozenset(read) - overwritten,
            frozenset(changes),
            frozenset(created),
            frozenset(overwritten),
        )
        if random:
            generator = kwargs.get("generator") or torch.default_generator
            if generator.device.type != "cpu":
                raise Unfollowable(f"a generator of {generator.device}")
            draws = self.draws.setdefault(id(generator), Draws(generator))
            op.generator = id(generator)
            op.before, op.drawn = draws.draw()
        for number in created | changes:
            self.written[number] = len(self.ops)
        self.ops.append(op)

    def _argument(self, x: Any) -> Any:
        if isinstance(x, torch.Generator):
            return self.draws.setdefault(id(x), Draws(x))
        if not isinstance(x, Tensor):
            return x
        if self.knows(x):
            return self.view(x)
        if x.nbytes > SMALL:
            self.constants.append((x, version(x)))
            return x
        return x.detach().clone()

    def _now(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        real = lambda x: self.read(x) if isinstance(x, Tensor) and self.knows(x) else x
        return func(*tree_map(real, args), **tree_map(real, kwargs))

    def read(self, t: Tensor) -> Tensor:
        """The values of a tensor at this moment."""
        view = self.view(t)
        at, memory = self._read.get(view.storage, (-1, None))
        if at != self.written[view.storage]:
            program = BuildProgram(self.ops, self.sizes, [view.storage])
            if program.draws:
                raise Unfollowable("it reads random numbers that it has drawn")
            ((_, memory),) = program.run()
            self._read[view.storage] = self.written[view.storage], memory
        assert memory is not None
        return view.on(memory).clone()

    def whole(self, before: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """For a function that fills a tensor with random numbers, and looks at them: it is run as a whole."""

        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            later = self.later(before, tensor, *args, random=True, **kwargs)
            return tensor if later else before(tensor, *args, **kwargs)

        return call

    def later(self, function: Callable[..., Any], tensor: Tensor, *args: Any, random: bool = False, **kw: Any) -> bool:
        """Whether ``function(tensor, ...)``, which fills it, was written down."""
        with self.aside():
            known = self.knows(tensor)
            if known:
                self._write_down(function, (tensor, *args), kw, [], [tensor], random=random)
        return known

    def left_elsewhere(self, model: Any) -> bool:
        """Whether tensors that were made here are held by anything but attributes of modules of ``model``."""
        modules = model.modules() if isinstance(model, nn.Module) else ()
        homes = (home for m in modules for home in (own_parameters(m), own_buffers(m), vars(m)))
        held = {id(t): t for home in homes for t in home.values() if isinstance(t, Tensor)}
        there = Counter(storage_id(t) for t in held.values())
        return any(holders(storage) > 1 + there[storage_id(storage)] for storage in self.kept)

    def check(self) -> None:
        for tensor, count in self.constants:
            if version(tensor) != count:
                raise Unfollowable("it changes a tensor after it has copied from it")


READS = {"tolist", "numpy", "__array__", "item", "__bool__", "__float__", "__int__", "__index__", "__complex__"}


class OnCPU(TorchFunctionMode):
    """What the function sees of tensors on meta: that they are on the CPU."""

    def __init__(self, recorder: BuildRecorder):
        super().__init__()
        self.recorder = recorder
        attribute = lambda name: getattr(torch.Tensor, name).__get__
        self.said = {attribute("device"): CPU, attribute("is_meta"): False, attribute("is_cpu"): True}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.said and self.recorder.knows(args[0]):
            return self.said[func]
        if func is Tensor.__setitem__ and self.recorder.knows(args[0]) and not isinstance(args[2], Tensor):
            args = *args[:2], torch.full((), args[2], dtype=args[0].dtype)  # torch would make it on meta by itself
        if func in (Tensor.to, Tensor.cpu) and self.recorder.knows(args[0]):
            args, kwargs = _without_cpu(args, kwargs or {})  # it is there: what is returned shares its memory
            if func is Tensor.cpu or (len(args) == 1 and not kwargs):
                return args[0]
        if getattr(func, "__name__", "") in READS and args and isinstance(args[0], Tensor):
            with self.recorder.aside():
                if self.recorder.knows(args[0]):
                    found = func(self.recorder.read(args[0]), *args[1:], **(kwargs or {}))
                    if isinstance(found, np.ndarray):
                        found.flags.writeable = False  # what is written there would be lost
                    return found
        return func(*args, **(kwargs or {}))


def _without_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of ``Tensor.to`` without the device, if that is the CPU."""
    device = next((a for a in args[1:] if isinstance(a, str | torch.device)), kwargs.get("device"))
    if device is None or torch.device(device).type != "cpu":
        return args, kwargs
    rest = (args[0], *(a for a in args[1:] if not isinstance(a, str | torch.device) and a is not None))
    rest = tuple(a for a in rest if not isinstance(a, bool)) if len(rest) == 1 or isinstance(rest[1], bool) else rest
    return rest, {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking")}
