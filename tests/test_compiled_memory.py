"""What compiled code keeps for backward, foretold on fake tensors, against what a compiled forward on the CPU holds."""

from typing import Any

import pytest
import torch

from benchmarks.compiled_memory import CASES, blocks_of, foretold, measured
from tests.few import diagonal

HOW = [(precision, word) for word in ("whole", "block") for precision in ("fp32", "bf16")]


def parted_as_compiled(forward: Any) -> Any:
    """As by inductor, without its kernels, which take half a minute: ``benchmarks/compiled_memory.py`` makes them."""
    from functorch.compile import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    as_it_is: Any = lambda graph, *_, **__: make_boxed_func(graph.forward)
    return torch.compile(forward, backend=lambda graph, inputs: compile_fx(graph, inputs, inner_compile=as_it_is))


@pytest.mark.filterwarnings("ignore")  # dynamo looks at what it warns of itself
@pytest.mark.parametrize(("name", "how"), diagonal(CASES, HOW))
def test_compiled_code_keeps_what_is_foretold(name: str, how: tuple[str, str]) -> None:
    precision, word = how
    blocks = blocks_of(name) if word == "block" else ()
    if word == "block" and not blocks:
        return
    told = foretold(name, 16, f"precision={precision} compile={word}")
    assert told == pytest.approx(measured(name, 16, precision, blocks, parted_as_compiled), rel=0.01)
