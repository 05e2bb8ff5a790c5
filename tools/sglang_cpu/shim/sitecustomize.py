"""Lets an unmodified SGLang wheel start on a CPU-only torch: two patches, each applied when its module is first
imported.

The rule: nothing here computes. (1) torchvision's own C++ library does not load beside a CPU torch, so the two
operators that its Python part registers fake kernels for are declared, without an implementation. (2) With
routed-expert capture on, SGLang page-locks a host buffer through CUDA; without a CUDA device ordinary memory serves, so
that one function does nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

_BOXES_TO_KEEP = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def _declare_torchvision_operators(_module: ModuleType | None) -> None:
    import torch

    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            torch.library.define(f"torchvision::{operator}", _BOXES_TO_KEEP)


def _leave_memory_pageable(module: ModuleType | None) -> None:
    import torch

    if module is not None and not torch.cuda.is_available():
        vars(module)["_cuda_host_register"] = lambda *_args, **_kwargs: None


class _OnImport(importlib.abc.MetaPathFinder):
    """Runs one action just before (`after=False`) or just after a named module is executed, once."""

    def __init__(self, name: str, action: Callable[[ModuleType | None], None], *, after: bool) -> None:
        self._name, self._action, self._after = name, action, after

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        if not self._after:
            self._action(None)
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_then_act(module: ModuleType) -> None:
            execute(module)
            self._action(module)

        spec.loader.exec_module = execute_then_act  # type: ignore[method-assign]
        return spec


sys.meta_path[:0] = [
    _OnImport("torchvision", _declare_torchvision_operators, after=False),
    _OnImport("sglang.srt.mem_cache.pool_host.common", _leave_memory_pageable, after=True),
]
