"""Test only: let DeepSeek's attention run on backends whose default handler picks a path that they cannot run."""


def register() -> None:
    """SGLang calls this in each of its processes."""
    try:
        from sglang.srt.models.deepseek_common.attention_backend_handler import (
            AttentionBackendRegistry,
            AttnForwardMethod,
        )
    except ImportError:  # older releases keep it elsewhere; only the newest serves this model in the tests
        return
    for backend in ("torch_native", "intel_amx"):
        AttentionBackendRegistry.register(backend, lambda _attention, _batch: AttnForwardMethod.MLA)
