"""Does this machine's compiler take flex attention as the trainer calls it? Some 20 s, before anything long begins.

    python -m benchmarks.train.smoke [HEADS KV_HEADS HEAD_DIM]

Forward and backward in bfloat16 and float32, with grouped heads and the strides of the drafter's projections, at two
lengths of one compilation, compared with dense attention. `apart` does it in a process of its own: a compiler that
fails or hangs takes nothing along, and what it compiled is in its cache for the training.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import torch

from hsdump.draft.attention import ByDocument, Flex

LENGTHS = (4094, 1531)
TIMEOUT_S = 150.0
BF16_ERROR, FP32_ERROR = 8e-2, 1e-2
"""Largest difference from dense attention in float32. Outputs are of size 4 at most, of which bfloat16 rounds away
0.016; gradients are divided by their largest; float32 products may be tf32 on a GPU. A wrong mask is off by 1."""


def check(heads: int, kv_heads: int, head_dim: int, *, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    """Run it; gives `works`, and the reason where it does not."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {"works": True, "lengths": list(lengths), "heads": [heads, kv_heads, head_dim], "runs": []}
    begin = time.monotonic()
    try:
        for dtype, largest in ((torch.bfloat16, BF16_ERROR), (torch.float32, FP32_ERROR)):
            for length in lengths:
                error = _difference(heads, kv_heads, head_dim, length, dtype, device)
                seconds = round(time.monotonic() - begin, 2)
                found["runs"].append({"dtype": str(dtype), "length": length, "difference": error, "after_s": seconds})
                if not error <= largest:
                    found |= {"works": False, "reason": f"{dtype}, {length} rows: {error} away from dense attention"}
    except Exception as error:
        found |= {"works": False, "reason": f"{type(error).__name__}: {error}"[:600]}
    return {**found, "seconds": round(time.monotonic() - begin, 2)}


def _difference(heads: int, kv_heads: int, width: int, length: int, dtype: torch.dtype, device: str) -> float:
    """Give the largest difference of output and, where flex attention has a backward, of gradients."""
    parts = [length // 3, length // 4, length - length // 3 - length // 4]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(parts)).to(device)
    backward = device == "cuda"
    results = []
    torch.manual_seed(length)
    made = [torch.randn(length, count, width, device=device).to(dtype) for count in (heads, kv_heads, kv_heads)]
    for causal, kind in ((Flex(documents), dtype), (ByDocument(parts), torch.float32)):
        flat = [one.to(kind, copy=True).requires_grad_(backward) for one in made]
        with torch.set_grad_enabled(backward):
            out, sums = causal(*(one.transpose(0, 1) for one in flat))
        found = [out, sums / 8]  # sums are about log(length)
        if backward:
            (out.float().square().mean() + sums.mean()).backward()
            found += [one.grad / one.grad.abs().max() for one in flat if one.grad is not None]
            with torch.no_grad():  # as validation calls it
                causal(*(one.transpose(0, 1) for one in flat))
        results.append([one.detach().float() for one in found])
    return max(float((one - other).abs().max()) for one, other in zip(*results, strict=True))


def apart(heads: int, kv_heads: int, head_dim: int, *, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Run it in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.train.smoke", str(heads), str(kv_heads), str(head_dim)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=timeout_s)
        return dict(json.loads(output.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return {"works": False, "reason": f"not done after {timeout_s:.0f} s"}
    except (ValueError, IndexError):
        return {"works": False, "reason": f"ended with exit code {process.returncode} and without a result"}
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    print(json.dumps(check(*(map(int, sys.argv[1:4]) if len(sys.argv) > 3 else (32, 8, 128)))))
