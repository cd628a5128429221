"""transformers' configs without its compiler: what their import takes besides is most of it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

KERNELS, ACTIVATIONS = "transformers.integrations.hub_kernels", "transformers.activations"

T = TypeVar("T")


@contextmanager
def without_kernels() -> Iterator[None]:
    """In here transformers' activations, which its Llama config imports, are imported as if without its kernels.

    Those import torch's compiler, sympy, accelerate and boto3: 85 MiB, and 1.5 s of processor time. Of them the
    activations take one decorator, which does nothing unless the package `kernels` is installed. Then, and once they
    are imported, nothing is changed here; a version of transformers that takes more of them gets them.
    """
    if KERNELS in sys.modules or ACTIVATIONS in sys.modules or importlib.util.find_spec("kernels") is not None:
        yield
        return
    stand_in: Any = ModuleType(KERNELS)
    stand_in.use_kernel_forward_from_hub, stand_in.__getattr__ = _unchanged, _of_the_kernels
    sys.modules[KERNELS] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(KERNELS) is stand_in:
            del sys.modules[KERNELS]  # whoever needs it imports it


def _of_the_kernels(name: str) -> Any:
    """What else they have, from themselves."""
    if name.startswith("__"):  # what an import asks of any module
        raise AttributeError(name)
    del sys.modules[KERNELS]
    return getattr(importlib.import_module(KERNELS), name)


def _unchanged(_: str) -> Callable[[T], T]:
    """The decorator for a layer that kernels may replace, where there are none."""
    return lambda layer: layer
