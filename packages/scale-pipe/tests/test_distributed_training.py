"""Around a step: tied parameters, replicas, optimizers, norms, states, measured times and the solver."""

from __future__ import annotations

import copy
import math
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cases import Plain, assert_equal, assert_near, batch, check_grads, micro_batches, mlp, mse, turns
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from scale_core import DivergenceError, ShardedGradScaler, check_replicas
from scale_core.comm.collectives import all_reduce
from scale_core.comm.group import Group
from scale_core.comm.work import CollectiveWork
from scale_core.hooks.gradients import mark_without_autograd_hooks
from scale_core.hooks.microbatch_grads import StepObserver, on_microbatch_steps
from scale_pipe import DistributedPipe, PipelineOptions, StageError, simulate
from scale_pipe.distributed.gradients import data_parallel
from scale_pipe.distributed.gradients.data_parallel import DataParallelWrappers
from scale_pipe.distributed.profile import measure_link_times
from scale_pipe.schedules.validate import validate
from scale_pipe.schedules.visualize import draw

WORDS = 7


class Head(nn.Module):
    """The embedding's weight as the output layer's: [N, 3, 8] to [N, 7, 3]."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.weight).transpose(1, 2)


def tied_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    embed = nn.Embedding(WORDS, 8)
    return nn.Sequential(embed, nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), Head(embed.weight)).double()


def tied_pipe(schedule: str = "1f1b", balance: tuple[int, ...] = (2, 3), **options: Any) -> DistributedPipe:
    """A pipeline of the tied model, with other values on each rank until it makes the copies equal or loads a state."""
    return DistributedPipe(tied_model(seed=dist.get_rank()), schedule, balance=[*balance], chunks=4, **options)


def words(samples: int = 8, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and targets [samples, 3]."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(WORDS, (samples, 3), generator=generator) for _ in range(2))  # type: ignore[return-value]


def tied_step(pipe: DistributedPipe, seed: int = 1) -> None:
    x, target = words(seed=seed)
    pipe.step(x, target=target, loss_fn=cross_entropy)


def tied_grads(pipe: DistributedPipe, *seeds: int) -> dict[str, Tensor]:
    """The plain gradients, where the sum over micro-batches of each use is taken first, and those are added then."""
    model, total = tied_model(), dict[str, Tensor]()
    model[4].weight = nn.Parameter(model[4].weight.detach().clone())
    stage_of = [0, 1, 2, 2, 3] if pipe.schedule.num_stages == 4 else [0, 0, 1, 1, 1]
    orders = turns(pipe.schedule)
    for seed in seeds:
        plain = Plain(model, lambda name: orders[stage_of[int(name[0])]])
        plain.step(micro_batches(*words(seed=seed)), cross_entropy)
        plain.grads["0.weight"] += plain.grads.pop("4.weight")
        for name, grad in plain.grads.items():
            total[name] = grad if name not in total else total[name] + grad
    return {**total, "4.weight": total["0.weight"]}


def own_tied_weight(pipe: DistributedPipe) -> tuple[str, nn.Parameter]:
    name = "0.weight" if dist.get_rank() == 0 else "4.weight"
    return name, dict(pipe.named_parameters())[name]


def fail(*_: object) -> None:
    raise ArithmeticError("on purpose")


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("schedule, balance", [("1f1b", (2, 3)), ("zb_h1", (2, 3)), ("interleaved_1f1b", (1, 1, 2, 1))])
def test_a_weight_on_two_ranks_has_the_sum_of_both_gradients(schedule: str, balance: tuple[int, ...]) -> None:
    pipe = tied_pipe(schedule, balance)
    pipe.load_state_dict({**tied_model().state_dict()})
    tied_step(pipe)
    grads = tied_grads(pipe, 1)
    check_grads(pipe, grads)
    unique = [grad for name, grad in grads.items() if name != "4.weight"]
    assert_near(pipe.clip_grad_norm_(math.inf), nn.utils.get_total_norm(unique))
    tied_step(pipe, seed=2)
    check_grads(pipe, tied_grads(pipe, 1, 2), assert_near)


@pytest.mark.fault(26)
@pytest.mark.ranks(2)
def test_copies_of_a_tied_weight_begin_equal() -> None:
    pipe = tied_pipe()
    copies: list[Any] = [None, None]
    dist.all_gather_object(copies, own_tied_weight(pipe)[1].detach())
    assert_equal(*copies)
    pipe.load_state_dict(tied_model().state_dict(), assign=True)  # Other tensors than those that were tied.
    tied_step(pipe)
    check_grads(pipe, tied_grads(pipe, 1))


@pytest.mark.fault(97)
@pytest.mark.ranks(2)
def test_a_tied_weight_is_frozen_in_all_stages_or_none() -> None:
    pipe = tied_pipe()
    name, weight = own_tied_weight(pipe)
    for frozen in (0, 1):
        weight.requires_grad_(dist.get_rank() != frozen)
        error = f"0.weight is one parameter in the stages [0, 1], but is frozen in [{frozen}] alone"
        with pytest.raises(StageError, match=re.escape(error)):
            tied_step(pipe)
        assert all(param.grad is None for param in pipe.parameters())
    weight.requires_grad_(False)
    tied_step(pipe)
    assert [title for title, param in pipe.named_parameters() if param.grad is None] == [name]


@pytest.mark.ranks(2)
def test_a_tied_weight_is_refused_in_wrappers_that_reduce() -> None:
    pipe = tied_pipe()
    for stage in pipe.stages.values():
        stage.no_sync = nullcontext
    with pytest.raises(StageError, match=r"0\.weight is tied to a parameter of another stage"):
        tied_step(pipe)


@pytest.mark.ranks(2)
def test_a_hook_on_a_shard_of_a_tied_weight_is_refused() -> None:
    pipe = tied_pipe()
    _, weight = own_tied_weight(pipe)
    mark_without_autograd_hooks([weight])  # As shards are.
    weight.register_post_accumulate_grad_hook(lambda param: None)
    with pytest.raises(StageError, match="weight is tied to a parameter of another stage, and its shard has a hook"):
        tied_step(pipe)


@pytest.mark.ranks(2)
def test_a_weight_on_two_stages_of_one_rank_is_added_up() -> None:
    pipe, plain, (x, target) = (
        DistributedPipe(tied_model(), "zb_v", balance=[1, 1, 2, 1], chunks=4),
        tied_model(),
        words(),
    )
    pipe.step(x, target=target, loss_fn=cross_entropy)
    for part, part_target in micro_batches(x, target):
        (cross_entropy(plain(part), part_target) / 4).backward()
    grads = {name: param.grad for name, param in plain.named_parameters(remove_duplicate=False)}
    check_grads(pipe, grads, assert_near)  # type: ignore[arg-type]


@pytest.mark.fault(115)
@pytest.mark.ranks(2)
def test_copies_of_a_tied_weight_that_come_apart_are_found() -> None:
    pipe = tied_pipe(options=PipelineOptions(check_replicas_every=1))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1 * (1 + dist.get_rank()))
    tied_step(pipe)
    check_replicas(pipe)
    optimizer.step()
    with pytest.raises(DivergenceError):
        check_replicas(pipe)
    with pytest.raises(DivergenceError, match="step 2: 1 of 1 tensors") as caught:
        tied_step(pipe)
    assert f"'0.weight' [{WORDS}, 8]: each of the ranks 0, 1 has values of its own" in str(caught.value)


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("rank_0_has_values", [True, False])
def test_stages_get_their_values_after_the_pipeline_is_made(rank_0_has_values: bool) -> None:
    rank = dist.get_rank()
    with torch.device("meta"):
        model = tied_model()
    if rank_0_has_values and rank == 0:
        model[0].weight = model[4].weight = tied_model()[0].weight
    pipe = DistributedPipe(model, "1f1b", balance=[2, 3], chunks=4, device="cpu")
    for stage in pipe.stages.values():
        for path, module in stage.named_modules():
            for name, param in module._parameters.items():
                if param is not None and param.is_meta:
                    value = tied_model().state_dict()[f"{path}.{name}"]
                    tied_elsewhere = rank == 1 and path == "4"
                    module._parameters[name] = nn.Parameter(torch.zeros_like(value) if tied_elsewhere else value)
    tied_step(pipe)
    check_grads(pipe, tied_grads(pipe, 1))


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("stepped_by", ["the pipeline", "the caller", "one optimizer for each stage"])
def test_three_steps_of_adamw_are_those_of_one_process(stepped_by: str) -> None:
    model, pipe = mlp(), DistributedPipe(mlp(), "zb_v", balance=[3] * 4, chunks=4)
    reference, optimizer = (torch.optim.AdamW(trained.parameters(), lr=0.1) for trained in (model, pipe))
    of_stages = {index: torch.optim.AdamW(stage.parameters(), lr=0.1) for index, stage in pipe.stages.items()}
    inside: Any = {"the pipeline": optimizer, "one optimizer for each stage": of_stages}.get(stepped_by)
    orders = turns(pipe.schedule)
    for seed in range(3):
        x, target = batch(seed=seed)
        plain = Plain(model, lambda name: orders[int(name.split(".")[0]) // 3])
        plain.step(micro_batches(x, target))
        for name, param in model.named_parameters():
            param.grad = plain.grads.get(name)
        reference.step()
        pipe.zero_grad()
        pipe.step(x, target=target, loss_fn=mse, optimizer=inside)
        if inside is None:
            optimizer.step()
    for name, param in pipe.named_parameters():
        assert_equal(param, model.get_parameter(name), name)


@pytest.mark.fault(72)
@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
def test_gradients_are_clipped_by_the_norm_over_all_stages(norm_type: float) -> None:
    pipe, model = DistributedPipe(mlp().double(), "1f1b", balance=[5, 7], chunks=4), mlp().double()
    x, target = (tensor.double() for tensor in batch())
    pipe.step(x, target=target, loss_fn=mse)
    plain = Plain(model, lambda name: range(4))
    plain.step(micro_batches(x, target))
    for name, param in model.named_parameters():
        param.grad = plain.grads[name]
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type)
    assert_near(nn.utils.get_total_norm([param.grad for param in pipe.parameters()], norm_type), expected)
    if norm_type in (1.0, math.inf):
        assert_near(nn.utils.clip_grad_norm_(pipe.parameters(), 0.01, norm_type), expected)
    else:
        assert_near(pipe.clip_grad_norm_(0.01, norm_type), expected)
    check_grads(pipe, {name: param.grad for name, param in model.named_parameters()}, assert_near)  # type: ignore[misc]
    if dist.get_rank() == 1:
        next(pipe.parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]
    assert pipe.clip_grad_norm_(1.0, norm_type).isnan()
    with pytest.raises(RuntimeError, match="can't be clipped"):
        nn.utils.clip_grad_norm_(pipe.parameters(), 1.0, error_if_nonfinite=True)


@pytest.mark.ranks(2)
def test_a_stage_without_parameters_takes_part_in_a_norm() -> None:
    pipe = DistributedPipe(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), "gpipe", balance=[1, 1], chunks=2)
    pipe.step(torch.ones(4, 4), loss_fn=torch.mean)
    norms = [pipe.clip_grad_norm_(math.inf), nn.utils.clip_grad_norm_(pipe.parameters(), math.inf)]
    assert 0 < norms[0] == norms[1]
    nn.utils.clip_grad_value_(pipe.parameters(), 1e-4)
    assert all(param.grad.abs().max().item() <= 1e-4 for param in pipe.parameters())  # type: ignore[union-attr]
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match=r"'0.weight' is a parameter of a pipeline's stage.*\[0, 1\]"):
            DistributedDataParallel(pipe.stages[0])


@pytest.mark.ranks(2)
def test_the_full_state_is_on_the_first_rank_with_plain_names() -> None:
    pipe = DistributedPipe(mlp(seed=1), "zb_v", balance=[3] * 4)
    for stage in pipe.stages:
        if stage % 2:
            pipe.stages[stage] = torch.compile(pipe.stages[stage], backend="eager")  # type: ignore[assignment]  # never run
    assert_equal(dict(pipe.state_dict(full=True)), dict(mlp(seed=1).state_dict()) if dist.get_rank() == 0 else {})


@pytest.mark.ranks(2)
def test_a_stage_loads_its_part_of_a_plain_state() -> None:
    state = mlp(seed=1).state_dict()
    pipe = DistributedPipe(mlp(seed=2), "1f1b", balance=[7, 5])
    pipe.load_state_dict(state)
    pipe.load_state_dict(pipe.state_dict())
    for name, value in [*pipe.state_dict().items(), *pipe.named_parameters()]:
        assert_equal(value.data, state[name], name)
    with pytest.raises(RuntimeError, match=r"in no stage: typo\.weight"):
        pipe.load_state_dict({**state, "typo.weight": torch.ones(1)})
    with pytest.raises(RuntimeError, match="missing: 1"):
        pipe.load_state_dict({name: value for name, value in state.items() if name not in ("1.weight", "10.weight")})
    pipe.load_state_dict({}, strict=False)
    assert list(pipe.stages) == [dist.get_rank()] and 5 not in pipe.stages


@pytest.mark.ranks(2)
def test_the_solver_takes_measured_times_and_computes_the_same() -> None:
    pipe = DistributedPipe(mlp(), "solve", balance=[3] * 4, chunks=3, options=PipelineOptions(memory_cap=3))
    unsolved, plain = pipe.schedule, Plain(mlp(), pipe)
    for seed in range(4):
        plain.order_of = Plain(plain.model, pipe).order_of  # The schedule changes after the second step.
        plain.step_with(pipe, *batch(6, seed=seed))
    assert pipe.schedule is not unsolved
    validate(pipe.schedule, memory_cap=3)
    measured = pipe.measured()
    assert measured.spans[0].start == 0 and all(span.end >= span.start for span in measured.spans)
    for rank, actions in enumerate(pipe.schedule.compute_actions()):
        assert tuple(span.action for span in measured.spans if span.rank == rank) == actions
    assert len(measured.spans) == sum(map(len, pipe.schedule.compute_actions()))
    own = tuple(span.action for span in pipe.last_trace)
    assert own == pipe.schedule.compute_actions()[dist.get_rank()]
    assert "<svg" in draw([simulate(pipe.schedule, measured.costs), measured])


@pytest.mark.ranks(2)
def test_links_between_stages_are_measured_alike_on_all_ranks() -> None:
    pipe = DistributedPipe(mlp(), "zb_v", balance=[3] * 4, chunks=3)
    links = measure_link_times(pipe.schedule.placement, pipe._channels.p2p, pipe.group, 60)
    links_by_rank: list[Any] = [None, None]
    dist.all_gather_object(links_by_rank, links)
    assert links_by_rank[0] == links_by_rank[1]
    # In a V, the two stages in the middle stand on one rank.
    assert [seconds > 0 for seconds in links] == [True, False, True] and max(links) < 5


@pytest.mark.ranks(2)
def test_a_gradient_scaler_has_one_verdict_for_all_stages() -> None:
    x, target = batch()
    pipe = DistributedPipe(mlp(), "1f1b", balance=[6, 6], chunks=4)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler = ShardedGradScaler(device="cpu", init_scale=1024.0, process_group=pipe.group)
    scaler.scale(torch.ones(()))  # All ranks know the scale, though only the last stage computes a loss.
    before = [param.detach().clone() for param in pipe.parameters()]
    for factor in (math.inf, 1.0):
        pipe.zero_grad()
        pipe.step(x, target=target, loss_fn=lambda output, to, factor=factor: scaler.scale(mse(output, to)) * factor)
        scaler.step(optimizer)
        scaler.update()
        assert all(map(torch.equal, before, pipe.parameters())) == (factor == math.inf)


@pytest.mark.ranks(2)
def test_a_measured_optimizer_that_fails_fails_on_all_ranks() -> None:
    """Its step is after those of all ranks, so that the error says what had been stepped."""
    pipe, (x, target) = DistributedPipe(mlp(), "1f1b", balance=[6, 6], chunks=4), batch()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    failing = optimizer.register_step_pre_hook(fail) if dist.get_rank() == 1 else None
    measuring = on_microbatch_steps(lambda step: StepObserver(lambda _: None, lambda: None, lambda *_: None))
    with pytest.raises(StageError, match="Stages 0 had been stepped") as caught:
        pipe.step(x, target=target, loss_fn=mse, optimizer=optimizer)
    assert "stage 1 on rank 1 raised ArithmeticError in the optimizer's step" in str(caught.value)
    assert all(param.grad is None for param in pipe.parameters())
    if failing is not None:
        failing.remove()
    pipe.step(x, target=target, loss_fn=mse, optimizer=optimizer)
    measuring.remove()


def replica_groups() -> tuple[Any, Any, int]:
    """Of four ranks: the pipeline's group, that of the stage's replicas, and which replica this rank is in."""
    rank = dist.get_rank()
    pipes, stages = ([dist.new_group(ranks) for ranks in pairs] for pairs in (([0, 1], [2, 3]), ([0, 2], [1, 3])))
    return pipes[rank // 2], stages[rank % 2], rank // 2


@pytest.mark.ranks(4, in_turn=True)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("schedule, balance", [("1f1b", [6, 6]), ("zb_v", [3] * 4)])
def test_replicas_average_their_gradients_once_per_step(schedule: str, balance: list[int]) -> None:
    pipe_group, stage_group, replica = replica_groups()
    pipe = DistributedPipe(mlp(), schedule, balance=balance, chunks=4, process_group=pipe_group)
    for index, stage in pipe.stages.items():
        pipe.stages[index] = DistributedDataParallel(stage, process_group=stage_group)
    plains = [Plain(mlp(), pipe), Plain(mlp(), pipe)]
    batches = [batch(seed=seed) for seed in (1, 2)]
    for plain, (x, target) in zip(plains, batches, strict=True):
        plain.step(micro_batches(x, target))
    means = {name: grad / 2 + plains[1].grads[name] / 2 for name, grad in plains[0].grads.items()}
    x, target = batches[replica]
    pipe.step(x, target=target, loss_fn=mse)
    check_grads(pipe, means)
    if dist.get_rank() == 3:  # A stage of the second replica fails: so do all stages, of both.
        for stage in pipe.stages.values():
            stage.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose" if replica == 1 else "replicas of this stage failed"):
        pipe.step(x, target=target, loss_fn=mse)
    check_grads(pipe, means)


class UsesSome(nn.Module):
    """A layer that never runs, and one that runs in the first replica alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.always, self.never, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.sometimes(x) if dist.get_rank() < 2 else self.always(x)


@pytest.mark.ranks(4)
@pytest.mark.filterwarnings("ignore")
def test_what_one_replica_uses_is_averaged_in_all() -> None:
    """What none uses has no gradient, so that no optimizer decays it."""
    pipe_group, stage_group, _ = replica_groups()
    model = nn.Sequential(UsesSome(), UsesSome()).double()
    pipe = DistributedPipe(model, "1f1b", balance=[1, 1], chunks=2, process_group=pipe_group)
    for index, stage in pipe.stages.items():
        pipe.stages[index] = DistributedDataParallel(stage, process_group=stage_group, find_unused_parameters=True)
    plain = [UsesSome().double(), UsesSome().double()]
    x = torch.ones(4, 4, dtype=torch.float64)
    plain[1].sometimes(plain[0].sometimes(x)).mean().backward()
    pipe.step(x, loss_fn=torch.mean)
    grads = {".".join(name.split(".")[-2:]): param.grad for name, param in pipe.named_parameters()}
    assert grads["never.weight"] is None and grads["never.bias"] is None
    for name in ("sometimes.weight", "sometimes.bias"):
        assert_near(grads[name], plain[dist.get_rank() % 2].get_parameter(name).grad / 2, name)  # type: ignore[operator]


@pytest.mark.ranks(2)
def test_gradients_of_replicas_are_averaged_bucket_by_bucket() -> None:
    """Gradients of 16, 4, 8 and 2 elements, in buckets of 10."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    model = DistributedDataParallel(copy.deepcopy(plain))
    batches, wrappers, sizes = torch.randn(2, 3, 4, dtype=torch.float64), DataParallelWrappers([model]), list[int]()
    with wrappers.no_sync(skip_reduce=False):
        model(batches[dist.get_rank()]).square().mean().backward()

    def counted(flat: Tensor, group: Group) -> CollectiveWork:
        sizes.append(flat.numel())
        return all_reduce(flat, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_parallel, "BUCKET_BYTES", 80)
        patch.setattr(data_parallel, "all_reduce", counted)
        wrappers.average_grads()
    (sum(plain(batch).square().mean() for batch in batches) / 2).backward()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad, expected.grad)
    assert sizes == [16, 4, 10]


class StepInHook:
    """An optimizer for each parameter, which steps as soon as its gradient is there."""

    def __init__(self, module: nn.Module) -> None:
        self.calls: list[str] = []
        for name, param in module.named_parameters():
            param.register_post_accumulate_grad_hook(self.step_of(name, torch.optim.SGD([param], lr=0.5)))

    def step_of(self, name: str, optimizer: torch.optim.Optimizer) -> Any:
        def hook(param: Tensor) -> None:
            self.calls.append(name)
            optimizer.step()
            optimizer.zero_grad()

        return hook


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("schedule, balance", [("1f1b", [2, 2]), ("zb_v", [1] * 4)])
@pytest.mark.parametrize("has_optimizer", [False, True])
def test_hooks_on_parameters_are_called_once_per_step(schedule: str, balance: list[int], has_optimizer: bool) -> None:
    def small_integers(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape).double()

    torch.manual_seed(3)
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    with torch.no_grad():
        for param in plain.parameters():
            param.copy_(small_integers(*param.shape))
    pipe = DistributedPipe(copy.deepcopy(plain), schedule, balance=balance, chunks=2)
    plain_hooks, hooks = StepInHook(plain), StepInHook(pipe)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=100.0) if has_optimizer else None  # Hooks leave it no gradient.
    for _ in range(2):
        x, y = small_integers(4, 4), small_integers(4, 4)
        mse(plain(x), y).backward()
        pipe.step(x, target=y, loss_fn=mse, optimizer=optimizer)
        own_names = dict(pipe.named_parameters())
        assert sorted(hooks.calls) == sorted(name for name in plain_hooks.calls if name in own_names)
    for name, param in pipe.named_parameters():
        torch.testing.assert_close(param, plain.get_parameter(name), rtol=1e-9, atol=0)


@pytest.mark.ranks(2)
def test_hooks_on_parameters_are_not_called_in_a_step_that_fails() -> None:
    pipe = DistributedPipe(mlp(), "1f1b", balance=[6, 6], chunks=2)
    hooks, (x, y) = StepInHook(pipe), batch(4)
    with pytest.raises(StageError):
        pipe.step(x, target=y, loss_fn=fail)
    assert hooks.calls == []
    pipe.step(x, target=y, loss_fn=mse)
    assert len(hooks.calls) == len(list(pipe.parameters()))
