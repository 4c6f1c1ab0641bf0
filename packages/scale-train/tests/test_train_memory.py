import pytest
import torch

from scale_core.shard import Shard
from scale_core.sharded_tensor.tensor import set_shard
from scale_train.errors import InputError
from scale_train.options import DataOptions, ModelOptions, Options, ParallelOptions
from scale_train.training import memory
from scale_train.training.memory import (
    check_fits,
    format_bytes,
    held_bytes,
    machine_bytes,
    peak_bytes,
    replicated_bytes,
    state_tensors,
)


def stepped(param: torch.nn.Parameter) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def test_a_parameter_holds_itself_a_gradient_and_two_moments():
    param = torch.nn.Parameter(torch.zeros(10, 3))
    optimizer = stepped(param)
    assert held_bytes([param], [param], optimizer) == 4 * 30 * 4 + 4
    assert replicated_bytes([param], optimizer) == held_bytes([param], [param], optimizer)
    param.grad = None
    assert replicated_bytes([param], optimizer) == held_bytes([param], [param], optimizer)
    assert sorted(tensor.numel() for tensor in state_tensors(optimizer)) == [1, 30, 30]


def test_a_shard_says_what_the_whole_would_need():
    param = torch.nn.Parameter(torch.zeros(5, 3))
    set_shard(param, Shard("weight", (10, 3), 0, 15))
    optimizer = stepped(param)
    assert held_bytes([param], [param], optimizer) == 4 * 15 * 4 + 4
    assert replicated_bytes([param], optimizer) == 4 * 30 * 4 + 4


def test_a_parameter_that_others_update_needs_state_as_well():
    whole, others = torch.nn.Parameter(torch.zeros(10, 3)), torch.nn.Parameter(torch.zeros(20))
    piece = torch.nn.Parameter(torch.zeros(5, 3))
    set_shard(piece, Shard("weight", (10, 3), 0, 15))
    optimizer = stepped(piece)
    assert held_bytes([whole, others], [piece], optimizer) == 50 * 4 + 3 * 15 * 4 + 4
    assert replicated_bytes([whole, others], optimizer) == 4 * 50 * 4 + 2 * 4


def test_a_model_that_the_machine_cannot_hold_is_refused(monkeypatch):
    model = ModelOptions(layers=1, width=64, heads=2)  # 65 thousand parameters or so
    data = DataOptions(batch=4, sequence=8)
    options = Options(data, model, ParallelOptions(parallel="ddp"))
    monkeypatch.setattr(memory, "machine_bytes", lambda: 500_000)
    check_fits(options, 1)
    message = r"--size tiny: 0 M parameters x 4 bytes x 2 local ranks are 5\d\d kB, and this machine has 500 kB"
    with pytest.raises(InputError, match=message):
        check_fits(options, 2)
    sharded = Options(data, model)
    check_fits(sharded, 2)
    large = Options(DataOptions(batch=40, sequence=64), model)
    with pytest.raises(InputError, match=r"--batch 40 x --sequence 64: the input of one block .* is 655 kB"):
        check_fits(large, 2)
    monkeypatch.setattr(memory, "machine_bytes", lambda: 200_000)
    check_fits(sharded, 2, world_size=4)
    message = r"4 bytes divided among the ranks x 2 local ranks are 2\d\d kB, and .* 200 kB; take a smaller --size$"
    with pytest.raises(InputError, match=message):
        check_fits(sharded, 2)
    monkeypatch.setattr(memory, "machine_bytes", lambda: None)
    check_fits(options, 2)


def test_a_container_s_limit_is_the_machine_s_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CGROUP_LIMIT", tmp_path / "memory.max")
    (tmp_path / "memory.max").write_text("max\n")
    whole = machine_bytes()
    assert whole is not None and whole > 100e6
    (tmp_path / "memory.max").write_text("1000000\n")
    assert machine_bytes() == 1_000_000


def test_the_peak_of_a_process_is_more_than_torch_alone_needs():
    assert 50e6 < peak_bytes(torch.device("cpu")) < 1e12


@pytest.mark.parametrize(
    "num_bytes, words", [(0, "0 B"), (999, "999 B"), (3_440_000, "3.44 MB"), (651e6, "651 MB"), (2.5e10, "25.0 GB")]
)
def test_bytes_as_text_have_two_or_three_digits(num_bytes, words):
    assert format_bytes(num_bytes) == words
