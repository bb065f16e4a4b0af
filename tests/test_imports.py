"""Imports point one way, as docs/README.md draws it."""

import os
import subprocess
import sys
from collections.abc import Iterator

import cloudpickle
import pytest

import meshfit
from benchmarks import package
from benchmarks.house import recurring
from benchmarks.package import Private, Tree, private_torch
from meshfit.torch_private.compilation import COMPILER

README = """
```imports
cli
run  loop   # one step
data
```
"""


@pytest.fixture(scope="module")
def tree() -> Iterator[Tree]:
    yield Tree.here()
    package._module.cache_clear()  # half a million nodes, which each search for garbage would look at


def test_imports_point_down(tree: Tree) -> None:
    assert tree.undrawn == [], "docs/README.md draws every folder and top-level file"
    assert tree.heights.keys() == {tree.drawn(module) for module in tree.modules}, "and nothing else"
    upward = [f"{edge.source}, line {edge.line}: {edge.target}" for edge in tree.upward]
    assert upward == [], "imports against the drawing in docs/README.md"


def test_one_class_name_one_class(tree: Tree) -> None:
    assert recurring(tree) == {}


def test_private_torch_is_in_its_file_alone(tree: Tree) -> None:
    assert private_torch(tree) == [], "give it a name in meshfit/torch_private/, with a test in test_torch_private.py"


def imported(code: str) -> set[str]:
    """The modules that a fresh Python has after ``code``."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    said = f"import atexit, sys; atexit.register(lambda: print(*sys.modules, sep='\\n', file=sys.stderr)); {code}"
    done = subprocess.run([sys.executable, "-c", said], env=env, capture_output=True, text=True, check=True)
    return set(done.stderr.splitlines())


def test_importing_meshfit_leaves_the_compiler_alone() -> None:
    """It takes as long to import as torch does, and an import of torch's own may bring it in unseen."""
    modules = imported("from meshfit import *")
    assert {"torch", "meshfit.fit", "meshfit.verify"} <= modules
    assert COMPILER not in modules


def test_help_waits_for_no_torch() -> None:
    modules = imported("import meshfit; sys.argv = ['meshfit', '--help']; from meshfit.cli import main; main()")
    assert "meshfit.cli.verbs" in modules
    assert not modules & {"torch", "numpy", "meshfit.cli.train"}


def test_public_names_are_what_they_are_whatever_is_imported_first() -> None:
    assert "meshfit.verify" in imported(
        "from meshfit.result import Result; import meshfit.evaluate; from meshfit import predict, verify;"
        "assert meshfit.evaluate.__name__ == 'evaluate' and verify is meshfit.verify and callable(verify);"
        "assert callable(meshfit.fit) and meshfit.observe.track.Track is meshfit.observe.Track"
    )


def test_the_package_is_a_module_like_others() -> None:
    assert cloudpickle.loads(cloudpickle.dumps(lambda: meshfit))() is meshfit
    assert set(meshfit.__all__) <= set(dir(meshfit))
    assert not hasattr(meshfit, "nothing")


def test_an_import_upward_or_sideways_is_found() -> None:
    files = {
        "cli/main.py": "from meshfit.run import run\nimport torch",
        "run.py": "from meshfit import loop, data\nfrom meshfit.data.order import order",
        "loop.py": "",
        "data/__init__.py": "from meshfit.data import order",
        "data/order.py": "if TYPE_CHECKING:\n    from meshfit import run\ndef f():\n    import meshfit.cli.main",
        "new.py": "",
    }
    tree = Tree.of(files, README)
    assert tree.rows == [["cli"], ["run", "loop"], ["data"]]
    assert tree.undrawn == ["new"]
    assert tree.upward == [("data.order", "cli.main", 4, True), ("run", "loop", 1, False)]
    assert tree.cycle(inside=False) == {}
    assert tree.cycle(inside=True) == {("cli", "run"): 1, ("run", "data"): 2, ("data", "cli"): 1}


def test_private_names_of_torch_are_found_and_our_own_are_not() -> None:
    ours = """
        import os
        import torch
        import torch.nn.functional as F
        from torch import Tensor, nn
        from torch.utils._pytree import tree_map
        aten = torch.ops.aten
        LOADED = "torch._dynamo"
        class Layer(nn.Module):
            _count: int = 0
            def forward(self, x: Tensor) -> Tensor:
                self._kept = self._count
                os._exit(0)
                return F.linear(x, layer._kept, shape._fields, x.__class__, self._buffers)
        F._pad
        aten._softmax
        Tensor._make_subclass
        x.storage()._cdata
        module._buffers
        getattr(module, "_forward_hooks")
    """
    tree = Tree.of({"layer.py": ours.replace("\n        ", "\n"), "torch_private/c.py": "import torch\ntorch._C"})
    assert private_torch(tree) == [
        Private("layer.py", 6, "torch.utils._pytree"),
        Private("layer.py", 8, "torch._dynamo"),
        Private("layer.py", 15, "torch.nn.functional._pad"),
        Private("layer.py", 16, "torch.ops.aten._softmax"),
        Private("layer.py", 17, "torch.Tensor._make_subclass"),
        Private("layer.py", 18, "_cdata"),
        Private("layer.py", 19, "_buffers"),
        Private("layer.py", 20, "_forward_hooks"),
    ]
