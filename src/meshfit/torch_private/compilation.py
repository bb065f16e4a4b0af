"""Compilation: limits, sizes and pieces of captured graphs."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional

COMPILER = "torch._dynamo"
"""Takes a second to import, and building an optimizer imports it."""


_compiling: list[tuple[int, frozenset[str]]] = []
_as_found: tuple[int, str] = (0, "")
_changing = threading.Lock()


@contextmanager
def compiling_alike(times: int, numbers: Iterable[str] = ()) -> Iterator[None]:
    """Within it, in all threads, code is compiled anew ``times`` times if need be (past its limit torch silently leaves
    code as it is), and what is compiled holds for any value of the integers that modules have under the names
    ``numbers``, unless their code decides by it."""
    mine = times, frozenset(numbers)
    with _changing:
        _compiling.append(mine)
        _set_compiling()
    try:
        yield
    finally:
        with _changing:
            _compiling.remove(mine)
            _set_compiling()


def _set_compiling() -> None:
    global _as_found
    from torch._dynamo import config

    if len(_compiling) == 1 and not _as_found[0]:
        _as_found = config.recompile_limit, torch.compiler.config.dynamic_sources
    limit, sources = _as_found
    numbers = sorted(frozenset().union(*(names for _, names in _compiling)))
    config.recompile_limit = max(limit, *(times for times, _ in _compiling)) if _compiling else limit
    torch.compiler.config.dynamic_sources = ",".join(
        [*([sources] if sources else []), *(rf".*\.{name}$" for name in numbers)]
    )
    if not _compiling:
        _as_found = 0, ""


def size_hint(size: Any) -> int:
    """The size of a dim that a captured graph knows, or what it was when the graph was captured."""
    return size if isinstance(size, int) else int(size.node.hint or 1)


def compiled_at(starts: Sequence[Any], graph: Any, inputs: Any, backend: str) -> Callable[..., Any]:
    """A captured graph compiled in pieces, each beginning with one of the nodes ``starts``, calls of functions all.
    Strides that a piece gives its results are those that the next is compiled for."""
    from torch._dynamo.backends.distributed import DDPOptimizer
    from torch._dynamo.backends.registry import lookup_backend

    compiler = lookup_backend(backend)
    if not starts:
        return compiler(graph, inputs)
    computing = (node for node in graph.graph.nodes if node.op == "call_function")
    marks = {*starts, next(computing)}

    class AtNodes(DDPOptimizer):  # it begins a piece where the one behind has bytes enough
        def add_param(self, bucket: Any, param: Any, name: str) -> None:
            pass

        def add_param_args(self, bucket: Any, node: Any) -> None:
            bucket.size += node in marks

    return AtNodes(1, compiler, 1).compile_fn(graph, inputs)
