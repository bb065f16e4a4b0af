"""The random generators that a data set or transform of the user's own draws from, seeded for every sample.

Python's ``random``, NumPy's and torch's global generators, and those that the code holds (attributes, closures, globals
of its module: ``find``), are seeded from (seed, epoch, sample) before each sample. So it draws the same numbers whoever
reads it, on however many ranks, after any resume. The global ones are put back afterwards: training draws from them
too. Whether code draws is seen from their states; of what does not, these are compared once a batch, and no more.

What is drawn from a generator that cannot be found (one made anew for each sample, the operating system's) is noticed
by reading some samples twice: see reading.py.
"""

import ctypes
import functools
import random
import threading
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

from meshfit.generators import Generators
from meshfit.python_state import DEPTH, GENERATORS, ITEMS, LIBRARIES, OBJECTS, is_library, names_in

R = TypeVar("R")
_MT_BYTES = 625 * 4  # NumPy's mt19937_state: 624 words and a position

_legacy: Any = np.random
_plain = str | bytes | int | float | complex | None | torch.Tensor | np.ndarray

reading = threading.RLock()
"""Held by who reads what may draw from the global generators."""
_thread = threading.local()


def beside_training() -> bool:
    """Whether this is a thread that reads while another trains: the global generators are not ours here."""
    return getattr(_thread, "reads", False)


def in_reading_thread() -> None:
    """Say so of this thread."""
    _thread.reads = True


@contextmanager
def exclusive() -> Iterator[None]:
    """The global generators for us alone; afterwards they are as they were."""
    with reading:
        held = global_generators()
        try:
            yield
        finally:
            held.restore()


def global_generators() -> Generators:
    """Where Python's, NumPy's and torch's generators stand now."""
    return Generators(torch.device("cpu"))


def put_back(mark: Any) -> None:
    """The global generators as they were at ``mark``; of NumPy's, but for a normal number drawn in advance."""
    torch.random.set_rng_state(torch.frombuffer(bytearray(mark[0]), dtype=torch.uint8))
    random.setstate(mark[1])
    bits = _legacy.get_bit_generator()
    if type(bits).__name__ == "MT19937":
        ctypes.memmove(bits.ctypes.state_address, mark[2], _MT_BYTES)


class CodeGenerators:
    """All generators that ``code`` may draw from."""

    def __init__(self, code: Any):
        self.code = code
        self._own: list[tuple[int, Any]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"code": self.code, "_own": None}

    @property
    def own(self) -> list[tuple[int, Any]]:
        """(a number of its place, generator) for those that ``code`` holds."""
        if self._own is None:
            self._own = [(zlib.crc32(path.encode()), generator) for path, generator in find(self.code)]
        return self._own

    def search_again(self) -> bool:
        """Look for generators anew: whether there are others than before."""
        before, self._own = self._own, None
        return before is not None and [id(g) for _, g in before] != [id(g) for _, g in self.own]

    def seed(self, number: int) -> None:
        """Seed all of them with a number of 32 bits."""
        torch.default_generator.manual_seed(number)
        random.seed(number)
        np.random.seed(number)
        self.seed_own(number)

    def seed_own(self, number: int) -> None:
        """Those that the code holds."""
        for place, generator in self.own:
            _seed(generator, number, place)

    def watch(self, act: Callable[[], R]) -> tuple[R, bool]:
        """What ``act`` returns, and whether it drew from any of them, or made one."""
        self.search_again()
        before = self.mark()
        made = act()
        return made, self.search_again() or self.mark() != before

    def mark(self) -> Any:
        """Changes when any of them is drawn from. Cheaper than their states."""
        marks = [_mark(generator) for _, generator in self.own]
        return torch.random.get_rng_state().numpy().tobytes(), random.getstate(), _numpy_mark(), marks


def seed_rank(number: int, code: Any) -> None:
    """All that a model may draw from in training: ranks that share samples must draw the same, others must not. Of
    those that code holds itself, the first rank goes on with what it finds, as one device does."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)
    CodeGenerators(code).seed_own(number % 2**32)


def _seed(generator: Any, number: int, place: int) -> None:
    both = (number << 32) | place
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        if type(bits).__name__ in ("PCG64", "PCG64DXSM"):  # ten times as fast as a new one's state
            spread = both * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128
            bits.state = {
                "bit_generator": type(bits).__name__,
                "state": {"state": spread ^ (spread >> 64), "inc": 2 * both + 1},
                "has_uint32": 0,
                "uinteger": 0,
            }
        else:
            bits.state = type(bits)(both).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed((number ^ place) & 0xFFFFFFFF)
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(both)
    else:
        generator.seed(both)


def _mark(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().cpu().numpy().tobytes()
    if isinstance(generator, random.Random):
        return None if isinstance(generator, random.SystemRandom) else generator.getstate()
    state: Any = generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()
    return repr(state) if not isinstance(state, tuple) else (state[1].tobytes(), *state[2:])


def _numpy_mark() -> Any:
    """Of NumPy's global generator: read from memory, since ``get_state`` takes as long as a batch."""
    bits = _legacy.get_bit_generator()
    if type(bits).__name__ == "MT19937":
        return ctypes.string_at(bits.ctypes.state_address, _MT_BYTES)
    return repr(np.random.get_state(legacy=False))


def find(code: Any) -> list[tuple[str, Any]]:
    """(path, generator) for every generator that ``code`` holds: in attributes and containers, in the closures,
    defaults and module globals of its functions, and in those that they call; not in libraries."""
    found: list[tuple[str, Any]] = []
    seen = {id(torch.default_generator), id(np.random.mtrand._rand), id(getattr(random, "_inst", None))}
    queue = deque([("", code, 0)])
    keep = []  # ids are of objects that live
    while queue and len(seen) < OBJECTS:
        path, thing, depth = queue.popleft()
        if id(thing) in seen or isinstance(thing, _plain):
            continue
        seen.add(id(thing))
        keep.append(thing)
        if isinstance(thing, GENERATORS):
            found.append((path, thing))
        elif depth < DEPTH:
            queue.extend((f"{path}.{name}", value, depth + 1) for name, value in _inside(thing))
    return found


def _inside(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, dict):  # as dict has it: other mappings may read files, or import a library's models
        yield from ((str(key), value) for key, value in islice(dict.items(thing), ITEMS))
    if isinstance(thing, list | tuple | set | frozenset | deque):
        yield from ((str(i), value) for i, value in enumerate(islice(thing, ITEMS)))
    elif isinstance(thing, functools.partial):
        yield from (("func", thing.func), ("args", thing.args), ("keywords", thing.keywords))
    elif isinstance(thing, types.MethodType):
        yield from (("self", thing.__self__), ("func", thing.__func__))
    elif isinstance(thing, types.BuiltinMethodType):  # rng.normal
        yield "self", thing.__self__
    elif isinstance(thing, types.FunctionType):
        yield from _of_function(thing)
    elif isinstance(thing, staticmethod | classmethod):
        yield "func", thing.__func__
    elif isinstance(thing, property):
        yield "get", thing.fget
    elif isinstance(thing, type):
        if not is_library(thing):
            yield from sorted(vars(thing).items())
    elif not isinstance(thing, types.ModuleType):
        yield from getattr(thing, "__dict__", {}).items()
        for kind in type(thing).__mro__:
            for slot in _slots(kind):
                if slot in vars(kind) and hasattr(thing, slot):
                    yield slot, getattr(thing, slot)
            yield kind.__name__, kind


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return () if is_library(kind) else (slots,) if isinstance(slots, str) else tuple(slots)


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield "defaults", function.__defaults__
    yield "kwdefaults", function.__kwdefaults__
    if is_library(function):
        return
    names = names_in(function.__code__)
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] not in LIBRARIES:
                yield from ((f"{name}.{n}", vars(value)[n]) for n in names if n in vars(value))
        elif value is not None:
            yield name, value
