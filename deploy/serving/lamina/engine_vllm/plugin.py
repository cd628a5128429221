"""The plugin that vLLM calls once in each of its processes."""

import lamina

ARCHITECTURE, MODEL = "LaminaForCausalLM", "lamina.engine_vllm.model:LaminaForVllm"


def register() -> None:
    """Register configuration and model, also repeatedly. vLLM imports the model's file when it needs it."""
    from vllm import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS

    from lamina.engine_vllm.counting import ExpertCounts

    lamina.register()
    ModelRegistry.register_model(ARCHITECTURE, MODEL)
    MODEL_ARCH_CONFIG_CONVERTORS[lamina.LaminaConfig.model_type] = ExpertCounts
    if current_platform.is_cpu():
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from lamina.engine_vllm.workers import LaminaVllmConfig

        MODELS_CONFIG_MAP[ARCHITECTURE] = LaminaVllmConfig
