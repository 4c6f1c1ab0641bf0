"""races.py: what has no order is found, with its lines; what has one is not."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

from scale_check.simulate import Race, RaceError, races, simulate
from scale_check.simulate.device_streams import SimulatedStream
from scale_core import compat
from scale_core.device.streams import copy_to, stream_for, worker_for
from scale_snapshot.staging import copy_to_host

pytestmark = [
    pytest.mark.simulation,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in takes the place of no real accelerator"),
]

SIM = torch.device("privateuseone", 0)  # "sim", before there was a simulation


def races_of(program: Callable[[], object]) -> list[Race]:
    with simulate(world_size=4, device="sim", races="collect") as simulation:
        program()
    return simulation.races


def accelerator() -> Any:
    return torch.get_device_module("sim")


def ones() -> Tensor:
    return torch.ones(64, device="sim")


def side_stream() -> Any:
    """A stream that has seen all that was launched so far."""
    stream = accelerator().Stream()
    stream.wait_stream(accelerator().current_stream())
    return stream


# Programs with a race, one each; the same with the wait that it lacks.


@pytest.fixture(params=[False, True], ids=["without its wait", "with its wait"])
def ordered(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the program waits; it has one race if it doesn't."""
    with simulate(world_size=4, device="sim", races="collect") as simulation:
        yield request.param
    assert len(simulation.races) == (0 if request.param else 1)


@pytest.fixture
def no_race() -> Iterator[None]:
    with simulate(world_size=4, device="sim", races="collect") as simulation:
        yield
    assert simulation.races == []


def read_of_what_a_side_stream_writes(ordered: bool) -> None:
    x, side = ones(), side_stream()
    with accelerator().stream(side):
        x.mul_(2)
    if ordered:
        accelerator().current_stream().wait_stream(side)
    x.sum()
    side.synchronize()


def test_write_of_what_a_side_stream_reads(ordered: bool) -> None:
    x, side = ones(), side_stream()
    with accelerator().stream(side):
        x.sum()
        read = side.record_event()
    if ordered:
        read.wait()
    x.mul_(2)
    side.synchronize()


def test_side_stream_that_does_not_wait_for_its_caller(ordered: bool) -> None:
    x, side = ones(), accelerator().Stream()
    if ordered:
        side.wait_event(accelerator().current_stream().record_event())
    with accelerator().stream(side):
        x.sum()
    side.synchronize()


def test_memory_of_another_stream(ordered: bool) -> None:
    side = accelerator().Stream()
    memory = torch.empty(
        64, device="sim"
    )  # Nothing was written there, but kernels may still use what was there before.
    if ordered:
        side.wait_stream(accelerator().current_stream())
    with accelerator().stream(side):
        memory.fill_(1)
    side.synchronize()


def end_of_a_tensor_that_a_side_stream_reads(ordered: bool) -> None:
    x, side = ones(), side_stream()
    with accelerator().stream(side):
        x.sum()
        if ordered:
            x.record_stream(side)
    del x
    ones()
    side.synchronize()


def test_release_of_memory_that_a_side_stream_reads(ordered: bool) -> None:
    x, side = ones(), side_stream()
    with accelerator().stream(side):
        x.sum()
    if ordered:
        accelerator().current_stream().wait_stream(side)
    x.untyped_storage().resize_(0)
    ones()
    side.synchronize()


def test_host_that_reads_a_copy_on_its_way(ordered: bool) -> None:
    copy = ones().to("cpu", non_blocking=True)
    if ordered:
        accelerator().synchronize()
    copy.sum()


def test_host_that_rewrites_what_is_copied_from_it(ordered: bool) -> None:
    source = torch.ones(64, pin_memory=True)
    source.to("sim", non_blocking=True)
    if ordered:
        accelerator().current_stream().record_event().synchronize()
    source.zero_()


def test_result_of_a_collective_that_nobody_waited_for(ordered: bool) -> None:
    x = ones()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    if ordered:
        work.wait()
    x.sum()
    work.wait()


def test_input_of_a_collective_that_is_rewritten(ordered: bool) -> None:
    x, output = ones(), torch.empty(256, device="sim")
    work: Any = compat.all_gather_single(output, x, dist.distributed_c10d._get_default_group())
    if ordered:
        work.wait()
    x.zero_()
    work.wait()


def test_input_of_a_collective_that_is_released(ordered: bool) -> None:
    x, output = ones(), torch.empty(256, device="sim")
    work: Any = compat.all_gather_single(output, x, dist.distributed_c10d._get_default_group())
    if ordered:
        work.wait()
    x.untyped_storage().resize_(0)
    ones()
    work.wait()


def test_collective_beside_the_stream_that_writes_its_input(ordered: bool) -> None:
    x, side = ones(), side_stream()
    with accelerator().stream(side):
        x.mul_(2)
    if ordered:
        accelerator().current_stream().wait_stream(side)
    dist.all_reduce(x)
    side.synchronize()


def test_result_of_a_collective_in_a_stream_that_did_not_wait(ordered: bool) -> None:
    x, side = ones(), side_stream()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    if ordered:
        side.wait_stream(accelerator().current_stream())
    with accelerator().stream(side):
        x.sum()
    side.synchronize()


def test_functional_collective_that_is_read_too_early(ordered: bool) -> None:
    x = ones()
    total = torch.ops._c10d_functional.all_reduce(x, "sum", dist.distributed_c10d._get_default_group().group_name)
    if ordered:
        total = torch.ops._c10d_functional.wait_tensor(total)
    total.sum()
    functional.wait_tensor(total)


def test_sent_tensor_that_is_rewritten(ordered: bool) -> None:
    x = ones()
    work = dist.isend(x, 1)
    assert work is not None
    if ordered:
        work.wait()
    x.zero_()
    work.wait()


def test_received_tensor_that_is_read_too_early(ordered: bool) -> None:
    x = torch.empty(64, device="sim")
    (work,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 1)])
    if ordered:
        work.wait()
    x.sum()
    work.wait()


def test_host_memory_that_a_worker_writes(ordered: bool) -> None:
    memory = torch.zeros(64)
    future = worker_for(SIM).submit(lambda: memory.add_(1))
    if ordered:
        future.result()
    memory.sum()
    future.result()


def test_read_of_what_a_side_stream_writes(ordered: bool) -> None:
    read_of_what_a_side_stream_writes(ordered)


def test_end_of_a_tensor_that_a_side_stream_reads(ordered: bool) -> None:
    end_of_a_tensor_that_a_side_stream_reads(ordered)


# Programs without a race.


def test_columns_of_a_matrix(ordered: bool) -> None:
    x, side = torch.ones(8, 64, device="sim"), side_stream()
    with accelerator().stream(side):
        x[:, :32].mul_(2)
    x[:, 32 if ordered else 31 :].mul_(2)
    side.synchronize()


def test_every_second_column(ordered: bool) -> None:
    x, side = torch.ones(8, 64, device="sim"), side_stream()
    with accelerator().stream(side):
        x[:, ::2].mul_(2)
    x[:, 1 if ordered else 2 :: 2].mul_(2)
    side.synchronize()


def test_columns_written_later_do_not_hide_a_write_of_a_row(ordered: bool) -> None:
    x, first, second = torch.ones(8, 64, device="sim"), side_stream(), accelerator().Stream()
    with accelerator().stream(first):
        x[1].mul_(2)
    second.wait_stream(first if ordered else accelerator().default_stream())
    accelerator().current_stream().wait_stream(first)
    x[:, :32].mul_(2)
    with accelerator().stream(second):
        x[1, 40:].sum()
    second.synchronize()


def test_copy_to_the_device_from_memory_that_is_not_pinned(ordered: bool) -> None:
    """Its source may be rewritten at once; its target has not arrived."""
    source, target, side = torch.ones(64), ones(), side_stream()
    with accelerator().stream(side):
        target.copy_(source, non_blocking=True)
    source.zero_()
    if ordered:
        accelerator().current_stream().wait_stream(side)
    target.sum()
    side.synchronize()


def test_stream_that_is_entered(ordered: bool) -> None:
    x, side = ones(), side_stream()
    with side:
        x.mul_(2)
    if ordered:
        accelerator().current_stream().wait_stream(side)
    x.sum()
    side.synchronize()


def test_stream_and_event_by_their_names_for_any_device(ordered: bool) -> None:
    x, side, done = ones(), torch.Stream(device="sim"), torch.Event()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.mul_(2)
        done.record()
    made: list[object] = [side, done]
    assert isinstance(made[0], torch.Stream) and isinstance(made[1], torch.Event)
    assert issubclass(SimulatedStream, torch.Stream)
    if ordered:
        torch.accelerator.current_stream().wait_event(done)
    x.sum()
    torch.accelerator.synchronize()


def test_event_recorded_too_early(ordered: bool) -> None:
    x, side = ones(), side_stream()
    with accelerator().stream(side):
        done = side.record_event()
        x.mul_(2)
        if ordered:
            done.record()
    accelerator().current_stream().wait_event(done)
    x.sum()
    side.synchronize()


def test_collective_that_is_waited_for_on_another_stream(ordered: bool) -> None:
    x, side = ones(), side_stream()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    with accelerator().stream(accelerator().default_stream() if ordered else side):
        work.wait()
    x.sum()
    side.synchronize()


def test_future_of_a_collective(ordered: bool) -> None:
    x = ones()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    future = work.get_future()
    if ordered:
        future.wait()
    x.sum()
    work.wait()


def test_callback_of_the_future_of_a_collective(ordered: bool) -> None:
    """It runs on a stream of its own, after the collective."""
    x = ones()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    future = work.get_future().then(lambda reduced: reduced.value()[0].div_(4))
    work.wait()
    if ordered:
        future.wait()
    x.sum()
    future.wait()


def test_collective_that_is_polled(ordered: bool) -> None:
    x = ones()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    while ordered and not work.is_completed():
        pass
    x.sum()
    work.wait()


def test_polls_of_a_handle_are_forgotten_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(races, "_MOST_TRANSFERS", 0)
    with simulate(world_size=4, device="sim", races="collect") as simulation:
        work = dist.all_reduce(ones(), async_op=True)
        assert work is not None and simulation._checker is not None
        work.is_completed()
        polls = simulation._checker._order._polls
        assert polls
        del work  # A later handle may have its identity.
        dist.all_reduce(ones())
        assert not polls


def test_copy_to_the_host_before_a_barrier(ordered: bool) -> None:
    copy = ones().to("cpu", non_blocking=True)
    if ordered:
        dist.barrier()
    copy.sum()


def test_gradients_sent_from_a_stream_that_has_not_waited(ordered: bool) -> None:
    layer, side, works = nn.Linear(8, 8, bias=False, device="sim"), side_stream(), list[Any]()

    def send(param: nn.Parameter) -> None:
        if ordered:
            side.wait_stream(accelerator().current_stream())
        with accelerator().stream(side):
            works.append(dist.all_reduce(param.grad, async_op=True))

    layer.weight.register_post_accumulate_grad_hook(send)
    layer(torch.ones(4, 8, device="sim")).sum().backward()
    for work in works:
        work.wait()


def test_release_to_a_stream_that_waits_before_it_allocates(no_race: None) -> None:
    side = accelerator().Stream()
    with accelerator().stream(side):
        x = ones()
    accelerator().current_stream().wait_stream(side)
    x.mul_(2)
    del x
    side.wait_stream(accelerator().current_stream())
    with accelerator().stream(side):
        ones()


def test_a_backward_on_the_streams_of_its_forward_without_a_race(no_race: None) -> None:
    """Autograd runs it there, and makes the caller's stream wait."""
    layer, side = nn.Linear(8, 8, device="sim"), side_stream()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        side.wait_stream(accelerator().current_stream())
        with accelerator().stream(side):
            loss = layer(torch.ones(4, 8, device="sim")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_disjoint_views_without_a_race(no_race: None) -> None:
    x, side = ones(), side_stream()
    with accelerator().stream(side):
        x[:32].mul_(2)
        x[40:40].mul_(2)
    x[32:].mul_(2)
    side.synchronize()


def test_two_reads_without_a_race(no_race: None) -> None:
    x, side = ones(), side_stream()
    with accelerator().stream(side):
        x.sum()
    x.sum()
    side.synchronize()


def test_waits_through_another_stream_without_a_race(no_race: None) -> None:
    x, first, second = ones(), side_stream(), side_stream()
    with accelerator().stream(first):
        x.mul_(2)
    second.wait_stream(first)
    accelerator().current_stream().wait_stream(second)
    x.sum()


def test_waits_of_the_host_without_a_race(no_race: None) -> None:
    x, side = ones(), side_stream()
    with accelerator().stream(side):
        x.mul_(2)
    side.synchronize()
    x.sum()  # Launched after the host has seen that the other stream is done.


def test_values_that_the_host_has_read_without_a_race(no_race: None) -> None:
    x, side = ones(), side_stream()
    with accelerator().stream(side):
        total = x.mul_(2).sum()
        compat.values_of(total.view(1), simulated=[0.0])
    x.sum()


def test_pinned_memory_that_ends_while_it_is_copied(no_race: None) -> None:
    torch.ones(64, pin_memory=True).to("sim", non_blocking=True)


def test_memory_that_is_not_pinned_is_waited_for_without_a_race(no_race: None) -> None:
    memory = torch.ones(64)
    memory.to("sim", non_blocking=True)
    memory.copy_(ones(), non_blocking=True)
    memory.sum()


def test_input_of_a_collective_that_ends_without_a_race(no_race: None) -> None:
    output = torch.empty(256, device="sim")
    work: Any = compat.all_gather_single(output, ones(), dist.distributed_c10d._get_default_group())
    work.wait()


def test_transfers_one_after_the_other_without_a_race(no_race: None) -> None:
    x = ones()
    works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
    assert works[-1] is not None
    works[-1].wait()
    x.sum()


def test_a_loop_that_polls_an_event_without_a_race(no_race: None) -> None:
    x, side = ones(), side_stream()
    with accelerator().stream(side):
        x.mul_(2)
    event = side.record_event()
    while not event.query():
        pass
    x.sum()


def test_a_copy_that_outlives_its_source_without_a_race(no_race: None) -> None:
    stream = stream_for(SIM)
    copy = copy_to(ones(), torch.device("cpu"), stream)
    stream.record().synchronize()
    copy.sum()


def test_a_state_that_is_copied_for_a_snapshot_without_a_race(no_race: None) -> None:
    state = {"weight": ones(), "moment": ones()}
    copies = copy_to_host(state)
    state["weight"].mul_(2)
    worker_for(SIM).submit(lambda: copies["weight"].sum()).result()


def train_torchs_fsdp(replicates: bool = False, **options: Any) -> list[Race]:
    with simulate(world_size=4, device="sim", races="collect") as simulation:
        with simulation.aside():
            shape = (2, 2) if replicates else (4,)
            mesh = init_device_mesh("sim", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        with torch.device("sim"):
            model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        for layer in model:
            torch_fully_shard(layer, mesh=mesh, **options)
        torch_fully_shard(model, mesh=mesh, **options)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(3):
            model(torch.randn(2, 64, device="sim")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return simulation.races


@pytest.mark.parametrize(
    "options",
    [{}, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, {"replicates": True}],
    ids=["fp32", "bf16", "hybrid"],
)
def test_fsdp2_of_torch_has_no_race(options: dict[str, Any]) -> None:
    assert train_torchs_fsdp(**options) == []


def test_fsdp2_of_torch_without_its_waits_has_races(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedStream, "wait_stream", lambda *_: None)
    waits_left_out = train_torchs_fsdp()
    monkeypatch.undo()
    monkeypatch.setattr(SimulatedStream, "wait_event", lambda *_: None)
    assert waits_left_out and train_torchs_fsdp()


def train_torchs_ddp(hook: Callable[[nn.Sequential], None] = lambda model: None, **options: Any) -> list[Race]:
    """Three steps; asserts that buckets of later steps are those of DDP: as many as layers if each has its own."""
    with simulate(world_size=4, device="sim", races="collect") as simulation:
        with torch.device("sim"):
            model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        wrapped = DistributedDataParallel(model, init_sync=False, **options)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        hook(model)
        for _ in range(3):
            simulation.restart()
            wrapped(torch.randn(2, 64, device="sim")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    num_bytes = 3 * (64 * 64 + 64) * 4
    assert len(simulation.collectives) == (3 if options.get("bucket_cap_mb") else 1)
    assert simulation.bytes_sent == {"all_reduce": num_bytes * 2 * 3 // 4}
    return simulation.races


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.01}, {"gradient_as_bucket_view": True}], ids=str)
def test_ddp_of_torch_has_no_race(options: dict[str, Any]) -> None:
    assert train_torchs_ddp(**options) == []


def test_a_gradient_scaled_while_ddp_averages_it_is_found() -> None:
    def scale_early(model: nn.Sequential) -> None:
        def scale(_: Tensor) -> None:
            for param in model[2].parameters():
                assert param.grad is not None
                param.grad.mul_(2)

        model[0].register_forward_hook(lambda module, inputs, output: output.register_hook(scale) and None)

    (race, *_) = train_torchs_ddp(scale_early, bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    assert race.earlier.startswith("c10d::allreduce_ writes on the communicator of ranks")
    assert race.later.startswith("aten::mul_.Tensor writes on the default stream")


def test_an_error_names_both_lines_both_streams_and_the_wait() -> None:
    lines, first = inspect.getsourcelines(read_of_what_a_side_stream_writes)
    place = {word: first + next(i for i, line in enumerate(lines) if word in line) for word in ("mul_", "sum", "ones")}
    with pytest.raises(RaceError) as caught, simulate(device="sim", races=True):
        read_of_what_a_side_stream_writes(False)
    race = caught.value.race
    assert race.earlier.startswith("aten::mul_.Tensor writes on side stream")
    assert f"test_races.py:{place['mul_']}," in race.earlier
    assert race.later.startswith(f"aten::sum reads on the default stream: tests/test_races.py:{place['sum']},")
    assert race.memory == f"256 bytes, allocated by the default stream at tests/test_races.py:{ones_line()}"
    assert race.missing.startswith(f"Before tests/test_races.py:{place['sum']}, make the default stream wait")
    assert all(part in str(caught.value) for part in race)
    assert caught.traceback[-1].frame.code.name != "close"  # Raised where it happens, not at the end.
    assert any(entry.lineno + 1 == place["sum"] for entry in caught.traceback)


def ones_line() -> int:
    return inspect.getsourcelines(ones)[1] + 1


def test_an_error_tells_communicators_of_the_same_ranks_apart() -> None:
    def program() -> None:
        x, second = ones(), dist.new_group(range(4))
        works = [dist.all_reduce(x, async_op=True), dist.all_reduce(x, group=second, async_op=True)]
        for work in works:
            assert work is not None
            work.wait()

    (race,) = races_of(program)
    assert "the communicator of ranks [0, 1, 2, 3]: " in race.earlier
    assert "the communicator of ranks [0, 1, 2, 3] (number 2): " in race.later


def test_a_line_of_c_in_a_backward_thread_is_the_one_that_calls_backward() -> None:
    with simulate(world_size=4, device="sim", races="collect", backward_thread=True) as simulation:
        layer, side = nn.Linear(8, 8, device="sim"), accelerator().Stream()
        loss = layer(torch.ones(4, 8, device="sim")).sum()
        with accelerator().stream(side):
            layer.weight.detach().zero_()
        loss.backward()
    assert simulation.races
    assert all("unknown" not in str(race) for race in simulation.races)


def test_a_hook_of_ddp_whose_future_is_waited_for_has_no_race() -> None:
    def program() -> None:
        model = DistributedDataParallel(nn.Linear(8, 8, device="sim"), init_sync=False)

        def average(_: object, bucket: Any) -> torch.futures.Future[Any]:
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            assert work is not None
            future: torch.futures.Future[Any] = work.get_future().then(lambda reduced: reduced.value()[0].div_(4))
            return future

        # torch looks at the very annotations, which here are strings.
        average.__annotations__ = {"bucket": vars(dist)["GradBucket"], "return": torch.futures.Future[Tensor]}
        model.register_comm_hook(None, average)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(4, 8, device="sim")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert races_of(program) == []


def test_a_thread_of_the_program_is_refused() -> None:
    errors: list[Exception] = []

    def use_a_stream() -> None:
        try:
            accelerator().Stream().synchronize()
        except RuntimeError as error:
            errors.append(error)

    with simulate(world_size=4, device="sim", races=True):
        thread = threading.Thread(target=use_a_stream)
        thread.start()
        thread.join()
    assert "a thread that the program has started" in str(*errors)


def test_a_race_at_the_end_of_a_tensor_is_raised_all_the_same() -> None:
    with pytest.raises(RaceError, match="released by the end of its last tensor"), simulate(device="sim", races=True):
        end_of_a_tensor_that_a_side_stream_reads(False)


def test_a_race_that_a_program_suppresses_is_raised_at_the_end() -> None:
    with pytest.raises(RaceError), simulate(device="sim", races=True), suppress(RuntimeError):
        read_of_what_a_side_stream_writes(False)


def test_one_pair_of_lines_is_one_race() -> None:
    def program() -> None:
        for _ in range(3):
            read_of_what_a_side_stream_writes(False)

    assert len(races_of(program)) == 1


def test_the_host_alone_has_no_races_to_look_for() -> None:
    with pytest.raises(ValueError, match="device='sim', races=True"), simulate(races=True):
        pass
    with pytest.raises(ValueError, match="device='sim'"), simulate(backward_thread=True):
        pass


def test_without_races_an_event_has_happened_at_once() -> None:
    with simulate(device="sim") as simulation:
        read_of_what_a_side_stream_writes(False)
        assert side_stream().record_event().query()
    assert simulation.races == []


@pytest.mark.parametrize("races", [False, True])
def test_a_backward_pass_runs_in_a_thread_of_its_own(races: bool) -> None:
    threads: list[str] = []
    with simulate(device="sim", races=races, backward_thread=True) as simulation:
        x = torch.ones(8, device="sim", requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: threads.append(threading.current_thread().name))
        y.sum().backward()
        assert x.grad is not None and compat.is_fake(x.grad)
        x.grad.mul_(2)  # The caller has waited for the pass.
        assert simulation.current_bytes > 0
    assert threads == ["simulated backward"]


def test_an_error_in_the_thread_of_a_backward_pass_comes_out() -> None:
    def fail(_: Tensor) -> None:
        raise KeyError("hook")

    with simulate(device="sim", backward_thread=True):
        x = torch.ones(8, device="sim", requires_grad=True)
        x.register_hook(fail)
        with pytest.raises(KeyError, match="hook"):
            (x * 2).sum().backward()
