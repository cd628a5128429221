"""The cores of tensor-parallel workers on a CPU."""

import os

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.config import VerifyAndUpdateConfig

BIND, NODES = "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_SIM_MULTI_NUMA"

logger = init_logger("vllm.lamina")


class LaminaVllmConfig(VerifyAndUpdateConfig):  # type: ignore[misc]  # types are checked without vLLM
    """Adapts vLLM's options to Lamina's models before workers start."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Leave threads unbound if there are fewer memory nodes than workers, for which vLLM would fail an assertion.

        Environment variables that are already set are not changed.
        """
        from vllm.utils.cpu_resource_utils import get_visible_memory_node

        workers = vllm_config.parallel_config.local_world_size
        if BIND in os.environ or NODES in os.environ or workers <= (nodes := len(get_visible_memory_node())):
            return
        os.environ[BIND] = "nobind"
        logger.warning(
            "%d workers share %d memory node(s): %s=nobind, so that each may use every core. To give each worker its "
            "own cores, set OMP_NUM_THREADS, or %s to lists of cores such as '0-3|4-7'.", workers, nodes, BIND, BIND,
        )  # fmt: skip
