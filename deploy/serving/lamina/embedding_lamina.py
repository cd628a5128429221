# mypy: allow-untyped-calls
# (torch's modules ship hooks without annotations)
"""The embedding table, learned positions and the head.

Nothing here imports transformers' modelling code, which takes seconds. D hidden, V vocabulary.
"""

from torch import Tensor, nn

from .attention_lamina import soft_capped
from .layers_config_lamina import LayersConfig


class Embedding(nn.Embedding):
    """torch's embedding. On the meta device it skips the random numbers, for which torch would import sympy (1 s)."""

    def reset_parameters(self) -> None:
        """Draw random weights as torch does, but on the meta device."""
        if not self.weight.is_meta:
            super().reset_parameters()


class ScaledEmbedding(Embedding):
    """Embeddings (…, D) of token ids (…), times `embed_scale` in the weight's dtype."""

    def __init__(self, num_embeddings: int, embedding_dim: int, embed_scale: float) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.embed_scale = embed_scale

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids (…) to embeddings (…, D)."""
        return super().forward(ids) * self.weight.new_full((), self.embed_scale)


def make_embedding(config: LayersConfig) -> nn.Embedding:
    """Build the table (V, D) of token embeddings, scaled if the config has a scale."""
    scale, width = config.block["embed_scale"], config.hidden_size
    if scale is None:
        return Embedding(config.vocab_size, width)
    return ScaledEmbedding(config.vocab_size, width, width**0.5 if scale == "sqrt(hidden_size)" else float(scale))


def make_positions(config: LayersConfig) -> nn.Embedding:
    """Build the table of learned positions, (offset + longest sequence, D)."""
    return Embedding(config.max_position_embeddings + config.block["positions"]["offset"], config.hidden_size)


def make_head(config: LayersConfig) -> nn.Linear:
    """Build the language-model head, from D to V."""
    return nn.Linear(config.hidden_size, config.vocab_size, bias=config.block["head_bias"])


def finish_logits(config: LayersConfig, logits: Tensor) -> Tensor:
    """Scale and soft-cap the head's outputs (…, V) according to the config."""
    block = config.block
    if block["logit_scale"] is not None:
        logits = logits * block["logit_scale"]
    if block["logit_divisor"] is not None:
        logits = logits / block["logit_divisor"]
    return logits if block["logit_softcap"] is None else soft_capped(logits, block["logit_softcap"])
