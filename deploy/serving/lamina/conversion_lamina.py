# mypy: allow-untyped-calls
"""Conversions of stored factors for transformers, which applies them by model type when it loads and saves.

In memory a factor is the matrix `weight` of a linear. Checkpoints name its tensor after the linear, and some tensors
have more dimensions (factored_lamina: StoredFactor).
"""

from typing import Any

from torch import Tensor
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

# Stored name → name in memory. Not followed by a letter (`first_o`) or a dot (`second.weight`, `core.values`).
END = r"(?!\w|\.)"
TUCKER = ("first", "first_o", "second", "second_o", "core", "core_qo", "core_q", "core_kv", "core_o")
NAMES = {rf"tucker\.{name}{END}": f"tucker.{name}.weight" for name in TUCKER}
NAMES[rf"(?<!tucker)\.second{END}"] = ".head_second.weight"


class ToLinear(ConversionOps):
    """Converts a stored factor to a linear's weight, or (`back`) the weight to its stored form."""

    def __init__(self, back: bool = False) -> None:
        self.back = back

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        """Convert one tensor. One of another shape gets another dimension, so that transformers reports it."""
        tensor: Tensor = next(iter(input_dict.values()))
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        path, _, name = kwargs["full_layer_name"].removesuffix(".weight").rpartition(".")
        module: Any = kwargs["model"].get_submodule(path)
        factor = next(f for stored, f in module.factors.items() if name in (stored, f.module))
        if self.back:
            return {target_patterns[0]: factor.stored(tensor)}
        fits = tuple(tensor.shape) == factor.shape
        return {target_patterns[0]: factor.weight(tensor) if fits else tensor[None]}

    @property
    def reverse_op(self) -> ConversionOps:
        """Return the conversion in the other direction."""
        return ToLinear(not self.back)


def register_conversions(model_type: str) -> None:
    """Register the conversions of a model type with transformers. Safe to call again."""
    converters: list[Any] = [WeightConverter(stored, here, operations=[ToLinear()]) for stored, here in NAMES.items()]
    register_checkpoint_conversion_mapping(model_type, converters, overwrite=True)
