"""``fit`` in a real notebook: what is defined in cells trains in ranks, the bar is one output, the result a page."""

import base64
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshfit.observe.notebook import busy, kernel_display

EXAMPLE = Path(__file__).parents[1] / "examples" / "notebook.ipynb"
EXECUTE = """
import sys, nbformat
from jupyter_client import KernelManager
from nbclient import NotebookClient
book = nbformat.read(sys.argv[1], 4)
book.cells.append(nbformat.v4.new_code_cell(
    "def broken(outputs, targets): raise ValueError('in a cell')\\n"
    "try:\\n"
    "    meshfit.fit(Net, train, valid=valid, plan='data=2', **{**asked, 'loss': broken})\\n"
    "except Exception as error:\\n"
    "    print(type(error).__name__, 'in a cell' in str(error))"
))
manager = KernelManager()
manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
NotebookClient(book, km=manager, timeout=240).execute()
nbformat.write(book, sys.argv[2])
"""


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """The outputs of each code cell."""
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    folder = tmp_path_factory.mktemp("notebook")
    asked = [sys.executable, "-c", EXECUTE, str(EXAMPLE), "executed.ipynb"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(asked, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    book = nbformat.read(folder / "executed.ipynb", 4)
    return [cell.outputs for cell in book.cells if cell.cell_type == "code"]


def test_a_cell_shows_one_bar_and_the_result(executed: list[list[Any]]) -> None:
    for outputs, plan in ((executed[1], "data=1"), (executed[2], "data=2")):
        bar, result = outputs  # no line a step, and nothing on standard error
        assert bar.output_type == "display_data"
        assert "84 of 84 steps" in bar.data["text/plain"]
        assert "width:100.0%" in bar.data["text/html"]
        assert "valid: loss" in bar.data["text/plain"]
        html = result.data["text/html"]
        assert f"{plan}, batch of 64" in html
        pictures = [base64.b64decode(found).decode() for found in re.findall(r"svg\+xml;base64,([\w+/=]+)", html)]
        assert len(pictures) == (1 if plan == "data=1" else 2)
        assert pictures[0].count(">rank ") == int(plan[-1])
        assert "forward and backward" in pictures[0]
        assert plan in result.data["text/plain"]


def test_ranks_train_what_cells_define(executed: list[list[Any]]) -> None:
    losses = [re.search(r"loss</td>.*?to ([\d.e-]+)<", outputs[1].data["text/html"]) for outputs in executed[1:3]]
    one, two = (float(found[1]) for found in losses if found)
    assert two == pytest.approx(one, rel=1e-3)
    assert executed[-1][-1].text == "RankError True\n"


def test_no_notebook() -> None:
    assert kernel_display() is None


def test_a_picture_of_how_busy_ranks_were() -> None:
    svg = busy([{"forward_backward": 3.0, "exchange": 1.0}] * 20, 4.0)
    assert "the first 16 of 20 ranks" in svg
    assert svg.count('class="k-forward_backward"') == 16 + 1  # and the legend
    assert re.search(r"<title>waiting for other ranks, 25.0%</title>", svg)
