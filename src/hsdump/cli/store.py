"""`hsdump store`: look into a store, repair it, and make stores of stores."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hsdump.cli.output import Result, emit
from hsdump.cli.progress import byte_progress
from hsdump.errors import UsageError
from hsdump.store import Store, StoreWriter, WriterOptions
from hsdump.store.attach import RemoteOptions, read_local_part, release
from hsdump.store.export import FORMATS, ExportOptions, export_store
from hsdump.store.info import StoreInfo, store_info
from hsdump.store.scrub import Progress as Tick
from hsdump.store.scrub import ScrubReport, repair, scrub
from hsdump.store.surgery import SurgeryOptions, SurgeryReport, merge, recode, remove, split
from hsdump.verify.norms import NormHistogram, scan_rows
from hsdump.verify.show import human_bytes

STORE = typer.Argument(..., help="Folder that `hsdump extract --out` wrote; where it is only read, also a URL.")
PATIENCE_S = 60.0
"""Of an upload that somebody waits for at a terminal."""

JSON = typer.Option(False, "--json", help="Print the result as JSON.")
DRY_RUN = typer.Option(False, "--dry-run", help="Say what would be done, and do nothing.")
SHARD_BYTES = typer.Option(1 << 30, min=1 << 16, help="Size at which a shard is closed.")

EXAMPLES = {
    "info": "/data/kimi-store",
    "ls": "/data/kimi-store --failed",
    "show": "0 --store /data/kimi-store",
    "scrub": "/data/kimi-store --repair",
    "merge": "/data/part-a /data/part-b --out /data/kimi-store",
    "split": "/data/kimi-store --out /data/train --out /data/test --shares 0.95,0.05",
    "rm": "3f2a9c --store /data/kimi-store --dry-run",
    "recode": "/data/kimi-store --codec blosc2 --out /data/kimi-small",
    "export": "/data/kimi-store --to specforge --out /data/for-specforge",
    "push": "/data/kimi-store s3://bucket/kimi-store --local-bytes 100000000000",
    "release": "s3://bucket/kimi-store",
}
"""Of each verb, what is typed behind it."""


def add_to(app: typer.Typer) -> None:
    verbs = typer.Typer(name="store", help="Look into a store, repair it, make stores of stores.", no_args_is_help=True)
    for name, command in COMMANDS.items():
        verbs.command(name, epilog=f"Example:  hsdump store {name} {EXAMPLES[name]}")(command)
    app.add_typer(verbs)


def info(store: Path = STORE, json: bool = JSON) -> None:
    """Say what a store holds."""
    found = store_info(store)
    raise typer.Exit(emit(Result(data=found, text=_show_info(found)), as_json=json))


def ls(
    store: Path = STORE,
    limit: int = typer.Option(100, min=0, help="Most rows; 0 for all."),
    failed: bool = typer.Option(False, help="The samples that failed instead."),
    json: bool = JSON,
) -> None:
    """List samples: key, tokens, learned tokens, bytes, shard, source."""
    with Store(store) as opened:
        if failed:
            rows = [
                {"key": f.key, "tokens": f.num_tokens, "reason": f.reason, "detail": f.detail, "source": f.source}
                for f in islice(opened.failures().values(), limit or None)
            ]
            total = len(opened.failures())
        else:
            indexed = (opened.row(place) for place in range(min(len(opened), limit or len(opened))))
            rows = [
                {
                    "key": row.record.key,
                    "tokens": row.record.num_tokens,
                    "learned": row.record.num_learned,
                    "bytes": sum(entry.num_bytes for entry in row.record.tensors),
                    "shard": row.shard,
                    "source": row.record.source,
                }
                for row in indexed
            ]
            total = len(opened)
    result = Result(data={"total": total, "rows": rows}, text=_rows_table(rows, total))
    raise typer.Exit(emit(result, as_json=json))


def show(
    sample: str = typer.Argument(..., help="A key, the beginning of one, or a position from 0."),
    store: Path = typer.Option(..., "--store", help="Folder that `hsdump extract --out` wrote, or URL."),
    tokens: int = typer.Option(32, min=0, help="Token ids to print."),
    json: bool = JSON,
) -> None:
    """Show one sample: where it lies, its tensors, the norms of its states, its first tokens."""
    with Store(store) as opened:
        data = _describe(opened, _find(opened, sample), tokens)
    raise typer.Exit(emit(Result(data=data, text=_show_sample(data)), as_json=json))


def scrub_command(
    store: Path = STORE,
    repair_: bool = typer.Option(False, "--repair", help="Save the sound samples of damaged shards; quarantine these."),
    json: bool = JSON,
) -> None:
    """Prove every byte. Exit codes: 0 sound, 1 damage repaired, 2 damage found."""
    with byte_progress("store") as tick:
        report = repair(store, tick) if repair_ else scrub(store, tick)
    raise typer.Exit(emit(Result(data=report, text=_show_scrub(report), exit_code=report.exit_code), as_json=json))


def merge_command(
    stores: list[Path] = typer.Argument(..., help="Stores of the same capture."),
    out: Path = typer.Option(..., help="The store to write, new or begun."),
    shard_bytes: int = SHARD_BYTES,
    dry_run: bool = DRY_RUN,
    json: bool = JSON,
) -> None:
    """Copy several stores into one; a sample that several have is taken once."""
    with byte_progress("store") as tick:
        report = merge(stores, out, _surgery(dry_run, shard_bytes, tick))
    _emit_surgery(report, json)


def split_command(
    store: Path = STORE,
    out: list[Path] = typer.Option(..., help="A store to write; repeat it for each part."),
    shares: str = typer.Option(..., help="Share of each --out, as 0.95,0.05."),
    seed: int = typer.Option(0, help="Which samples go where; the same for every store that holds them."),
    shard_bytes: int = SHARD_BYTES,
    dry_run: bool = DRY_RUN,
    json: bool = JSON,
) -> None:
    """Divide a store's samples among new stores, for instance for training and validation."""
    try:
        parts = [float(share) for share in shares.split(",")]
    except ValueError:
        raise UsageError(f"--shares {shares!r} are not numbers", "write them as --shares 0.95,0.05") from None
    if len(parts) != len(out):
        raise UsageError(f"{len(parts)} shares for {len(out)} stores", "give one share for each --out")
    with byte_progress("store") as tick:
        report = split(store, dict(zip(out, parts, strict=True)), _surgery(dry_run, shard_bytes, tick), seed)
    _emit_surgery(report, json)


def rm(
    samples: list[str] = typer.Argument(..., help="Keys to take out."),
    store: Path = typer.Option(..., "--store", help="Folder that `hsdump extract --out` wrote, or URL."),
    dry_run: bool = DRY_RUN,
    json: bool = JSON,
) -> None:
    """Take samples out. Their bytes are gone for good; the next extract captures them again."""
    _emit_surgery(remove(store, samples, SurgeryOptions(dry_run=dry_run)), json)


def recode_command(
    store: Path = STORE,
    codec: str = typer.Option(..., help="raw, blosc2 (lossless, about 0.7) or fp8 (half, lossy)."),
    out: Path = typer.Option(..., help="The store to write, new or begun."),
    replace: bool = typer.Option(False, help="When all is proved, put --out in the place of STORE and delete that."),
    shard_bytes: int = SHARD_BYTES,
    dry_run: bool = DRY_RUN,
    json: bool = JSON,
) -> None:
    """Write a store anew with another codec, and prove every sample against the source."""
    with byte_progress("store") as tick:
        report = recode(store, out, codec, _surgery(dry_run, shard_bytes, tick), replace=replace)
    _emit_surgery(report, json)


def export(
    store: Path = STORE,
    to: str = typer.Option(..., help=f"One of {', '.join(FORMATS)}."),
    out: Path = typer.Option(..., help="Folder to write. Files that are there already are kept."),
    model: Path = typer.Option(None, help="Model folder, where the final norm must be converted."),
    gzip: bool = typer.Option(False, help="specforge: .ckpt.gz files."),
    dry_run: bool = DRY_RUN,
    json: bool = JSON,
) -> None:
    """Write files that other trainers read. The final state's norm is converted or refused, never relabelled."""
    with byte_progress("store") as tick:
        options = ExportOptions(to=to, out=out, model=model, gzip=gzip, dry_run=dry_run, progress=tick)
        report = export_store(store, options)
    text = f"{'would write' if dry_run else 'wrote'} {report.files} files, {human_bytes(report.num_bytes)}, to {out}"
    if report.converted:
        text += f"\nfinal state: {report.converted}"
    raise typer.Exit(emit(Result(data=report, text=text), as_json=json))


def push(
    store: Path = STORE,
    url: str = typer.Argument(None, show_default="where it is going already", help="Where to, as s3://bucket/folder."),
    local_bytes: int = typer.Option(None, min=0, help="Delete uploaded shards here beyond so many bytes."),
    json: bool = JSON,
) -> None:
    """Upload what is not at the store's URL yet. From then on every writer of the folder uploads there."""
    if url is None and read_local_part(store) is None:
        raise UsageError(f"{store} has no URL yet", f"name one: hsdump store push {store} s3://bucket/folder")
    remote = RemoteOptions(url=url, local_bytes=local_bytes, patience_s=PATIENCE_S)
    with StoreWriter.reopen(store, options=WriterOptions(remote=remote)) as writer:
        place, waiting = writer.url, writer.shards_to_upload
    data = {"store": str(store), "url": place, "uploaded_shards": waiting}
    raise typer.Exit(emit(Result(data=data, text=f"{place}: {waiting} shards uploaded, all is there"), as_json=json))


def release_command(
    url: str = typer.Argument(..., help="A store's URL."),
    json: bool = JSON,
) -> None:
    """Free a store at a URL whose writer is lost for good, so that another folder may go on with it."""
    owner = release(url)
    text = f"{url}: was written from {owner.folder} on {owner.host}" if owner else f"{url}: nobody writes there"
    raise typer.Exit(emit(Result(data={"url": url, "owner": owner}, text=text), as_json=json))


COMMANDS: dict[str, Callable[..., None]] = {
    "info": info,
    "ls": ls,
    "show": show,
    "scrub": scrub_command,
    "merge": merge_command,
    "split": split_command,
    "rm": rm,
    "recode": recode_command,
    "export": export,
    "push": push,
    "release": release_command,
}


def _surgery(dry_run: bool, shard_bytes: int, tick: Tick) -> SurgeryOptions:
    return SurgeryOptions(dry_run=dry_run, writer=WriterOptions(shard_bytes=shard_bytes), progress=tick)


def _emit_surgery(report: SurgeryReport, json: bool) -> None:
    would = "would have " if report.dry_run else ""
    lines = [f"{report.action}: {store} {would}{samples} samples" for store, samples in report.samples.items()]
    if report.already:
        lines.append(f"{report.already} samples were there already")
    lines += [f"{name}: relative error up to {error:.4f}" for name, error in report.errors.items() if error]
    raise typer.Exit(emit(Result(data=report, text="\n".join(lines)), as_json=json))


def _find(store: Store, text: str) -> str:
    if text.isdigit() and len(text) < 32:
        place = int(text)
        if place >= len(store):
            raise UsageError(f"there is no sample {place}", f"the last is {len(store) - 1}")
        return store.row(place).record.key
    matches = [key for key in store.keys() if key.startswith(text)] if text not in store else [text]  # noqa: SIM118
    if len(matches) != 1:
        what = f"{len(matches)} samples begin with {text!r}"
        raise UsageError(what, "list them with `hsdump store ls`, and give enough of the key")
    return matches[0]


def _describe(store: Store, key: str, tokens: int) -> dict[str, object]:
    row, sample = store.row(key), store[key]
    states = {}
    for name, state_SH in sample.states.items():
        histogram = NormHistogram()
        histogram.add(scan_rows(state_SH, store.manifest.dtype).norms)
        states[name] = histogram.summary(name)
    return {
        "key": key,
        "source": sample.source,
        "tokens": sample.num_tokens,
        "learned": int(sample.loss_mask.sum()),
        "attempts": row.record.attempts,
        "shard": row.shard,
        "tensors": row.record.tensors,
        "errors": row.record.errors,
        "states": states,
        "input_ids": sample.input_ids[:tokens].tolist(),
        "loss_mask": sample.loss_mask[:tokens].tolist(),
    }


def _show_sample(data: dict[str, object]) -> RenderableType:
    head = "\n".join(f"{name}: {data[name]}" for name in ("key", "source", "tokens", "learned", "attempts", "shard"))
    table = Table("tensor", "codec", "dtype", "shape", "offset", "bytes", "checksum")
    assert isinstance(data["tensors"], list)
    for entry in data["tensors"]:
        cells = (entry.name, entry.codec, entry.dtype, entry.shape, entry.offset, entry.num_bytes, entry.checksum)
        table.add_row(*map(str, cells))
    norms = Table("state", "norm min", "median", "max", "zero rows")
    assert isinstance(data["states"], dict)
    for name, state in data["states"].items():
        numbers = (f"{value:.4g}" for value in (state.norm_min, state.norm_median, state.norm_max))
        norms.add_row(name, *numbers, str(state.zero_rows))
    ids = Text("tokens (learned ones underlined): ")
    assert isinstance(data["input_ids"], list)
    assert isinstance(data["loss_mask"], list)
    for token, learned in zip(data["input_ids"], data["loss_mask"], strict=True):
        ids.append(str(token), style="underline green" if learned else "")
        ids.append(" ")
    return Group(head, table, norms, ids)


def _rows_table(rows: list[dict[str, object]], total: int) -> RenderableType:
    if not rows:
        return f"{total} samples"
    table = Table(*rows[0], caption=f"{len(rows)} of {total}")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    return table


def _show_info(found: StoreInfo) -> RenderableType:
    manifest = found.manifest
    table = Table(show_header=False, box=None)
    coverage = "nothing yet" if found.coverage is None else f"{found.coverage:.1%} of the samples that were tried"
    layers = ", ".join(map(str, manifest.layers))
    lines = {
        "store": found.store,
        "model": f"{manifest.model_class}, {manifest.num_layers} layers, vocabulary {manifest.vocab_size}",
        "read from": f"{manifest.model_path} (digest {manifest.model_digest})",
        "engine": f"{manifest.engine} {manifest.engine_version}, {manifest.attach}",
        "states": f"layers {layers} and the final state ({manifest.final_state}), {manifest.hidden_size} wide, "
        f"{manifest.dtype}",
        "layer ids are": manifest.layer_meaning,
        "codec": manifest.codec,
        "samples": f"{found.samples}, {coverage}",
        "tokens": f"{found.tokens}, of which {found.learned_tokens} are learned; longest sample {found.longest}",
        "on disk": f"{human_bytes(found.shard_bytes)} in {found.shards} shards, {found.bytes_per_token:.0f} bytes a "
        f"token ({found.raw_bytes_per_token} as they leave the model)",
        "failed": ", ".join(f"{reason} {count}" for reason, count in found.failures.items()) or "none",
        "skipped rows": ", ".join(f"{reason} {count}" for reason, count in found.skips.items()) or "none",
        "quarantine": f"{len(found.quarantined)} files" if found.quarantined else "empty",
        "events": "\n".join(f"{e.at} {e.kind} {e.subject}: {e.detail}" for e in found.events[-10:]) or "none",
        "made": f"{manifest.created} by hsdump {manifest.hsdump_version}",
    }
    for name, value in lines.items():
        table.add_row(Text(name, style="bold"), Text(value))
    return table


def _show_scrub(report: ScrubReport) -> RenderableType:
    word = {0: "sound", 1: "damage repaired", 2: "damaged"}[report.exit_code]
    head = f"{report.store}: {word}, {report.shards} shards, {report.samples} samples, {human_bytes(report.num_bytes)}"
    parts: list[RenderableType] = [head]
    if report.damaged:
        table = Table("shard", "problem", "sample", "tensors")
        for shard in report.damaged:
            table.add_row(str(shard.number), shard.problem, "", f"{shard.sound} samples sound")
            for sample in shard.samples[:20]:
                table.add_row("", "", f"{sample.key} {sample.source}", ", ".join(sample.tensors) or "all")
        parts.append(table)
    parts += [f"{event.kind} {event.subject}: {event.detail}" for event in report.recovered]
    if report.missing:
        parts.append(f"{len(report.missing)} samples are missing now; `hsdump extract` captures them again")
    return Group(*parts)
