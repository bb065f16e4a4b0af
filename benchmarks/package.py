"""The package as text: its modules, what they import, and which private names of torch they use. Nothing is run.

``Tree.here()`` reads the working tree, ``Tree.at(revision)`` a commit. benchmarks/house.py prints what is found,
tests/test_imports.py holds the imports to the drawing in docs/README.md.
"""

import ast
import io
import re
import subprocess
import tarfile
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple, Self

ROOT = Path(__file__).parents[1]
PACKAGE, DRAWN_IN = "src/meshfit", "docs/README.md"
BLANK = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)

PRIVATE_FILES = ("torch_private", "torch_private.py", "torch_compat.py")
"""The one folder that may use private names of torch, and the file that it was."""

TORCH_TOO = frozenset(("_parameters", "_buffers", "_modules", "_version", "_apply", "_base", "_cdata"))
"""Attributes of torch's objects that a class of ours may have as well: torch's, unless they are ``self``'s."""

OTHERS = frozenset(
    ("_fields", "_replace", "_asdict", "_fmt", "_inst", "_rand")  # Python, NumPy
    + ("_update_count", "_reductions")  # torchmetrics
    + ("_can_record_outputs", "_CAN_RECORD_REGISTRY", "_attn_implementation")  # transformers
    + ("_keys_to_ignore_on_load_unexpected", "_tied_weights_keys")
)


class Import(NamedTuple):
    source: str  # dotted, without "meshfit": "layout.shard"; "meshfit" is the package's own file
    target: str
    line: int
    inside: bool  # in a function: done when that is called


class Private(NamedTuple):
    file: str
    line: int
    name: str


@dataclass(frozen=True)
class Module:
    path: str  # below src/meshfit
    text: str

    @cached_property
    def parts(self) -> tuple[str, ...]:
        parts = Path(self.path).with_suffix("").parts
        return (parts[:-1] or ("meshfit",)) if parts[-1] == "__init__" else parts

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text)))

    @cached_property
    def docstrings(self) -> list[ast.Constant]:
        """Strings that stand as statements: of modules, classes, functions and fields."""
        statements = (n.value for n in self.nodes if isinstance(n, ast.Expr))
        return [v for v in statements if isinstance(v, ast.Constant) and isinstance(v.value, str)]

    @cached_property
    def strings(self) -> list[tuple[int, str]]:
        """Line and text of string constants, parts of f-strings included; no docstrings."""
        no = set(map(id, self.docstrings))
        constants = (n for n in self.nodes if isinstance(n, ast.Constant) and id(n) not in no)
        return [(c.lineno, c.value) for c in constants if isinstance(c.value, str)]

    @cached_property
    def identifiers(self) -> set[str]:
        """Names, attributes, keywords and arguments, in lower case, without underscores around them."""
        fields = (getattr(n, field, None) for n in self.nodes for field in ("id", "attr", "arg", "name", "asname"))
        return {name.lower().strip("_") for name in fields if isinstance(name, str)}

    @cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        """Code alone: no comments, docstrings, blank lines or indents."""
        left_out = {line for d in self.docstrings for line in lines_of(d)}
        every = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return [t for t in every if t.type not in BLANK and t.start[0] not in left_out]

    @cached_property
    def code_lines(self) -> int:
        return len({line for t in self.tokens for line in range(t.start[0], t.end[0] + 1)})

    @cached_property
    def imports(self) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
        """Import statements, and whether they stand in a function. Not those for type checkers alone."""
        return list(_imports(self.nodes[0], False))


_module = cache(Module)  # what two trees have in common is read once


@dataclass(frozen=True)
class Tree:
    modules: dict[str, Module]
    """By dotted name."""

    rows: list[list[str]]
    """The drawing, from top to bottom."""

    @classmethod
    def of(cls, files: dict[str, str], readme: str = "") -> Self:
        modules = [_module(path, text) for path, text in sorted(files.items())]
        return cls({".".join(m.parts): m for m in modules}, drawing(readme))

    @classmethod
    def here(cls, root: Path = ROOT) -> Self:
        package = root / PACKAGE
        files = {p.relative_to(package).as_posix(): p.read_text() for p in package.rglob("*.py")}
        return cls.of(files, (root / DRAWN_IN).read_text())

    @classmethod
    def at(cls, revision: str) -> Self:
        packed = subprocess.check_output(["git", "archive", revision, PACKAGE, DRAWN_IN], cwd=ROOT)
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            texts = {m.name: f.read().decode() for m in tar if (f := tar.extractfile(m)) is not None}
        files = {n.removeprefix(PACKAGE + "/"): t for n, t in texts.items() if n.endswith(".py")}
        return cls.of(files, texts[DRAWN_IN])

    @cached_property
    def imports(self) -> list[Import]:
        found = []
        for name, module in self.modules.items():
            for node, inside in module.imports:
                if isinstance(node, ast.Import):
                    targets = [a.name for a in node.names]
                else:
                    assert not node.level, f"{module.path}:{node.lineno}: import by full name"
                    full = [f"{node.module}.{a.name}" for a in node.names]
                    targets = [f if f.removeprefix("meshfit.") in self.modules else node.module or "" for f in full]
                ours = dict.fromkeys(t.removeprefix("meshfit.") for t in targets if t.split(".")[0] == "meshfit")
                found += [Import(name, target, node.lineno, inside) for target in ours]
        return found

    @cached_property
    def heights(self) -> dict[str, int]:
        return {name: -n for n, row in enumerate(self.rows) for name in row}

    def drawn(self, module: str) -> str:
        """The name in the drawing that ``module`` belongs to; its top folder or file where none does."""
        parts = module.split(".")
        prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        return next((p for p in prefixes if p in self.heights), parts[0])

    @cached_property
    def undrawn(self) -> list[str]:
        return sorted({self.drawn(module) for module in self.modules} - self.heights.keys())

    @cached_property
    def upward(self) -> list[Import]:
        """Imports of what is neither below in the drawing nor in the same folder."""
        found = []
        for edge in self.imports:
            source, target = self.drawn(edge.source), self.drawn(edge.target)
            if source != target and {source, target} <= self.heights.keys():
                found += [edge] * (self.heights[target] >= self.heights[source])
        return found

    def cycle(self, *, inside: bool) -> dict[tuple[str, str], int]:
        """How many imports go from one folder or top-level file to another from where others lead back."""
        count: dict[tuple[str, str], int] = defaultdict(int)
        after: dict[str, set[str]] = defaultdict(set)
        for edge in self.imports:
            source, target = edge.source.split(".")[0], edge.target.split(".")[0]
            if source != target and (inside or not edge.inside):
                count[source, target] += 1
                after[source].add(target)
        return {(a, b): n for (a, b), n in count.items() if a in _reached(b, after)}


def drawing(readme: str) -> list[list[str]]:
    """The rows of the fenced block ``imports``, from top to bottom. A module may import from rows below its own, and
    from its own folder. ``#`` begins a comment. Older READMEs have a sentence instead: ``a -> {b, c} -> d``."""
    block = re.search(r"^```imports\n(.*?)^```", readme, re.S | re.M)
    if block:
        return [row for line in block[1].splitlines() if (row := line.split("#")[0].split())]
    sentence = re.search(r"Imports point one way: `(.*?)`", readme)
    return [re.findall(r"\w+", row) for row in sentence[1].split("->")] if sentence else []


def lines_of(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _imports(node: ast.AST, inside: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    types = isinstance(node, ast.If) and getattr(node.test, "attr", getattr(node.test, "id", "")) == "TYPE_CHECKING"
    for child in node.orelse if types else ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, inside
        elif not isinstance(child, ast.expr):
            yield from _imports(child, inside)


def _reached(start: str, after: dict[str, set[str]]) -> set[str]:
    seen, todo = {start}, [start]
    while todo:
        new = after.get(todo.pop(), set()) - seen
        seen |= new
        todo += new
    return seen


def private_torch(tree: Tree) -> list[Private]:
    """Private names of torch outside its file: imported, reached from a name that was imported, in a string like
    "torch._dynamo", or attributes of torch's objects. An attribute with an underscore is taken for torch's if the
    package does not define it and it is none of ``OTHERS``; one of ``TORCH_TOO``, if it is not ``self``'s. Not found:
    names that are only compared, like those of operators."""
    own = {name for module in tree.modules.values() for name in _defined(module)}
    found = set()
    for module in tree.modules.values():
        if module.path.partition("/")[0] not in PRIVATE_FILES:
            found |= {Private(module.path, line, name) for line, name in _private_in(module, own)}
    return sorted(found)


def _private_in(module: Module, own: set[str]) -> Iterator[tuple[int, str]]:
    names = {}  # what a name of this file stands for: "F": "torch.nn.functional"
    dotted = [(line, text) for line, text in module.strings if text.startswith("torch.")]
    for node, _ in module.imports:
        base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for a in node.names:
            whole = base + a.name if base or a.asname else a.name.split(".")[0]
            names[a.asname or whole.removeprefix(base)] = whole
            dotted += [(node.lineno, base + a.name)] * (base + a.name).startswith("torch.")
    for node in module.nodes:  # aten = torch.ops.aten
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            whole = _dotted(node.value, names)
            if isinstance(target, ast.Name) and whole.startswith("torch."):
                names[target.id] = whole
    yield from ((line, private) for line, text in dotted if (private := _first_private(text)))
    for node in module.nodes:
        if isinstance(node, ast.Attribute):
            value, name = node.value, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            value, name = node.args[0], getattr(node.args[1], "value", "")
        else:
            continue
        if isinstance(name, str) and _is_private(name):
            whole = _dotted(value, names)
            if whole.split(".")[0] == "torch":
                yield node.lineno, _first_private(f"{whole}.{name}")
            elif not whole and (
                getattr(value, "id", "") not in ("self", "cls") if name in TORCH_TOO else name not in own
            ):
                yield node.lineno, name


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in ("_", *OTHERS)


def _first_private(dotted: str) -> str:
    """``torch._C`` of ``torch._C._autograd.x``; nothing if all is public."""
    parts = dotted.split(".")
    return next((".".join(parts[: n + 1]) for n, part in enumerate(parts) if _is_private(part)), "")


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    """``torch.nn.functional.relu`` of ``F.relu``; nothing if it does not begin with a name of ``names``."""
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value, names)
        return inner and f"{inner}.{node.attr}"
    return names.get(node.id, "") if isinstance(node, ast.Name) else ""


def _defined(module: Module) -> Iterator[str]:
    """Names that a module and its classes give: functions, variables, fields, slots, attributes of ``self``."""
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Module | ast.ClassDef):
            for each in (s for s in node.body if isinstance(s, ast.Assign | ast.AnnAssign)):
                stored = {n.id for n in ast.walk(each) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
                yield from stored
                if "__slots__" in stored:
                    yield from (str(n.value) for n in ast.walk(each) if isinstance(n, ast.Constant))
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("self", "cls"):
            yield from [node.attr] * isinstance(node.ctx, ast.Store)
