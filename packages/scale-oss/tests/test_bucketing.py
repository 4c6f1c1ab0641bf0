"""bucketing.py: parameters of one device, dtype and kind stand together, in buckets that are updated where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_check.simulate import simulate
from scale_oss import OSS, OSSOptions, ShardedDataParallel


@pytest.mark.simulation
def test_each_device_has_buckets_of_its_own() -> None:
    def device_of(tensor: Tensor | None) -> str:
        return "" if tensor is None else tensor.device.type

    class OnTwoDevices(nn.Module):
        """A table and a head on the host, what is between them on the device."""

        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(40, 8), nn.Linear(6, 4)
            self.first, self.last = nn.Linear(8, 16, device="sim"), nn.Linear(16, 6, device="sim")

        def forward(self, indices: Tensor) -> Tensor:
            y: Tensor = self.head(self.last(self.first(self.table(indices).to("sim")).relu()).cpu())
            return y

    with simulate(rank=1, world_size=2, device="sim") as simulation:
        module = OnTwoDevices()
        optimizer = OSS(module.named_parameters(), torch.optim.AdamW, lr=0.1, options=OSSOptions(bucket_numel=200))
        model = ShardedDataParallel(module, optimizer)
        assert [(bucket.device.type, bucket.names) for bucket in optimizer.buckets] == [
            ("cpu", ["table.weight"]),
            ("cpu", ["head.weight", "head.bias"]),
            ("sim", ["first.weight"]),
            ("sim", ["first.bias", "last.weight", "last.bias"]),
        ]
        assert model.is_multi_device_module
        numel = {"cpu": 40 * 8 + 6 * 4 + 4, "sim": 8 * 16 + 16 + 16 * 6 + 6}
        for _ in range(3):
            model(torch.zeros(3, dtype=torch.long)).sum().backward()
            assert all(device_of(piece.grad) in ("", device_of(piece)) for piece in optimizer.local_params)
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait()
        for bucket in optimizer.buckets:
            assert {device_of(each) for each in (*bucket.params, *bucket.pieces)} == {bucket.device.type}
        for piece, state in optimizer.optim.state.items():
            values: list[Any] = [value for value in state.values() if isinstance(value, Tensor) and value.ndim]
            assert {device_of(value) for value in values} <= {device_of(piece)}
        for device, expected in numel.items():
            held = simulation.on(device).current_by_kind
            assert held["parameters"] - 4 * expected in range(65)  # padding
            assert abs(held["optimizer state"] - 4 * 2 * expected / 2) < 70  # two moments of half of them
        sent = simulation.bytes_sent
        assert sent["reduce_scatter"] == sent["all_gather"]  # each way, for both devices


def test_neighbors_of_one_kind_stand_together_and_others_apart() -> None:
    first, second, frozen = nn.Linear(4, 4), nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4).requires_grad_(False)
    named = [(f"{at}.{name}", p) for at, m in enumerate((first, second, frozen)) for name, p in m.named_parameters()]
    optimizer = OSS(named, torch.optim.SGD, lr=0.1, options=OSSOptions(bucket_numel=16))
    assert [bucket.names for bucket in optimizer.buckets] == [
        ["0.weight"],
        ["0.bias"],
        ["1.weight"],
        ["1.bias"],
        ["2.weight"],
        ["2.bias"],
    ]
    optimizer = OSS(named, torch.optim.SGD, lr=0.1, options=OSSOptions(bucket_numel=20))
    assert [bucket.names for bucket in optimizer.buckets] == [
        ["0.weight", "0.bias"],
        ["1.weight", "1.bias"],
        ["2.weight", "2.bias"],
    ]


def test_parameters_over_one_memory_are_refused() -> None:
    embed, head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
    head.weight.data = embed.weight.data
    named = [("embed.weight", embed.weight), ("head.weight", head.weight)]
    with pytest.raises(ValueError, match=r"'embed.weight' and 'head.weight'.*head.weight = embed.weight, before OSS"):
        OSS(named)
    assert head.weight.data_ptr() == embed.weight.data_ptr()
    optimizer = OSS(named[:1])
    with pytest.raises(ValueError, match=r"'embed.weight' and 'head.weight' share"):
        optimizer.add_param_group({"params": named[1:]})
    head.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"ShardedDataParallel: 'embed.weight' and '1.weight' share"):
        ShardedDataParallel(nn.Sequential(embed, head), optimizer)


@pytest.mark.parametrize("elementwise", [True, False])
def test_the_optimizer_sees_attributes_that_users_set(elementwise: bool) -> None:
    model = nn.Linear(4, 2)
    vars(model.bias)["_no_weight_decay"] = True
    optimizer = OSS(model.parameters(), torch.optim.SGD, options=OSSOptions(elementwise=elementwise), lr=0.1)
    stepped = [param for group in optimizer.optim.param_groups for param in group["params"]]
    assert [getattr(param, "_no_weight_decay", False) for param in stepped] == [False, True]
