# mypy: allow-untyped-calls
"""Rotary position embedding. B batch, T tokens, D hidden, H heads, d head_dim, c rotary width (c <= d)."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update

from .block_lamina import rotary_width
from .foreign_lamina import has_foreign_rotary, make_foreign_rotary
from .layers_config_lamina import LayersConfig

Angles = tuple[Tensor, Tensor]  # cos and sin


class LaminaRotaryEmbedding(nn.Module):
    """cos and sin of the position angles, each (B, T, c), for every rope type of transformers.

    Do not build it on the meta device: `inv_freq` is computed, not loaded.
    """

    inv_freq: Tensor

    def __init__(self, config: LayersConfig, device: torch.device | None = None, layer_type: str | None = None) -> None:
        """`layer_type`: for a config whose layer types have rope parameters of their own."""
        super().__init__()
        assert config.rope_parameters is not None
        if layer_type is not None:
            rope, config = config.rope_of(layer_type), copy.copy(config)
            config.rope_parameters = rope
        assert config.rope_parameters is not None
        self.config, self.rope_type = config, config.rope_parameters["rope_type"]
        self.interleaved = config.block["rotary"] == "interleaved"
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        if self.rope_type == "dynamic" and config.rope_parameters.get("alpha"):
            self.rope_type = "default"  # of Hunyuan: its frequencies follow from alpha alone
        default = self.compute_default_rope_parameters
        init = default if self.rope_type == "default" else ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = init(config, device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(
        config: LayersConfig, device: torch.device | None = None, **kwargs: Any
    ) -> tuple[Tensor, float]:
        """Return theta^(-2i/c) for i < c/2. transformers calls a method of this name when it fills in buffers.

        Hunyuan's alpha multiplies theta by alpha^(c / (c - 2)).
        """
        rope = config.rope_parameters or {}
        width = rotary_width(rope, config.head_dim)
        exponents = torch.arange(0, width, 2, dtype=torch.float, device=device) / width
        alpha = rope.get("alpha") if rope.get("rope_type") == "dynamic" else None
        theta = rope["rope_theta"] * (alpha ** (width / (width - 2)) if alpha else 1.0)
        return 1.0 / (theta**exponents), 1.0

    @torch.no_grad()
    @dynamic_rope_update  # type: ignore[untyped-decorator]
    def forward(self, x_BTD: Tensor, position_ids_BT: Tensor) -> Angles:
        """Return cos and sin (B, T, c) for positions (B, T), in the dtype and on the device of x.

        Positions (3, B, T) are those in time, height and width, each of which turns its pairs of numbers.
        """
        return self.angles(x_BTD, position_ids_BT)

    @torch.no_grad()
    def angles(self, x_BTD: Tensor, position_ids_BT: Tensor) -> Angles:
        """Return cos and sin as `forward` does, with the frequencies of its last call.

        The frequencies of some rope types depend on the longest position.
        """
        freqs = position_ids_BT[..., None].float() * self.inv_freq.to(device=x_BTD.device, dtype=torch.float)
        if freqs.ndim > 3:
            freqs = self._of_grids(freqs)
        angles_BTc = freqs.repeat_interleave(2, -1) if self.interleaved else torch.cat((freqs, freqs), dim=-1)
        cos_BTc, sin_BTc = angles_BTc.cos() * self.attention_scaling, angles_BTc.sin() * self.attention_scaling
        return cos_BTc.to(x_BTD.dtype), sin_BTc.to(x_BTD.dtype)

    def _of_grids(self, freqs: Tensor) -> Tensor:
        """Return (B, T, c/2) of (3, B, T, c/2): every third pair, up to `mrope_section`, is of height or width."""
        section = (self.config.rope_parameters or {}).get("mrope_section", (11, 11, 10))
        chosen = freqs[0].clone()
        for grid in (1, 2):
            pairs = slice(grid, 3 * section[grid], 3)
            chosen[..., pairs] = freqs[grid][..., pairs]
        return chosen


class LaminaRotations(nn.ModuleDict):
    """A rotation for each layer type."""


def make_rotary(config: LayersConfig, device: torch.device | None = None) -> nn.Module | None:
    """Build the module of the rotation of all layers, or one for each layer type; None without rotation."""
    if has_foreign_rotary(config.foreign):
        return make_foreign_rotary(config).to(device)
    if config.block["rotary"] is None:
        return None
    if not config.has_own_ropes():
        return LaminaRotaryEmbedding(config, device)
    types = dict.fromkeys(config.layer_types)
    return LaminaRotations({name: LaminaRotaryEmbedding(config, device, name) for name in types})


def rotation_of(rotary: nn.Module, layer_type: str) -> nn.Module:
    """Return the module that maps hidden states and positions to the angles of a layer type."""
    return rotary[layer_type] if isinstance(rotary, LaminaRotations) else rotary


def rotate_once(x_BHTd: Tensor, cos_BTc: Tensor, sin_BTc: Tensor) -> Tensor:
    """Rotate by halves like `rotate`, without gradient and in a third of the passes over memory: for keys read once."""
    half, out_BHTd = cos_BTc.shape[-1] // 2, torch.empty_like(x_BHTd)
    first, second, rest = x_BHTd.tensor_split((half, 2 * half), dim=-1)
    cos, sin = cos_BTc[..., :half].unsqueeze(1), sin_BTc[..., :half].unsqueeze(1)
    torch.mul(first, cos, out=out_BHTd[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_BHTd[..., half : 2 * half]).addcmul_(first, sin)
    out_BHTd[..., 2 * half :] = rest
    return out_BHTd


def rotate(x_BHTd: Tensor, cos_BTc: Tensor, sin_BTc: Tensor, interleaved: bool) -> Tensor:
    """Apply RoPE to the first c of d numbers, in pairs (i, i + c/2), or (2i, 2i + 1) if interleaved."""
    width = cos_BTc.shape[-1]
    turned, rest = x_BHTd[..., :width], x_BHTd[..., width:]
    if interleaved:
        other = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    else:
        other = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), dim=-1)
    turned = turned * cos_BTc.unsqueeze(1) + other * sin_BTc.unsqueeze(1)
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)
