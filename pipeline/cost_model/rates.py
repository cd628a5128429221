"""Operations and bytes per second of a worker and its node, with a table of GPUs. `probe.py` measures them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

TERA, GIGA = 1e12, 1e9
BACK = 3  # the cost of a forward and a backward pass, in forward passes
DIGEST_THREADS = 16  # at most, as `stores.threads`
OPERATIONS = ("products", "backward", "moments", "single", "double", "factors", "eigen")


@dataclass(frozen=True)
class Rates:
    """Floating-point operations and bytes per second.

    Attributes:
        products: operations of products in the checkpoint's dtype, in a layer's forward pass.
        backward: operations of a layer's forward and backward pass together.
        moments: operations of the products of moments; a CPU computes them in float32.
        single: operations in float32, which tensor cores may round (`workers.device_settings.tensor_cores`).
        double: operations in float64.
        factors: operations of Cholesky, LU and QR factors, triangular solves, and updates by few columns at a time.
        eigen: operations of eigenproblems, 10 n³ each.
        memory: bytes of device memory that elementwise kernels read and write, new tensors included.
        link: bytes between pinned host memory and the device; on a CPU, bytes of copies in memory.
        network: bytes that leave a node.
        disk: bytes that a node reads or writes.
        digest: bytes that a node digests, with `DIGEST_THREADS`.
        step_s: seconds for one removal in an elimination, without its products (kernel launches).
        column_s: seconds to round a column with error feedback.
        commit_s: fixed seconds of a commit, to create files and make them durable.
        workers_per_node: workers that share a node's network and disk.
        device_bytes: memory of a worker's device, if known.
    """

    products: float
    backward: float
    moments: float
    single: float
    double: float
    factors: float
    eigen: float
    memory: float
    link: float
    network: float
    disk: float
    digest: float
    step_s: float
    column_s: float
    commit_s: float
    workers_per_node: int
    device_bytes: float = float("inf")

    def with_operations(self, rate: float) -> Rates:
        """Return the rates with one rate for all operations."""
        operations: dict[str, Any] = dict.fromkeys(OPERATIONS, rate)
        return replace(self, **operations)

    def report(self) -> dict[str, float]:
        """Return the rates as JSON, without infinite ones."""
        return {name: value for name, value in asdict(self).items() if value != float("inf")}


# A core of a current CPU, for comparing the phases of a job.
NOMINAL_CPU = Rates(
    products=50 * GIGA,
    backward=50 * GIGA,
    moments=50 * GIGA,
    single=50 * GIGA,
    double=25 * GIGA,
    factors=15 * GIGA,
    eigen=10 * GIGA,
    memory=5 * GIGA,
    link=5 * GIGA,
    network=1.25 * GIGA,
    disk=1 * GIGA,
    digest=1.5 * GIGA,
    step_s=6e-4,
    column_s=1e-5,
    commit_s=15e-3,
    workers_per_node=1,
)


def _gpu(half: float, double: float, memory: float, link: float, device_bytes: float) -> Rates:
    """Return the rates of a GPU from its operations in half and double precision, and its bytes per second."""
    return Rates(
        products=half,
        backward=half,
        moments=half,
        single=half / 2,
        double=double,
        factors=double,
        eigen=double,
        memory=memory,
        link=link,
        network=25 * GIGA,
        disk=5 * GIGA,
        digest=DIGEST_THREADS * 1.5 * GIGA,
        step_s=1e-4,
        column_s=2e-5,
        commit_s=5e-3,
        workers_per_node=8,
        device_bytes=device_bytes,
    )


# By `torch.cuda.get_device_name`, at about half of the published peak of dense products.
GPUS: dict[str, Rates] = {
    "NVIDIA H200": _gpu(500 * TERA, 60 * TERA, 0.7 * 4.8 * TERA, 40 * GIGA, 141 * GIGA),
    "NVIDIA H100 80GB HBM3": _gpu(500 * TERA, 60 * TERA, 0.7 * 3.35 * TERA, 40 * GIGA, 80 * GIGA),
    "NVIDIA A100-SXM4-80GB": _gpu(160 * TERA, 15 * TERA, 0.7 * 2.0 * TERA, 20 * GIGA, 80 * GIGA),
}


def rates_of(gpu: str) -> Rates:
    """Return the rates of a GPU by its name or a unique part of it. Raises ValueError with the known names."""
    fitting = [name for name in GPUS if gpu.lower() in name.lower()]
    if len(fitting) != 1:
        raise ValueError(f"{gpu!r} does not name exactly one of the GPUs with known rates: {', '.join(GPUS)}")
    return GPUS[fitting[0]]


def known_rates(device: str) -> Rates:
    """Return the rates of the GPU with this name, or else those of a CPU core."""
    return GPUS.get(device, NOMINAL_CPU)
