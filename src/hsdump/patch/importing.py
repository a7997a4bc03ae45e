"""Whether SGLang imports in its environment with the patched text, tried before any file is changed.

And the code that the blocks import there: a copy of hsdump's server side beside the journal, so that neither installing
hsdump in that environment nor keeping the client's is needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import hsdump
from hsdump.errors import PatchError
from hsdump.patch.disk import Disk
from hsdump.patch.site import Site
from hsdump.spool.names import ENV_DUMP_DIR, ENV_SPOOL

SERVER_SIDE = ("_version.py", "errors.py", "layers.py", "locks.py", "schema.py", "spool", "capture", "sglang")
"""What runs inside SGLang, with torch and the standard library only."""

LIMIT_S = 600
_SWITCHES = (ENV_SPOOL, ENV_DUMP_DIR)

_PROBE = """
import importlib, importlib.abc, importlib.machinery, importlib.util, json, sys
sys.path = [path for path in sys.path if path]
texts = json.loads(sys.argv[1])

class Patched(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        with open(texts[fullname], "rb") as file:
            return compile(file.read(), self.path, "exec")

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname not in texts:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        return importlib.util.spec_from_file_location(fullname, spec.origin, loader=Patched(fullname, spec.origin))

sys.meta_path.insert(0, Finder())
for name in json.loads(sys.argv[2]):
    importlib.import_module(name)
ours = sys.modules.get("hsdump.sglang.patched")
import sglang
print("hsdump-probe " + json.dumps({
    "attached": ours.attached() if ours else [],
    "hsdump": getattr(sys.modules.get("hsdump"), "__file__", None),
    "sglang": list(sglang.__path__),
}))
"""


def copy_code(folder: Path, disk: Disk) -> None:
    """Put hsdump's server side into a folder of its own, durable."""
    source = Path(hsdump.__file__).parent
    paths = [path for name in SERVER_SIDE for path in _sources(source / name)]
    for path in [source / "__init__.py", *paths]:
        target = folder / "hsdump" / path.relative_to(source)
        disk.make_folder(target.parent)
        disk.write(target, path.read_bytes())


def _sources(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def check_imports(site: Site, texts: dict[Path, bytes], expected: list[str]) -> str:
    """Import the files in their environment as they would be, in a process of their own.

    Args:
        texts: file -> what it would hold; empty to import what lies there now.
        expected: the classes that must have been handed over to hsdump.

    Returns:
        A line for the journal.

    Raises:
        PatchError: the import fails, or hsdump does not get its classes.
    """
    if site.python is None:
        raise PatchError(
            f"{site.given.parent} belongs to no interpreter that could import it",
            "name it with --python, or leave the proof out with --no-import-check",
        )
    with tempfile.TemporaryDirectory(prefix="hsdump-patch-") as tmp:
        names = {}
        for number, (path, data) in enumerate(texts.items()):
            text = Path(tmp) / f"{number}.py"
            text.write_bytes(data)
            names[_module(site, path)] = str(text)
        modules = list(names) or ["sglang.srt.model_executor.model_runner"]
        error, found = _run(site, names, modules, Path(tmp) / "spool")
        if error is not None:
            _, plain = _run(site, {}, modules, Path(tmp) / "spool")
            if plain is None:
                raise PatchError(
                    f"SGLang {site.version} does not import in {site.python}'s environment, patched or not: {error}",
                    "set what it needs (SGLANG_USE_CPU_ENGINE=1 on a machine without a GPU), "
                    "or leave the proof out with --no-import-check",
                )
            raise PatchError(f"the patched SGLang does not import: {error}", "nothing was changed; report this")
    assert found is not None
    missing = sorted(set(expected) - set(found["attached"]))
    if missing:
        raise PatchError(
            f"the patched SGLang imports, but hsdump was not given {', '.join(missing)} "
            f"(its code there: {found['hsdump']})",
            "an older hsdump installed in that environment comes first: upgrade or uninstall it there",
        )
    return f"imports in {site.python}'s environment" + (f", hsdump from {found['hsdump']}" if expected else "")


def _module(site: Site, path: Path) -> str:
    return ".".join(path.relative_to(site.root).with_suffix("").parts)


def _run(
    site: Site, names: dict[str, str], modules: list[str], spool: Path
) -> tuple[str | None, dict[str, list[str]] | None]:
    """Give (what went wrong, None) or (None, what was found)."""
    environment = {name: value for name, value in os.environ.items() if name not in _SWITCHES}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "SGLANG_PLUGINS": "none-but-the-patch"}
    paths = [str(site.given.parent), *filter(None, [environment.get("PYTHONPATH")])]
    if site.by_pythonpath or site.editable:
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    if names:
        environment[ENV_DUMP_DIR] = str(spool)
    command = [str(site.python), "-c", _PROBE, json.dumps(names), json.dumps(modules)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=spool.parent
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error), None
    answers = [line for line in done.stdout.splitlines() if line.startswith("hsdump-probe ")]
    if done.returncode != 0 or not answers:
        return (done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"])[0], None
    found: dict[str, list[str]] = json.loads(answers[-1].partition(" ")[2])
    if str(site.package) not in [os.path.realpath(place) for place in found["sglang"]]:
        return f"another SGLang is imported there: {found['sglang']}", None
    return None, found
