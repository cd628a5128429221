"""Fixtures of tests that need vLLM: `make test-vllm` creates such an environment."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
