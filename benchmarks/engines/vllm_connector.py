"""vLLM's hidden-states connector where there is no accelerator: it copies into page-locked memory and asks an event
whether the copy is done, and a CPU build has neither. Found by vLLM through `kv_connector_module_path`, in its
worker's own process.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as example

HostHiddenStatesConnector = example.ExampleHiddenStatesConnector

_empty_like = torch.empty_like


def _never_pinned(*args: Any, **options: Any) -> torch.Tensor:
    options.pop("pin_memory", None)
    return _empty_like(*args, **options)


class _Done:
    """An event of a copy that is over when it returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        return None

    def record(self, *_: Any) -> None:
        return None

    def wait(self, *_: Any) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True


torch.empty_like = _never_pinned
torch.cuda.Event = _Done
