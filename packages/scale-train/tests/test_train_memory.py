import pytest
import torch

from scale_core.shard import Shard, mark
from scale_train import memory
from scale_train.errors import InputError
from scale_train.memory import check_fits, held_bytes, in_words, machine_bytes, peak_bytes, replicated_bytes
from scale_train.options import ModelOptions, Options


def stepped(param: torch.nn.Parameter) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def test_a_whole_parameter_holds_itself_its_gradient_and_two_moments():
    param = torch.nn.Parameter(torch.zeros(10, 3))
    optimizer = stepped(param)
    assert held_bytes([param], optimizer) == 4 * 30 * 4 + 4
    assert replicated_bytes([param], optimizer) == held_bytes([param], optimizer)
    param.grad = None
    assert replicated_bytes([param], optimizer) == held_bytes([param], optimizer)


def test_a_shard_says_what_the_whole_would_need():
    param = torch.nn.Parameter(torch.zeros(5, 3))
    mark(param, Shard("weight", (10, 3), 0, 15))
    optimizer = stepped(param)
    assert held_bytes([param], optimizer) == 4 * 15 * 4 + 4
    assert replicated_bytes([param], optimizer) == 4 * 30 * 4 + 4


def test_a_model_that_the_machine_cannot_hold_once_for_each_rank_is_refused(monkeypatch):
    options = Options(model=ModelOptions(layers=1, width=64, heads=2))  # 65 thousand parameters or so
    monkeypatch.setattr(memory, "machine_bytes", lambda: 500_000)
    check_fits(options, 1)
    message = r"--size tiny: 0 M parameters x 4 bytes x 2 local ranks are 5\d\d kB, and this machine has 500 kB"
    with pytest.raises(InputError, match=message):
        check_fits(options, 2)
    monkeypatch.setattr(memory, "machine_bytes", lambda: None)
    check_fits(options, 2)


def test_a_container_s_limit_is_the_machine_s_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_LIMIT_OF_THE_CONTAINER", tmp_path / "memory.max")
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
def test_bytes_in_words_have_two_or_three_digits(num_bytes, words):
    assert in_words(num_bytes) == words
