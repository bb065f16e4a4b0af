"""docs/fit.md names every argument of ``fit``."""

import inspect
import re
from pathlib import Path

import meshfit


def test_the_page_of_fit_names_all_its_arguments() -> None:
    page = (Path(__file__).parents[1] / "docs" / "fit.md").read_text()
    named = {word for row in re.findall(r"^\|([^|]*)\|", page, re.M) for word in re.findall(r"`(\w+)`", row)}
    missing = set(inspect.signature(meshfit.fit).parameters) - named
    assert not missing
