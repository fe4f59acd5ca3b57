"""What a GPU can compute at most, for model FLOPs utilisation (MFU)."""

from __future__ import annotations

import re

PEAKS: dict[str, float] = {
    # NVIDIA's data sheets; where those give the number with sparsity, half of it.
    r"GB200": 2500e12,
    r"B200": 2250e12,
    r"GH200": 989e12,
    r"H200 NVL": 835e12,
    r"H200": 989e12,
    r"H100 NVL": 835e12,
    r"H100 PCIe": 756e12,
    r"H[18]00": 989e12,
    r"A[18]00": 312e12,
    r"L40S": 362e12,
    r"L40": 181e12,
    r"L4": 121e12,
    r"A40": 149.7e12,
    r"A10": 125e12,
    # NVIDIA's white papers on GA102, AD102 and Blackwell; sums in float32.
    r"RTX A6000": 154.8e12,
    r"RTX 6000 Ada": 364.2e12,
    r"RTX 5090(?! D| Laptop)": 209.5e12,
    r"RTX 4090(?! D| Laptop)": 165.2e12,
    r"RTX 3090(?! Ti| Laptop)": 71e12,
    # AMD's data sheets. PyTorch sees an MI250X as two devices.
    r"MI3(00|25)X": 1307.4e12,
    r"MI250X": 191.5e12,
}
"""FLOPs per second with dense bfloat16 products, by what the device's name contains; the first that fits."""


def peak_flops(device_name: str) -> float | None:
    """FLOPs per second of a GPU with dense bfloat16 products, at most; None where it is not known.

    Args:
        device_name: as ``torch.cuda.get_device_name()`` has it. A share of a GPU (MIG) is not known.
    """
    if "MIG" in device_name:
        return None
    return next((peak for name, peak in PEAKS.items() if re.search(rf"\b{name}\b", device_name)), None)
