"""simulation.py: one process plays one rank of a large world."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

from scale_check.simulate import Simulation, UseAfterReleaseError, simulate
from scale_core import compat
from scale_core.comm.group import group_of
from scale_core.flat.buffer import FlatBuffer
from scale_core.flat.config import DtypePolicy
from scale_core.flat.layout import FlatLayout

pytestmark = pytest.mark.simulation

WIDTH = 32


class Block(nn.Module):
    """A small pre-norm transformer block, checkpointed as the large ones are."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self._compute, x, use_reentrant=False)
        return result

    def _compute(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        changed: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + changed


class TinyGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 50, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        return loss


needs_stand_in = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the stand-in takes the place of no real accelerator"
)

Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), foreach=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, simulation: Simulation) -> None:
    """Two steps; the books are those of the second."""
    for _ in range(2):
        simulation.restart()
        model(torch.ones(2, 16, dtype=torch.int64, device=simulation.device)).backward()
        optimizer.step()
        optimizer.zero_grad()


def shard_by_torch(model: TinyGPT, simulation: Simulation, place: OffloadPolicy) -> None:
    with simulation.aside():
        mesh = init_device_mesh(simulation.device.type, (simulation.world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for unit in (*model.blocks, model):
        torch_fully_shard(unit, mesh=mesh, mp_policy=policy, offload_policy=place)


def run_plain(fake: bool, optimizer: Optimizers = adamw) -> Simulation:
    torch.manual_seed(0)
    with simulate(fake=fake) as simulation:
        model = TinyGPT()
        train(model, optimizer(model), simulation)
        simulation.peak_by_kind  # noqa: B018
    return simulation


def run_sharded(fake: bool, device: str = "cpu", place: OffloadPolicy | None = None) -> Simulation:
    torch.manual_seed(0)
    with simulate(rank=1, world_size=4, fake=fake, device=device) as simulation:
        with simulation.device:
            model = TinyGPT()
        shard_by_torch(model, simulation, place or OffloadPolicy())
        train(model, adamw(model), simulation)
    return simulation


@pytest.mark.parametrize("run", [run_plain, run_sharded])
def test_fake_and_real_tensors_agree_to_the_byte(run: Callable[[bool], Simulation]) -> None:
    fake, real = run(True), run(False)
    assert fake.peak_bytes == real.peak_bytes
    assert fake.peak_by_kind == real.peak_by_kind
    assert fake.current_by_kind == real.current_by_kind
    assert fake.collectives == real.collectives


def test_a_storage_another_tensor_was_set_to_is_released_with_it() -> None:
    with simulate() as simulation:
        tensor = torch.empty(1000)
        same = torch.empty(0).set_(tensor.untyped_storage())
        del tensor
        assert simulation.current_bytes == 4000
        del same
        assert simulation.current_bytes == 0


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        lambda model: torch.optim.Adam(model.parameters(), fused=True),
        lambda model: torch.optim.AdamW(model.parameters(), foreach=True),
    ],
)
def test_fake_and_real_tensors_agree_for_other_optimizers(optimizer: Optimizers) -> None:
    fake, real = run_plain(True, optimizer), run_plain(False, optimizer)
    assert (fake.peak_by_kind, fake.current_by_kind) == (real.peak_by_kind, real.current_by_kind)


def test_the_kinds_of_a_plain_step_have_the_sizes_of_arithmetic() -> None:
    with simulate() as simulation:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        one, size = 4 * 64 * 64, 4 * 4 * 64 * 64
        optimizer = adamw(model)
        for _ in range(2):
            simulation.restart()
            model(torch.zeros(1, 64)).sum().backward()
            optimizer.step()
            held = {"optimizer state": 2 * size + 4 * 4, "parameters": size}  # a count of steps for each parameter
            assert simulation.current_by_kind == {**held, "gradients": size}
            optimizer.zero_grad()
            assert simulation.current_by_kind == held
        # The peak is in the step: the root and the denominator of a weight, beside the denominator of the one before.
        assert simulation.peak_by_kind == {**held, "gradients": size, "temporaries": 3 * one}
    assert simulation.collectives == []


def test_a_sharded_step_gathers_and_reduces_what_arithmetic_says() -> None:
    simulation = run_sharded(fake=True)
    model = TinyGPT()
    block, rest = (sum(p.numel() for p in part.parameters()) for part in (model.blocks[0], model))
    rest -= 3 * block
    # bf16, world 4, all sizes here divide: forward gathers the root's unit and each block, backward gathers the blocks
    # again, but for the last one in the root's order, which stays, and reduces all.
    sent = {(each.op, each.phase): 0 for each in simulation.collectives}
    for each in simulation.collectives:
        sent[each.op, each.phase] += each.bytes_sent
    whole = 2 * (3 * block + rest) * 3 // 4
    assert sent["all_gather", "forward"] == pytest.approx(whole, rel=0.01)
    assert sent["all_gather", "backward"] == pytest.approx(2 * 3 * block * 3 // 4, rel=0.01)
    bytes_of_element = 4 if compat.reduces_in_param_dtype() else 2
    assert sent["reduce_scatter", "backward"] == pytest.approx(whole * bytes_of_element // 2, rel=0.01)


def test_the_order_of_the_collectives_is_kept() -> None:
    with simulate(rank=0, world_size=2) as simulation:
        x = torch.zeros(4, requires_grad=True)
        dist.all_reduce(x.detach())
        x.register_hook(lambda grad: dist.broadcast(grad, src=0))
        x.sum().backward()
        dist.barrier()
    assert [(each.op, each.phase) for each in simulation.collectives] == [
        ("all_reduce", "forward"),
        ("broadcast", "backward"),
        ("barrier", "forward"),
    ]


def test_only_a_second_step_shows_the_optimizers_state() -> None:
    with simulate() as simulation:
        model = TinyGPT()
        optimizer = adamw(model)
        peaks = []
        for _ in range(2):
            simulation.restart()
            model(torch.ones(2, 16, dtype=torch.int64)).backward()
            peaks.append(simulation.peak_bytes)
            optimizer.step()
            optimizer.zero_grad()
    size = 4 * sum(param.numel() for param in model.parameters())
    assert peaks[1] - peaks[0] > 1.9 * size


def flat_buffer(compute: torch.dtype = torch.float32, *, trainable: bool = True) -> FlatBuffer:
    params = [nn.Parameter(torch.zeros(16, 8), trainable), nn.Parameter(torch.zeros(8), trainable)]
    group = group_of()
    layout = FlatLayout.plan(["weight", "bias"], [tuple(param.shape) for param in params], group.size)
    return FlatBuffer(["weight", "bias"], params, layout, group, DtypePolicy(compute=compute))


def test_a_flat_buffer_takes_memory_from_gather_to_release_only() -> None:
    with simulate(rank=2, world_size=4) as simulation:
        buffer = flat_buffer(torch.bfloat16)
        shard = 4 * buffer.layout.shard_numel
        assert simulation.current_by_kind == {"parameters": shard}
        buffer.gather()
        buffer.wait_gathered()
        assert simulation.current_by_kind == {"parameters": shard, "gathered": 2 * buffer.layout.full_numel}
        buffer.release()
        assert simulation.current_by_kind == {"parameters": shard}
    assert simulation.bytes_sent == {"all_gather": 3 * 2 * buffer.layout.shard_numel}


def test_shards_of_frozen_units_are_parameters_of_no_optimizer() -> None:
    with simulate(rank=0, world_size=4) as simulation:
        buffer = flat_buffer(trainable=False)
        assert simulation.current_by_kind == {"parameters": 4 * buffer.layout.shard_numel}


@pytest.mark.parametrize("fake", [True, False])
def test_a_weight_used_after_its_release_names_the_operator(fake: bool) -> None:
    with simulate(rank=0, world_size=4, fake=fake):
        buffer = flat_buffer()
        weight = buffer.unsharded_params[0]
        with pytest.raises(
            UseAfterReleaseError, match=r"aten::mul.Tensor in forward got a tensor \(16, 8\) .* was released"
        ):
            weight * 2
        buffer.gather()
        buffer.wait_gathered()
        weight * 2


def test_a_released_buffer_is_caught_in_collectives_and_backward() -> None:
    with simulate(rank=0, world_size=4):
        full = torch.zeros(8)
        x = torch.ones(8, requires_grad=True)
        loss = (x * full).sum()
        full.untyped_storage().resize_(0)
        with pytest.raises(UseAfterReleaseError, match="c10d::allreduce_"):
            dist.all_reduce(full)
        with pytest.raises(UseAfterReleaseError, match=r"aten::mul\.Tensor in backward"):
            loss.backward()


def test_sizes_and_views_of_a_released_buffer_may_be_asked_for() -> None:
    with simulate():
        full = torch.zeros(8)
        full.untyped_storage().resize_(0)
        assert full.view(2, 4)[1].shape == (4,)
        assert full.detach().new_empty(3).shape == torch.empty_like(full)[:3].shape
        assert full[:0].clone().numel() == 0


def test_without_the_check_a_use_after_release_passes() -> None:
    with simulate(check=False):
        full = torch.zeros(8)
        full.untyped_storage().resize_(0)
        assert (full + 1).shape == (8,)


def test_the_largest_at_the_peak_name_their_operator() -> None:
    with simulate() as simulation:
        x = torch.zeros(1000, requires_grad=True)
        x.exp().sum().backward()
        kinds = [(item.kind, item.made_by, item.num_bytes) for item in simulation.largest_at_peak[:3]]
    assert kinds == [
        ("activations", "aten::zeros in forward", 4000),
        ("activations", "aten::exp in forward", 4000),
        ("temporaries", "aten::mul.Tensor in backward", 4000),
    ]


def test_a_label_stands_above_everything_else() -> None:
    with simulate() as simulation:
        model = nn.Linear(8, 8, bias=False)
        simulation.label(model.weight, "teacher")
        model(torch.zeros(1, 8))
        assert simulation.current_by_kind == {"teacher": 256}


def test_buffers_of_modules_are_told_apart() -> None:
    with simulate() as simulation:
        model = nn.BatchNorm1d(8)
        model(torch.zeros(2, 8))
        assert simulation.current_by_kind == {"parameters": 64, "buffers": 72}


def test_what_is_done_aside_is_real_and_not_booked() -> None:
    with simulate() as simulation:
        with simulation.aside():
            values = torch.arange(3)
            assert values.tolist() == [0, 1, 2]
        assert simulation.current_bytes == simulation.peak_bytes == 0


def test_a_meta_tensor_takes_no_memory() -> None:
    with simulate() as simulation:
        nn.Linear(1000, 1000, device="meta")(torch.zeros(0, 1000, device="meta"))
        assert simulation.peak_bytes == 0


def test_the_report_shows_kinds_peak_and_traffic() -> None:
    with simulate(rank=3, world_size=128) as simulation:
        weight = nn.Linear(2**15, 2**15, bias=False).weight
        dist.all_reduce(weight.data)
        report = simulation.report()
    assert report.splitlines() == [
        "rank 3 of 128                            GiB",
        "  activations                          4.000",
        "  peak                                 4.000",
        "sent                                     GiB   calls",
        "  all_reduce in forward                7.938       1",
    ]


# Host and device apart.


@needs_stand_in
def test_a_separate_device_holds_and_sends_what_one_memory_did(monkeypatch: pytest.MonkeyPatch) -> None:
    # The attentions of CPU and CUDA keep other statistics.
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda query, key, value, is_causal: query * key + value)
    one, two = run_sharded(fake=True), run_sharded(fake=True, device="sim")
    kind = "optimizer state"
    counts_of_steps = two.on("cpu").peak_by_kind
    if compat.torch_version() < (2, 13):
        counts_of_steps.pop("temporaries")  # A few that torch 2.11 makes on the host.
    assert set(counts_of_steps) == {kind}
    expected = {**one.peak_by_kind, kind: one.peak_by_kind[kind] - counts_of_steps[kind]}
    # Of each row in bf16, layer norm keeps mean and deviation in fp32 on devices and in bf16 on CPU.
    num_norms, num_rows, num_statistics = 2, 2 * 16, 2
    expected["temporaries"] += num_norms * num_rows * num_statistics * (4 - 2)
    assert two.peak_by_kind == expected
    assert two.collectives == one.collectives


@needs_stand_in
def test_offloaded_tensors_are_on_the_host_others_on_the_device() -> None:
    simulation = run_sharded(fake=True, device="sim", place=CPUOffloadPolicy(pin_memory=False))
    whole = run_sharded(fake=True)
    host = simulation.on("cpu")
    assert set(simulation.peak_by_kind) == {"gathered", "reduction", "activations", "temporaries"}
    assert set(host.peak_by_kind) == {"parameters", "gradients", "optimizer state", "temporaries"}
    for kind in ("parameters", "optimizer state"):
        assert host.peak_by_kind[kind] == whole.peak_by_kind[kind]
    assert simulation.collectives == whole.collectives


@needs_stand_in
def test_each_memory_has_a_peak_of_its_own() -> None:
    with simulate(device="sim") as simulation:
        host = simulation.on("cpu")
        here = torch.zeros(1000, dtype=torch.uint8)
        there = here.to(simulation.device, torch.float32)
        assert (host.current_bytes, simulation.current_bytes) == (1000, 4000)
        back = torch.empty(1000).copy_(there, non_blocking=True)
        del there
        assert (host.current_bytes, simulation.current_bytes) == (5000, 0)
        del here, back
        assert (host.peak_bytes, simulation.peak_bytes) == (5000, 4000)
        assert simulation.on("sim:0").peak_bytes == simulation.peak_bytes
        simulation.restart()
        assert (host.peak_bytes, simulation.peak_bytes) == (0, 0)


@needs_stand_in
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_buffer_released_and_filled_again_stays_in_its_memory(device: str) -> None:
    with simulate(device="sim") as simulation:
        full = torch.zeros(8, device=device)
        full.untyped_storage().resize_(0)
        assert simulation.on(device).current_bytes == 0
        full.untyped_storage().resize_(32)
        assert simulation.on(device).current_by_kind == {"gathered": 32}
        other = "sim" if device == "cpu" else "cpu"
        assert simulation.on(other).peak_bytes == 0


@needs_stand_in
def test_a_released_buffer_is_caught_in_a_backward_on_the_device() -> None:
    with simulate(device="sim") as simulation:
        full = torch.zeros(8, device=simulation.device)
        loss = (torch.ones(8, device=simulation.device, requires_grad=True) * full).sum()
        full.untyped_storage().resize_(0)
        with pytest.raises(UseAfterReleaseError, match=r"aten::mul\.Tensor in backward"):
            loss.backward()


@needs_stand_in
def test_ranks_send_from_the_device_and_from_the_host() -> None:
    with simulate(rank=1, world_size=4, device="sim") as simulation:
        part = dist.new_group([1, 3])
        for device in ("sim", "cpu"):
            dist.all_reduce(torch.zeros(24, device=device))
            dist.all_reduce(torch.zeros(24, device=device), group=part)
            messages = [dist.P2POp(dist.isend, torch.zeros(6, device=device), 2)]
            messages += [dist.P2POp(dist.irecv, torch.zeros(6, device=device), 0)]
            for work in dist.batch_isend_irecv(messages):
                work.wait()
    assert [(each.op, each.bytes_sent) for each in simulation.collectives] == 2 * [
        ("all_reduce", 2 * 3 * 24),
        ("all_reduce", 2 * 24 * 4 // 2),
        ("send", 24),
        ("receive", 0),
    ]


@needs_stand_in
def test_the_report_shows_each_memory() -> None:
    with simulate(device="sim") as simulation:
        weight = nn.Linear(2**15, 2**15, bias=False).weight
        gathered = weight.detach().to(simulation.device, torch.bfloat16)
        simulation.label(weight, "shards")
        report = simulation.report()
        assert gathered.device == simulation.device
    assert report.splitlines() == [
        "rank 0 of 1 on sim                       GiB",
        "  activations                          2.000",
        "  peak                                 2.000",
        "  reserved by the allocator            2.000",
        "rank 0 of 1 on cpu                       GiB",
        "  shards                               4.000",
        "  peak                                 4.000",
        "sent                                     GiB   calls",
    ]


def test_without_a_device_of_its_own_the_host_is_the_device() -> None:
    with simulate() as simulation:
        weight = torch.zeros(10)
        assert simulation.device == weight.device
        assert simulation.on("cpu").current_by_kind == simulation.current_by_kind == {"activations": 40}
        with pytest.raises(ValueError, match=r"no memory on 'sim', but on cpu: simulate\(\.\.\., device='sim'\)"):
            simulation.on("sim")


def test_a_device_that_nothing_stands_in_for_is_refused() -> None:
    with pytest.raises(ValueError, match="expected device to be 'cpu' or 'sim', got 'cuda'"), simulate(device="cuda"):
        pass


def test_real_tensors_on_the_stand_in_are_refused() -> None:
    with pytest.raises(ValueError, match="leave fake=False out"), simulate(device="sim", fake=False):
        pass


@pytest.mark.parametrize("fake", [True, False])
def test_whether_two_tensors_are_the_same_memory_can_be_asked(fake: bool) -> None:
    with simulate(fake=fake) as simulation:
        full = torch.zeros(6)
        assert full.is_set_to(full.view(6))
        assert full[2:4].is_set_to(full[2:4])
        assert not full[2:4].is_set_to(full[3:5])
        assert not full.is_set_to(full.view(2, 3))
        assert not full.is_set_to(torch.zeros(6))
        assert simulation.peak_bytes == 48


def test_a_rank_outside_of_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="rank from 0 to 3 in a world of 4, got rank 4"), simulate(4, 4):
        pass


def test_a_simulation_inside_of_another_is_refused() -> None:
    expected = pytest.raises(RuntimeError, match="no default process group, got one of 2 ranks")
    with simulate(world_size=2), expected, simulate():
        pass


def test_nothing_is_left_behind_after_an_error() -> None:
    resize = torch.UntypedStorage.resize_
    with pytest.raises(KeyError), simulate(world_size=2):
        raise KeyError
    assert torch.UntypedStorage.resize_ is resize
    assert not dist.is_initialized()
    assert compat.active_fake_mode() is None
    assert torch.autograd.is_multithreading_enabled()
    with simulate() as simulation:
        tensor = torch.zeros(4)
    del tensor
    nn.Linear(2, 2)(torch.zeros(1, 2))
    assert simulation.current_bytes == 16


def test_another_torch_is_refused_before_anything_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    with pytest.raises(RuntimeError, match=r"torch 2\.11 to 2\.15, but this is torch 2\.10\.0"), simulate():
        pass
    assert not dist.is_initialized()
