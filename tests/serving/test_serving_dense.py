"""With every form dense, the model computes what transformers' own class of the source computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lamina import LaminaConfig, LaminaForCausalLM, LaminaModel
from lamina.layers_lamina import LaminaDecoderLayer
from tests.serving.serving_sources import SOURCES, build, describe, layer_prefix, make_source, padded_batch

pytestmark = pytest.mark.sample(3)

SHARED_MODELS = Path(__file__).resolve().parents[2].parent / "shared" / "models"
# OPT scales the query before the product, GPT-J divides after it, Cohere computes its norm in steps: equal to rounding.
# The rest is equal bit for bit.
ROUNDING = {"opt": 5e-6, "gptj": 5e-6, "cohere2": 5e-6}


def difference(source: torch.Tensor, ours: torch.Tensor, mask_BT: torch.Tensor) -> float:
    assert source.abs().amax() > 0.1  # else nothing is being compared
    return float((source - ours)[mask_BT.bool()].abs().amax())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", SOURCES)
def test_logits_of_the_source(name: str, attention: str) -> None:
    source = make_source(name)
    model = build(source.config, source.state_dict())
    if name == "gemma2-tied":  # torch's kernels cap no scores
        source.set_attn_implementation("eager")
    elif source.config.model_type != "gptj":  # it has its own eager attention only
        source.set_attn_implementation(attention)
    model.set_attn_implementation(attention)
    limit = ROUNDING.get(source.config.model_type, 0.0)
    ids_BT, mask_BT = padded_batch()
    full_BT = torch.ones_like(mask_BT)
    with torch.no_grad():
        assert difference(source(ids_BT).logits, model(ids_BT).logits, full_BT) <= limit
        padded = {"input_ids": ids_BT, "attention_mask": mask_BT}
        assert difference(source(**padded).logits, model(**padded).logits, mask_BT) <= limit
        positions = (mask_BT.cumsum(1) - 1).clamp(min=0)  # as generate() gives them
        ours = model(**padded, position_ids=positions).logits
        assert difference(source(**padded, position_ids=positions).logits, ours, mask_BT) <= limit


@pytest.mark.parametrize(
    "name", ["llama-gqa", "mistral-window", "qwen2-mixed-window", "opt-tied", "gptj", "gemma2-tied"]
)
def test_generate_like_the_source(name: str) -> None:
    source = make_source(name)
    model = build(source.config, source.state_dict())
    ids_BT, mask_BT = padded_batch()
    options = {"attention_mask": mask_BT, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    assert torch.equal(source.generate(ids_BT, **options), model.generate(ids_BT, **options))


def test_loss_hidden_states_attentions_and_kept_logits() -> None:
    source = make_source("llama-gqa")
    model = build(source.config, source.state_dict())
    for one in (source, model):
        one.set_attn_implementation("eager")
    ids_BT, mask_BT = padded_batch()
    asked = {"labels": ids_BT, "output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        theirs, ours = (one(ids_BT, attention_mask=mask_BT, **asked) for one in (source, model))
        assert torch.equal(theirs.loss, ours.loss)
        for key in ("hidden_states", "attentions"):
            assert len(ours[key]) == len(theirs[key])
            assert all(torch.equal(a, b) for a, b in zip(theirs[key], ours[key], strict=True))
        last = model(ids_BT, logits_to_keep=2).logits
        assert torch.allclose(last, model(ids_BT).logits[:, -2:], atol=1e-6)
        picked = model(ids_BT, logits_to_keep=torch.tensor([0, 5])).logits
        assert picked.shape[1] == 2
        assert isinstance(model(ids_BT, return_dict=False), tuple)
        embedded = model(inputs_embeds=model.get_input_embeddings()(ids_BT)).logits
        assert torch.equal(embedded, model(ids_BT).logits)
    with pytest.raises(ValueError, match="exactly one"):
        model()


@pytest.mark.parametrize("name", ["llama-gqa", "opt-tied", "gptj"])
def test_base_model_alone(name: str) -> None:
    source = make_source(name)
    model = build(source.config, source.state_dict())
    prefix = model.base_model_prefix
    base: Any = LaminaModel(model.config)
    tensors = {key.removeprefix(f"{prefix}."): t for key, t in source.state_dict().items() if key.startswith(prefix)}
    base.eval().load_state_dict(tensors, strict=True)
    ids_BT, _ = padded_batch()
    with torch.no_grad():
        hidden_BTD = base(ids_BT).last_hidden_state
        assert torch.equal(model.get_output_embeddings()(hidden_BTD), model(ids_BT).logits)


def test_gradients_with_checkpointing() -> None:
    source = make_source("llama-gqa")
    model = build(source.config, source.state_dict()).train()
    ids_BT, mask_BT = padded_batch()
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            # transformers 5.14 knows the old name only, 5.23 warns of it
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.zero_grad()
        model(ids_BT, attention_mask=mask_BT, labels=ids_BT, use_cache=False).loss.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert all(torch.allclose(grads[0][name], grads[1][name], atol=1e-6) for name in grads[0])
    assert all(grad.abs().amax() > 0 for grad in grads[0].values())


def test_embeddings_can_be_replaced() -> None:
    source = make_source("gptj")
    model = build(source.config, source.state_dict())
    model.resize_token_embeddings(101)
    assert model.get_input_embeddings().weight.shape[0] == model(torch.tensor([[100]])).logits.shape[-1] == 101
    assert model.config.vocab_size == 101


def test_tied_embeddings_are_one_tensor() -> None:
    source = make_source("qwen2-tied")
    tensors = {name: t for name, t in source.state_dict().items() if name != "lm_head.weight"}
    config = LaminaConfig(**describe(source.config))
    model: Any = LaminaForCausalLM(config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.load_state_dict(tensors, strict=False).missing_keys == ["lm_head.weight"]
    ids_BT, _ = padded_batch()
    with torch.no_grad():
        assert torch.equal(model.eval()(ids_BT).logits, source(ids_BT).logits)


def test_state_dict_names_are_the_sources() -> None:
    for name in SOURCES:
        source = make_source(name)
        with torch.device("meta"):
            model = LaminaForCausalLM(LaminaConfig(**describe(source.config)))
            layer = LaminaDecoderLayer(model.config, 1)
        assert model.state_dict().keys() == source.state_dict().keys()
        prefix = layer_prefix(source.config, 1)
        mine = {prefix + key for key in layer.state_dict()}
        assert mine == {key for key in source.state_dict() if key.startswith(prefix)}


@pytest.mark.parametrize("name", ["opt-tiny-ts", "gptj-tiny-ts", "babyllama-361", "wiki-llama-gqa-8m"])
def test_trained_models(name: str) -> None:
    folder = SHARED_MODELS / name
    if not folder.is_dir():
        pytest.skip(f"no trained model at {folder}")
    source: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = build(source.config, source.state_dict())
    ids_BT, mask_BT = padded_batch(48, source.config.vocab_size)
    with torch.no_grad():
        theirs, ours = (one(ids_BT, attention_mask=mask_BT).logits for one in (source, model))
    limit = 5e-5 if source.config.model_type in ROUNDING else 0.0
    assert difference(theirs, ours, mask_BT) <= limit
