"""Hardware: what a GPU offers, by name. Memory is the vendor's figure, GB = 1e9 bytes; see each one's data sheet.

The reserve is what a process holds that torch's allocator does not see: a CUDA context takes 0.3 to 0.6 GB, NCCL 0.5 to
1.6 GB; the upper ends are added up.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from zplan.errors import SpecError, nearest

CONTEXT_NBYTES = 600_000_000
NCCL_NBYTES = 1_600_000_000


@dataclass(frozen=True, slots=True)
class Gpu:
    """`memory`: bytes on the device."""

    name: str
    title: str
    memory: int

    @property
    def budget(self) -> int:
        """Bytes that a plan may use."""
        return self.memory - reserve_nbytes()


GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("v100-16", "NVIDIA V100 SXM2 16 GB", 16 * 10**9),
        Gpu("v100-32", "NVIDIA V100 SXM2 32 GB", 32 * 10**9),
        Gpu("a100-40", "NVIDIA A100 SXM 40 GB", 40 * 10**9),
        Gpu("a100-80", "NVIDIA A100 SXM 80 GB", 80 * 10**9),
        Gpu("h100", "NVIDIA H100 SXM 80 GB", 80 * 10**9),
        Gpu("h200", "NVIDIA H200 SXM 141 GB", 141 * 10**9),
        Gpu("b200", "NVIDIA B200 180 GB", 180 * 10**9),
        Gpu("mi300x", "AMD MI300X 192 GB", 192 * 10**9),
        Gpu("l4", "NVIDIA L4 24 GB", 24 * 10**9),
        Gpu("rtx4090", "NVIDIA RTX 4090 24 GB", 24 * 10**9),
    )
}


def reserve_nbytes() -> int:
    return CONTEXT_NBYTES + NCCL_NBYTES


def gpu(name: str) -> Gpu:
    """
    >>> gpu("h100").budget
    77800000000
    """
    found = GPUS.get(name.lower())
    if found is None:
        raise SpecError(f"no GPU is known as {name!r}{nearest(name, list(GPUS)) or '; known: ' + ', '.join(GPUS)}")
    return found
