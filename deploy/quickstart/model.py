"""Train a small Llama, and save it like a model of the hub, in shards with an index.

B windows in a batch, S tokens in a window (one more is drawn, for the targets), T tokens of the whole text.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from deploy.quickstart.text import story_text

BOS, EOS = "<s>", "</s>"
NUM_PARTS = 2  # of a batch, each computed by a thread; fixed, so that the same seed gives the same weights everywhere


@dataclass(frozen=True)
class ModelRecipe:
    """The settings that decide the weights.

    About 115,000 parameters. Deep and narrow, so that compression changes the loss: unused weights would hide it.
    """

    vocab_size: int = 640
    hidden_size: int = 32
    intermediate_size: int = 96
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    window_tokens: int = 128
    batch_windows: int = 16
    num_steps: int = 600
    learning_rate: float = 6e-3
    train_bytes: int = 3_000_000
    calibration_bytes: int = 150_000
    evaluation_bytes: int = 60_000
    shard_size: str = "150KB"
    seed: int = 0


def make_model(directory: Path, recipe: ModelRecipe, say: Callable[[str], None] = print) -> None:
    """Write `directory`/model, calibration.txt and evaluation.txt, with stories that the model was not trained on.

    `model` is renamed to its name last, so that its presence means that everything is complete.
    """
    directory.mkdir(parents=True, exist_ok=True)
    text = story_text(recipe.train_bytes, recipe.seed)
    (directory / "calibration.txt").write_text(story_text(recipe.calibration_bytes, recipe.seed + 1), encoding="utf-8")
    (directory / "evaluation.txt").write_text(story_text(recipe.evaluation_bytes, recipe.seed + 2), encoding="utf-8")
    tokenizer = train_tokenizer(text[:300_000], recipe.vocab_size)
    tokens_T = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    model = build_model(recipe)
    train_model(model, tokens_T, recipe, say)
    unfinished = directory / "model.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished, max_shard_size=recipe.shard_size)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(directory / "model")


def train_tokenizer(text: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `vocab_size` tokens, which puts <s> before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=EOS)


def build_model(recipe: ModelRecipe) -> LlamaForCausalLM:
    """Build a Llama with grouped heads and untied embeddings, with random weights by the recipe's seed."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        max_position_embeddings=recipe.window_tokens,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return LlamaForCausalLM(config)


def train_model(
    model: LlamaForCausalLM, tokens_T: torch.Tensor, recipe: ModelRecipe, say: Callable[[str], None]
) -> float:
    """Train in place on random windows of `tokens_T`. Return the last loss, in nats per token.

    Each thread computes the gradients of one part of the batch. Products of this size are too small to share.
    """
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.05)
    started = time.monotonic()
    loss = math.nan
    with ThreadPoolExecutor(NUM_PARTS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for step in range(recipe.num_steps):
            parts = _draw_windows(tokens_T, recipe, generator).chunk(NUM_PARTS)
            losses, gradients = zip(*pool.map(partial(_loss_and_gradients, model), parts), strict=True)
            loss = sum(losses) / NUM_PARTS
            _step(model, optimizer, gradients, recipe.learning_rate * _schedule(step, recipe.num_steps))
            if (step + 1) % max(1, recipe.num_steps // 6) == 0:
                say(f"  step {step + 1}/{recipe.num_steps}  loss {loss:.3f}  {time.monotonic() - started:.0f} s")
    torch.set_num_threads(threads_before)
    model.eval()
    return loss


def _draw_windows(tokens_T: torch.Tensor, recipe: ModelRecipe, generator: torch.Generator) -> torch.Tensor:
    """Draw windows (B, S + 1). Every second one begins with <s>, as a prompt does, the others amid the text."""
    length = recipe.window_tokens + 1
    starts_B = torch.randint(len(tokens_T) - length, (recipe.batch_windows,), generator=generator)
    windows_BS = tokens_T[starts_B[:, None] + torch.arange(length)]
    windows_BS[::2, 0] = 0
    return windows_BS


def _schedule(step: int, num_steps: int) -> float:
    """Return the share of the learning rate: linear warm-up over a twentieth of the steps, then a cosine to 2 %."""
    warm_up = max(1, num_steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, num_steps - warm_up)))


def _loss_and_gradients(model: LlamaForCausalLM, windows_BS: torch.Tensor) -> tuple[float, tuple[torch.Tensor, ...]]:
    """Return the mean loss over the windows, and its gradient by each parameter."""
    logits_BSV = model(input_ids=windows_BS[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), windows_BS[:, 1:].flatten())
    return float(loss.detach()), torch.autograd.grad(loss, list(model.parameters()))


def _step(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    gradients: Sequence[Sequence[torch.Tensor]],
    rate: float,
) -> None:
    """Step along the mean of the parts' gradients."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    for parameter, *of_parts in zip(model.parameters(), *gradients, strict=True):
        parameter.grad = torch.stack(of_parts).mean(dim=0)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
