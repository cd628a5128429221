"""These tests run where vLLM is installed: `make test-vllm` makes such an environment."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
