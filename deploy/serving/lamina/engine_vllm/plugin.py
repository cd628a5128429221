"""What vLLM calls once in each of its processes."""

import lamina

MODEL = "lamina.engine_vllm.model:LaminaForVllm"


def register() -> None:
    """Registers configuration and model; safe to call again. The model's file is imported when it is needed."""
    from vllm import ModelRegistry

    lamina.register()
    ModelRegistry.register_model("LaminaForCausalLM", MODEL)
