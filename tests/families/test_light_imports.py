"""transformers' configs are imported without its compiler, and what is imported later is whole."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
import transformers

from pipeline.families.light_imports import ACTIVATIONS, KERNELS, without_kernels
from pipeline.families.registry import COMMON_ACTIVATIONS


@pytest.fixture
def nothing_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers as it is before its activations are imported; afterwards as it was."""
    monkeypatch.setattr(transformers, "activations", transformers.activations)
    for name in (ACTIVATIONS, KERNELS):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("nothing_imported")
def test_activations_are_imported_without_kernels() -> None:
    before = set(sys.modules)
    with without_kernels():
        from transformers.activations import ACT2FN
    assert set(sys.modules) - before == {ACTIVATIONS}
    assert set(ACT2FN) >= COMMON_ACTIVATIONS
    assert type(ACT2FN["silu"]).__name__ == "SiLUActivation"


@pytest.mark.usefixtures("nothing_imported")
def test_what_else_is_asked_of_the_kernels_is_theirs() -> None:
    with without_kernels():
        from transformers.integrations.hub_kernels import replace_kernel_forward_from_hub, use_kernel_forward_from_hub
    kernels = sys.modules[KERNELS]
    assert replace_kernel_forward_from_hub is kernels.replace_kernel_forward_from_hub
    assert use_kernel_forward_from_hub.__module__ in (KERNELS, without_kernels.__module__)


@pytest.mark.usefixtures("nothing_imported")
def test_kernels_that_are_installed_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "kernels" else None)
    with without_kernels():
        assert KERNELS not in sys.modules


def test_what_is_imported_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = ModuleType(KERNELS)
    monkeypatch.setitem(sys.modules, KERNELS, kernels)
    with without_kernels():
        assert sys.modules[KERNELS] is kernels
    assert sys.modules[KERNELS] is kernels
