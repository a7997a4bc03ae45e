"""Which model is this? A digest that two revisions of one checkpoint do not share, without reading a terabyte; and what
a store is told of the engine that its states come from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hsdump.arrays import xxh3
from hsdump.schema import EngineInfo, StateShape
from hsdump.store import Manifest

UNKNOWN = "unknown"
"""The digest of a model that cannot be read from here."""

LAYER_MEANING = "index into transformers' output_hidden_states (0 = embeddings, k = output of decoder layer k-1)"

PROBES = 16
PROBE_BYTES = 4096


def model_digest(model_path: str) -> str:
    """Digest `config.json` and every weight file's name, size and 16 spread blocks of 4 KiB.

    A fine-tune keeps names, sizes and headers, but changes practically every block of the matrices, so the sampled
    blocks tell revisions apart at the price of a few hundred kilobytes of reading for any checkpoint.

    Returns:
        32 hex digits, or `unknown` when the folder cannot be read from here (a remote name, another container).
    """
    folder = Path(model_path)
    config = folder / "config.json"
    if not config.is_file():
        return UNKNOWN
    parts: list[bytes] = [config.read_bytes()]
    weights = sorted(path for pattern in ("*.safetensors", "*.bin", "*.gguf") for path in folder.glob(pattern))
    for path in weights:
        size = path.stat().st_size
        parts.append(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for probe in range(PROBES):
                file.seek(size * probe // PROBES)
                parts.append(file.read(PROBE_BYTES))
    return xxh3(*parts)


def manifest_of(info: EngineInfo, shape: StateShape, **more: Any) -> Manifest:
    """Make the manifest of a store for an engine's states.

    Args:
        shape: what is kept of them; may be less than the engine gives.
        more: everything that does not follow from the engine: digests of tokenizer and template, `max_tokens`, `codec`.
    """
    facts = {
        "engine": info.engine,
        "engine_version": info.engine_version,
        "model_path": info.model_path,
        "model_digest": model_digest(info.model_path),
        "model_class": info.model_class,
        "num_layers": info.num_layers,
        "vocab_size": info.vocab_size,
        "layers": list(shape.layers),
        "hidden_size": shape.hidden_size,
        "dtype": shape.dtype,
        "final_state": shape.final_state,
        "layer_meaning": LAYER_MEANING,
        "attach": info.attach,
        "notes": list(info.notes),
    }
    return Manifest(**{**facts, **more})
