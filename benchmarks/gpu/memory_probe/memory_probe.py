"""A plugin that tells how much GPU memory a server has taken: on a request named `memory-*` it writes MEMORY_FILE."""

import json
import os
from pathlib import Path


def register() -> None:
    """SGLang calls this in each of its processes."""
    if not os.environ.get("MEMORY_FILE"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    forward = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
    HookRegistry.register(forward, before_forward, HookType.BEFORE)


def before_forward(runner, batch, *args, **kwargs):
    if batch.rids is not None and any(rid.startswith("memory-") for rid in batch.rids):
        import torch

        found = {}
        if torch.cuda.is_available():
            found = {
                "reserved_peak": torch.cuda.max_memory_reserved(),
                "allocated_peak": torch.cuda.max_memory_allocated(),
            }
        Path(os.environ["MEMORY_FILE"]).write_text(json.dumps(found))
