"""The compressed model while it is trained: loaded by transformers as a user loads it, with float32 weights.

Legend: B windows, S tokens of a window, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import lamina  # noqa: F401 - registers its classes, so that no code of the checkpoint runs
from lamina.decoder_layer_lamina import find
from lamina.embedding_lamina import finish_logits
from lamina.factored_lamina import stored_factors
from manifests.errors import InputError

CHECKPOINTED_BYTES = 4 * 2**30  # of activations of a micro-batch, from which they are computed twice


class Student:
    """A compressed model. Only the named tensors are trained.

    Attributes:
        trained: stored name -> parameter in float32.
    """

    def __init__(self, folder: Path, names: Mapping[str, torch.dtype], device: torch.device, activation_bytes: int):
        """Load a checkpoint.

        Args:
            folder: the checkpoint.
            names: the stored names of the trained tensors, and the dtypes in which they are stored.
            device: where the model is trained.
            activation_bytes: of a micro-batch; many are computed again in the backward pass.

        Raises InputError if a named tensor is no parameter.
        """
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
        self.model: Any = loaded.to(device).requires_grad_(False)
        self.model.config.attention_dropout = 0.0
        self.dtypes, self.device = names, device
        self.factors = {stored: (name, factor) for name, (stored, factor) in stored_factors(self.model).items()}
        parameters = dict(self.model.named_parameters())
        self.trained = {name: _parameter(parameters, self._path(name), name) for name in sorted(names)}
        for parameter in self.trained.values():
            parameter.requires_grad_(True)
        self.model.eval()
        if activation_bytes > CHECKPOINTED_BYTES:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()

    @property
    def vocabulary(self) -> int:
        """The number of tokens V."""
        return int(self.model.config.vocab_size)

    def hidden(self, ids_BS: Tensor) -> Tensor:
        """Return the head's inputs (B, S, D)."""
        hidden_BSD: Tensor = self.model.get_decoder()(input_ids=ids_BS, use_cache=False).last_hidden_state
        return hidden_BSD

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return logits (T, V) of the head's inputs (T, D)."""
        head: nn.Module = self.model.get_output_embeddings()
        logits_TV: Tensor = finish_logits(self.model.config, head(hidden_TD))
        return logits_TV

    def teacher_logits(self, outputs_TD: Tensor) -> Tensor:
        """Return logits (T, V) of the dense model, whose final norm and head are the student's, of its last layer's
        outputs (T, D)."""
        base = self.model.get_decoder()
        norm: nn.Module = find(base, base._names["final_norm"])
        return self.logits(norm(outputs_TD.to(self.device, torch.float32)))

    def stored(self) -> dict[str, Tensor]:
        """Return the trained tensors, on the CPU, as a checkpoint stores them."""
        tensors = {}
        for name, parameter in self.trained.items():
            value = parameter.detach().to(self.dtypes[name]).cpu()
            tensors[name] = self.factors[name][1].stored(value) if name in self.factors else value.clone()
        return tensors

    @contextmanager
    def rounded(self) -> Iterator[None]:
        """Compute with the weights as they would be stored, in the block."""
        masters = {name: parameter.detach().clone() for name, parameter in self.trained.items()}
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(parameter.to(self.dtypes[name]))
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self.trained.items():
                    parameter.copy_(masters[name])

    def _path(self, stored: str) -> str:
        return self.factors[stored][0] if stored in self.factors else stored


def _parameter(parameters: Mapping[str, nn.Parameter], path: str, stored: str) -> nn.Parameter:
    if path not in parameters:
        raise InputError(
            f"heal: the tensor {stored} is no parameter of the model that transformers loads; its stored form does not "
            "train; leave out heal, or compress without the method that wrote it"
        )
    return parameters[path]
