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

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        """Find the capture points and set the layers.

        Args:
            model: SGLang's outer model (`ModelRunner.model`).
            layers: hsdump's ids, ascending.

        Raises:
            CannotSwitch: no or several capture points, another user of them, or ids that did not arrive as asked.
        """
        self._layers = list(layers)
        self._list_owner = _only(model, "layers_to_capture")
        self._flag_owner = _only(model, "capture_aux_hidden_states")
        if self._flag_owner.capture_aux_hidden_states or list(self._list_owner.layers_to_capture or []):
            raise CannotSwitch(
                "the model's auxiliary hidden states are already in use "
                f"(layers_to_capture {list(self._list_owner.layers_to_capture)}), perhaps by speculative decoding"
            )
        self._apply_setter(model)
        self._marked = [module for module in model.modules() if vars(module).get(_MARK)]
        if self._marked and list(self._list_owner.layers_to_capture) != self._layers:
            found = list(self._list_owner.layers_to_capture)
            self._forget_marks()
            raise CannotSwitch(f"asked for layers {self._layers}, the model's own setter marked {found}")
        self.on()
        arrived = list(self._list_owner.layers_to_capture)
        if arrived != self._layers:
            raise CannotSwitch(f"asked for layers {self._layers}, the model took {arrived}")

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

    def _apply_setter(self, model: Any) -> None:
        """Let the model's own setter prepare whatever it keeps beside the list; `on` then sets the list itself."""
        setter = getattr(model, "set_eagle3_layers_to_capture", None)
        if setter is None:
            raise CannotSwitch(f"{type(model).__name__} has no set_eagle3_layers_to_capture")
        setter([layer - 1 for layer in self._layers])


def _only(model: Any, attribute: str) -> Any:
    """Find the one module that has an attribute of this name."""
    owners = [module for module in model.modules() if attribute in vars(module)]
    if len(owners) != 1:
        names = [type(owner).__name__ for owner in owners]
        raise CannotSwitch(f"{type(model).__name__} has {len(owners)} modules with {attribute} {names}, expected one")
    return owners[0]
