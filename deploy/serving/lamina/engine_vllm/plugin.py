"""The plugin that vLLM calls once in each of its processes."""

import lamina

ARCHITECTURE, MODEL = "LaminaForCausalLM", "lamina.engine_vllm.model:LaminaForVllm"


def register() -> None:
    """Register configuration and model. Safe to call again; vLLM imports the model's file when it needs it."""
    from vllm import ModelRegistry
    from vllm.platforms import current_platform

    lamina.register()
    ModelRegistry.register_model(ARCHITECTURE, MODEL)
    if current_platform.is_cpu():
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from lamina.engine_vllm.workers import LaminaVllmConfig

        MODELS_CONFIG_MAP[ARCHITECTURE] = LaminaVllmConfig
