"""Stand-in for SGLang's compiled kernels where there is no GPU: every name resolves, none computes.

SGLang imports kernel names at module level and calls them only on GPU paths. With SGLANG_USE_CPU_ENGINE=1 it takes its
own PyTorch paths instead, so an operator that is called here is a path that tests must not take: it raises.

One thing is put in besides: on a processor without bfloat16 instructions torch multiplies bfloat16 matrices ten times
slower than float32 ones, so there `linear` multiplies the same numbers in float32 and rounds once, which is what torch
itself does up to the order of its sums.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch


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


def _multiplies_bfloat16() -> bool:
    words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split())
    return bool(words & {"amx_bf16", "avx512_bf16", "bf16", "svebf16"})


def _widen_linear() -> None:
    plain = torch.nn.functional.linear

    def linear(input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002 - torch's own name
        if not input.dtype == weight.dtype == torch.bfloat16 or input.device.type != "cpu" or weight.is_inference():
            return plain(input, weight, bias)
        version, wide = getattr(weight, "_widened", (None, None))
        if version != weight._version:
            wide = weight.detach().float()
            weight._widened = (weight._version, wide)
        return plain(input.float(), wide, None if bias is None else bias.float()).to(torch.bfloat16)

    torch.nn.functional.linear = linear


if not _multiplies_bfloat16():
    _widen_linear()
sys.meta_path.append(_KernelModules())
sys.modules[__name__].__class__ = _KernelModule
