"""SGLang's plugin: entry point `hsdump` in the group `sglang.srt.plugins`, run in every process of the server.

Without HSDUMP_SPOOL in the environment it does nothing at all. With it, nothing here ever raises into the server: what
cannot be set up is announced in the spool, where the client's handshake reads it; see `hsdump.sglang.hooks`.
"""

from __future__ import annotations

import os
from pathlib import Path

from hsdump.sglang.hooks import ServerCapture, claim
from hsdump.spool.names import ENV_SPOOL


def register() -> None:
    """Register hsdump's hooks, when this server was started for capture."""
    root = os.environ.get(ENV_SPOOL)
    if not root or not claim("plugin"):
        return
    capture = ServerCapture(Path(root))
    try:
        from sglang import __version__ as version
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from hsdump.sglang.targets import targets_for

        targets, capture.notes = targets_for(version)
        capture.engine_version = version
        HookRegistry.register(targets.load_model, capture.after_load_model, HookType.AFTER)
        HookRegistry.register(targets.forward, capture.around_forward, HookType.AROUND)
        HookRegistry.register(targets.logits, capture.around_logits, HookType.AROUND)
    except Exception as error:  # noqa: BLE001 - a process border: the server must start whatever is wrong with us
        capture.give_up(f"hsdump's hooks could not be registered: {type(error).__name__}: {error}")
