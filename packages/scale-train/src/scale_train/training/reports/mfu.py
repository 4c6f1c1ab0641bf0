"""Model FLOPs utilization: the part of the devices' peak that the arithmetic of the model itself takes.

Chowdhery et al., "PaLM", arXiv 2204.02311, Appendix B: a token costs 6 N + 12 L H Q T operations in forward and
backward (N parameters, L layers, H heads of Q features, T tokens in a sequence). Neither recomputation nor experts that
a token skips count.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from scale_train.configuration.derived import attention_width, model_shape
from scale_train.huggingface.config import is_mixture, read_config
from scale_train.options import Options
from scale_train.training.memory import count_active_parameters

# Operations in a second of bf16 and fp16 matrix products with sums in fp32, from the maker's data sheets, looked up on
# 2026-11-28. They are those without sparsity: half of what NVIDIA prints for Hopper, Blackwell and L4, whose tables are
# "with sparsity". The first name that the device's name contains as a word is taken: a variant stands above what it is
# a variant of. None: the figure is not confirmed, and a shorter matching name must not supply it.
_PEAKS = {
    # nvidia.com, Blackwell data sheet: 5 and 4.5 PFLOPS of one GPU, with sparsity
    "GB200": 2500e12,
    "B200": 2250e12,
    # nvidia.com/en-us/data-center/h200: 1,979 TFLOPS of the SXM, with sparsity
    "H200 NVL": None,
    "H200": 989e12,
    # nvidia.com/en-us/data-center/h100: SXM 1,979, PCIe 1,513, NVL 1,671 TFLOPS, with sparsity
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,  # nvidia.com/en-us/data-center/a100, SXM and PCIe
    # nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf: 125, with sparsity 250 TFLOPS
    "A10": 125e12,
    "L40S": 362e12,  # nvidia.com/en-us/data-center/l40s
    "L4": 121e12,  # nvidia.com/en-us/data-center/l4: 242 TFLOPS with sparsity
    # images.nvidia.com/aem-dam/Solutions/Data-Center/l4/nvidia-ada-gpu-architecture-whitepaper-v2.1.pdf, Appendix A:
    # 165.2 TFLOPS with sums in fp32, 330.4 with sparsity
    "RTX 4090 Laptop": None,
    "RTX 4090 D": None,
    "RTX 4090": 165e12,
    # images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf
    "V100S": 130e12,
    "V100-PCIE": 112e12,
    "V100": 125e12,
    # nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf
    "T4": 65e12,
    # rocm.docs.amd.com, conceptual/gpu-arch/mi300: 1,307.4 TFLOPS; the MI325X (amd.com, Instinct) has as many units
    "MI325X": 1307e12,
    "MI300X": 1307e12,
    # rocm.docs.amd.com, conceptual/gpu-arch/mi250: 362.1 TFLOPS of the two devices of an MI250, with 104 units each; an
    # MI250X has 110
    "MI250X": 191e12,
    "MI250": 181e12,
}
_WITHOUT_BF16 = ("V100", "V100S", "T4")
"""These multiply matrices of fp16 alone."""


class UtilizationModel(NamedTuple):
    """What turns tokens per second into a part of the peak."""

    flops_per_token: float
    peak_flops: float  # of all ranks together

    def mfu(self, tokens_per_second: float) -> float:
        """Returns the part, 0.4 for 40 %."""
        return tokens_per_second * self.flops_per_token / self.peak_flops


def flops_per_token(num_params: int, layers: int, width: int, sequence: int) -> int:
    """Returns the operations of forward and backward for one token; `width` is heads times features of each.

    >>> flops_per_token(540_000_000_000, 118, 48 * 256, 2048)  # PaLM 540B
    3275634806784
    """
    return 6 * num_params + 12 * layers * width * sequence


def peak_of(device_name: str, precision: str) -> float | None:
    """Returns the peak of one device; None where it is not known, as for fp32 and for a MIG slice of a GPU."""
    if precision == "fp32" or _contains(device_name, "MIG"):
        return None
    if precision == "bf16" and any(_contains(device_name, name) for name in _WITHOUT_BF16):
        return None
    return next((peak for name, peak in _PEAKS.items() if _contains(device_name, name)), None)


def _contains(device_name: str, word: str) -> bool:
    return re.search(rf"\b{word}\b", device_name) is not None


def utilization_model(options: Options, num_ranks: int, device: torch.device) -> UtilizationModel | None:
    """Returns how utilization is computed; None where the peak or the model's operations are not known."""
    peak = options.run.peak_flops
    if peak is None and device.type == "cuda":
        peak = peak_of(torch.cuda.get_device_name(device), options.parallel.precision)
    layers, width = model_shape(options).layers, attention_width(options)
    of_experts = options.model.model is not None and is_mixture(read_config(options.model.model))
    if peak is None or not layers or not width or of_experts:  # Of experts, a token passes through a part of them.
        return None
    cost = flops_per_token(count_active_parameters(options), layers, width, options.data.sequence)
    return UtilizationModel(cost, peak * num_ranks)
