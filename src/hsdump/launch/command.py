"""The exact command and environment that start the user's SGLang with capture on."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hsdump.errors import UsageError
from hsdump.patch.site import find_site
from hsdump.patch.status import is_patched
from hsdump.spool.names import (
    DEFAULT_SPOOL_BYTES,
    ENV_DUMP_DIR,
    ENV_HAND_OVER,
    ENV_LAYERS,
    ENV_SPOOL,
    ENV_SPOOL_BYTES,
    ENV_STAGING_BYTES,
)

ENTRY_POINT = "hsdump"
"""Our name in the entry point group `sglang.srt.plugins`."""

_PROBE = """
import json
from importlib.metadata import entry_points, version, PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
try:
    sglang = version("sglang")
except PackageNotFoundError:
    sglang = None
plugins = {e.name: e.value for e in entry_points(group="sglang.srt.plugins")}
spec = find_spec("sglang")
folders = (spec and spec.submodule_search_locations) or []
api = any(Path(f, "srt", name).exists() for f in folders for name in ("plugins", "plugins.py"))
print(json.dumps({"sglang": sglang, "plugin": plugins.get("hsdump"), "api": api}))
"""
"""Looks without importing SGLang, which takes 8 s of CPU time with torch and which the server does anyway."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """What `hsdump serve` was asked for."""

    python: str
    """Interpreter of the environment that SGLang lives in."""

    spool: Path
    layers: str = "auto"
    spool_bytes: int = DEFAULT_SPOOL_BYTES
    hand_over: str = "auto"
    staging_bytes: int | None = None
    """None: the server side's own default."""

    attach: str = "plugin"
    """`plugin`, or `patch` for a source that carries hsdump's blocks."""

    sglang_args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeCommand:
    """A command line and the variables to set for it."""

    argv: tuple[str, ...]
    variables: dict[str, str]

    def as_shell(self) -> str:
        """Give it as one would type it, or paste it into a unit file."""
        assignments = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " \\\n  ".join(["env " + " ".join(assignments), shlex.join(self.argv)])


def build_command(options: ServeOptions) -> ServeCommand:
    """Put hsdump's variables before the user's own SGLang command.

    A restricting SGLANG_PLUGINS of the user's keeps its meaning, with hsdump added.

    Raises:
        UsageError: no SGLang arguments.
    """
    args = options.sglang_args
    if not args:
        raise UsageError(
            "there are no SGLang arguments after --",
            "give your own, for instance: hsdump serve -- --model-path MODEL --port 30000",
        )
    variables = {
        ENV_DUMP_DIR if options.attach == "patch" else ENV_SPOOL: str(options.spool),
        ENV_LAYERS: options.layers,
        ENV_SPOOL_BYTES: str(options.spool_bytes),
    }
    if options.hand_over != "auto":
        variables[ENV_HAND_OVER] = options.hand_over
    if options.staging_bytes is not None:
        variables[ENV_STAGING_BYTES] = str(options.staging_bytes)
    allowed = options.environment.get("SGLANG_PLUGINS", "").strip()
    if options.attach == "plugin" and allowed and ENTRY_POINT not in [name.strip() for name in allowed.split(",")]:
        variables["SGLANG_PLUGINS"] = f"{allowed},{ENTRY_POINT}"
    return ServeCommand(argv=(options.python, "-m", "sglang.launch_server", *args), variables=variables)


def check_environment(python: str) -> tuple[str, str]:
    """Make sure that this interpreter has an SGLang with a plugin API and hsdump beside it, or one that is patched.

    Returns:
        SGLang's version, and how capture is attached there: `plugin` or `patch`.

    Raises:
        UsageError: what is missing there, and how to add it.
    """
    try:
        done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{python} does not run ({error})", "name SGLang's interpreter with --python") from error
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise UsageError(f"{python} cannot be asked for its packages: {last[0]}", "name SGLang's own with --python")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    if found["sglang"] is None:
        raise UsageError(
            f"{python} has no SGLang", "name the interpreter that has it: hsdump serve --python PATH -- ..."
        )
    if found["api"] and found["plugin"]:
        return str(found["sglang"]), "plugin"
    if is_patched(find_site(python=python)):
        return str(found["sglang"]), "patch"
    if not found["api"]:
        raise UsageError(
            f"SGLang {found['sglang']} has no plugin API (it came with 0.5.11)",
            f"use SGLang 0.5.11 or later, or patch this one: hsdump run --python {python} -- ...",
        )
    raise UsageError(
        f"hsdump is not installed beside SGLang {found['sglang']} in {python}'s environment",
        f"{python} -m pip install --no-deps hsdump (it needs nothing there that SGLang does not bring)",
    )
