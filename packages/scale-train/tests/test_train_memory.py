import pytest
import torch

from scale_core.shard import Shard, mark
from scale_train.memory import held_bytes, in_words, peak_bytes, replicated_bytes


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


def test_a_shard_says_what_the_whole_would_need():
    param = torch.nn.Parameter(torch.zeros(5, 3))
    mark(param, Shard("weight", (10, 3), 0, 15))
    optimizer = stepped(param)
    assert held_bytes([param], optimizer) == 4 * 15 * 4 + 4
    assert replicated_bytes([param], optimizer) == 4 * 30 * 4 + 4


def test_the_peak_of_a_process_is_more_than_torch_alone_needs():
    assert 50e6 < peak_bytes(torch.device("cpu")) < 1e12


@pytest.mark.parametrize(
    "num_bytes, words", [(0, "0 B"), (999, "999 B"), (3_440_000, "3.44 MB"), (651e6, "651 MB"), (2.5e10, "25.0 GB")]
)
def test_bytes_in_words_have_two_or_three_digits(num_bytes, words):
    assert in_words(num_bytes) == words
