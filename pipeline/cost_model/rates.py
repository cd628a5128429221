"""What a worker and its node do in a second: the table of GPUs. `probe.py` measures."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Rates:
    """Operations and bytes a second.

    Attributes:
        products: floating-point operations in products of the checkpoint's dtype, in a layer's forward pass.
        backward: of them in a layer's forward and backward pass together.
        moments: of them in the products of which sums over tokens are made; a CPU multiplies these in float32.
        single: of them in float32, which tensor cores may round (`workers.device_settings.tensor_cores`).
        double: of them in float64.
        factors: of them in Cholesky, LU and QR factors, triangular solves, and updates by few columns at a time.
        eigen: of them in eigenproblems, of 10 n³.
        memory: bytes that a worker's device memory moves, as far as elementwise kernels that make new tensors get.
        link: bytes between host and device, pinned; of a CPU, to which there is no link, as its memory copies.
        network: bytes that leave a node.
        disk: bytes that a node reads or writes.
        digest: bytes that its threads take digests of, 16 at most.
        step_s: seconds of one removal of an elimination that no product hides (launches of kernels); `column_s`: of one
            column that is rounded with error feedback.
        commit_s: seconds of a commit that no byte explains: files made, and made durable.
        workers_per_node: workers that share a node's network and disk.
        device_bytes: of a worker's device, where it is known.
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
        """All products, factors and eigenproblems at one rate."""
        return replace(
            self,
            products=rate,
            backward=rate,
            moments=rate,
            single=rate,
            double=rate,
            factors=rate,
            eigen=rate,
        )

    def report(self) -> dict[str, float]:
        """As JSON, which has no infinity."""
        return {name: value for name, value in asdict(self).items() if value != float("inf")}


_H200 = Rates(
    products=500 * TERA,
    backward=500 * TERA,
    moments=500 * TERA,
    single=250 * TERA,
    double=60 * TERA,
    factors=60 * TERA,
    eigen=60 * TERA,
    memory=0.7 * 4.8 * TERA,
    link=40 * GIGA,
    network=25 * GIGA,
    disk=5 * GIGA,
    digest=16 * 1.5 * GIGA,
    step_s=1e-4,
    column_s=2e-5,
    commit_s=5e-3,
    workers_per_node=8,
    device_bytes=141 * GIGA,
)
# A core of today, where how phases compare is enough.
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
# By the names that `torch.cuda.get_device_name` gives: about half of the published peak of dense products.
GPUS: dict[str, Rates] = {
    "NVIDIA H200": _H200,
    "NVIDIA H100 80GB HBM3": replace(_H200, memory=0.7 * 3.35 * TERA, device_bytes=80 * GIGA),
    "NVIDIA A100-SXM4-80GB": replace(
        _H200,
        products=160 * TERA,
        backward=160 * TERA,
        moments=160 * TERA,
        single=80 * TERA,
        double=15 * TERA,
        factors=15 * TERA,
        eigen=15 * TERA,
        memory=0.7 * 2.0 * TERA,
        link=20 * GIGA,
        device_bytes=80 * GIGA,
    ),
}


def rates_of(gpu: str) -> Rates:
    """Of a GPU by name, or by a part of it that fits one. Raises ValueError, naming the GPUs that are known."""
    fitting = [name for name in GPUS if gpu.lower() in name.lower()]
    if len(fitting) != 1:
        raise ValueError(f"{gpu!r} is none, or several, of the GPUs whose rates are known: {', '.join(GPUS)}")
    return GPUS[fitting[0]]


def known_rates(device: str) -> Rates:
    """Of a GPU by its whole name, or those of a core: to compare the phases of one job."""
    return GPUS.get(device, NOMINAL_CPU)
