"""What the blocks of `hsdump patch` call, in each process of a server whose SGLang source carries them.

A block runs while SGLang's module is imported, and only when SGLANG_HS_DUMP_DIR is set. It hands the class above it to
a function here, which wraps the methods that a plugin would have hooked; the wrappers are the plugin's own.
"""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import Any

from hsdump.sglang.hooks import ServerCapture, claim
from hsdump.spool.names import ENV_DUMP_DIR, PREFIX

logger = logging.getLogger(__name__)

TESTED = ("0.5.6", "0.5.23")
"""Oldest and newest release whose source the patch fits; see docs/patch.md for those that served."""

_NUMBERS = tuple(tuple(int(part) for part in version.split(".")) for version in TESTED)


class _Attached:
    """What was handed over in this process so far."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.capture: ServerCapture | None = None
        self.asked = False


_state = _Attached()


def attached() -> list[str]:
    """Name the classes that were handed over in this process."""
    return list(_state.names)


def attach_logits(kind: Any) -> None:
    """Take LogitsProcessor: its `forward` sees the final and the auxiliary states of every row."""
    capture = _capture()
    if capture is None:
        return
    original = kind.forward

    @functools.wraps(original)
    def forward(
        self: Any,
        input_ids: Any,
        hidden_states: Any,
        lm_head: Any,
        logits_metadata: Any,
        aux_hidden_states: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        aux = aux_hidden_states
        return capture.around_logits(
            original, self, input_ids, hidden_states, lm_head, logits_metadata, aux, *args, **kwargs
        )

    kind.forward = forward
    _state.names.append(kind.__name__)


def attach_runner(kind: Any) -> None:
    """Take ModelRunner: after `load_model` capture is switched on, and `forward` knows the requests of a batch."""
    capture = _capture()
    if capture is None:
        return
    load_model, model_forward = kind.load_model, kind.forward

    @functools.wraps(load_model)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load_model(self, *args, **kwargs)
        if "LogitsProcessor" not in _state.names:
            # Without it the auxiliary states would reach SGLang's own code, which then waits for nobody's request.
            capture.give_up("only a part of the patch is in place; see `hsdump patch status`")
            return result
        _keep_out_of_the_cache()
        return capture.after_load_model(result, self)

    @functools.wraps(model_forward)
    def forward(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        return capture.around_forward(model_forward, self, forward_batch, *args, **kwargs)

    kind.load_model, kind.forward = load, forward
    _state.names.append(kind.__name__)


def _keep_out_of_the_cache() -> None:
    """Give each request of hsdump the cache namespace that it asked for.

    Up to 0.5.9 the scheduler drops `extra_key` on its way to the request; then tokens of somebody's earlier prompt
    would not be computed again, and their rows would not exist. Called while the model loads: no request exists before.
    """
    try:
        from sglang.srt.managers.schedule_batch import Req
    except ImportError:
        logger.exception("hsdump cannot keep its requests out of the prefix cache; rows from there are refused")
        return
    if getattr(Req.__init__, "hsdump", False):
        return
    original = Req.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        rid = getattr(self, "rid", None)
        if isinstance(rid, str) and rid.startswith(PREFIX) and rid not in (getattr(self, "extra_key", None) or ""):
            self.extra_key = rid

    init.hsdump = True  # type: ignore[attr-defined]  # a model and its draft are loaded in one process
    Req.__init__ = init


def attach_batch(kind: Any) -> None:
    """Take ForwardBatch of a release before 0.5.10, which does not hold the ids of its requests: give them to it."""
    if _capture() is None:
        return
    original = kind.init_new.__func__

    @functools.wraps(original)
    def init_new(cls: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(cls, batch, *args, **kwargs)
        requests = getattr(batch, "reqs", None)
        made.rids = None if requests is None else [request.rid for request in requests]
        return made

    kind.init_new = classmethod(init_new)
    _state.names.append(kind.__name__)


def attach_model(kind: Any) -> None:
    """Take the class of a model whose forward loop carries the tap (`hsdump patch apply --target`).

    It gets `_hsdump_loop`: None until a model is built with capture on.
    """
    capture = _capture()
    if capture is None:
        return
    from hsdump.sglang.loop import LoopCapture

    loop = LoopCapture(capture)
    original = kind.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _keep_out_of_the_cache()
        loop.after_init(self, kwargs.get("config", args[0] if args else None))

    kind.__init__ = init
    kind._hsdump_loop = loop
    _state.names.append(kind.__name__)


def _capture() -> ServerCapture | None:
    """Give the one capture of this process, or None when a plugin has attached already."""
    if not _state.asked:
        _state.asked = True
        root = os.environ.get(ENV_DUMP_DIR)
        if root and claim("patch"):
            capture = ServerCapture(Path(root), attach="patch")
            capture.engine_version, capture.notes = _version()
            _state.capture = capture
    return _state.capture


def _version() -> tuple[str, tuple[str, ...]]:
    """Give SGLang's version, and a note when the patch has not seen it."""
    try:
        from sglang.version import __version__ as version
    except ImportError:
        return "unknown", ("SGLang does not say its version",)
    try:
        numbers = tuple(int(part) for part in str(version).split(".")[:3])
        if _NUMBERS[0] <= numbers <= _NUMBERS[1]:
            return str(version), ()
    except ValueError:
        pass
    return str(version), (f"SGLang {version} is outside {TESTED[0]}..{TESTED[1]}; its anchors were found by shape",)
