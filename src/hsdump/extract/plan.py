"""From options and a handshake to what this run will do: which states, which manifest, which limits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from hsdump._version import __version__
from hsdump.errors import InputError, StoreError, UsageError
from hsdump.extract.identity import manifest_of
from hsdump.layers import check_layers
from hsdump.prompts import PromptOptions, Renderer, prepared_settings
from hsdump.prompts.hub import is_dataset
from hsdump.prompts.options import SETTINGS
from hsdump.schema import EngineInfo, StateShape
from hsdump.store import Manifest
from hsdump.store.attach import RemoteOptions
from hsdump.store.manifest import PROMPTS


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractOptions:
    """What `hsdump extract` was asked for."""

    inputs: tuple[Path, ...]
    out: Path
    layers: tuple[int, ...] | None = None
    """None: what the engine captures."""

    final_state: str = "post_norm"
    """Which final state an embedded engine gives; servers give `post_norm`."""

    model: str | None = None
    """Where the tokenizer is read from; None: the engine's own model path."""

    max_tokens: int | None = None
    concurrency: int = 16
    attempts: int = 5
    """Tries of one sample, for faults that may pass."""

    retry_failed: bool = False
    codec: str = "raw"
    """How states are stored: `raw`, `blosc2` (lossless) or `fp8`."""

    remote: RemoteOptions = field(default_factory=RemoteOptions)
    """A URL that committed shards go to, and how much stays here."""

    shard_bytes: int = 1 << 30
    direct: bool = False
    """Write shards past the page cache."""

    commit_s: float = 30.0
    """Captured samples wait at most so long for their commit; a kill costs at most this much work."""

    only: tuple[str, ...] = ()
    """Rows' ids or keys to take; empty: all."""

    max_failed: int = 1000
    """More failed samples than this end the run: then it is not the samples."""

    disk_reserve: int = 1 << 30
    """Bytes of the disk that stay free; the run stops before."""

    tokens_in_flight: int | None = None
    """At each server; None: what concurrency and spool allow."""

    max_rate: float | None = None
    """Tokens a second over all servers."""

    live_share: float = 0.25
    """Of a server's time, what is taken while others use it; 1 takes no notice of them."""

    server_wait_s: float = 120.0
    """How long a run waits when no server is left."""

    prompts: PromptOptions = field(default_factory=PromptOptions)
    """How conversations become tokens; lengths and vocabulary are settled by the handshake."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractPlan:
    """What this run will do, settled before the first sample is sent."""

    info: EngineInfo
    shape: StateShape
    """What is stored: the engine's states, or the subset that was asked for."""

    columns: tuple[int, ...]
    """Of the engine's states, the indices to store, the final one or both last."""

    prompt_options: PromptOptions
    renderer: Renderer | None

    renderer_problem: InputError | None
    """Why there is none; said as soon as a row needs one."""

    manifest: Manifest


def check_output(out: Path) -> None:
    """Find out now, not after the first hour, whether the store can be written.

    Raises:
        StoreError: a file is in the way, or the folder is not writable.
    """
    place = out
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise StoreError(f"{place} is a file", "name a folder with --out")
    if not os.access(place, os.W_OK | os.X_OK) or shutil.disk_usage(place).free == 0:
        raise StoreError(f"{place} is not writable", "name a writable folder with --out, or change its rights")


def make_plan(options: ExtractOptions, info: EngineInfo) -> ExtractPlan:
    """Settle states, limits, tokenizer and manifest.

    Raises:
        UsageError: layers that the engine does not capture, or a limit that makes no sense.
        InputError: no input file, or the model's files cannot be read.
    """
    for path in options.inputs:
        if not path.exists() and not is_dataset(path):
            raise InputError(f"{path} does not exist", "name a JSONL, JSON or Parquet file")
    columns = _columns(options.layers, info)
    shape = StateShape(
        layers=tuple(info.shape.layers[index] for index in columns if index < len(info.shape.layers)),
        hidden_size=info.shape.hidden_size,
        dtype=info.shape.dtype,
        final_state=info.shape.final_state,
    )
    max_tokens = min(options.max_tokens or info.context_length, info.context_length)
    if max_tokens < 1:
        raise UsageError(f"--max-tokens {options.max_tokens} leaves nothing", "use at least 1")
    prompt_options = replace(options.prompts, max_tokens=max_tokens, vocab_size=info.vocab_size)
    # A collector is given token ids and has no input of its own; a tokenizer costs seconds and, with torch, 260 MB.
    reads = bool(options.inputs)
    renderer, problem = _renderer(options.model, info.model_path, prompt_options) if reads else (None, None)
    manifest = manifest_of(
        info,
        shape,
        tokenizer_digest=_made_by("tokenizer_digest", options.inputs, renderer),
        template_digest=_made_by("template_digest", options.inputs, renderer),
        max_tokens=max_tokens,
        codec=options.codec,
        hsdump_version=__version__,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        extra=_prompt_settings(options, renderer),
    )
    return ExtractPlan(
        info=info,
        shape=shape,
        columns=columns,
        prompt_options=prompt_options,
        renderer=renderer,
        renderer_problem=problem,
        manifest=manifest,
    )


def count_rows(inputs: Sequence[Path]) -> int | None:
    """Count the rows of JSONL files by their line ends, for an ETA; None when another format is among them."""
    total = 0
    for path in inputs:
        if path.suffix != ".jsonl":
            return None
        with path.open("rb") as file:
            total += sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    return total


def _columns(asked: Sequence[int] | None, info: EngineInfo) -> tuple[int, ...]:
    captured = info.shape.layers
    finals = range(len(captured), len(info.shape.names))
    if asked is None:
        return (*range(len(captured)), *finals)
    layers = check_layers(asked, info.num_layers)
    missing = [layer for layer in layers if layer not in captured]
    if missing:
        ids = ",".join(map(str, layers))
        raise UsageError(
            f"--layers {ids}: the server captures layers {list(captured)}, so {missing} are not to be had from it",
            f"leave --layers out, or start the server again with: hsdump serve --layers {ids} -- ...",
        )
    return (*(captured.index(layer) for layer in layers), *finals)


def _renderer(asked: str | None, served: str, options: PromptOptions) -> tuple[Renderer | None, InputError | None]:
    """Load the tokenizer that was asked for, or the served model's; ready-made token ids do without the latter."""
    if asked is not None:
        return Renderer.load(asked, options), None
    try:
        return Renderer.load(served, options), None
    except InputError as error:
        return None, error


def _made_by(digest: str, inputs: Sequence[Path], renderer: Renderer | None) -> str:
    """Say what made the tokens: the prepared files' own tokenizer and template, else those of this run."""
    prepared = {str(prepared_settings(path).get(digest, "")) for path in inputs} - {""}
    own = getattr(renderer, digest) if renderer else "none"
    return "+".join(sorted(prepared)) or own


def _prompt_settings(options: ExtractOptions, renderer: Renderer | None) -> dict[str, str]:
    """Give the settings that made tokens and masks, for `Manifest.extra`: the prepared files' own, else this run's.

    This run's `max_tokens` is a fact of its own; token ids that somebody else made have no settings.
    """
    prepared = [made for path in options.inputs if (made := prepared_settings(path))]
    if not prepared and renderer is not None:
        prepared = [{name: value for name, value in options.prompts.settings().items() if name != "max_tokens"}]
    found: dict[str, set[str]] = {}
    for made in prepared:
        for name in SETTINGS:
            if name in made:
                value = made[name]
                text = value if isinstance(value, str) else msgspec.json.encode(value, order="sorted").decode()
                found.setdefault(PROMPTS + name, set()).add(text)
    return {name: "+".join(sorted(values)) for name, values in found.items()}
