"""Stand-in for SGLang's compiled kernels where there is no GPU: every name resolves, none computes.

SGLang imports kernel names at module level and calls them only on GPU paths. With SGLANG_USE_CPU_ENGINE=1 it takes its
own PyTorch paths instead, so an operator that is called here is a path that tests must not take: it raises.

Two things are put in besides: `speculative`, the kernels of EAGLE decoding in plain torch, and `widening`, for
processors without bfloat16 instructions.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from . import speculative
from .speculative import (  # noqa: F401 - SGLang imports them from here
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    verify_tree_greedy_cpu,
)
from .widening import widen_where_needed


class _MissingKernel:
    """One kernel, or a namespace of kernels: attributes give more of them, a call raises."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> _MissingKernel:
        if name.startswith("__"):  # inspection protocols must see an object without extras
            raise AttributeError(name)
        return _MissingKernel(f"{self.__name__}.{name}")

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{self.__name__} needs a GPU; this is the stand-in for a CPU")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _MissingKernel) and other.__name__ == self.__name__

    def __hash__(self) -> int:
        return hash(self.__name__)


class _KernelModule(ModuleType):
    """A module in which every public name is a kernel."""

    def __getattr__(self, name: str) -> _MissingKernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return _MissingKernel(f"{self.__name__}.{name}")


class _KernelModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every `sgl_kernel.<anything>`, to any depth."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _KernelModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: names appear when they are asked for."""


speculative.install()
widen_where_needed()
sys.meta_path.append(_KernelModules())
sys.modules[__name__].__class__ = _KernelModule
