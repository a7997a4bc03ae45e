"""Each engine's layer ids and final state, as found by numbers: the same tokens through all of them.

    python -m benchmarks.engines.conventions --out benchmarks/results/engines

Needs the environments of the tests. Every state that an engine hands out under an id of its own is held against all of
transformers' hidden_states, and against the last layer's output before the norm.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from tests.server.driving import capture, model, token_samples
from tests.server.harness import SglangServer
from tests.tiny_models import tiny_model_path

from hsdump.layers import FINAL
from hsdump.verify.rows import row_errors

Wide = NDArray[np.float32]
IDS = {"llama": (2, 4, 5), "dsv3": (2, 3, 4)}


def candidates(path: Path, ids: NDArray[np.int64]) -> dict[str, Wide]:
    """Give transformers' states of one sample by index, and the one before the norm."""
    import torch

    oracle = model(path)
    seen: list[Any] = []
    handle = oracle.model.norm.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        hidden = oracle(torch.tensor(ids)[None], output_hidden_states=True, use_cache=False).hidden_states
    handle.remove()
    found = {str(index): state[0].float().numpy() for index, state in enumerate(hidden[:-1])}
    return {**found, "final, before the norm": seen[0][0].float().numpy(), "final": hidden[-1][0].float().numpy()}


def by_plugin(path: Path, own: tuple[int, ...], samples: list[Any], log: Path) -> list[dict[str, Wide]]:
    """Give states under the engine's own ids, through hsdump's capture."""
    native = "native:" + ",".join(map(str, own))
    with SglangServer(model=path, log=log, serve_options=("--layers", native)) as server:
        _, states = capture(server.url, samples)
    names = [*map(str, own), FINAL]
    return [dict(zip(names, states[one.key], strict=True)) for one in samples]


def by_native_json(path: Path, own: tuple[int, ...], samples: list[Any], log: Path) -> list[dict[str, Wide]]:
    """Give states under the engine's own ids, through SGLang's own JSON. Prompts fit into one chunk: only the last
    chunk's rows come back.
    """
    args = ("--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3", "--chunked-prefill-size", "4096")
    args += ("--return-aux-hidden-state-layer-ids", *map(str, own), "--disable-radix-cache")
    found = []
    with SglangServer(model=path, log=log, capture=False, sglang_args=args) as server:
        for one in samples:
            body = {
                "input_ids": one.input_ids.tolist(),
                "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
                "return_hidden_states": True,
            }
            answer = httpx.post(f"{server.url}/generate", json=body, timeout=300).json()
            rows = np.asarray(answer["meta_info"]["hidden_states"][0], np.float32).reshape(len(one.input_ids), -1)
            parts = np.split(rows, len(own), axis=1)
            found.append({str(ident): part for ident, part in zip(own, parts, strict=True)})
    return found


def matches(found: list[dict[str, Wide]], expected: list[dict[str, Wide]]) -> dict[str, dict[str, Any]]:
    """Give the nearest candidate of each state, by the median row error over all samples."""
    table = {}
    for ident in found[0]:
        errors = {
            name: float(
                np.median(np.concatenate([row_errors(a[ident], b[name]) for a, b in zip(found, expected, strict=True)]))
            )
            for name in expected[0]
        }
        best, second = sorted(errors, key=errors.__getitem__)[:2]
        table[ident] = {"is": best, "error": errors[best], "next": second, "next_error": errors[second]}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    result: dict[str, Any] = {}
    samples = token_samples(6, 2048, seed=11, longest=120)
    with tempfile.TemporaryDirectory() as name:
        for architecture, own in IDS.items():
            path = tiny_model_path(architecture)  # type: ignore[arg-type]
            expected = [candidates(path, one.input_ids) for one in samples]
            log = Path(name) / "log"
            ways = {"SGLang, hsdump's capture": by_plugin, "SGLang, its own JSON": by_native_json}
            for way, run in ways.items():
                try:
                    result[f"{architecture}: {way}"] = matches(run(path, own, samples, log), expected)
                except (RuntimeError, KeyError, ValueError, TypeError, httpx.HTTPError) as error:
                    result[f"{architecture}: {way}"] = {"failed": f"{type(error).__name__}: {error}"[-2000:]}
                print(way, json.dumps(result[f"{architecture}: {way}"], indent=1), flush=True)
    options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
