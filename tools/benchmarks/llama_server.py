"""Serve a GGUF file by llama.cpp's server, from the package xllamacpp, in a process without anything else.

python -m tools.benchmarks.llama_server FILE --port 8093 --sequences 32 --context 256 [--float32-cache]
"""

from __future__ import annotations

import argparse
import signal


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--sequences", type=int, required=True, help="at a time")
    parser.add_argument("--context", type=int, required=True, help="tokens of each sequence")
    parser.add_argument("--float32-cache", action="store_true", help="in place of float16")
    options = parser.parse_args()
    import xllamacpp  # installed in a folder of its own

    settings = xllamacpp.CommonParams()
    settings.model.path, settings.port, settings.verbosity = options.path, options.port, 0
    settings.n_parallel, settings.n_ctx = options.sequences, options.sequences * options.context
    settings.cache_ram_mib = 0
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    if options.float32_cache:
        settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(settings)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
