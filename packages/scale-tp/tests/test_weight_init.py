"""weight_init.py: a part of a matrix with the values that it has in the whole one, which is never built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from scale_tp import weight_init as initialising
from scale_tp.split import Split
from scale_tp.weight_init import blocks_of, full_noise, init_shard

INITIALISERS: dict[str, Callable[[Tensor], object]] = {
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": partial(nn.init.kaiming_uniform_, a=5**0.5),
    "normal": partial(nn.init.normal_, mean=1.0, std=0.3),
    "constant": partial(nn.init.constant_, val=3.0),
    "zeros": nn.init.zeros_,
    "two draws": lambda x: x.uniform_().add_(1).mul_(2).div_(3).normal_().neg_(),
    "nothing": lambda x: x,
    # These look at values, so that the whole is built.
    "trunc_normal": partial(nn.init.trunc_normal_, a=-1.0, b=1.0),
    "orthogonal": nn.init.orthogonal_,
    "row": lambda x: nn.init.normal_(x)[1].zero_(),
}
SPLITS = [Split.even(37, 3), Split.strided(40, 3, 2), Split.even(2, 3), Split.of_sizes([0, 5, 2])]


@pytest.fixture(params=[64, 1 << 20], ids=["blocks", "one block"])
def block_size(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Small blocks, so that small matrices have several."""
    monkeypatch.setattr(initialising, "_HOST_BLOCK", request.param)
    initialising._draws_in_blocks.cache_clear()
    yield request.param
    initialising._draws_in_blocks.cache_clear()


@pytest.mark.parametrize("name", INITIALISERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_part_has_full_values_and_random_numbers_go_on(name: str, dtype: torch.dtype, block_size: int) -> None:
    fill = INITIALISERS[name]
    if name == "orthogonal" and dtype == torch.bfloat16:
        pytest.skip("torch decomposes no matrix of half precision")
    for split in SPLITS:
        for dim, shape in ((0, (split.total, 13)), (1, (7, split.total)), (0, (split.total, 3, 5))):
            torch.manual_seed(4)
            whole = torch.zeros(shape, dtype=dtype)
            with torch.no_grad():
                fill(whole)
            after = torch.get_rng_state()
            for rank in range(split.num_ranks):
                part = torch.zeros_like(split.take(whole, rank, dim).contiguous())
                torch.manual_seed(4)
                init_shard(part, shape, dim, split, rank, fill)
                assert torch.equal(part, split.take(whole, rank, dim)), (split, dim, rank)
                assert torch.equal(torch.get_rng_state(), after)


class Largest(TorchDispatchMode):
    """The most elements that any tensor has while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not isinstance(out, initialising.FullWeightProxy):
            self.numel = max(self.numel, out.numel())
        return out


@pytest.mark.parametrize("name", ["xavier_normal", "kaiming_uniform", "normal", "two draws"])
def test_the_whole_matrix_is_never_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialising, "_HOST_BLOCK", 160)
    initialising._draws_in_blocks.cache_clear()
    part, split = torch.zeros(10, 40), Split.even(40, 4)
    nothing = torch.zeros(10, 40)
    init_shard(nothing, (40, 40), 0, split, 1, INITIALISERS[name])  # Tries once what blocks draw.
    with Largest() as largest:
        init_shard(part, (40, 40), 0, split, 1, INITIALISERS[name])
    assert part.count_nonzero() > 390
    assert largest.numel == 400
    initialising._draws_in_blocks.cache_clear()


def test_where_blocks_draw_other_numbers_the_whole_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialising, "_HOST_BLOCK", 33)  # Normal numbers come by sixteens.
    initialising._draws_in_blocks.cache_clear()
    assert not initialising._draws_in_blocks(torch.ops.aten.normal_.default, torch.float32, torch.device("cpu"))
    split = Split.even(11, 2)
    torch.manual_seed(0)
    whole = nn.init.normal_(torch.empty(11, 9))
    torch.manual_seed(0)
    part = torch.zeros(6, 9)
    init_shard(part, (11, 9), 0, split, 0, nn.init.normal_)
    assert torch.equal(part, whole[:6])
    initialising._draws_in_blocks.cache_clear()


def test_noise_is_the_part_of_the_whole_noise() -> None:
    split, shape = Split.even(7, 2), (3, 7, 4)
    torch.manual_seed(1)
    whole = torch.empty(shape).bernoulli_(0.3)
    torch.manual_seed(1)
    part = full_noise(torch.ones(3, 3, 4), shape, 1, split, 1, lambda noise: noise.bernoulli_(0.3))
    assert torch.equal(part, whole[:, 4:])


def test_the_whole_can_be_kept() -> None:
    split = Split.even(5, 2)
    torch.manual_seed(0)
    expected = nn.init.normal_(torch.empty(5, 3))
    for num_ranks in (2, 1):
        torch.manual_seed(0)
        split = Split.even(5, num_ranks)
        part = torch.zeros(split.sizes[0], 3)
        kept = init_shard(part, (5, 3), 0, split, 0, nn.init.normal_, keep_full=True)
        assert torch.equal(kept, expected)
        assert torch.equal(part, expected[: len(part)])
        assert kept is not part


def test_on_the_meta_device_nothing_is_drawn() -> None:
    before = torch.get_rng_state()
    init_shard(torch.empty(3, 2, device="meta"), (5, 2), 0, Split.even(5, 2), 0, nn.init.normal_)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_part_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a part of shape \[3, 2\] of a tensor \[5, 2\], got \[2, 2\]"):
        init_shard(torch.zeros(2, 2), (5, 2), 0, Split.even(5, 2), 0, nn.init.normal_)


@pytest.mark.parametrize("total", [0, 1, 5, 16, 31, 32, 33])
def test_blocks_follow_each_other_and_none_is_short(total: int) -> None:
    found = list(blocks_of(total, 8))
    assert [i for start, stop in found for i in range(start, stop)] == list(range(total))
    assert all(stop - start >= min(8, total) for start, stop in found)
    assert all(stop - start < 16 for start, stop in found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["xavier_normal", "kaiming_uniform", "trunc_normal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_a_part_has_the_values_of_the_whole(name: str, dtype: torch.dtype) -> None:
    shape, device = (5003, 1009), torch.device("cuda")
    torch.manual_seed(0)
    whole = torch.zeros(shape, dtype=dtype, device=device)
    with torch.no_grad():
        INITIALISERS[name](whole)
    after = torch.cuda.get_rng_state()
    for dim in (0, 1):
        split = Split.even(shape[dim], 3)
        for rank in range(3):
            part = torch.zeros_like(split.take(whole, rank, dim).contiguous())
            torch.manual_seed(0)
            init_shard(part, shape, dim, split, rank, INITIALISERS[name])
            assert torch.equal(part, split.take(whole, rank, dim))
            assert torch.equal(torch.cuda.get_rng_state(), after)
    kind = torch.ops.aten.normal_ if name == "xavier_normal" else torch.ops.aten.uniform_
    assert initialising._draws_in_blocks(kind.default, dtype, device), "and without the whole"
