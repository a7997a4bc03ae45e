"""What a person sees while a run goes on: counts, rates, what is left, what failed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hsdump.extract.state import RunState
from hsdump.live import LivePanel, Views
from hsdump.schema import EngineInfo

LISTED = 20
"""Failures that the summary names."""

SAID_AT_ONCE = frozenset({"server-away", "server-back", "server-refused", "stopped"})


def live_panel(state: RunState, *, quiet: bool = False) -> LivePanel:
    """Show how far the run is, until the end of its `shown` block."""
    return LivePanel(Views(panel=lambda: panel(state), line=lambda: status_line(state)), quiet=quiet)


def say_event(shown: LivePanel, kind: str, facts: dict[str, Any]) -> None:
    """Say at once what a person has to know."""
    if kind in SAID_AT_ONCE:
        shown.say(f"hsdump: {kind}: {', '.join(str(value) for value in facts.values())}")


def panel(state: RunState) -> RenderableType:
    """Draw everything about the run that changes."""
    table = Table.grid(padding=(0, 2))
    there = f", {state.already} there before" if state.already else ""
    table.add_row("samples", f"{state.committed} committed{there}, {_on_their_way(state)}, {_total(state)} read so far")
    table.add_row("tokens", f"{state.captured_tokens:,} captured at {_captured_rate(state):,.0f}/s")
    table.add_row("committed", f"{decimal(state.state_bytes)} at {decimal(int(state.state_bytes / state.seconds))}/s")
    table.add_row("left", _eta(state))
    if state.disk_free is not None:
        table.add_row("disk", f"{decimal(state.disk_free)} free")
    total = None if state.to_do is None else max(state.finished + state.to_do, 1)
    bar = Table.grid()  # alone, a bar ends without a new line
    bar.add_row(ProgressBar(total=total, completed=state.finished, width=60))
    rows: list[RenderableType] = [bar, table]
    rows.append(_servers(state))
    if state.failed or state.skipped:
        rows.append(Text(_reasons(state), style="yellow"))
    return Group(*rows)


def _servers(state: RunState) -> RenderableType:
    """One line a server: what it is doing for us, and how full its spool is."""
    table = Table("server", "", "tokens/s", "in flight", "others", "spool", "", box=None, pad_edge=False)
    for lane in state.lanes:
        spool: RenderableType = ""
        share = ""
        if lane.spool_bytes:
            spool = ProgressBar(total=lane.spool_bytes, completed=lane.in_flight_bytes, width=16)
            share = f"{lane.in_flight_bytes / lane.spool_bytes:.0%}"
        status = Text(lane.status, style="green" if lane.status == "up" else "red")
        if lane.stepping_back:
            status = Text("steps back", style="cyan")
        rate = f"{lane.tokens / max(state.seconds, 1e-9):,.0f}"
        flight = f"{lane.in_flight} ({lane.in_flight_tokens:,} tokens)"
        table.add_row(lane.name, status, rate, flight, str(lane.others), spool, share)
    return table


def greeting(info: EngineInfo) -> str:
    """Say what the handshake found, before the first sample is sent."""
    shape = info.shape
    lines = [
        (
            f"hsdump: {info.engine} {info.engine_version} with hsdump {info.hsdump_version} ({info.attach}), "
            f"{info.model_class} at {info.model_path}"
        ),
        (
            f"  layers {list(shape.layers)} of {info.num_layers} and the final state ({shape.final_state}), "
            f"hidden size {shape.hidden_size}, {shape.dtype}: {shape.bytes_per_token:,} bytes a token"
        ),
        f"  tp {info.tp_size}, dp {info.dp_size} on {info.device}, at most {info.context_length:,} tokens a sample",
    ]
    if info.spool_max_bytes is not None:
        lines.append(f"  spool {info.spool_dir}, {decimal(info.spool_max_bytes)}, by {info.hand_over}")
    return "\n".join([*lines, *(f"  note: {note}" for note in info.notes)])


def _on_their_way(state: RunState) -> str:
    waiting = f", {state.waiting} waiting for the disk" if state.waiting else ""
    uncommitted = state.captured - state.committed
    captured = f"{uncommitted} captured for the next commit, " if uncommitted > 0 else ""
    return f"{captured}{state.in_flight} in flight{waiting}"


def status_line(state: RunState) -> str:
    """Say it in one line of plain text."""
    away = [lane.name for lane in state.lanes if lane.status != "up"]
    return (
        f"hsdump: {state.committed} committed, {_on_their_way(state)}, {_total(state)} read, "
        f"{_captured_rate(state):,.0f} tokens/s, {decimal(state.state_bytes)} written, {_eta(state)}{_reasons(state)}"
        f"{' [not up: ' + ', '.join(away) + ']' if away else ''}"
    )


def summary(state: RunState) -> RenderableType:
    """Say at the end what became of every row."""
    table = Table(title="extract", title_justify="left", show_header=False)
    table.add_row("committed in this run", f"{state.committed} samples, {state.tokens:,} tokens")
    table.add_row("states", f"{decimal(state.state_bytes)} at {_rate(state):,.0f} tokens/s")
    if state.already:
        table.add_row("already there", f"{state.already}")
    if state.earlier_failures:
        table.add_row("failed earlier", f"{state.earlier_failures} (take them again with --retry-failed)")
    for reason, count in sorted(state.failed.items()):
        table.add_row(f"[red]failed: {reason}", f"{count}")
    for reason, count in sorted(state.skipped.items()):
        table.add_row(f"[yellow]skipped: {reason}", f"{count}")
    _add_rare(table, state)
    if state.retries:
        table.add_row("tries that failed and passed later", f"{state.retries}")
    if state.stopped:
        fix = f"\nfix: {state.error.fix}" if state.error else ""
        table.add_row("[red]stopped early", f"{state.stopped}{fix}\nrun the same command again to go on")
    return table


def _add_rare(table: Table, state: RunState) -> None:
    """Add the rows that most runs do not have."""
    for failure in state.failures[:LISTED]:
        table.add_row(f"  {failure.source}", Text(f"{failure.reason}: {failure.detail}"[:200]))
    if state.failed.total() > LISTED:
        table.add_row("  more of them", "hsdump store ls --failed --limit 0 STORE")
    if state.not_asked:
        table.add_row("left out by --only", f"{state.not_asked}")
    for name in state.unknown_ids:
        table.add_row("[red]--only names what is not there", name)
    if state.server_deaths:
        table.add_row("requests whose server died", f"{state.server_deaths}, sent again")
    if state.is_empty:
        why = "see the reasons above, and hsdump prepare --show 3" if state.skipped else "it has no rows"
        table.add_row("[red]the input gave no sample", why)


def _total(state: RunState) -> str:
    return f"{state.read}" if state.input_done else f"{state.read}+"


def _rate(state: RunState) -> float:
    return state.tokens / max(state.seconds, 1e-9)


def _captured_rate(state: RunState) -> float:
    """Commits come in strides: the first one 30 s after the start."""
    return state.captured_tokens / max(state.seconds, 1e-9)


def _eta(state: RunState) -> str:
    left = state.to_do
    if left is None:
        return "ETA unknown: still reading the input"
    if not state.captured:
        return f"{left} to go"
    to_capture = left - (state.captured - state.committed)  # commits come in strides and say little of the pace
    return f"{left} to go, ETA {timedelta(seconds=round(max(to_capture, 0) * state.seconds / state.captured))}"


def _reasons(state: RunState) -> str:
    parts = [f"failed {reason} {count}" for reason, count in state.failed.items()]
    parts += [f"skipped {reason} {count}" for reason, count in state.skipped.items()]
    return f" [{', '.join(parts)}]" if parts else ""
