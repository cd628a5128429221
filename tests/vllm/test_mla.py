"""What `mla` writes, in vLLM's own class: the tokens of transformers, and a cache of half and of a quarter."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from tests.vllm.checkpoints import heal
from tests.vllm.generate import LENGTH, PROMPTS
from tests.vllm.latents import SIZES, write, write_dense, write_random
from tests.vllm.test_engines import run

SHARES = (0.5, 0.25)
DENSER = "denser"  # half of the cache, with four rotated frequencies for each of the source's
HEALED = "healed"  # half of the cache, trained
LATENT, ROTATED = 512, 64  # of DeepSeek-V3, the only sizes that the kernel for CPUs takes
HEADS = {share: round((LATENT + ROTATED) / (2 * ROTATED * share)) for share in SHARES}  # of a dense model: 9 and 18


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latents")
    for share in SHARES:
        write(folder / str(share), share)
    write(folder / DENSER, 0.5, rotated=64, density=4)
    heal(write(folder / HEALED, 0.5))
    return folder


@pytest.fixture(scope="module")
def said(root: Path) -> dict[str, Any]:
    """Latent attention as a plain one, and no rotary operator: that of vLLM 0.32 for CPUs rotates one head alone."""
    folders = [root / str(name) for name in (*SHARES, DENSER, HEALED)]
    return run("auto", 1, folders, "float32-native", VLLM_MLA_DISABLE="1")


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model of DeepSeek's cache and dense ones of which it is a share, in bfloat16, by vLLM's kernel for latents."""
    folder = tmp_path_factory.mktemp("caches")
    folders = [write_dense(folder / f"dense-{share}", heads, ROTATED) for share, heads in HEADS.items()]
    folders.append(write_random(folder / "latent", LATENT, ROTATED))
    return run("auto", 1, folders, "bfloat16-native", OMP_NUM_THREADS="1")


@cache
def expected(folder: Path) -> list[list[int]]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is DeepseekV3ForCausalLM
    found = []
    for ids in PROMPTS:
        out = model.generate(torch.tensor([ids]), max_new_tokens=LENGTH, do_sample=False, eos_token_id=None)
        found.append(out[0, len(ids) :].tolist())
    return found


@pytest.mark.parametrize("name", [*SHARES, DENSER, HEALED])
def test_it_says_the_same(said: dict[str, Any], root: Path, name: float | str) -> None:
    one = said[str(name)]
    assert one.get("error") is None
    assert one["class"] == "DeepseekV3ForCausalLM"
    assert one["tokens"] == expected(root / str(name))


@pytest.mark.parametrize("share", SHARES)
def test_bytes_of_a_token_by_vllm_s_specification(root: Path, share: float) -> None:
    """Of the checkpoint's sizes, beside the source's."""
    model: Any = AutoModelForCausalLM.from_pretrained(root / str(share))
    config, common = model.config, {"block_size": 16, "dtype": torch.float32}
    latent = MLAAttentionSpec(num_kv_heads=1, head_size=config.kv_lora_rank + config.qk_rope_head_dim, **common)
    dense = FullAttentionSpec(num_kv_heads=SIZES["num_key_value_heads"], head_size=SIZES["head_dim"], **common)
    assert latent.page_size_bytes == share * dense.page_size_bytes


@pytest.mark.parametrize("share", SHARES)
def test_a_gib_holds_as_many_more_tokens(cached: dict[str, Any], share: float) -> None:
    dense, latent = cached[f"dense-{share}"], cached["latent"]
    assert [each.get("error") for each in (dense, latent)] == [None, None]
    assert latent["token_bytes"] == share * dense["token_bytes"] == 2 * (LATENT + ROTATED)
    assert latent["capacity"] * share == pytest.approx(dense["capacity"], rel=0.001)
