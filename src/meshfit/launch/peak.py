"""What devices could compute at most, by their names."""

# Dense products on tensor cores in bf16, and plain fp32, in TFLOP/s: the makers' data sheets.
PEAKS = {
    "B200": (2250, 75),
    "H200": (989, 67),
    "H100 PCIe": (756, 51),
    "H100 NVL": (835, 60),
    "H100": (989, 67),
    "A100": (312, 19.5),
    "A10G": (125, 31),
    "L40S": (362, 91.6),
    "L4": (121, 30.3),
    "V100": (125, 15.7),
    "T4": (65, 8.1),
    "RTX 4090": (165, 82.6),
    "RTX 3090": (71, 35.6),
    "MI300X": (1307, 163),
    "MI250X": (383, 47.9),
}


def peak_flops(device: str, precision: str) -> float | None:
    """Of a device by its name; None for one that is not known, as CPUs are not."""
    half, single = next((peaks for name, peaks in PEAKS.items() if name in device), (0.0, 0.0))
    return 1e12 * (single if precision == "fp32" else half) or None
