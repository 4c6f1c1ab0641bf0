"""compat.py: the doors to what torch renames or keeps private."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from scale_core import compat


def default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


@pytest.mark.simulation
def test_the_flat_collectives_run_under_their_new_names() -> None:
    with compat.fake_default_group(rank=1, world_size=4):
        compat.all_gather_single(torch.zeros(8), torch.zeros(2), default_group()).wait()
        compat.reduce_scatter_single(torch.zeros(2), torch.zeros(8), default_group()).wait()


@pytest.mark.simulation
def test_control_messages_stand_on_the_host_if_it_is_reachable() -> None:
    with compat.fake_default_group(rank=0, world_size=2):
        assert compat.control_device(default_group()) == torch.device("cpu")


@pytest.mark.simulation
def test_a_message_stays_on_a_device_that_the_group_reaches() -> None:
    with compat.fake_default_group(rank=0, world_size=2):
        for wished, found in (("cuda:0", "cuda:0"), ("cpu", "cpu"), ("meta", "cpu")):
            assert compat.control_device(default_group(), torch.device(wished)) == torch.device(found)


def test_gradients_are_added_as_torch_adds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0], requires_grad=True)
    other = torch.ones(2, requires_grad=True)
    for expected in ([10.0, 40.0], [20.0, 80.0]):
        edge = get_gradient_edge(x * weight + other)
        compat.add_gradients([edge], [torch.tensor([10.0, 20.0])], [weight])
        assert weight.grad is not None and weight.grad.tolist() == expected and other.grad is None
        monkeypatch.setattr(torch.autograd, "Variable", object())  # As in a torch that keeps its engine elsewhere.


def test_it_is_known_which_views_autograd_lets_nobody_change() -> None:
    x = torch.ones(4, requires_grad=True)
    whole = x * 2
    assert not any(map(compat.forbids_in_place, (x, whole, whole[:2], x.detach()[:2], whole.detach())))
    parts = whole.chunk(2)
    assert compat.forbids_in_place(parts[0])
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        parts[0].mul_(2)


def test_values_are_the_tensor_s_own() -> None:
    assert compat.values_of(torch.tensor([1.5, 2.0]), simulated=[0.0, 0.0]) == [1.5, 2.0]


@pytest.mark.simulation
def test_in_a_simulation_values_are_what_is_taken_for_them() -> None:
    with compat.fake_tensors():
        assert compat.values_of(torch.ones(2), simulated=[3.0, 4.0]) == [3.0, 4.0]


def test_a_gradient_is_asked_for_in_a_pass_that_adds_to_none() -> None:
    param, found = torch.ones(2, requires_grad=True), list[bool]()
    param.register_hook(lambda grad: found.append(compat.is_autograd_grad(param)))
    param.square().sum().backward()
    param.square().sum().backward(inputs=[param])
    torch.autograd.grad(param.square().sum(), [param])
    torch.autograd.grad(param.square().sum(), [param], create_graph=True)
    assert found == [False, False, True, True]


def test_a_callback_runs_once_after_the_whole_backward() -> None:
    order: list[str] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def first(_: Tensor) -> None:
        order.append("hook")
        compat.queue_callback(lambda: order.append("end"))

    y.register_hook(first)
    x.register_hook(lambda _: order.append("leaf"))
    y.sum().backward()
    assert order == ["hook", "leaf", "end"]


def test_only_inside_the_engine_are_we_in_a_backward() -> None:
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(compat.graph_task_id() != -1))
    assert compat.graph_task_id() == -1
    x.sum().backward()
    assert seen == [True]
    assert compat.graph_task_id() == -1


@pytest.mark.parametrize(
    "version, supported",
    [("2.13.0", True), ("2.11.1+cpu", True), ("2.15.0", True), ("2.16.0a0+git1", False), ("2.8.0", False)],
)
def test_simulation_is_supported_where_it_was_tested(
    monkeypatch: pytest.MonkeyPatch, version: str, supported: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert compat.simulation_supported() is supported


def test_another_torch_is_refused_with_both_versions_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    with pytest.raises(RuntimeError, match=r"torch 2\.11 to 2\.15, but this is torch 2\.8\.0: install torch==2\.13"):
        compat.require_simulation()
    with pytest.raises(RuntimeError, match=r"2\.8\.0"), compat.fake_default_group(0, 1):
        pass
    with pytest.raises(RuntimeError, match=r"2\.8\.0"):
        compat.fake_tensors()


@pytest.mark.simulation
def test_the_fake_group_ends_with_its_context_after_an_error_too() -> None:
    with pytest.raises(KeyError), compat.fake_default_group(rank=2, world_size=5):
        assert (dist.get_rank(), dist.get_world_size()) == (2, 5)
        raise KeyError
    assert not dist.is_initialized()


@pytest.mark.simulation
def test_the_fake_group_reaches_a_device_for_its_own_time_only() -> None:
    devices = list(dist.Backend.backend_capability["fake"])
    with compat.fake_default_group(rank=0, world_size=2, device="mps"):
        assert dist.get_backend_config().endswith("mps:fake")
    assert dist.Backend.backend_capability["fake"] == devices


@pytest.mark.simulation
def test_a_second_default_group_is_refused() -> None:
    with compat.fake_default_group(rank=0, world_size=3):
        with pytest.raises(RuntimeError, match=r"got one of 3 ranks \(fake\)"), compat.fake_default_group(0, 2):
            pass
        assert dist.get_world_size() == 3


@pytest.mark.simulation
def test_the_group_of_an_operation_is_found_by_name_too() -> None:
    with compat.fake_default_group(rank=1, world_size=4):
        group = dist.new_group([1, 3])
        assert isinstance(group, dist.ProcessGroup)
        assert compat.group_of_operation(group) is group
        assert compat.group_of_operation(group.group_name) is group


@pytest.mark.simulation
def test_a_wrapper_is_taken_apart_into_its_plain_tensors() -> None:
    plain = torch.zeros(3)
    assert compat.inner_tensors(plain) == [plain]
    with compat.fake_default_group(rank=0, world_size=2):
        mesh = init_device_mesh("cpu", (2,))
        local = torch.zeros(2, 3)
        (inner,) = compat.inner_tensors(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
        assert inner.untyped_storage() is local.untyped_storage()


@pytest.mark.simulation
def test_each_resize_of_a_storage_is_reported_with_its_old_size() -> None:
    sizes: list[tuple[int, int]] = []
    tensor = torch.zeros(4)
    original = torch.UntypedStorage.resize_
    with compat.watching_resizes(lambda storage, before: sizes.append((before, storage.nbytes()))):
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(16)
    tensor.untyped_storage().resize_(0)
    assert sizes == [(16, 0), (0, 16)]
    assert torch.UntypedStorage.resize_ is original


@pytest.mark.simulation
def test_fake_tensors_hold_no_memory_and_can_be_set_aside() -> None:
    with compat.fake_tensors():
        assert compat.active_fake_mode() is not None
        assert torch.zeros(10**12).untyped_storage().nbytes() == 4 * 10**12
        with compat.without_fake_tensors():
            assert compat.active_fake_mode() is None
            assert torch.ones(2).tolist() == [1.0, 1.0]
    assert compat.active_fake_mode() is None


@pytest.mark.simulation
def test_a_group_tells_its_store_and_none_is_there_without_one() -> None:
    assert compat.default_store() is None
    with compat.fake_default_group(rank=0, world_size=2):
        assert compat.default_store() is not None


def test_a_group_tells_how_long_its_operations_may_take() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore(), timeout=timedelta(seconds=77))
    try:
        assert compat.time_limit(default_group()) == timedelta(seconds=77)
        assert compat.control_device(default_group()) == torch.device("cpu")
    finally:
        dist.destroy_process_group()


def test_the_end_of_a_recomputation_is_told_from_a_failure() -> None:
    from torch.utils.checkpoint import _StopRecomputationError

    assert compat.ends_recomputation(_StopRecomputationError()) and not compat.ends_recomputation(ValueError())


@pytest.mark.simulation
def test_a_mesh_of_all_ranks_is_the_default_group() -> None:
    with compat.fake_default_group(0, 4):
        assert compat.flatten_mesh(init_device_mesh("cpu", (2, 2))) is None
        assert compat.flatten_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]) is not None


def test_a_profiler_that_records_is_seen() -> None:
    assert not compat.profiler_runs()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert compat.profiler_runs()
    assert not compat.profiler_runs()


def test_an_accelerator_of_any_type_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compat.accelerator() is None and compat.with_index(torch.device("cuda")) == torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert compat.accelerator() == torch.device("xpu", 3)
    assert compat.with_index(torch.device("xpu")) == torch.device("xpu", 3)
    assert compat.with_index(torch.device("xpu", 1)) == torch.device("xpu", 1)
    assert compat.with_index(torch.device("cpu")) == torch.device("cpu")
    assert compat.with_index(torch.device("cuda")) == torch.device("cuda")
    assert compat.available_device("xpu") == torch.device("xpu") and compat.available_device("cuda") is None
    assert compat.available_device("cpu") == torch.device("cpu")
