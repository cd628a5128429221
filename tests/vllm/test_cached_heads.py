"""How wide heads are in vLLM's cache, by what its backends can: chosen here with a platform and backends made up."""

from typing import Any

import pytest
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from lamina import LaminaConfig
from lamina.engine_vllm import attention
from lamina.engine_vllm.attention import CachedHeads
from tests.serving.serving_factors import forms_of, latent_both
from tests.serving.serving_sources import describe
from tests.vllm.checkpoints import SOURCES, flat, wide


def config_of(*layers: Any) -> LaminaConfig:
    return LaminaConfig(**describe(SOURCES["llama"], forms_of(SOURCES["llama"], [*layers], 0.5)))


class Platform:
    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda

    def is_cuda(self) -> bool:
        return self.cuda


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "current_platform", Platform(True))


def backend(name: str) -> Any:
    return AttentionBackendEnum[name].get_class()


def test_one_width_for_all_layers() -> None:
    assert config_of(flat, flat, flat).served_value_width() == 16
    assert config_of(flat, latent_both, flat).served_value_width() == 32
    assert config_of(flat, wide, flat).served_value_width() == 64  # 51, in sixteens
    config = config_of(flat, flat, latent_both)
    config.head_dim = 40  # of which sixteens do not make a head: as wide as keys
    assert config.served_value_width() == 40


def test_a_cpu_holds_equal_widths() -> None:
    heads = CachedHeads(config_of(flat, flat, flat), kernel_sizes=(32, 64))
    assert (heads.key, heads.value, heads.backend, heads.saved()) == (32, 32, None, 0.0)
    heads = CachedHeads(config_of(flat, wide, flat), kernel_sizes=(32, 96))
    assert (heads.key, heads.value, heads.backend) == (96, 96, None)


def test_heads_without_a_kernel_are_widened() -> None:
    heads = CachedHeads(config_of(flat, flat, flat), kernel_sizes=(40, 64))
    assert (heads.key, heads.value, heads.backend) == (40, 40, None)


@pytest.mark.usefixtures("on_cuda")
def test_cuda_holds_narrow_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for able, name in ((True, "FLASH_ATTN_DIFFKV"), (False, "TRITON_ATTN_DIFFKV")):
        flash = backend("FLASH_ATTN_DIFFKV")
        monkeypatch.setattr(flash, "is_supported_on_current_device", lambda able=able, **_: able)
        heads = CachedHeads(config_of(flat, flat, flat))
        assert heads.backend is backend(name)
        assert (heads.key, heads.value, heads.backend.head_size_v, heads.saved()) == (32, 16, 16, 0.25)


@pytest.mark.usefixtures("on_cuda")
def test_cuda_holds_equal_widths_where_a_layer_or_the_user_asks_for_them() -> None:
    heads = CachedHeads(config_of(flat, flat, latent_both))
    assert (heads.key, heads.value, heads.backend) == (32, 32, None)
    heads = CachedHeads(config_of(flat, flat, flat), AttentionBackendEnum.FLASH_ATTN)
    assert (heads.key, heads.value, heads.backend) == (32, 32, None)
    heads = CachedHeads(config_of(flat, flat, flat), AttentionBackendEnum.TRITON_ATTN_DIFFKV)
    assert (heads.value, heads.backend) == (16, backend("TRITON_ATTN_DIFFKV"))
