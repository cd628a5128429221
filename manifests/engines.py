"""The engines that serve compressed models, by the names that commands take."""

from __future__ import annotations

from typing import Literal, get_args

Engine = Literal["transformers", "vllm", "llama.cpp"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
FAST_BITS = frozenset({8, 4})  # for which vLLM and llama.cpp have kernels
