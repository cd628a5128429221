"""Round a model's linear modules by llm-compressor. Runs in an environment of its own, which `tools.peers` makes.

python llm_compressor.py CHECKPOINT WINDOWS OUTPUT gptq|awq BITS GROUP

WINDOWS: token ids (N, T) under the name `ids`. OUTPUT: the tensors of the decoder, multiplied out, float32.
"""

import sys

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(checkpoint: str, windows: str, output: str, algorithm: str, bits: str, group: str) -> None:
    """Round the model, and write its decoder."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = load_file(windows)["ids"].tolist()
    weights = QuantizationArgs(num_bits=int(bits), group_size=int(group), strategy="group", symmetric=True)
    scheme = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    fields = {"config_groups": scheme, "ignore": ["lm_head"]}
    oneshot(
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(checkpoint),
        dataset=Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}),
        recipe=[GPTQModifier(**fields)] if algorithm == "gptq" else [AWQModifier(), QuantizationModifier(**fields)],
        num_calibration_samples=len(ids),
        max_seq_length=len(ids[0]),
        shuffle_calibration_samples=False,
        pipeline="sequential",
    )
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            arguments = module.quantization_scheme.weights
            rounded = fake_quantize(module.weight, module.weight_scale, module.weight_zero_point, arguments)
            module.weight.data.copy_(rounded)
    names = {name for name, _ in model.named_parameters() if ".layers." in name and "_scale" not in name}
    state = model.state_dict()
    save_file({name: state[name].float().contiguous() for name in names if "zero_point" not in name}, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
