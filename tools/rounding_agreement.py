"""The same matrices, moments, groups and bits through `pipeline.kernels.rounding` and through llm-compressor's GPTQ.

Run by hand, in an environment that has llmcompressor (0.14) beside this repository's packages:

    python -m tools.rounding_agreement MODEL [--bits 4 3 8] [--group 32]

MODEL is a dense Llama checkpoint; the moments are those of its own activations on random tokens. Prints for each
matrix the relative errors tr(Δ M Δᵀ) / tr(W M Wᵀ): of the reference with its own scales, of the reference with ours,
and ours; and last the largest ratio of ours to the reference with the same scales, which should be within 2 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pipeline.kernels.packing import code_range
from pipeline.kernels.rounding import error_feedback, round_with_feedback, rounding_error

TOLERANCE = 1.02
TOKENS, LENGTH = 8192, 256


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3, 8])
    parser.add_argument("--group", type=int, default=32)
    arguments = parser.parse_args()
    ratios = []
    for name, weight_OI, moment_II in _matrices(arguments.model, arguments.group):
        for bits in arguments.bits:
            own, shared, ours = _errors(weight_OI, moment_II, bits, arguments.group)
            ratios.append(ours / shared)
            print(f"{name} {bits} bits: reference {own:.5f}, with our scales {shared:.5f}, ours {ours:.5f}", flush=True)
    print(f"{len(ratios)} matrices: ours / reference with the same scales {min(ratios):.4f} .. {max(ratios):.4f}")
    raise SystemExit(not max(ratios) <= TOLERANCE)


def _errors(weight_OI: Tensor, moment_II: Tensor, bits: int, group: int) -> tuple[float, float, float]:
    low, high = code_range(bits)
    peaks_OS = weight_OI.reshape(len(weight_OI), -1, group).abs().amax(dim=-1)
    ours = round_with_feedback(weight_OI, error_feedback(moment_II), bits, group, torch.float32)
    scales = (peaks_OS * 2.0 / (high - low), ours.scales)
    references = [_reference(weight_OI, moment_II, scales_OS, bits, group) for scales_OS in scales]
    own, shared, found = (rounding_error(weight_OI, values, moment_II) for values in (*references, ours.values))
    return own, shared, found


def _reference(weight_OI: Tensor, moment_II: Tensor, scales_OS: Tensor, bits: int, group: int) -> Tensor:
    """The weight as llm-compressor's GPTQ rounds it; columns of large diagonal first, groups as they lie."""
    from compressed_tensors.quantization import QuantizationArgs
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

    settings: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group"}
    found, _, fallback = quantize_weight(
        weight_OI.float()[None].clone(),
        moment_II.float()[None].clone(),
        scales_OS.float()[None],
        torch.zeros_like(scales_OS, dtype=torch.int8)[None],
        None,
        QuantizationArgs(**settings, group_size=group, actorder="weight"),
    )
    if bool(fallback.any()):
        raise RuntimeError("the reference fell back to rounding to nearest")
    return found[0].double()


@torch.inference_mode()
def _matrices(model: str, group: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, weight (O, I) and moment (I, I) per token of every linear that groups divide; float64."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    sums: dict[str, Tensor] = {}

    def watch(name: str, values: Tensor) -> None:
        values_TI = values.flatten(0, -2).double()
        sums[name] = sums.get(name, 0.0) + values_TI.T @ values_TI / TOKENS

    linears = {
        name: module
        for name, module in loaded.get_decoder().named_modules()
        if isinstance(module, torch.nn.Linear) and module.in_features % group == 0
    }
    for name, module in linears.items():
        module.register_forward_pre_hook(lambda _, inputs, name=name: watch(name, inputs[0]))
    source = torch.Generator().manual_seed(0)
    for ids_BS in torch.randint(loaded.config.vocab_size, (TOKENS // LENGTH, LENGTH), generator=source).split(4):
        loaded(ids_BS)
    for name, module in linears.items():
        yield name, module.weight.double(), sums[name]


if __name__ == "__main__":
    main()
