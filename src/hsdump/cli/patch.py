"""`hsdump patch`: put capture into an SGLang without a plugin API, and give its source back byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import typer
from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from hsdump.cli.output import Result, emit
from hsdump.patch.blocks import insert
from hsdump.patch.environments import find_sites, remember
from hsdump.patch.journal import Journal, open_journal, read_journals
from hsdump.patch.restore import RestoreOptions, restore
from hsdump.patch.restore import clean as clean_site
from hsdump.patch.site import Site, find_site, sha256, unified
from hsdump.patch.status import PATCHED, Status
from hsdump.patch.status import status as status_of
from hsdump.patch.transaction import ApplyOptions, make_plan
from hsdump.patch.transaction import apply as apply_patch
from hsdump.spool.names import ENV_DUMP_DIR

PYTHON = typer.Option(None, "--python", help="Interpreter of the environment that SGLang lives in.")
SITE = typer.Option(None, "--site", help="Or the folder that holds the package: site-packages, or a checkout's python.")
JSON = typer.Option(False, "--json", help="Print the result as JSON.")
TARGET = typer.Option(None, help="Put the tap into this model file's forward loop: models/deepseek_v2.py.")
FORCE = typer.Option(False, help="Although a server seems to run, or GPU memory is held.")
CHECK = typer.Option(True, help="Prove that SGLang imports in its environment.")

EXAMPLES = {"apply": " --reason TICKET-7", "status": " --json", "diff": " --target models/deepseek_v2.py"}
"""What some verbs have behind the interpreter."""


def add_to(app: typer.Typer) -> None:
    verbs = typer.Typer(
        name="patch",
        help="Put capture into an SGLang without a plugin API (before 0.5.11, or a fork), and give its source back.",
        no_args_is_help=True,
        epilog="Example:  hsdump patch apply --python /opt/sglang/bin/python --reason TICKET-7",
    )
    for name, command in COMMANDS.items():
        example = f"Example:  hsdump patch {name} --python /opt/sglang/bin/python{EXAMPLES.get(name, '')}"
        verbs.command(name, epilog=example)(command)
    app.add_typer(verbs)


def plan(python: str = PYTHON, site: Path = SITE, target: str = TARGET, json: bool = JSON) -> None:
    """Say what apply would change and where; nothing is written."""
    found = find_site(python=python, folder=site)
    planned = make_plan(found, target)
    files = [
        {"path": change.record.path, "origin": change.record.origin, "anchors": change.record.anchors}
        for change in planned.changes
    ]
    lines = [f"{found.package}: SGLang {found.version}"]
    lines += [f"  {file['path']} ({file['origin']})" for file in files]
    lines += [f"    {anchor}" for change in planned.changes for anchor in change.record.anchors]
    lines.append("see the text with `hsdump patch diff`; put it in with `hsdump patch apply`")
    data = {"package": str(found.package), "sglang_version": found.version, "target": target, "files": files}
    raise typer.Exit(emit(Result(data=data, text=Text("\n".join(lines))), as_json=json))


def apply(
    python: str = PYTHON,
    site: Path = SITE,
    target: str = TARGET,
    reason: str = typer.Option("", help="Why, for the journal: a ticket, a name."),
    accept_modified: bool = typer.Option(False, help="Patch files that differ from what was installed."),
    import_check: bool = CHECK,
    force: bool = FORCE,
    json: bool = JSON,
) -> None:
    """Put the patch in: backup, journal, one rename a file; refused with the reason when something is not right."""
    found = find_site(python=python, folder=site)
    options = ApplyOptions(
        target=target, reason=reason, accept_modified=accept_modified, import_check=import_check, force=force
    )
    journal = apply_patch(found, options)
    remember(found)
    lines = [f"patch {journal.patch_id} is in {found.package} (SGLang {found.version})"]
    lines += [f"  {record.path}  sha256 {record.after[:16]}..., backup beside it" for record in journal.files]
    lines += [f"  {event['what']}" for event in journal.events]
    start = f"hsdump serve --python {found.python or 'PYTHON'} -- ..."
    lines.append(f"start the server with capture: {start}, or with {ENV_DUMP_DIR}=/dev/shm/hsdump-NAME set")
    lines.append(f"take it out again: hsdump patch restore {found.how_to_name}")
    raise typer.Exit(emit(Result(data=journal, text=Text("\n".join(lines))), as_json=json))


def status(
    python: str = PYTHON,
    site: Path = SITE,
    all_: bool = typer.Option(False, "--all", help="Every environment of this machine that hsdump can find."),
    search: list[Path] = typer.Option(None, help="With --all: look below this folder, too. Repeat it."),
    json: bool = JSON,
) -> None:
    """Say what state environments are in. Exit codes: 0 clean, 1 patched, 2 somebody has to look."""
    sites = find_sites(list(search or [])) if all_ else [find_site(python=python, folder=site)]
    found = [status_of(one) for one in sites]
    code = max((one.exit_code for one in found), default=0)
    text: RenderableType = Group(*map(show_status, found)) if found else "no SGLang found; name one with --python"
    raise typer.Exit(emit(Result(data=found, text=text, exit_code=code), as_json=json))


def verify(python: str = PYTHON, site: Path = SITE, json: bool = JSON) -> None:
    """Hash files, backups and originals again. Exit codes: 0 all as the journal or the wheel says, 2 not."""
    found = status_of(find_site(python=python, folder=site))
    sound = found.state in (PATCHED, "clean")
    table = Table("file", "is", "backup")
    for file in found.files:
        table.add_row(file.path, file.state, file.backup or "none expected")
    text = Group(show_status(found), table)
    raise typer.Exit(emit(Result(data=found, text=text, exit_code=0 if sound else 2), as_json=json))


def diff(python: str = PYTHON, site: Path = SITE, target: str = TARGET, json: bool = JSON) -> None:
    """Show the patch: what is in the files, and what was edited since; or what apply would put in."""
    found = find_site(python=python, folder=site)
    journal = open_journal(found)
    text = make_plan(found, target).diff if journal is None else journal.diff
    since = "" if journal is None else _edits(found, journal)
    data = {"applied": journal is not None, "diff": text, "edited_since": since}
    shown: RenderableType = Syntax(text, "diff", word_wrap=True)
    if since:
        shown = Group(shown, "edited since:", Syntax(since, "diff", word_wrap=True))
    raise typer.Exit(emit(Result(data=data, text=shown), as_json=json))


def _edits(site: Site, journal: Journal) -> str:
    """Give the difference between what was applied and what is there, as far as the backups allow."""
    shown = []
    for record in journal.files:
        path, backup = record.file(site), record.backup(site)
        if path.is_file() and backup.is_file() and sha256(path.read_bytes()) not in (record.after, record.before):
            patched = insert(backup.read_bytes(), record.texts)
            shown.append(unified(patched, path.read_bytes(), f"{record.path} (patched)", f"{record.path} (now)"))
    return "".join(shown)


def restore_command(
    python: str = PYTHON,
    site: Path = SITE,
    keep_edits: bool = typer.Option(False, help="Give the original back with later edits of others in it."),
    without_backup: bool = typer.Option(False, help="Without a sound backup: take the blocks out; proved by hash."),
    import_check: bool = CHECK,
    force: bool = FORCE,
    json: bool = JSON,
) -> None:
    """Give the originals back, byte for byte, mode and times too, and prove it."""
    found = find_site(python=python, folder=site)
    options = RestoreOptions(
        keep_edits=keep_edits, without_backup=without_backup, import_check=import_check, force=force
    )
    done = restore(found, options)
    lines = [f"{found.package}: {done.outcome}" + (f" (patch {done.patch_id})" if done.patch_id else "")]
    lines += [f"  {path}  sha256 {digest}" for path, digest in done.files.items()]
    lines += [f"  {proof}" for proof in done.proofs]
    if done.files:
        lines.append(f"backups and journal stay until: hsdump patch clean {found.how_to_name}")
    raise typer.Exit(emit(Result(data=done, text=Text("\n".join(lines))), as_json=json))


def clean(
    python: str = PYTHON,
    site: Path = SITE,
    orphans: bool = typer.Option(False, help="Backups that no journal knows, too."),
    json: bool = JSON,
) -> None:
    """Remove backups and journals of patches that were restored."""
    removed = clean_site(find_site(python=python, folder=site), orphans=orphans)
    text = Text("\n".join(f"removed {name}" for name in removed) or "nothing to remove")
    raise typer.Exit(emit(Result(data={"removed": removed}, text=text), as_json=json))


def log(python: str = PYTHON, site: Path = SITE, json: bool = JSON) -> None:
    """Print the whole journal as text for a ticket: what, when, by whom, hashes, diff."""
    journals = read_journals(find_site(python=python, folder=site))
    if json:
        raise typer.Exit(emit(Result(data=journals, text=""), as_json=True))
    if not journals:
        typer.echo("no patch was ever applied here, or its journal was cleaned away")
    for journal in journals:
        typer.echo(_ticket(journal))


def _ticket(journal: Journal) -> str:
    lines = [
        f"hsdump patch {journal.patch_id}: {journal.state}",
        f"  package   {journal.package} (SGLang {journal.sglang_version})",
        f"  applied   {journal.created} by {journal.by} with hsdump {journal.hsdump_version}",
        f"  reason    {journal.reason or 'none given'}",
        f"  target    {journal.target or 'general: every model'}",
    ]
    for record in journal.files:
        lines += [
            f"  file      {record.path} ({record.origin})",
            f"    before  sha256 {record.before}, mode {record.stamp['mode']:04o}, owner {record.stamp['uid']}",
            f"    after   sha256 {record.after}",
            *(f"    at      {anchor}" for anchor in record.anchors),
        ]
    lines += [f"  {event['at']}  {event['by']}  {event['what']}" for event in journal.events]
    return "\n".join([*lines, "", journal.diff])


COMMANDS: dict[str, Callable[..., None]] = {
    "plan": plan,
    "apply": apply,
    "status": status,
    "diff": diff,
    "verify": verify,
    "restore": restore_command,
    "clean": clean,
    "log": log,
}


def show_status(found: Status) -> RenderableType:
    """Show one environment in a few lines."""
    head = Text.assemble((f"{found.state}  ", "bold"), f"{found.package} (SGLang {found.sglang_version})")
    lines = [f"  {found.what}"]
    if found.patch_id:
        by = f"  patch {found.patch_id} by hsdump {found.hsdump_version}, {found.since}, {found.by}"
        lines.append(by + (f", because: {found.reason}" if found.reason else ""))
    if found.editable:
        lines.append("  an editable installation or a tree of its own, not a wheel's copy")
    if found.next:
        lines.append(f"  next: {found.next}")
    return Group(head, Text("\n".join(lines)))
