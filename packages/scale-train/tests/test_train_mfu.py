"""The utilization by PaLM's formula."""

from pathlib import Path

import pytest
import torch

from scale_train.configuration.resolve import model_config
from scale_train.model.gpt import GPT, num_parameters
from scale_train.options import DataOptions, ModelOptions, Options, ParallelOptions, RunOptions
from scale_train.training.reports.mfu import flops_per_token, peak_of, utilization_model

CPU = torch.device("cpu")


def test_a_token_costs_six_operations_for_each_parameter():
    # Brown et al., arXiv 2005.14165, Table D.1: 6 operations for each of 175 B parameters and 300 B tokens, 3.14e23.
    assert flops_per_token(174_600_000_000, 96, 12288, 0) * 300e9 == pytest.approx(3.14e23, rel=2e-3)
    assert flops_per_token(10, 2, 8, 16) == 60 + 12 * 2 * 8 * 16


def test_utilization_is_of_the_peak_of_all_ranks():
    options = Options(
        DataOptions(sequence=16), ModelOptions(layers=2, width=32, heads=2), run=RunOptions(peak_flops=1e9)
    )
    count = num_parameters(GPT(model_config(options)))
    found = utilization_model(options, 4, CPU)
    assert found is not None and found.mfu(1000.0) == 1000 * (6 * count + 12 * 2 * 32 * 16) / 4e9


def test_nothing_is_said_where_the_peak_is_not_known(tmp_path):
    assert utilization_model(Options(), 2, CPU) is None
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "mixtral", "num_local_experts": 8, "num_hidden_layers": 2, "hidden_size": 8}')
    experts = Options(model=ModelOptions(model=Path(config)), run=RunOptions(peak_flops=1e9))
    assert utilization_model(experts, 1, CPU) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("AMD Instinct MI300X", 1307e12),
        ("AMD Instinct MI250X", 191e12),
        ("AMD Instinct MI250", 181e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("NVIDIA RTX A1000", None),
        ("Quadro T400", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
    ],
)
def test_peaks_are_those_of_16_bit_products(name, peak):
    assert peak_of(name, "bf16") == peak_of(name, "fp16") == peak
    assert peak_of(name, "fp32") is None and peak_of("another", "bf16") is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("Tesla V100-SXM2-16GB", 125e12),
        ("Tesla V100-PCIE-16GB", 112e12),
        ("Tesla V100S-PCIE-32GB", 130e12),
        ("Tesla T4", 65e12),
    ],
)
def test_devices_without_bf16_have_no_peak_in_bf16(name, peak):
    assert (peak_of(name, "fp16"), peak_of(name, "bf16")) == (peak, None)


def test_a_run_on_a_known_gpu_takes_its_peak(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    found = utilization_model(Options(parallel=ParallelOptions(precision="bf16")), 8, torch.device("cuda", 0))
    assert found is not None and found.peak_flops == 8 * 312e12
