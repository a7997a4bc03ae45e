"""Switching a model's own auxiliary capture on, whatever its public setter does to the ids.

SGLang's setters disagree: `llama`, `qwen*` and most others store id + 1, `deepseek_v2` and `glm4_moe_lite` do so only
when the first id is 1. What they all fill is the list `layers_to_capture` of the inner model, in which k means "input
of layer k", which is transformers' `output_hidden_states[k]`. So the list is set and read back, and no convention is
trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_MARK = "_is_layer_to_capture"
"""Mixture-of-experts models of the Qwen family mark the layers themselves, and look at the mark only: with it left on,
the inner model goes on returning auxiliary states that the outer one no longer takes apart."""


class CannotSwitch(Exception):
    """This model's auxiliary capture cannot be switched on safely; says why."""


class AuxSwitch:
    """The auxiliary capture of one loaded model."""

    def __init__(self, model: Any, layers: Sequence[int], native: Sequence[int] | None = None) -> None:
        """Find the capture points and set the layers.

        Args:
            model: SGLang's outer model (`ModelRunner.model`).
            layers: hsdump's ids, ascending.
            native: ids in the meaning of the model's own setter, to be used in place of `layers`: what they come to is
                read back.

        Raises:
            CannotSwitch: no or several capture points, another user of them, or ids that did not arrive as asked.
                What was switched on here is off again then.
        """
        self._list_owner = _only(model, "layers_to_capture")
        self._flag_owner = _only(model, "capture_aux_hidden_states")
        if self._flag_owner.capture_aux_hidden_states or list(self._list_owner.layers_to_capture or []):
            raise CannotSwitch(
                "the model's auxiliary hidden states are already in use "
                f"(layers_to_capture {list(self._list_owner.layers_to_capture)}), perhaps by speculative decoding"
            )
        self._marked: list[Any] = []
        try:
            self._choose(model, layers, native)
        except BaseException:
            self.off()  # half switched on, the model would end the server in its first pass
            raise

    def _choose(self, model: Any, layers: Sequence[int], native: Sequence[int] | None) -> None:
        if native is None:
            self._layers = list(layers)
            self.engine_layers = self._find_own_ids(model)
        else:
            self._layers = self._apply_setter(model, native)
            self.engine_layers = tuple(native)
            if sorted(set(self._layers)) != self._layers or self._layers[0] < 1:
                raise CannotSwitch(f"the model's own ids {list(native)} come to layers {self._layers}")
        self.on()
        arrived = list(self._list_owner.layers_to_capture)
        if arrived != self._layers:
            raise CannotSwitch(f"asked for layers {self._layers}, the model took {arrived}")

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that are captured, in hsdump's meaning."""
        return tuple(self._layers)

    def on(self) -> None:
        """Compute the auxiliary states from the next pass on."""
        self._list_owner.layers_to_capture = list(self._layers)
        self._flag_owner.capture_aux_hidden_states = True
        for module in self._marked:
            setattr(module, _MARK, True)

    def off(self) -> None:
        """Run the model as if hsdump were not there."""
        self._list_owner.layers_to_capture = []
        self._flag_owner.capture_aux_hidden_states = False
        self._forget_marks()

    def _forget_marks(self) -> None:
        for module in self._marked:
            setattr(module, _MARK, False)

    def _find_own_ids(self, model: Any) -> tuple[int, ...]:
        """Try how the model's own setter takes ids, and let it prepare whatever it keeps beside the list.

        Returns:
            The ids that made it choose our layers; empty when none did, and the list alone says it.
        """
        marked = None
        for ids in (tuple(self._layers), tuple(layer - 1 for layer in self._layers)):
            try:
                found = self._apply_setter(model, ids)
            except IndexError:  # it marks layer k + 1, and there is none after the last
                found = []
            if found == self._layers:
                return ids
            marked = found if self._marked else marked
            self._forget_marks()
        if marked is not None:  # the loop of such a model looks at the marks only, which nothing else sets
            raise CannotSwitch(f"asked for layers {self._layers}, the model's own setter marked {marked}")
        return ()

    def _find_marks(self, model: Any) -> None:
        self._marked = [module for module in model.modules() if vars(module).get(_MARK)]

    def _apply_setter(self, model: Any, ids: Sequence[int]) -> list[int]:
        """Call the model's own setter, and read back which layers it chose."""
        setter = getattr(model, "set_eagle3_layers_to_capture", None)
        if setter is None:
            raise CannotSwitch(f"{type(model).__name__} has no set_eagle3_layers_to_capture")
        try:
            setter(list(ids))
        finally:  # some are set before it finds that one layer is not there
            self._find_marks(model)
        return list(self._list_owner.layers_to_capture)


def _only(model: Any, attribute: str) -> Any:
    """Find the one module that has an attribute of this name."""
    owners = [module for module in model.modules() if attribute in vars(module)]
    if len(owners) != 1:
        names = [type(owner).__name__ for owner in owners]
        raise CannotSwitch(f"{type(model).__name__} has {len(owners)} modules with {attribute} {names}, expected one")
    return owners[0]
