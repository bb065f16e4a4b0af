"""How large and how tidy is the package, and what does a new axis touch: before and after.

    python benchmarks/house.py --base REV             # a commit beside the working tree
    python benchmarks/house.py --base REV --short     # no lists

Both trees are read as text; nothing of the package is run.

Code lines have a token that is neither comment nor docstring. Files that a new axis, schedule or source
touches are counted at those that are there: its own, whose path has its word, and the others whose code has it: as a
name, attribute or keyword (``plan.branch``, ``Branches``), as a string ("branch", "branch=2", "schedule=zbv"), or in an
import of one of its own. Duplicated lines are those of 60 tokens in a row that stand elsewhere too, but for names,
strings and numbers; imports aside.
"""

import argparse
import ast
import keyword
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.package import Module, Tree, lines_of, private_torch

WINDOW = 60
LONGEST = 5
AXES, SCHEDULES, SOURCES = (
    ("branch", "expert", "context"),
    ("interleaved", "zbv", "dualpipev"),
    ("sql", "tars", "jsonl"),
)
WORDS = {"axis": AXES, "schedule": SCHEDULES, "source": SOURCES}
FOLDERS = {"context": "sequence"}
"""Folders of an axis that had another name than its word."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, metavar="REV", help="the commit to compare the working tree with")
    parser.add_argument("--short", action="store_true", help="figures alone, no lists")
    options = parser.parse_args()
    trees = Tree.at(options.base), Tree.here()
    before, after = map(found, trees)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(beside("By folder", ("files ", "lines ", "code lines "), sizes(trees)))
    console.print(beside("Found", ("",), {title: [before[title][0], after[title][0]] for title in before}))
    for title, of in (("Longest functions", functions), ("Longest files", files)):
        table = Table("before", "after", title=title, title_justify="left")
        for pair in list(zip(*map(of, trees), strict=False))[:LONGEST]:
            table.add_row(*(f"{lines} {what}" for lines, what in pair))
        console.print(table)
    for title, (count, places) in {} if options.short else after.items():
        print(f"\n{title}: {count}", *places, sep="\n  ")


def beside(title: str, heads: Sequence[str], rows: dict[str, list[int]]) -> Table:
    table = Table("", title=title, title_justify="left")
    for head in heads:
        table.add_column(f"{head}before", justify="right")
        table.add_column("after", justify="right")
    for name, cells in rows.items():
        table.add_row(name, *(f"{cell:,}" for cell in cells))
    return table


def sizes(trees: Sequence[Tree]) -> dict[str, list[int]]:
    """Of each folder: files, lines and code lines, before and after."""
    every: dict[str, list[int]] = defaultdict(lambda: [0] * 6)
    for after, tree in enumerate(trees):
        for module in tree.modules.values():
            for name in (module.path.partition("/")[0] if "/" in module.path else "top-level files", "total"):
                for n, more in enumerate((1, len(module.text.splitlines()), module.code_lines)):
                    every[name][2 * n + after] += more
    return dict(sorted(every.items(), key=lambda item: (item[0] == "total", item[0])))


def found(tree: Tree) -> dict[str, tuple[int, list[str]]]:
    """How often, and where."""
    every = {}
    for title, inside in (("imports against the drawing", False), ("... in functions", True)):
        edges = [edge for edge in tree.upward if edge.inside == inside]
        every[title] = len(edges), [f"{edge.source} -> {edge.target}, line {edge.line}" for edge in edges]
    every["not in the drawing"] = len(tree.undrawn), tree.undrawn
    for title, inside in (("folders and files in import cycles", False), ("... imports in functions too", True)):
        cycle = tree.cycle(inside=inside)
        after = {a: [f"{b} {n}" for (source, b), n in cycle.items() if source == a] for a, _ in cycle}
        every[title] = len(after), [f"{a} -> {', '.join(targets)}" for a, targets in sorted(after.items())]
    classes = recurring(tree)
    every["class names that recur"] = len(classes), [f"{name}: {' '.join(paths)}" for name, paths in classes.items()]
    private = private_torch(tree)
    every["private torch outside its folder"] = len(private), [f"{p.file}:{p.line} {p.name}" for p in private]
    lines = Counter(path for path, _ in duplicated(tree))
    every["duplicated lines"] = sum(lines.values()), [f"{path} {n}" for path, n in lines.most_common()]
    for kind, words in WORDS.items():
        for word in words:
            own, others = having(tree, word)
            every[f"{kind} {word}: its own files"] = len(own), own
            every[f"{kind} {word}: other files"] = len(others), others
    return every


def having(tree: Tree, word: str) -> tuple[list[str], list[str]]:
    """The files whose path has ``word``, and the others whose code has it."""
    forms = {word, word + ("es" if word.endswith("ch") else "s")}
    own = {name for name, module in tree.modules.items() if {*forms, FOLDERS.get(word)} & set(module.parts)}
    others = {edge.source for edge in tree.imports if edge.target in own} - own
    for name, module in tree.modules.items():
        if name not in own and (
            forms & module.identifiers
            or any(text in forms or re.search(rf"\b{word}=|={word}\b", text) for _, text in module.strings)
        ):
            others.add(name)
    return [tree.modules[n].path for n in sorted(own)], [tree.modules[n].path for n in sorted(others)]


def recurring(tree: Tree) -> dict[str, list[str]]:
    """Class names that stand for several classes, with their files."""
    every: dict[str, list[str]] = defaultdict(list)
    for module in tree.modules.values():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                every[node.name].append(module.path)
    return {name: paths for name, paths in sorted(every.items()) if len(paths) > 1}


def duplicated(tree: Tree) -> set[tuple[str, int]]:
    """File and line of what stands elsewhere, too."""
    places: dict[int, list[tuple[str, int]]] = defaultdict(list)
    streams = {module.path: list(shape(module)) for module in tree.modules.values()}
    for path, tokens in streams.items():
        words = [word for word, _ in tokens]
        for start in range(len(words) - WINDOW + 1):
            places[hash(tuple(words[start : start + WINDOW]))].append((path, start))
    every = set()
    for same in places.values():
        (first, begin), (last, end) = same[0], same[-1]
        if first != last or end - begin >= WINDOW:  # a row of like lines is no duplicate of itself
            every |= {(path, line) for path, start in same for _, line in streams[path][start : start + WINDOW]}
    return every


def shape(module: Module) -> Iterator[tuple[str, int]]:
    """Tokens with their lines, where all names are alike, and all strings and numbers. No imports."""
    imports = {line for n in module.nodes if isinstance(n, ast.Import | ast.ImportFrom) for line in lines_of(n)}
    for token in module.tokens:
        alike = token.type == tokenize.NAME and not keyword.iskeyword(token.string)
        value = token.type in (tokenize.STRING, tokenize.NUMBER)
        if token.start[0] not in imports:
            yield "name" if alike else "0" if value else token.string, token.start[0]


def functions(tree: Tree) -> list[tuple[int, str]]:
    every = [(m.path, n) for m in tree.modules.values() for n in m.nodes]
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return sorted(((len(lines_of(n)), f"{path}: {n.name}") for path, n in every if isinstance(n, kinds)), reverse=True)


def files(tree: Tree) -> list[tuple[int, str]]:
    return sorted(((len(m.text.splitlines()), m.path) for m in tree.modules.values()), reverse=True)


if __name__ == "__main__":
    main()
