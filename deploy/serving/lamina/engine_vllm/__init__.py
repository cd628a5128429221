"""Lamina checkpoints in vLLM: what its entry point registers, and the model built of its parallel layers.

Nothing here is imported but by vLLM (entry point `vllm.general_plugins`); `lamina` itself does without it.
"""
