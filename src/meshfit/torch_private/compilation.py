"""Compilation: limits, sizes and pieces of captured graphs."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
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


def fake_tensors() -> AbstractContextManager[Any]:
    """Tensors that are made within it have shapes and devices, and no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


class _Partitioned(Exception):
    """Nothing more is asked of the compiler."""


def saved_for_backward(
    forward: Callable[..., Any], weights: Sequence[Any], inputs: Sequence[Any]
) -> list[tuple[Any, bool]]:
    """The tensors that ``forward(weights, inputs)``, compiled, keeps for backward, those of its inputs among them; each
    with whether it is computed of weights alone. It takes fake tensors, and returns such: AOTAutograd traces forward
    and backward and parts them, with inductor's decompositions and passes, and no code is made of it."""
    from functorch.compile import aot_function
    from torch._guards import detect_fake_mode
    from torch._inductor import compile_fx, config
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V

    found: list[tuple[Any, bool]] = []

    def parted(joint: Any, joint_inputs: Any, **how: Any) -> Any:
        how["static_lifetime_input_indices"] = list(range(len(weights)))  # they are there anyway
        ahead, back = compile_fx.partition_fn(joint, joint_inputs, **how)
        names = list(_placeholders(ahead))
        given, of_weights = dict(zip(names, (*weights, *inputs), strict=False)), set(names[: len(weights)])
        for node in ahead.graph.nodes:
            if node.all_input_nodes and all(taken.name in of_weights for taken in node.all_input_nodes):
                of_weights.add(node.name)
        for name, value in _placeholders(back).items():
            if not name.startswith("tangents") and isinstance(value, torch.Tensor):
                found.append((given.get(name, value), name in of_weights))
        raise _Partitioned

    as_it_is: Any = lambda graph, _: graph
    weights, inputs = list(weights), list(inputs)
    mode = detect_fake_mode((weights, inputs))
    compiled = aot_function(forward, as_it_is, as_it_is, parted, select_decomp_table(), len(weights))
    # products are padded by what the device measures
    with config.patch(shape_padding=False), V.set_fake_mode(mode), suppress(_Partitioned):
        compiled(weights, inputs)
    return found


def _placeholders(graph: Any) -> dict[str, Any]:
    return {node.name: node.meta.get("val") for node in graph.graph.nodes if node.op == "placeholder"}
