"""Finding the places to insert at, in the syntax tree: each found exactly once, or the whole plan is refused.

No line numbers and no text search: a fork may have moved, renamed or reformatted everything around them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hsdump.errors import PatchError, UsageError
from hsdump.patch.blocks import Block, marks
from hsdump.patch.site import Site

_LOGITS = ("self", "input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states")
_RUNNER = ("self", "forward_batch")
_BATCH = ("cls", "batch", "model_runner")

LOGITS_FILE = "layers/logits_processor.py"
RUNNER_FILE = "model_executor/model_runner.py"
BATCH_FILE = "model_executor/forward_batch_info.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """What one file gets."""

    path: Path
    original: bytes
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class _Source:
    path: Path
    data: bytes
    tree: ast.Module


_MakeBlocks = Callable[[Site, _Source, ast.ClassDef], tuple[Block, ...]]


class _NotThere(Exception):
    """The class is not in this file, or not with what is needed; says which."""


def find_edits(site: Site, target: str | None = None) -> tuple[Edit, ...]:
    """Find all places of the general patch, or of the tap in one model's forward loop.

    Args:
        target: a model file below `sglang/srt`, such as models/deepseek_v2.py; None for the general patch.

    Raises:
        PatchError: a place is missing or ambiguous in this source, or it carries a patch.
        UsageError: no such target.
    """
    batch = _find_class(site, BATCH_FILE, "ForwardBatch", _batch_block)
    if target is None:
        found = [
            _find_class(site, LOGITS_FILE, "LogitsProcessor", _logits_block),
            _find_class(site, RUNNER_FILE, "ModelRunner", _runner_block),
            batch,
        ]
        return tuple(edit for edit in found if edit.blocks)
    return tuple(edit for edit in (_find_loop(site, target), batch) if edit.blocks)


def _find_class(site: Site, usual: str, name: str, make: _MakeBlocks) -> Edit:
    """Find a class at its usual place, or anywhere below `sglang/srt` when a fork has moved it."""
    srt = site.package / "srt"
    tried: list[str] = []
    found: list[Edit] = []
    for path in _candidates(srt, usual, name):
        try:
            source = _parse(path)
            kind = _only_class(source, name)
            found.append(Edit(path=path, original=source.data, blocks=make(site, source, kind)))
        except _NotThere as reason:
            tried.append(f"{site.relative(path)}: {reason}")
        if path == srt / usual and found:
            break
    if len(found) != 1:
        what = "; ".join(tried) if not found else ", ".join(site.relative(edit.path) for edit in found)
        raise PatchError(
            f"the place for {name} is {'missing' if not found else 'ambiguous'} in SGLang {site.version} "
            f"({what or f'no file below srt defines {name}'})",
            "use --target with the file of your model, such as --target models/deepseek_v2.py",
        )
    return found[0]


def _candidates(srt: Path, usual: str, name: str) -> Iterator[Path]:
    if (srt / usual).is_file():
        yield srt / usual
    needle = f"class {name}".encode()
    for path in sorted(srt.rglob("*.py")):
        if path != srt / usual and needle in path.read_bytes():
            yield path


def _parse(path: Path) -> _Source:
    data = path.read_bytes()
    found = marks(data)
    if found:
        raise PatchError(
            f"{path} carries hsdump's patch {', '.join(found)} already", "see `hsdump patch status`; restore it first"
        )
    try:
        data.decode("utf-8")
        return _Source(path, data, ast.parse(data, filename=str(path)))
    except (SyntaxError, ValueError) as error:
        raise PatchError(
            f"{path} is not Python as this interpreter reads it ({error})", "mend the file first"
        ) from None


def _only_class(source: _Source, name: str) -> ast.ClassDef:
    kinds = [node for node in source.tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    if len(kinds) != 1:
        raise _NotThere(f"{len(kinds)} classes {name} at the top of the file")
    bound = [
        node.lineno
        for node in source.tree.body
        if isinstance(node, ast.Assign | ast.FunctionDef)
        for target in (node.targets if isinstance(node, ast.Assign) else ())
        if isinstance(target, ast.Name) and target.id == name
    ]
    if bound:
        raise _NotThere(f"{name} is bound again in line {bound[0]}")
    return kinds[0]


def _method(kind: ast.ClassDef, name: str, first: Sequence[str]) -> ast.FunctionDef:
    """Find a method by its name and first parameters."""
    methods = [node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == name]
    if len(methods) != 1:
        raise _NotThere(f"{kind.name} has {len(methods)} methods {name}")
    names = [argument.arg for argument in (*methods[0].args.posonlyargs, *methods[0].args.args)]
    if tuple(names[: len(first)]) != tuple(first):
        raise _NotThere(f"{kind.name}.{name} takes ({', '.join(names)}), expected ({', '.join(first)}, ...)")
    return methods[0]


def _after(site: Site, source: _Source, kind: ast.ClassDef, block: str, methods: str) -> Block:
    line = int(kind.end_lineno or 0)
    anchor = f"{site.relative(source.path)}:{line} after class {kind.name} ({methods})"
    return Block(kind=block, after_line=line, name=kind.name, anchor=anchor)


def _logits_block(site: Site, source: _Source, kind: ast.ClassDef) -> tuple[Block, ...]:
    _method(kind, "forward", _LOGITS)
    return (_after(site, source, kind, "logits", "forward"),)


def _runner_block(site: Site, source: _Source, kind: ast.ClassDef) -> tuple[Block, ...]:
    _method(kind, "load_model", ("self",))
    _method(kind, "forward", _RUNNER)
    return (_after(site, source, kind, "runner", "load_model, forward"),)


def _batch_block(site: Site, source: _Source, kind: ast.ClassDef) -> tuple[Block, ...]:
    """Nothing where a batch knows its requests' ids, as it does from 0.5.10 on."""
    fields = {ast.unparse(node.target) for node in kind.body if isinstance(node, ast.AnnAssign)}
    if "rids" in fields:
        return ()
    method = _method(kind, "init_new", _BATCH)
    if [ast.unparse(decorator) for decorator in method.decorator_list] != ["classmethod"]:
        raise _NotThere(f"{kind.name}.init_new is no plain classmethod")
    return (_after(site, source, kind, "batch", "init_new: request ids"),)


def _find_loop(site: Site, target: str) -> Edit:
    path = (site.package / "srt" / target).resolve()
    if not path.is_file() or site.package not in path.parents:
        raise UsageError(
            f"--target {target} is no file below {site.package}/srt", "name a model's file: --target models/NAME.py"
        )
    source = _parse(path)
    found = []
    reasons = []
    for kind in source.tree.body:
        if isinstance(kind, ast.ClassDef):
            try:
                found.append((kind, *_loop_places(source, kind)))
            except _NotThere as reason:
                if "loops" in str(reason):
                    reasons.append(f"{kind.name}: {reason}")
    if len(found) != 1:
        names = ", ".join(kind.name for kind, *_ in found)
        what = f"{len(found)} classes have one ({names})" if found else "; ".join(reasons) or "no class has one"
        raise PatchError(
            f"{target} has no single forward loop over layers with a residual: {what}",
            "use the general patch: no --target",
        )
    kind, loop, norm = found[0]
    where = site.relative(path)
    begin, body = loop.lineno - 1, loop.body[0].lineno - 1
    assert isinstance(loop.target, ast.Name)
    blocks = (
        Block(kind="begin", after_line=begin, indent=_indent(source, loop), anchor=f"{where}:{begin} before the loop"),
        Block(
            kind="layer",
            after_line=body,
            name=loop.target.id,
            indent=_indent(source, loop.body[0]),
            anchor=f"{where}:{body} first in the loop over layers of {kind.name}.forward",
        ),
        Block(
            kind="final",
            after_line=int(norm.end_lineno or 0),
            indent=_indent(source, norm),
            anchor=f"{where}:{norm.end_lineno} after the final norm",
        ),
        _after(site, source, kind, "model", "__init__"),
    )
    return Edit(path=path, original=source.data, blocks=blocks)


def _loop_places(source: _Source, kind: ast.ClassDef) -> tuple[ast.For, ast.stmt]:
    """Find the loop over layers and the statement after which `hidden_states` is the final state."""
    forwards = [node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "forward"]
    if len(forwards) != 1:
        raise _NotThere("no forward")
    forward = forwards[0]
    names = {argument.arg for argument in forward.args.args}
    if not {"input_ids", "forward_batch"} <= names:
        raise _NotThere("its forward takes no input_ids and forward_batch")
    loops = [node for node in forward.body if isinstance(node, ast.For) and _is_layer_loop(node)]
    if len(loops) != 1:
        raise _NotThere(f"{len(loops)} loops over self.layers that pass hidden_states and residual on")
    place = forward.body.index(loops[0])
    norms = [node for node in forward.body[place + 1 :] if _assigns(node, "hidden_states", "self.norm(")]
    if len(norms) != 1:
        raise _NotThere(f"{len(norms)} statements after the loop that apply self.norm to hidden_states")
    for node in (loops[0], loops[0].body[0], norms[0]):
        _indent(source, node)
    return loops[0], norms[0]


def _is_layer_loop(loop: ast.For) -> bool:
    if not isinstance(loop.target, ast.Name) or not ast.unparse(loop.iter).startswith("range("):
        return False
    uses = any(ast.unparse(node) == f"self.layers[{loop.target.id}]" for node in ast.walk(loop))
    passes = any(
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and [ast.unparse(name) for name in node.targets[0].elts[:2]] == ["hidden_states", "residual"]
        for node in ast.walk(loop)
    )
    return uses and passes


def _assigns(statement: ast.stmt, name: str, call: str) -> bool:
    return any(
        isinstance(node, ast.Assign) and name in ast.unparse(node.targets[0]) and call in ast.unparse(node.value)
        for node in ast.walk(statement)
    )


def _indent(source: _Source, node: ast.stmt) -> str:
    """Give the white space before a statement, which must begin its line."""
    line = source.data.splitlines()[node.lineno - 1].decode("utf-8")
    before = line[: len(line) - len(line.lstrip())]
    if len(before.encode()) != node.col_offset:
        raise _NotThere(f"line {node.lineno} holds more than one statement")
    return before
