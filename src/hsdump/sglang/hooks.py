"""What hsdump does at its three hooks in SGLang, whichever way they were put there: by plugin or by patch.

Nothing here ever raises into the server: what cannot be captured is refused request by request, and what cannot be set
up is announced in the spool, where the client's handshake reads it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsdump._version import __version__
from hsdump.layers import AUTO, check_layers, parse_native, resolve_layers
from hsdump.schema import EngineInfo, StateShape
from hsdump.spool.names import ENV_LAYERS, PREFIX

if TYPE_CHECKING:  # it imports torch, which a server without capture must not need from us
    from hsdump.sglang.facts import RunnerFacts

logger = logging.getLogger(__name__)

DECODE_STALE_S = 60.0
"""A generating request without a step for so long is not waited for at other people's decode batches."""

_attached: list[str] = []
"""How this process was attached to, once it was. A second way would take every row twice."""


def claim(attach: str) -> bool:
    """Let the first way of attaching have this process."""
    if _attached:
        if attach not in _attached:
            logger.warning("hsdump is attached by %s already; not by %s as well", _attached[0], attach)
        return False
    _attached.append(attach)
    return True


def wanted_layers(num_layers: int) -> tuple[int, ...]:
    """Read the layers from the environment that `hsdump serve` sets.

    Raises:
        UsageError: ids that this model does not have.
    """
    return resolve_layers(os.environ.get(ENV_LAYERS, AUTO), num_layers)


class ServerCapture:
    """The state that the three hooks share in one process. The hooks run in the scheduler's one thread."""

    def __init__(self, root: Path, attach: str = "plugin") -> None:
        self._root = root
        self._attach = attach
        self.engine_version = ""
        self.notes: tuple[str, ...] = ()
        self._announcement: Any = None
        self._tap: Any = None
        self._switch: Any = None
        self._dynamic = False
        self._in_step = False
        """The other ranks of this model compute auxiliary states, so this one must as well, with a tap or without."""

        self._segments: list[Any] = []
        self._decoding: dict[Any, float] = {}
        """Requests whose decode steps are wanted, and when they last had rows."""

    def after_load_model(self, result: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        """Switch the model's capture on and announce it, or announce why not."""
        if getattr(runner, "is_draft_worker", False):
            return result
        try:
            self._set_up(runner)
        except Exception as error:  # noqa: BLE001 - a process border, as above
            self._tap = None
            if not self._in_step:
                self._switch_off()
            args_ = getattr(runner, "server_args", None)
            host, port = getattr(args_, "host", ""), getattr(args_, "port", 0)
            self.give_up(f"{type(error).__name__}: {error}", host=str(host), port=int(port or 0))
        return result

    def around_forward(self, original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Note which rows of the batch are hsdump's while the model runs."""
        if self._switch is None:
            return original(runner, batch, *args, **kwargs)
        self._settle()
        segments = self._begin(batch)
        if not segments:
            return original(runner, batch, *args, **kwargs)
        try:
            return original(runner, batch, *args, **kwargs)
        finally:
            if self._segments and segments[0].decode and self._tap is not None:
                self._refuse_unseen(segments)
            self._end()

    def around_logits(  # noqa: PLR0913, PLR0917 - SGLang's own signature
        self,
        original: Callable[..., Any],
        processor: Any,
        input_ids: Any,
        hidden_states: Any,
        lm_head: Any,
        metadata: Any,
        aux_hidden_states: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Take hsdump's rows, then go on as if there had been no auxiliary states."""
        if self._switch is None:
            return original(processor, input_ids, hidden_states, lm_head, metadata, aux_hidden_states, *args, **kwargs)
        if self._segments and self._tap is not None:
            self._take(input_ids, hidden_states, aux_hidden_states)
        return original(processor, input_ids, hidden_states, lm_head, metadata, None, *args, **kwargs)

    def give_up(self, reason: str, *, host: str = "", port: int = 0) -> None:
        """Let the client's handshake know; the server goes on without capture."""
        logger.error("hsdump captures nothing: %s", reason)
        try:
            self._announce().decline(reason, host=host, port=port)
        except Exception as error:  # noqa: BLE001 - a process border, as above
            logger.error("hsdump cannot announce that either: %s", error)

    def _set_up(self, runner: Any) -> None:
        from hsdump.sglang.facts import conflict, read_facts
        from hsdump.sglang.switch import AuxSwitch, CannotSwitch

        reason = conflict(runner)
        if reason:
            raise CannotSwitch(f"capture cannot be combined with {reason}")
        facts = read_facts(runner)
        native = parse_native(os.environ.get(ENV_LAYERS, AUTO))
        self._switch = AuxSwitch(runner.model, wanted_layers(facts.num_layers) if native is None else (), native)
        layers = check_layers(self._switch.layers, facts.num_layers)
        # A CUDA graph bakes the choice in, so only an eager model can be left alone between our batches.
        self._dynamic = facts.device == "cpu"
        if self._dynamic:
            self._switch.off()
        # What failed so far fails on each rank. A ring that does not fit is one rank's matter, and SGLang gathers
        # auxiliary states over all ranks where their rows are scattered: one that left would hang the others.
        self._in_step = facts.tp_size > 1
        self._open(facts, layers)

    def _switch_off(self) -> None:
        """Leave the model as it was, before any graph is captured: a server that captures nothing pays nothing."""
        switch, self._switch = self._switch, None
        if switch is not None:
            with contextlib.suppress(Exception):  # a process border, as above
                switch.off()

    def _open(self, facts: RunnerFacts, layers: tuple[int, ...]) -> None:
        """Make the tap of this process, if it copies at all, and tell clients."""
        from hsdump.sglang.taps import make_tap, read_settings

        settings = read_settings(facts.device, facts.tp_size)
        if facts.tp_rank >= settings.copying_ranks:
            return
        shape = StateShape(layers=layers, hidden_size=facts.hidden_size, dtype=facts.dtype, final_state="post_norm")
        announcement = self._announce()
        self._tap, ring = make_tap(self._root, shape, facts, settings)
        info = EngineInfo(
            engine="sglang",
            engine_version=self.engine_version,
            attach=self._attach,
            hsdump_version=__version__,
            model_path=facts.model_path,
            model_class=facts.model_class,
            num_layers=facts.num_layers,
            vocab_size=facts.vocab_size,
            context_length=facts.context_length,
            shape=shape,
            device=facts.device,
            tp_size=facts.tp_size,
            dp_size=facts.dp_size,
            spool_dir=str(self._root),
            spool_max_bytes=settings.spool_bytes,
            hand_over=settings.hand_over,
            rings=facts.dp_size * settings.copying_ranks if settings.hand_over == "ring" else 0,
            engine_layers=getattr(self._switch, "engine_layers", ()),
            no_decode=facts.no_decode,
            notes=self.notes,
        )
        announcement.offer(info, host=facts.host, port=facts.port, ring=ring)
        logger.info("hsdump captures layers %s into %s by %s", list(layers), self._root, settings.hand_over)

    def _announce(self) -> Any:
        from hsdump.sglang.announce import Announcement

        if self._announcement is None:
            self._announcement = Announcement(self._root)
        return self._announcement

    def _begin(self, batch: Any) -> list[Any]:
        """Find our rows in a batch; one look at its ids for every other prefill batch, and none at decode batches
        while nobody captures those.
        """
        self._segments = []
        try:
            if batch.rids is None:
                return []
            if batch.forward_mode.is_extend():
                self._segments = self._begin_prefill(batch)
            elif self._decoding and batch.forward_mode.is_decode():
                self._segments = self._begin_decode(batch)
            if self._segments and self._dynamic:
                self._switch.on()
        except Exception:  # a process border, as above
            logger.exception("hsdump could not read a batch; its requests are not captured")
            self._end()
        return self._segments

    def _begin_prefill(self, batch: Any) -> list[Any]:
        if not any(rid.startswith(PREFIX) for rid in batch.rids):
            return []
        from hsdump.capture.batch import segments_of, split_late

        found = segments_of(batch.rids, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu)
        segments, late = split_late(found)
        if late and self._tap is not None:
            self._tap.refuse(late, "retracted", "the server computed generated tokens again by prefill, under pressure")
        for segment in segments:
            if segment.rid.prompt_tokens is not None:
                self._decoding[segment.rid] = time.monotonic()
        return segments

    def _begin_decode(self, batch: Any) -> list[Any]:
        from hsdump.capture.batch import decode_segments

        now_s = time.monotonic()
        segments = decode_segments(batch.rids, batch.seq_lens.tolist())
        for segment in segments:
            self._decoding[segment.rid] = now_s
            if segment.position + 1 == segment.rid.num_tokens:
                del self._decoding[segment.rid]
        if not segments:  # aborted requests must not keep us looking at other people's batches
            self._decoding = {rid: seen for rid, seen in self._decoding.items() if now_s - seen < DECODE_STALE_S}
        return segments

    def _refuse_unseen(self, segments: list[Any]) -> None:
        """The step ran, but its logits processor was not called from Python."""
        detail = "a CUDA graph hides decode steps from Python; start the server with --disable-cuda-graph"
        with contextlib.suppress(Exception):  # a process border, as above
            self._tap.refuse(segments, "decode-hidden", detail)

    def _settle(self) -> None:
        if self._tap is not None:
            try:
                self._tap.settle()
            except Exception:  # a process border, as above
                logger.exception("hsdump could not wait for its last copies")

    def _end(self) -> None:
        self._segments = []
        if self._dynamic:
            self._switch.off()

    def _take(self, input_ids: Any, hidden_states: Any, aux_hidden_states: Any) -> None:
        from hsdump.capture.batch import BatchStates

        segments, self._segments = self._segments, []
        try:
            if aux_hidden_states is None:
                raise ValueError("the model gave no auxiliary states")
            self._tap.take(segments, BatchStates(input_ids, aux_hidden_states, hidden_states))
        except Exception as error:  # a process border, as above
            logger.exception("hsdump could not capture a batch")
            with contextlib.suppress(Exception):  # a process border, as above
                self._tap.refuse(segments, "capture-error", f"{type(error).__name__}: {error}")
