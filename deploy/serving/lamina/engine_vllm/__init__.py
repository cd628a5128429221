"""Lamina checkpoints in vLLM: the plugin, and a model built from vLLM's parallel layers.

Only vLLM imports this package (entry point `vllm.general_plugins`).
"""
