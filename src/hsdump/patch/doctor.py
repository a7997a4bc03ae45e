"""Which way of attaching fits an environment, what is in place there now, and undoing whichever it is."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from hsdump.errors import HsdumpError, PatchError
from hsdump.patch.anchors import find_edits
from hsdump.patch.journal import open_journal
from hsdump.patch.live import Process, find_processes
from hsdump.patch.restore import Restored, RestoreOptions, restore
from hsdump.patch.site import Site
from hsdump.patch.status import CLEAN, PATCHED, Status, status
from hsdump.spool.sweep import sweep_dead_spools

_PLUGINS = """
import json, sys
sys.path = [path for path in sys.path if path]
from importlib.metadata import entry_points
print(json.dumps([e.value for e in entry_points(group="sglang.srt.plugins") if e.name == "hsdump"]))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """One environment."""

    package: str
    python: str | None
    sglang_version: str
    native: bool
    """SGLang has its own `--enable-return-aux-hidden-states`: JSON, without the final state; hsdump does not use it."""

    plugin_api: bool
    plugin_installed: bool
    patchable: str
    """Empty, or why the places of the general patch are not found."""

    fits: str
    """`plugin`, `patch` or `none`."""

    in_place: str
    """What of hsdump is there: `plugin`, `patch`, `plugin and patch`, or `nothing`."""

    next: str
    patch: Status
    servers: tuple[Process, ...]


def diagnose(site: Site) -> Diagnosis:
    """Look at an environment; nothing is changed or imported."""
    srt = site.package / "srt"
    api = (srt / "plugins/hook_registry.py").is_file()
    installed = _plugin_installed(site)
    patch = status(site)
    patched = open_journal(site) is not None
    reason = "" if patched else _why_not(site)
    fits = "plugin" if api else "patch" if patched or not reason else "none"
    names = [name for name, there in (("plugin", installed and api), ("patch", patched)) if there]
    return Diagnosis(
        package=str(site.package),
        python=site.python,
        sglang_version=site.version,
        native=_has_native(srt),
        plugin_api=api,
        plugin_installed=installed,
        patchable=reason,
        fits=fits,
        in_place=" and ".join(names) or "nothing",
        next=_next(site, fits, installed, patch),
        patch=patch,
        servers=tuple(find_processes(site)),
    )


def _why_not(site: Site) -> str:
    try:
        find_edits(site)
    except HsdumpError as error:
        return error.what
    return ""


def _has_native(srt: Path) -> bool:
    return any(
        b"enable_return_aux_hidden_states" in path.read_bytes()
        for path in (srt / "server_args.py", *srt.glob("arg_groups/**/*.py"))
        if path.is_file()
    )


def _plugin_installed(site: Site) -> bool:
    if site.python is None:
        return False
    try:
        done = subprocess.run([site.python, "-c", _PLUGINS], capture_output=True, text=True, timeout=120, check=False)
        return bool(json.loads(done.stdout))
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return False


def _next(site: Site, fits: str, installed: bool, patch: Status) -> str:
    python = site.python or "PYTHON"
    if patch.state not in (CLEAN, PATCHED):
        return patch.next or "look at `hsdump patch status`"
    if fits == "plugin":
        if installed:
            return f"hsdump serve --python {python} -- ..."
        return f"{python} -m pip install --no-deps hsdump, then hsdump serve --python {python} -- ..."
    if fits == "patch":
        return f"hsdump {'serve' if patch.state == PATCHED else 'run'} --python {python} -- ..."
    return "name your model's file: hsdump patch plan --target models/NAME.py"


@dataclass(kw_only=True, slots=True)
class Detached:
    """What was undone, and the proofs that nothing of hsdump is left at work."""

    undone: list[str] = field(default_factory=list)
    proofs: list[str] = field(default_factory=list)
    restored: Restored | None = None


def detach(site: Site, options: RestoreOptions, *, uninstall: bool = False) -> Detached:
    """Undo whatever attaches hsdump to an environment.

    Args:
        uninstall: the plugin too; it does nothing in a server that was started without `hsdump serve`.

    Raises:
        PatchError: a server still captures, or the restore is refused.
    """
    done = Detached()
    capturing = [process for process in find_processes(site) if process.spool]
    if capturing and not options.force:
        pids = ", ".join(f"pid {process.pid} ({process.spool})" for process in capturing)
        raise PatchError(f"servers of this environment still capture: {pids}", "stop them first")
    done.restored = restore(site, options)
    if done.restored.patch_id:
        done.undone.append(f"patch {done.restored.patch_id}: {done.restored.outcome}")
        done.proofs += done.restored.proofs
    if uninstall and _plugin_installed(site):
        _uninstall(site)
        done.undone.append("plugin uninstalled")
    swept = sweep_dead_spools()
    if swept.spools:
        done.undone.append(f"{len(swept.spools)} spools of dead servers removed, {swept.num_bytes} bytes")
    after = status(site)
    done.proofs.append(f"source: {after.what}" if after.state == CLEAN else f"source: {after.state}, {after.what}")
    if _plugin_installed(site):
        done.proofs.append("plugin installed, inert: it acts only where `hsdump serve` set HSDUMP_SPOOL")
    else:
        done.proofs.append("no plugin of hsdump is installed")
    done.proofs.append("no process of this environment captures")
    return done


def _uninstall(site: Site) -> None:
    command = [str(site.python), "-m", "pip", "uninstall", "-y", "hsdump"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if run.returncode != 0:
        raise PatchError(f"hsdump could not be uninstalled: {run.stderr.strip()[-200:]}", " ".join(command))
