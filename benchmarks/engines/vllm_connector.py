"""vLLM's hidden-states connector where there is no accelerator: it copies into page-locked memory, which a CPU build
has no allocator for. Found by vLLM through `kv_connector_module_path`, in its worker's own process.
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


torch.empty_like = _never_pinned
