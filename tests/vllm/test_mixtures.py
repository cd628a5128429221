"""Mixtures of experts: `layer` and `free` in Lamina's class for vLLM, `stock` in vLLM's own classes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.fused_moe import layer as fused_layer
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

from lamina import LaminaConfig
from lamina.engine_vllm.mixtures import FusedExperts
from lamina.vllm_lamina import fused_width
from tests.vllm.checkpoints import heal
from tests.vllm.mixtures import CASES, exported, write
from tests.vllm.test_engines import expected, run

OURS = [name for name in CASES if not name.endswith("stock")]
STOCK = [name for name in CASES if name.endswith("stock")]
SPLIT = ("mixtral-layer", "qwen2-layer", "qwen3-free")
CLASSES = {"mixtral": "MixtralForCausalLM", "qwen3": "Qwen3MoeForCausalLM", "deepseek": "DeepseekV3ForCausalLM"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtures")
    for name in OURS:
        write(folder / name, name)
    write(folder / "rounded", "mixtral-layer", bits=8)
    heal(write(folder / "healed", "mixtral-layer"))
    for name in STOCK:
        exported(folder / "exported" / name, name)
    return folder


@pytest.fixture(scope="module")
def native(root: Path) -> dict[str, Any]:
    return run("auto", 1, [root / name for name in (*OURS, "rounded", "healed")])


@pytest.fixture(scope="module")
def on_two(root: Path) -> dict[str, Any]:
    return run("auto", 2, [root / name for name in SPLIT])


@pytest.fixture(scope="module")
def stock(root: Path) -> dict[str, Any]:
    """Latent attention as a plain one: the CPU has a kernel for DeepSeek's own sizes alone."""
    folders = [root / "exported" / name / name for name in STOCK]
    return run("auto", 1, folders, "float32-native", VLLM_MLA_DISABLE="1")


@pytest.mark.parametrize("name", [*OURS, "rounded", "healed"])
def test_our_class_says_the_same(native: dict[str, Any], root: Path, name: str) -> None:
    assert native[name].get("error") is None
    assert native[name]["class"] == "LaminaForVllm"
    assert native[name]["tokens"] == expected(root / name)


@pytest.mark.parametrize("name", SPLIT)
def test_two_devices_say_the_same(on_two: dict[str, Any], root: Path, name: str) -> None:
    assert on_two[name].get("error") is None
    assert on_two[name]["tokens"] == expected(root / name)


@pytest.mark.parametrize("name", STOCK)
def test_vllm_s_own_classes_load_exports(stock: dict[str, Any], root: Path, name: str) -> None:
    assert stock[name].get("error") is None
    assert stock[name]["class"] == CLASSES[name.split("-")[0]]
    assert stock[name]["tokens"] == expected(root / "exported" / name / "output")


def test_an_export_has_the_narrow_latents(root: Path) -> None:
    """vLLM caches a latent and the rotated part of the keys for each token."""
    config = json.loads(
        (root / "exported" / "deepseek-latents-stock" / "deepseek-latents-stock" / "config.json").read_text()
    )
    assert (config["kv_lora_rank"], config["q_lora_rank"]) == (32, 24)


def test_compiled_it_says_the_same_unless_experts_differ(root: Path) -> None:
    said = run("auto", 1, [root / "mixtral-layer", root / "qwen3-free"], "float32-compiled")
    assert said["mixtral-layer"]["tokens"] == expected(root / "mixtral-layer")
    assert "layer 0: its experts differ in width or form" in said["qwen3-free"]["error"]


def test_expert_parallelism_is_refused_on_cpus(root: Path) -> None:
    said = run("auto", 1, [root / "mixtral-layer"], "float32-ep")["mixtral-layer"]
    assert "enable_expert_parallel: vLLM's experts on CPUs ignore which device has which expert" in said["error"]


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tmp_path / 'rendezvous'}", 0, "gloo")
        initialize_model_parallel()
        yield
    cleanup_dist_env_and_memory()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("rank", "mine"), [(0, [0, 1, 2]), (1, [3, 4, 5])])
def test_expert_parallelism_places_each_expert_on_one_device(
    root: Path, monkeypatch: pytest.MonkeyPatch, rank: int, mine: list[int]
) -> None:
    """The third layer has six experts of 24 channels: each of two devices holds three, whole."""
    plain = FusedMoEParallelConfig.make_no_parallel()
    values = {name: getattr(plain, name) for name in FusedMoEParallelConfig.__dataclass_fields__}
    divided = FusedMoEParallelConfig(**values | {"use_ep": True, "ep_size": 2, "ep_rank": rank})
    monkeypatch.setattr(fused_layer, "make_parallel_config", lambda *args, **options: divided)
    config = LaminaConfig.from_pretrained(root / "mixtral-layer")
    width = fused_width(config, 2)
    assert width == 24
    fused = FusedExperts(config, 2, width, "model.layers.2")
    stored = load_file(root / "mixtral-layer" / "model.safetensors")
    for path, load in fused.places():
        load(stored[f"model.layers.2.{path}.weight"])
    held = fused.runner.routed_experts
    assert held.w13_weight.shape == (3, 48, 128)
    for place, expert in enumerate(mine):
        gate, down, up = (
            stored[f"model.layers.2.block_sparse_moe.experts.{expert}.{name}.weight"] for name in ("w1", "w2", "w3")
        )
        assert torch.equal(held.w13_weight[place], torch.cat([gate, up]))
        assert torch.equal(held.w2_weight[place], down)
