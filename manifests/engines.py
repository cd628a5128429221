"""The engines that serve compressed models, by the names that commands take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from manifests.records import LevelKind

Engine = Literal["transformers", "vllm", "llama.cpp"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
FAST_BITS = frozenset({8, 4})  # for which vLLM and llama.cpp have kernels
GGUF_BLOCK = 32  # numbers of a row that a GGUF file stores together; rows of other lengths have no codes there
# The levels of codes for which they have kernels.
FAST_LEVELS: Mapping[Engine, frozenset[LevelKind]] = {
    "vllm": frozenset({"uniform"}),
    "llama.cpp": frozenset({"uniform", "iq4_nl"}),
}
