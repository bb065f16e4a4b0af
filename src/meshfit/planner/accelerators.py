"""What one device can do, from datasheets and microbenchmarks. Nothing here was fitted to a training.

    rates       dense peak of the datasheet (no sparsity), FLOP/s by precision
    reached     the share of that peak that long runs of large matrix products reach, at the device's power limit
    bandwidth   of its own memory, datasheet; ``streamed`` is the share that element-wise kernels reach

Sources of ``rates``, ``bandwidth``, ``memory``, ``watts`` and link speeds: the vendors' datasheets. Of ``reached`` and
``fastest`` (the best shape in short runs):

    A100      fastest 0.87: 271 of 312 TFLOP/s (ml-engineering, Maximum Achievable Matmul FLOPS). reached 0.80 at 400 W,
              between that and the 0.75 that the PCIe card reaches at 300 W over 100 transformer shapes (SimuMax,
              configs/system/a100_pcie.json)
    H100      fastest 0.80: 794 of 989 (ml-engineering). reached 0.70 at 700 W: an estimate, as SimuMax's default for
              it; fp8 0.62, by the same step from its best shape (1,403 of 1,979). H200: 0.72. The 500 W part: its clock
              falls with the square root of the power
    B200      fastest 0.78: 1,745 of 2,250. reached 0.50 at 1,000 W: large products in SimuMax's table of 500 shapes
              (configs/system/b200_bf16_ceperm.json). B300, GB200 and GB300 in proportion to their power (1,200, 1,200
              and 1,400 W), as is fp8; fp4 twice as fast as fp8. No long public measurement of these is known to us
    MI300X    0.54: 708 of 1,307 (ml-engineering)
    others    estimates: 0.75 where the board's power suits the chip, 0.50 to 0.65 for A10, L4, L40S, T4

``streamed``: 0.85 is common for HBM in stream benchmarks; B200 0.67 (SimuMax: 5,330 of 8,000 GB/s).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TERA, GIGA, GIB = 1e12, 1e9, 2**30


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device. Rates in FLOP/s, bandwidths in bytes/s and in one direction, memory in bytes."""

    name: str
    memory: int
    bandwidth: float
    rates: Mapping[str, float]
    """By precision: fp32, tf32, bf16, fp16, fp8, fp4. Dense."""

    reached: Mapping[str, float] = field(default_factory=dict)
    """Shares of those rates that large products reach; 0.75 where none is known."""

    fastest: float = 0.85
    """Share of those rates that the best of all shapes reaches, in short runs: what tiles run at while the power limit
    does not hold them back."""

    streamed: float = 0.85
    """Share of ``bandwidth`` that element-wise kernels reach."""

    packs: float = 0.0
    """How often what a product reads and writes passes through memory before and after its arithmetic: CPUs copy
    operands into the order of their registers. 0: while it computes (GPUs)."""

    units: int = 100
    """Streaming multiprocessors (compute units, cores): matrix products run in waves of as many tiles."""

    tile: tuple[int, int] = (128, 256)
    """The largest tile of a matrix product that one unit works on."""

    fill: float = 160.0
    """Elements of k that filling and draining a tile's pipeline takes: products of k = 1,024 and 2,048 on an A100 reach
    0.83 and 0.915 of those with large k (SimuMax's table)."""

    launch: float = 4e-6
    """Seconds between two kernels that follow each other on the device."""

    watts: float = 0.0
    nvlink: float = 0.0
    """Bytes/s in one direction to all peers of the link together; 0 without one."""

    pcie: float = 32 * GIGA

    def rate(self, precision: str) -> float:
        """Peak in FLOP/s; what the device lacks runs as the next wider precision that it has."""
        word = self._there(precision)
        return self.rates[word] if word else max(self.rates.values())

    def best(self, precision: str) -> float:
        """What the best shape reaches while power does not limit it, FLOP/s."""
        return max(self.rate(precision) * self.fastest, self.sustained(precision))

    def sustained(self, precision: str) -> float:
        """What large products reach, FLOP/s."""
        return self.rate(precision) * self.reached.get(self._there(precision), 0.75)

    def _there(self, precision: str) -> str:
        """The next precision that the device has; empty: none that is as wide."""
        return next((word for word in WIDER[WIDER.index(precision) :] if word in self.rates), "")


WIDER = ("fp4", "fp8", "fp16", "bf16", "tf32", "fp32")


def _nvidia(
    name: str,
    memory: float,
    bandwidth: float,
    half: float,
    fp32: float,
    *,
    reached: float = 0.75,
    fp8: float = 0.0,
    fp4: tuple[float, float] | None = None,
    fp16_alone: bool = False,
    nvlink: float = 0.0,
    pcie: float = 32.0,
    **rest: Any,
) -> Accelerator:
    """``memory`` GiB; ``bandwidth`` TB/s; TFLOP/s of bf16 and fp16 (``half``), of fp32, and of fp4 with its share that
    is reached; ``fp8``: the share of twice ``half``; links in GB/s. ``fp16_alone``: neither bf16 nor tf32."""
    rates = {"fp16": half} if fp16_alone else {"fp16": half, "bf16": half, "tf32": half / 2}
    rates["fp32"], shares = fp32, dict.fromkeys(("bf16", "fp16", "tf32"), reached)
    if fp8:
        rates["fp8"], shares["fp8"] = 2 * half, fp8
    if fp4:
        rates["fp4"], shares["fp4"] = fp4
    return Accelerator(
        name=name,
        memory=int(memory * GIB),
        bandwidth=bandwidth * TERA,
        rates={word: rates[word] * TERA for word in sorted(rates)},
        reached=dict(sorted(shares.items())),
        nvlink=nvlink * GIGA,
        pcie=pcie * GIGA,
        **rest,
    )


_SMALL = {"tile": (128, 128)}
_V100 = {"units": 80, "reached": 0.80, "fp16_alone": True, "pcie": 16, "watts": 300, "nvlink": 150, **_SMALL}
_A100 = {"units": 108, "fastest": 0.87, "reached": 0.80}
_HOPPER = {"units": 132, "fastest": 0.80, "pcie": 64, "fp8": 0.62}
_BLACKWELL = {"units": 148, "fastest": 0.78, "tile": (256, 256), "pcie": 64, "streamed": 0.67, "nvlink": 900}

ACCELERATORS = {
    device.name: device
    for device in (
        _nvidia("V100-16GB", 16, 0.9, 125, 15.7, **_V100),
        _nvidia("V100-32GB", 32, 0.9, 125, 15.7, **_V100),
        _nvidia("A100-40GB", 40, 1.555, 312, 19.5, watts=400, nvlink=300, **_A100),
        _nvidia("A100-80GB", 80, 2.039, 312, 19.5, watts=400, nvlink=300, **_A100),
        _nvidia("A100-PCIe", 80, 1.935, 312, 19.5, watts=300, **(_A100 | {"reached": 0.75})),
        _nvidia("H100-SXM", 80, 3.35, 989, 67, reached=0.70, watts=700, nvlink=450, **_HOPPER),
        _nvidia("H100-SXM-500W", 96, 2.4, 989, 67, reached=0.58, watts=500, nvlink=450, **(_HOPPER | {"fp8": 0.50})),
        _nvidia("H100-PCIe", 80, 2.0, 756, 67, reached=0.55, watts=350, **(_HOPPER | {"units": 114})),
        _nvidia("H200", 141, 4.8, 989, 67, reached=0.72, watts=700, nvlink=450, **_HOPPER),
        _nvidia("B200", 180, 8.0, 2250, 75, reached=0.50, fp8=0.50, fp4=(9000, 0.50), watts=1000, **_BLACKWELL),
        _nvidia("B300", 288, 8.0, 2250, 75, reached=0.60, fp8=0.60, fp4=(13500, 0.40), watts=1200, **_BLACKWELL),
        _nvidia("GB200", 186, 8.0, 2450, 80, reached=0.55, fp8=0.55, fp4=(9800, 0.55), watts=1200, **_BLACKWELL),
        _nvidia("GB300", 288, 8.0, 2450, 80, reached=0.64, fp8=0.64, fp4=(14700, 0.43), watts=1400, **_BLACKWELL),
        _nvidia("A10", 24, 0.6, 125, 31.2, reached=0.55, watts=150, units=72, **_SMALL),
        _nvidia("A10G", 24, 0.6, 70, 35, watts=300, units=80, **_SMALL),
        _nvidia("L4", 24, 0.3, 121, 30.3, reached=0.50, fp8=0.50, watts=72, units=58, **_SMALL),
        _nvidia("L40S", 48, 0.864, 362, 91.6, reached=0.65, fp8=0.60, watts=350, units=142),
        _nvidia("T4", 16, 0.32, 65, 8.1, reached=0.55, fp16_alone=True, watts=70, units=40, pcie=16, **_SMALL),
        _nvidia("RTX3090", 24, 0.936, 71, 35.6, watts=350, units=82, **_SMALL),
        _nvidia("RTX4090", 24, 1.008, 165, 82.6, fp8=0.75, watts=450, units=128, **_SMALL),
        Accelerator(
            name="MI300X",
            memory=192 * GIB,
            bandwidth=5.3 * TERA,
            rates={
                **{"fp8": 2614.9 * TERA, "bf16": 1307.4 * TERA, "fp16": 1307.4 * TERA},
                **{"tf32": 653.7 * TERA, "fp32": 163.4 * TERA},
            },
            reached={"bf16": 0.54, "fp16": 0.54, "fp8": 0.5, "tf32": 0.5},
            streamed=0.75,
            units=304,
            tile=(256, 256),
            watts=750,
            nvlink=448 * GIGA,
            pcie=64 * GIGA,
        ),
    )
}

ALIASES = {
    "V100": "V100-16GB",
    "V100-SXM": "V100-16GB",
    "A100": "A100-80GB",
    "A100-40": "A100-40GB",
    "A100-80": "A100-80GB",
    "A100-SXM": "A100-80GB",
    "A100-SXM-40GB": "A100-40GB",
    "A100-SXM-80GB": "A100-80GB",
    "H100": "H100-SXM",
    "H100-80GB": "H100-SXM",
    "H100-SXM-80GB": "H100-SXM",
    "H200-SXM": "H200",
    "B200-SXM": "B200",
    "RTX-3090": "RTX3090",
    "RTX-4090": "RTX4090",
    "3090": "RTX3090",
    "4090": "RTX4090",
}
