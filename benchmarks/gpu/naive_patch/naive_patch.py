"""The story's own method, as a plugin so that it can be measured: four tensors a request, torch.save, synchronously.

Active when NAIVE_DIR is set. It fires for requests named `naive-*` only, so that one server can run both kinds.
"""

import os


def register() -> None:
    """SGLang calls this in each of its processes."""
    if not os.environ.get("NAIVE_DIR"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    HookRegistry.register(f"{runner}.load_model", after_load_model, HookType.AFTER)
    HookRegistry.register(f"{runner}.forward", around_forward, HookType.AROUND)
    logits = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"
    HookRegistry.register(logits, around_logits, HookType.AROUND)


BATCH = []


def after_load_model(result, runner, *args, **kwargs):
    layers = [int(layer) for layer in os.environ["NAIVE_LAYERS"].split(",")]
    runner.model.set_eagle3_layers_to_capture([layer - 1 for layer in layers])
    inner = next(m for m in runner.model.modules() if "layers_to_capture" in vars(m))
    inner.layers_to_capture = layers
    return result


def around_forward(original, runner, batch, *args, **kwargs):
    BATCH[:] = [batch] if batch.rids is not None and batch.forward_mode.is_extend() else []
    try:
        return original(runner, batch, *args, **kwargs)
    finally:
        BATCH.clear()


def around_logits(original, self, input_ids, hidden, lm_head, metadata, aux=None, *args, **kwargs):
    if BATCH and aux is not None and BATCH[0].rids[0].startswith("naive-"):
        dump(BATCH[0], hidden, aux)
    return original(self, input_ids, hidden, lm_head, metadata, None, *args, **kwargs)


def dump(batch, hidden, aux):
    import torch

    parts = list(aux.split(hidden.shape[-1], dim=-1)) if isinstance(aux, torch.Tensor) else list(aux)
    row = 0
    for rid, rows, before in zip(batch.rids, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True):
        states = {f"aux{i}": part[row : row + rows].cpu().clone() for i, part in enumerate(parts)}
        states["final"] = hidden[row : row + rows].cpu().clone()
        torch.save(states, os.path.join(os.environ["NAIVE_DIR"], f"{rid}.{before}.pt"))
        row += rows
