"""Where an environment keeps its SGLang, which release it is, and whether a file is still as it was installed."""

from __future__ import annotations

import base64
import csv
import difflib
import hashlib
import json
import os
import shlex
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path

from hsdump.errors import PatchError, UsageError

STATE_FOLDER = "sglang.hsdump"
"""Beside the package: journals, lock, the code that the blocks import. Not importable, since its name has a dot."""

_PROBE = """
import json, sys, sysconfig
sys.path = [path for path in sys.path if path]
from importlib.util import find_spec
spec = find_spec("sglang")
places = list((spec and spec.submodule_search_locations) or [])
print(json.dumps({"places": places, "prefix": sys.prefix, "libraries": sysconfig.get_paths()["purelib"]}))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """One installed SGLang."""

    package: Path
    """The folder `sglang`, all links resolved: environments that share it are one to hsdump."""

    given: Path
    """The same folder as the environment names it."""

    python: str | None
    """Interpreter of its environment; None when a folder was named that belongs to none."""

    prefix: Path | None
    """`sys.prefix` of that interpreter."""

    libraries: Path
    """Its `site-packages`: what a process of this environment has files of mapped, torch's at least."""

    version: str
    editable: bool
    """Not a copy made by an installer: a checkout, or a tree put on PYTHONPATH."""

    by_pythonpath: bool = False
    """Found only because PYTHONPATH names it: other processes of that interpreter may run another SGLang."""

    hashes: dict[str, str] = field(default_factory=dict, repr=False)
    """File relative to `root` -> sha256 in hex, as the wheel promised them (RECORD). Empty for an editable one."""

    @property
    def root(self) -> Path:
        """The folder that holds the package."""
        return self.package.parent

    @property
    def state(self) -> Path:
        return self.root / STATE_FOLDER

    def relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    @property
    def how_to_name(self) -> str:
        """The option that names this environment on hsdump's command line."""
        where = ("--python", self.python) if self.python else ("--site", str(self.given.parent))
        return shlex.join(where)


def find_site(*, python: str | None = None, folder: Path | None = None) -> Site:
    """Find the SGLang of an interpreter, or in a `site-packages` or checkout folder.

    Raises:
        UsageError: there is none, or more than one.
    """
    if (python is None) == (folder is None):
        raise UsageError(
            "name one environment", "use --python with SGLang's interpreter, or --site with the folder that holds it"
        )
    if python is not None:
        return _site_of_python(python)
    assert folder is not None
    given = folder.absolute()
    given = given if given.name == "sglang" and (given / "srt").is_dir() else given / "sglang"
    if not (given / "srt").is_dir():
        raise UsageError(f"{folder} holds no sglang package", "name the folder that does, such as .../site-packages")
    interpreter = _interpreter_above(given)
    return _make(given, interpreter, interpreter and interpreter.parents[1], given.parent)


def _site_of_python(python: str) -> Site:
    try:
        done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{python} does not run ({error})", "name SGLang's interpreter with --python") from error
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise UsageError(f"{python} cannot be asked for its packages: {last[0]}", "name SGLang's own with --python")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    places = [place for place in found["places"] if (Path(place) / "srt").is_dir()]
    if not places:
        raise UsageError(f"{python} has no SGLang", "name the interpreter that has it: --python PATH")
    if len(places) > 1:
        raise UsageError(f"{python} has several: {', '.join(places)}", "name one of the folders with --site")
    return _make(Path(places[0]), Path(python), Path(found["prefix"]), Path(found["libraries"]))


def _on_pythonpath(package: Path) -> bool:
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return any(os.path.realpath(path) == str(package.parent) for path in paths if path)


def _interpreter_above(package: Path) -> Path | None:
    """Find `bin/python` of the environment that holds a package folder, by its usual layout."""
    for folder in package.parents:
        if (folder / "pyvenv.cfg").is_file() or (folder / "conda-meta").is_dir():
            python = folder / "bin/python"
            return python if os.access(python, os.X_OK) else None
    return None


def _make(given: Path, python: Path | None, prefix: Path | None, libraries: Path) -> Site:
    package = given.resolve()
    found = list(distributions(name="sglang", path=[str(package.parent)]))
    if len(found) > 1:
        raise UsageError(
            f"{package.parent} holds the metadata of {len(found)} SGLang installations",
            "a failed upgrade leaves that behind; install SGLang again there first",
        )
    hashes = _record_hashes(found[0]) if found else {}
    version = found[0].version if found else _version_in_source(package)
    if version is None and python is not None:
        version = _version_by_metadata(python)
    return Site(
        package=package,
        given=given,
        python=None if python is None else str(python),
        prefix=prefix,
        libraries=libraries.resolve(),
        version=version or "unknown",
        editable=not any(name.startswith("sglang/srt/") for name in hashes),
        by_pythonpath=_on_pythonpath(package),
        hashes=hashes,
    )


def _record_hashes(dist: Distribution) -> dict[str, str]:
    hashes = {}
    for row in csv.reader((dist.read_text("RECORD") or "").splitlines()):
        if len(row) == 3 and row[1].startswith("sha256="):
            digest = row[1].removeprefix("sha256=")
            hashes[row[0]] = base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex()
    return hashes


def _version_in_source(package: Path) -> str | None:
    """Read what setuptools wrote into a checkout."""
    for name in ("_version.py", "version.py"):
        path = package / name
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
            name_, equals, value = line.partition("=")
            if equals and name_.split(":")[0].split()[-1:] in (["__version__"], ["version"]):
                return value.split("=")[-1].strip().strip("'\"") or None
    return None


def _version_by_metadata(python: Path) -> str | None:
    code = "from importlib.metadata import version; print(version('sglang'))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=120, check=False)
    return done.stdout.strip() or None


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, slots=True)
class Origin:
    """Whether a file is what was installed."""

    state: str
    """`as installed`, `modified`, or `unknown` when nothing says what was installed."""

    detail: str


def origin(site: Site, path: Path) -> Origin:
    """Compare a file with the wheel's own hash, or, in a checkout, with what git has committed.

    Raises:
        PatchError: the file cannot be read.
    """
    try:
        digest = sha256(path.read_bytes())
    except OSError as error:
        raise PatchError(f"{path} cannot be read ({error})", "see its permissions, and who owns it") from error
    promised = site.hashes.get(site.relative(path))
    if promised is not None:
        if digest == promised:
            return Origin("as installed", "equals the hash in the wheel's RECORD")
        return Origin("modified", f"sha256 {digest[:16]}..., the wheel's RECORD says {promised[:16]}...")
    return _by_git(path)


def _by_git(path: Path) -> Origin:
    """Compare with what git has committed; git's own diff would refresh its index, and nothing may be changed here."""
    command = ["git", "-C", str(path.parent), "show", f"HEAD:./{path.name}"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return Origin("unknown", "no RECORD lists it, and git does not answer")
    if done.returncode != 0:
        return Origin("unknown", "no RECORD lists it, and it is in no git repository")
    now = path.read_bytes()
    if done.stdout != now:
        return Origin("modified", f"differs from git's HEAD:\n{unified(done.stdout, now, 'HEAD', path.name).rstrip()}")
    return Origin("as installed", "equals git's HEAD")


def unified(old: bytes, new: bytes, old_name: str, new_name: str) -> str:
    """Give a unified diff of two texts."""
    lines: Iterable[str] = difflib.unified_diff(
        old.decode("utf-8", "replace").splitlines(keepends=True),
        new.decode("utf-8", "replace").splitlines(keepends=True),
        old_name,
        new_name,
    )
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)
