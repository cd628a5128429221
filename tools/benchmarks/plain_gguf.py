"""Write a GGUF file again in other numbers: Q4_0 as llama.cpp's `llama-quantize` chooses it, or float32.

    python -m tools.benchmarks.plain_gguf dense.gguf q4_0.gguf --to Q4_0

Q4_0 rounds each matrix to the nearest code of 4 bits, without calibration; token embeddings that are also the head get
Q6_K from llama.cpp, or Q8_0 where rows are no multiples of 256, and Q8_0 here in both cases. Vectors stay. float32 is
for comparisons of tokens, as llama.cpp rounds activations to the precision of a matrix.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import gguf

OUTER = ("token_embd.weight", "output.weight")
WRITTEN = ("general.architecture", "general.file_type", "general.quantization_version")  # anew


def kind_of(tensor: Any, wanted: str) -> gguf.GGMLQuantizationType:
    """Return the type of a tensor in the new file."""
    if len(tensor.shape) == 1:
        return gguf.GGMLQuantizationType.F32
    if wanted == "Q4_0" and tensor.name in OUTER:
        return gguf.GGMLQuantizationType.Q8_0
    return gguf.GGMLQuantizationType[wanted]


def rewrite(source: Path, destination: Path, wanted: str) -> None:
    """Write the file: the fields of the source, and its tensors in other numbers."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(destination, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in WRITTEN:
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if wanted == "F32" else f"MOSTLY_{wanted}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in reader.tensors:
        stored = kind_of(tensor, wanted)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--to", choices=("Q4_0", "Q8_0", "F32"), required=True)
    options = parser.parse_args()
    rewrite(options.source, options.destination, options.to)
    print(f"{options.destination}: {options.destination.stat().st_size:,} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
