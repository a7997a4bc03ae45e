"""A checkpoint's tensors, read lazily: only the bytes that are looked at leave the disk, whatever the model's size.

Letters: V = vocabulary, H = hidden size, B = rows of a block.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hsdump.arrays import to_float32
from hsdump.errors import InputError

EMBEDDING = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")
HEAD = ("lm_head.weight", "output.weight")
NORM = ("model.norm.weight", "norm.weight", "final_layernorm.weight", "norm_f.weight")
"""Ends of the names that checkpoints give these tensors; the shortest name that fits is taken."""

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_NUMPY = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "F8_E4M3": "u1"}

BLOCK_BYTES = 64 << 20
"""float32 rows of a matrix widened at a time."""

FIX = "name the folder of the served checkpoint with --model"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies."""

    path: Path
    dtype: str
    """As safetensors writes it, such as `BF16`."""

    shape: tuple[int, ...]
    start: int
    end: int
    """Bytes of the file."""


class Checkpoint:
    """A folder with `config.json` and safetensors files."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Read the config and the files' headers.

        Raises:
            InputError: not a folder with both.
        """
        self.folder = _local(folder)
        try:
            self.raw_config = msgspec.json.decode((self.folder / "config.json").read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.MsgspecError) as error:
            raise InputError(f"{self.folder}: its config.json cannot be read ({error})", FIX) from error
        text = self.raw_config.get("text_config")
        self.config: dict[str, Any] = {**self.raw_config, **text} if isinstance(text, dict) else self.raw_config
        self.places: dict[str, Place] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            self.places |= _header(path)
        if not self.places:
            raise InputError(f"{self.folder} holds no safetensors weights", FIX)
        self._maps: dict[Path, mmap.mmap] = {}

    @property
    def num_layers(self) -> int:
        return self._number("num_hidden_layers", "n_layer", "num_layers")

    @property
    def hidden_size(self) -> int:
        return self._number("hidden_size", "n_embd", "d_model")

    @property
    def embedding_factor(self) -> float:
        """Gemma's embedding module multiplies by the root of its width, which is not in the tensor."""
        kind = str(self.config.get("model_type", ""))
        return float(self.hidden_size) ** 0.5 if "gemma" in kind else 1.0

    def _number(self, *names: str) -> int:
        """Read a number that configs give one of these names.

        Raises:
            InputError: none of them is there.
        """
        found = next((self.config[name] for name in names if isinstance(self.config.get(name), int)), None)
        if found is None:
            raise InputError(f"{self.folder}: its config.json has no {names[0]}", FIX)
        return int(found)

    @property
    def dtype(self) -> str:
        """The dtype that the model computes in."""
        return str(self.config.get("dtype") or self.config.get("torch_dtype") or "bfloat16").removeprefix("torch.")

    @property
    def prefix(self) -> str:
        """What stands before `layers.0` in the names: `model.`, `language_model.model.` or the like."""
        names = [name for name in self.places if "layers.0." in name and "visual" not in name and "vision" not in name]
        if not names:
            raise InputError(f"{self.folder} holds no tensors of decoder layers", FIX)
        return min(names, key=len).split("layers.0.")[0]

    def find(self, ends: Sequence[str]) -> str | None:
        """Give the shortest tensor name with one of these ends, outside the layers."""
        found = [name for name in self.places if name.endswith(tuple(ends)) and ".layers." not in name]
        return min(found, key=len, default=None)

    def bits(self, name: str) -> NDArray[Any]:
        """Map a tensor as numpy holds it (bfloat16 as uint16); nothing is read before it is looked at.

        Raises:
            InputError: a dtype that is none of bfloat16, float16, float32 and float8_e4m3.
        """
        place = self.places[name]
        kind = _NUMPY.get(place.dtype)
        if kind is None:
            raise InputError(f"{place.path}: {name} is {place.dtype}", "bfloat16, float16, float32 and fp8 can be read")
        if place.path not in self._maps:
            with place.path.open("rb") as file:
                self._maps[place.path] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        count = int(np.prod(place.shape, dtype=np.int64))
        flat = np.frombuffer(self._maps[place.path], kind, count=count, offset=place.start)
        return flat.reshape(place.shape)

    def rows(self, name: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Read single rows of a matrix, float32 [len(ids), ...]."""
        return to_float32(self.bits(name)[ids], self._plain(name))

    def whole(self, name: str) -> NDArray[np.float32]:
        """Read a whole tensor as float32, dequantized when it is fp8 with a scale beside it."""
        if self.places[name].dtype == "F8_E4M3":
            return self._dequantized(name)
        return to_float32(self.bits(name), self._plain(name))

    def blocks(self, name: str, limit: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Read a matrix a block of rows at a time: (first row, float32 [B, H]).

        Args:
            limit: rows in all; vocabularies are padded beyond their tokens.
        """
        bits_VH, dtype = self.bits(name), self._plain(name)
        total, width = min(bits_VH.shape[0], limit), bits_VH.shape[1]
        step = max(1, BLOCK_BYTES // (4 * width))
        for start in range(0, total, step):
            yield start, to_float32(bits_VH[start : min(start + step, total)], dtype)

    def _plain(self, name: str) -> str:
        place = self.places[name]
        if place.dtype not in _DTYPES:
            raise InputError(f"{place.path}: {name} is quantized ({place.dtype})", "use an unquantized head or norm")
        return _DTYPES[place.dtype]

    def _dequantized(self, name: str) -> NDArray[np.float32]:
        """Undo DeepSeek's fp8: one scale a block of 128 x 128, or one a tensor or row."""
        scale_name = next((name + end for end in ("_scale_inv", "_scale") if name + end in self.places), None)
        if scale_name is None:
            raise InputError(f"{self.folder}: {name} is fp8 without a scale", "use another checkpoint of this model")
        values = _e4m3()[self.bits(name)]
        scale = self.whole(scale_name)
        if scale.size == 1:
            return np.asarray(values * scale.reshape(()), np.float32)
        rows, columns = values.shape
        if scale.size == rows:
            return np.asarray(values * scale.reshape(rows, 1), np.float32)
        quantization = self.raw_config.get("quantization_config") or self.config.get("quantization_config") or {}
        high, wide = quantization.get("weight_block_size") or (128, 128)
        if scale.shape != (-(-rows // high), -(-columns // wide)):
            what = f"{self.folder}: {name} {values.shape} has scales {scale.shape}, blocks are {high} x {wide}"
            raise InputError(what, "use another checkpoint of this model")
        spread = np.repeat(np.repeat(scale, high, axis=0), wide, axis=1)
        return np.asarray(values * spread[:rows, :columns], np.float32)


def _local(named: str | os.PathLike[str]) -> Path:
    """Give the folder, or the local copy of a model that is named as on the hub; nothing is downloaded."""
    folder = Path(named)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(named), local_files_only=True))
    except (OSError, ValueError):  # not in the cache, or no name of a model
        return folder


def _header(path: Path) -> dict[str, Place]:
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(size - 8, 100 << 20):
                raise ValueError(f"a header of {length} bytes")
            entries = msgspec.json.decode(file.read(length), type=dict[str, dict[str, Any]])
        entries.pop("__metadata__", None)
        places = {}
        for name, entry in entries.items():
            start, end = (8 + length + int(offset) for offset in entry["data_offsets"])
            if not 8 + length <= start <= end <= size:
                raise ValueError(f"{name} lies outside the file")
            places[name] = Place(path, str(entry["dtype"]), tuple(entry["shape"]), start, end)
    except (OSError, ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise InputError(f"{path} is no safetensors file: {error}", "fetch the checkpoint again") from error
    return places


def _e4m3() -> NDArray[np.float32]:
    """Give the value of each of the 256 codes of float8_e4m3fn."""
    codes = np.arange(256)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent, mantissa = (codes >> 3) & 0xF, codes & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values[(codes & 0x7F) == 0x7F] = np.nan
    return (sign * values).astype(np.float32)
