"""How far is a model from itself when other programs round it, on the text and windows of `tools.tuning`?

python -m tools.peers CHECKPOINT --text PASSAGES.json:0-820 --score TEST.txt PASSAGES.json:910- --cache FOLDER \
    llm-compressor:gptq:3:32 auto-round:200:3:32 ggml:Q4_0 ggml:IQ4_NL

llm-compressor: gptq or awq (which 0.14.0.1 runs on GPUs alone), bits, group. auto-round: steps, bits, group. ggml: a
type of llama.cpp, rounded by its kernels with an importance matrix of the calibration text; rows that a type does not
fit get llama.cpp's substitute, or stay in 16 bits. Environments (about 1 GB each) and kernels (45 seconds of
compiling, with cmake and a C++ compiler) are made in --made at the first use. All round the decoder's linear modules
and are scored in float32. Results are appended to FOLDER/results.jsonl, beside those of `tools.tuning` with the same
FOLDER: divergence, bits per number (scales counted), seconds, and peak memory.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.benchmarks.jobs import Watch
from tools.tuning import READS, Bench, add_options

SCRIPTS = Path(__file__).parent / "peer_programs"
ROOT = Path(__file__).parents[1]
PACKAGES = {"llm-compressor": "llmcompressor==0.14.0.1", "auto-round": "auto-round==0.16.1"}
PROGRAMS = {"llm-compressor": "llm_compressor.py", "auto-round": "auto_round_signs.py"}
LLAMA_CPP = "llama-cpp-python==0.3.36"  # whose source holds llama.cpp
SUBSTITUTES = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # of llama.cpp; for all other types IQ4_NL
MIB = 2**20


def environment(name: str, folder: Path) -> Path:
    """Return the Python of a program's environment, made unless it is there."""
    python = folder / name / "bin" / "python"
    if not (folder / name / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder / name], check=True)
        torch_alone = folder / "torch.txt"
        pins = (ROOT / "deploy" / "constraints.txt").read_text().splitlines()
        torch_alone.write_text("\n".join(pin for pin in pins if pin.startswith("torch==")))
        subprocess.run([python, "-m", "pip", "install", "-q", "-c", torch_alone, PACKAGES[name]], check=True)
        (folder / name / "made").touch()
    return python


def ggml_library(folder: Path) -> ctypes.CDLL:
    """Return llama.cpp's kernels, compiled unless they are there."""
    built = folder / "ggml" / "bin" / "libggml-base.so"
    if not built.exists():
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python"]
        subprocess.run([*pip, LLAMA_CPP, "-d", folder], check=True)
        with tarfile.open(next(folder.glob("llama_cpp_python-*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        source: Path = next(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))
        cmake: list[str | Path] = [
            "cmake",
            "-S",
            source,
            "-B",
            folder / "ggml",
            "-DCMAKE_BUILD_TYPE=Release",
            "-DLLAMA_CURL=OFF",
        ]
        subprocess.run([*cmake, "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_BUILD_TESTS=OFF"], check=True)
        subprocess.run(["cmake", "--build", folder / "ggml", "--target", "ggml-base", "-j2"], check=True)
    library = ctypes.CDLL(str(built))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    return library


def ggml_rounded(library: ctypes.CDLL, name: str, weight_OI: Tensor, squares_I: Tensor) -> tuple[Tensor, int]:
    """Return a matrix rounded to a type, and its bytes."""
    rows, columns = weight_OI.shape
    tried = (gguf.GGMLQuantizationType[each] for each in (name, SUBSTITUTES.get(name, "IQ4_NL")))
    kind = next((each for each in tried if columns % gguf.GGML_QUANT_SIZES[each][0] == 0), None)
    if kind is None:
        return weight_OI.to(torch.float16).float(), 2 * weight_OI.numel()
    block, size = gguf.GGML_QUANT_SIZES[kind]
    source = numpy.ascontiguousarray(weight_OI.float().numpy())
    codes = numpy.zeros((rows, columns // block * size), numpy.uint8)
    weights = numpy.ascontiguousarray(squares_I.float().numpy())
    floats, blob = ctypes.POINTER(ctypes.c_float), ctypes.c_void_p
    written = library.ggml_quantize_chunk(
        ctypes.c_int(kind), source.ctypes.data_as(floats), codes.ctypes.data_as(blob), ctypes.c_int64(0),
        ctypes.c_int64(rows), ctypes.c_int64(columns), weights.ctypes.data_as(floats),
    )  # fmt: skip
    assert written == codes.nbytes
    return torch.from_numpy(gguf.quants.dequantize(codes, kind)), codes.nbytes


def by_ggml(bench: Bench, name: str, folder: Path) -> dict[str, Any]:
    """Round the model in memory by llama.cpp's kernels."""
    library, begun, modules = ggml_library(folder), time.monotonic(), bench.modules
    stored = 0
    with safe_open(bench.inputs, "pt") as inputs:
        for (layer, role), module in modules.items():
            squares_I = inputs.get_tensor(f"{layer}.{READS[role]}").diagonal() / bench.text.numel()
            values, size = ggml_rounded(library, name, module.weight.data, squares_I)
            module.weight.data.copy_(values)
            stored += size
    numbers = sum(module.weight.numel() for module in modules.values())
    return {"bits": 8 * stored / numbers, "seconds": round(time.monotonic() - begun, 1)}


def levels_of(weight_OI: Tensor, group: int) -> int:
    """Return the most distinct numbers of a group in the first row of a matrix."""
    return max(len(group_g.unique()) for group_g in weight_OI[0].split(group))


def by_program(bench: Bench, checkpoint: str, peer: str, folder: Path) -> dict[str, Any]:
    """Round the model by a program in an environment of its own."""
    name, *settings = peer.split(":")
    python, rounded, ids = environment(name, folder), folder / "rounded.safetensors", folder / "windows.safetensors"
    save_file({"ids": bench.text.contiguous()}, ids)
    begun = time.monotonic()
    with (bench.folder / f"{peer.replace(':', '-')}.log").open("w") as log:
        command: list[str | Path] = [python, SCRIPTS / PROGRAMS[name], checkpoint, ids, rounded, *settings]
        child, watch = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT), Watch()
        watch(child.pid)
    if code := child.wait():
        raise SystemExit(f"{peer} ended with {code}; see {log.name}")
    seconds, peak = time.monotonic() - begun, watch.processes[child.pid].rss_bytes / MIB
    missing, unknown = bench.model.load_state_dict(load_file(rounded), strict=False)
    assert not unknown, unknown
    assert not [key for key in missing if "_proj" in key], missing
    rounded.unlink()
    _, bits, group = settings
    whole = {
        role for (_, role), module in bench.modules.items() if levels_of(module.weight, int(group)) > 2 ** int(bits)
    }
    if whole:
        raise SystemExit(f"{peer} has left {', '.join(sorted(whole))} as they were; see {log.name}")
    return {"bits": int(bits) + 16 / int(group), "seconds": round(seconds, 1), "peak_mib": round(peak)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Round the model by each program that has no result yet, and score it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("peers", nargs="+", metavar="PROGRAM:SETTING:...")
    parser.add_argument("--made", type=Path, default=Path(".engines"), help="folder of environments and kernels")
    options = parser.parse_args(arguments)
    if unknown := [peer for peer in options.peers if peer.partition(":")[0] not in ("ggml", *PROGRAMS)]:
        raise SystemExit(f"{unknown[0]}: no such program; known: ggml, {', '.join(PROGRAMS)}")
    whole = [peer for peer in options.peers if not peer.startswith("ggml:")]
    if whole and options.every > 1:
        raise SystemExit(f"--every {options.every}: {whole[0]} rounds all layers; only ggml rounds some")
    options.made.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    done = {line["name"] for line in bench.results()}
    dense = {key: value.clone() for key, value in bench.model.state_dict().items()}
    for peer in options.peers:
        if peer in done:
            continue
        bench.model.load_state_dict(dense)
        name, _, settings = peer.partition(":")
        with torch.no_grad():
            if name == "ggml":
                figures = by_ggml(bench, settings, options.made)
            else:
                figures = by_program(bench, options.checkpoint, peer, options.made)
            bench.record(peer, **figures)


if __name__ == "__main__":
    main()
