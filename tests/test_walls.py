"""Rules about the shape of the code: who imports whom, public names, exit codes, sizes."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import hsdump
import hsdump.errors
from hsdump.errors import HsdumpError

SOURCES = Path(hsdump.__file__).parent

RANKS = {
    part: rank
    for rank, parts in enumerate(
        (
            ("_version", "errors", "arrays", "connections", "keys", "locks", "live"),
            ("layers", "lean", "samples"),
            ("schema",),
            ("spool",),
            ("capture", "engines", "patch", "prompts", "store"),
            ("sglang", "extract", "generate", "launch", "torch"),
            ("verify",),
            ("draft",),
            ("demo",),
            ("cli",),
        )
    )
    for part in parts
}
"""Imports between parts go strictly down, so that each can be read, tested and replaced without those above it."""

SERVER_SIDE = {"_version", "errors", "layers", "locks", "schema", "spool", "capture", "sglang"}
"""Runs in the processes of somebody's server: nothing may be needed there that SGLang does not bring for certain."""

NEVER_FOR_CLIENTS = {"capture", "sglang"}

LONGEST_MODULE = 420
LONGEST_FUNCTION = 60
"""Lines of its body, without the docstring. The goals are 400 and 40; these are where a change has to be split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """One source file, parsed."""

    path: Path
    num_lines: int
    tree: ast.Module

    @property
    def part(self) -> str:
        """The folder or single module directly under hsdump; `__init__` for hsdump itself."""
        return self.path.relative_to(SOURCES).parts[0].removesuffix(".py")

    def imports(self) -> Iterator[tuple[str, int]]:
        """Give every imported module with its line, those inside functions too."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}:{node.lineno}: write imports in full, so that walls can be seen"
                module = str(node.module)
                names = [f"{module}.{alias.name}" for alias in node.names] if module == "hsdump" else [module]
                yield from ((name, node.lineno) for name in names)

    def imported_parts(self) -> Iterator[tuple[str, int]]:
        for name, line in self.imports():
            if name.startswith("hsdump."):
                yield name.split(".")[1], line


@cache
def modules() -> tuple[Module, ...]:
    found = []
    for path in sorted(SOURCES.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found.append(Module(path=path, num_lines=text.count("\n"), tree=ast.parse(text)))
    return tuple(found)


def where(module: Module, line: int) -> str:
    return f"{module.path.relative_to(SOURCES)}:{line}"


def test_every_part_has_a_place() -> None:
    assert {module.part for module in modules()} - {"__init__"} <= RANKS.keys()


def test_imports_between_parts_go_down() -> None:
    wrong = [
        f"{where(module, line)} imports hsdump.{part}"
        for module in modules()
        if module.part != "__init__"
        for part, line in module.imported_parts()
        if part != module.part and RANKS[part] >= RANKS[module.part]
    ]
    assert not wrong


def test_server_side_needs_torch_and_the_standard_library_only() -> None:
    allowed = {"torch", "hsdump", *sys.stdlib_module_names}
    wrong = [
        f"{where(module, line)} imports {name}"
        for module in modules()
        if module.part in SERVER_SIDE
        for name, line in module.imports()
        if name.split(".")[0] not in allowed | ({"sglang"} if module.part == "sglang" else set())
    ]
    wrong += [
        f"{where(module, line)} imports hsdump.{part}"
        for module in modules()
        if module.part in SERVER_SIDE
        for part, line in module.imported_parts()
        if part not in SERVER_SIDE
    ]
    assert not wrong


def test_clients_never_import_sglang_or_what_runs_inside_it() -> None:
    wrong = [
        f"{where(module, line)} imports {name}"
        for module in modules()
        if module.part not in NEVER_FOR_CLIENTS
        for name, line in module.imports()
        if name.split(".")[0] == "sglang" or (name.startswith("hsdump.") and name.split(".")[1] in NEVER_FOR_CLIENTS)
    ]
    assert not wrong


def test_nothing_unpickles() -> None:
    """Stores, spools and inputs come from elsewhere; reading one must never run code."""
    banned = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    wrong = [
        f"{where(module, line)} imports {name}"
        for module in modules()
        for name, line in module.imports()
        if name.split(".")[0] in banned
    ]
    wrong += [
        f"{where(module, node.lineno)} calls torch.load"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "load"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    ]
    assert not wrong


def test_a_server_without_capture_loads_nothing_but_the_plugin_module() -> None:
    """SGLang imports the plugin in each of its processes, on servers that never capture too."""
    probe = (
        "import sys; import hsdump.sglang.plugin; "
        "roots = {name.split('.')[0] for name in sys.modules if not name.startswith('_')}; "
        "print(sorted(roots - set(sys.stdlib_module_names)))"
    )
    # -S: without site-packages' own start-up files, which import what they like; the path is given by hand instead.
    run = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(SOURCES.parent)!r}); {probe}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "['hsdump']"


def test_public_names_are_frozen() -> None:
    assert hsdump.__all__ == ["Store", "__version__"]
    assert all(hasattr(hsdump, name) for name in hsdump.__all__)


def test_an_unknown_public_name_is_an_ordinary_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'hsdump' has no attribute 'Stoer'"):
        _ = hsdump.Stoer


def error_classes() -> list[type[HsdumpError]]:
    """Give every error class of the package, wherever it is defined."""
    for module in pkgutil.walk_packages([str(SOURCES)], "hsdump."):
        importlib.import_module(module.name)

    def below(kind: type[HsdumpError]) -> Iterator[type[HsdumpError]]:
        yield kind
        for child in kind.__subclasses__():
            yield from below(child)

    return [kind for kind in below(HsdumpError) if kind.__module__.startswith("hsdump.")]


def test_each_error_has_an_exit_code_of_its_own() -> None:
    classes = [kind for kind in error_classes() if kind.__module__ == hsdump.errors.__name__]
    codes = {kind.__name__: kind.__dict__.get("exit_code") for kind in classes}
    assert None not in codes.values(), "an error without its own code cannot be told from its parent by a script"
    assert len(set(codes.values())) == len(classes)
    # 0 to 4 are verdicts of verify and extract; from 126 on, shells and signals have their own meanings.
    assert all(4 < int(code or 0) < 126 for code in codes.values())


def test_errors_defined_elsewhere_keep_their_parents_code() -> None:
    """They tell parts of hsdump apart from each other; a script sees the kind that errors.py documents."""
    elsewhere = [kind for kind in error_classes() if kind.__module__ != hsdump.errors.__name__]
    assert not [kind.__name__ for kind in elsewhere if "exit_code" in kind.__dict__]


def test_the_table_of_exit_codes_is_complete() -> None:
    documented = str(hsdump.errors.__doc__)
    rows = [line.replace("├──", "").replace("└──", "").replace("│", "").split() for line in documented.splitlines()]
    table = {row[0]: int(row[1]) for row in rows if len(row) > 2 and row[1].isdecimal()}
    classes = [kind for kind in error_classes() if kind.__module__ == hsdump.errors.__name__]
    assert table == {kind.__name__: kind.exit_code for kind in classes}


def test_modules_are_small() -> None:
    sizes = {str(module.path.relative_to(SOURCES)): module.num_lines for module in modules()}
    assert {path: size for path, size in sizes.items() if size > LONGEST_MODULE} == {}


def test_functions_are_small() -> None:
    sizes = {
        f"{where(module, node.lineno)} {node.name}": body_lines(node)
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: size for name, size in sizes.items() if size > LONGEST_FUNCTION} == {}


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a body from its first statement after the docstring."""
    body = function.body
    if ast.get_docstring(function, clean=False) is not None and len(body) > 1:
        body = body[1:]
    return int(body[-1].end_lineno or 0) - body[0].lineno + 1
