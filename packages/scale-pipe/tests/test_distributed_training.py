"""Around a step: tied parameters, replicas, optimizers, norms, states, measured times and the solver."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cases import Plain, batch, differences, micro_batches, mlp, mse, step_beside, turns
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from scale_core import DivergenceError, ShardedGradScaler, check_replicas
from scale_core.comm.collectives import all_reduce
from scale_core.comm.group import Group, group_of
from scale_core.comm.work import CollectiveWork
from scale_core.hooks.autograd import mark_without_autograd_hooks
from scale_core.hooks.microbatch_grads import StepObserver, on_microbatch_steps
from scale_core.testing import run_ranks
from scale_pipe import DistributedPipe, StageError, draw, simulate, validate
from scale_pipe.distributed.gradients import data_parallel
from scale_pipe.distributed.gradients.data_parallel import DataParallelWrappers
from scale_pipe.distributed.profile import measure_link_times

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


def words(samples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and targets [samples, 3]."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(WORDS, (samples, 3), generator=generator) for _ in range(2))  # type: ignore[return-value]


def tied_grads(pipe: DistributedPipe, steps: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The plain gradients, where the sum over micro-batches of each use is taken first, and those are added then."""
    model, total = tied_model(), {}
    head = model[4]
    assert isinstance(head, Head)
    copy = nn.Parameter(head.weight.detach().clone())
    head.weight = copy
    orders, stages = turns(pipe.schedule), {0: 0, 1: 0, 2: 1, 3: 1, 4: pipe.schedule.num_stages - 1}
    if pipe.schedule.num_stages == 4:
        stages = {0: 0, 1: 1, 2: 2, 3: 2, 4: 3}
    for x, target in steps:
        plain = Plain(model)
        parts = micro_batches(x, target, pipe.chunks)
        plain.step(parts, nn.functional.cross_entropy, lambda name: orders[stages[int(name[0])]])
        plain.grads["0.weight"] += plain.grads.pop("4.weight")
        for name, grad in plain.grads.items():
            total[name] = grad if name not in total else total[name] + grad
    return {**total, "4.weight": total["0.weight"]}


def tied() -> list[str]:
    """Embeddings that two ranks share, in a loop; and in a V, where both stages are on one rank."""
    rank, wrong = dist.get_rank(), []
    for name, balance in (("1f1b", [2, 3]), ("zb_h1", [2, 3]), ("interleaved_1f1b", [1, 1, 2, 1])):
        pipe = DistributedPipe(tied_model(seed=rank), name, balance=balance, chunks=4)  # Other values on each rank.
        pipe.load_state_dict({**tied_model().state_dict()})
        steps = [words(8), words(8, seed=2)]
        for x, target in steps[:1]:
            pipe.step(x, target=target, loss_fn=nn.functional.cross_entropy)
        wrong += [f"{name}: {w}" for w in differences(pipe, tied_grads(pipe, steps[:1]))]
        norm = nn.utils.clip_grad_norm_(_as_parameters(tied_grads(pipe, steps[:1])), math.inf)
        found = pipe.clip_grad_norm_(math.inf)
        wrong += [f"{name}: norm {found} and {norm}"] * (not torch.allclose(found, norm, rtol=1e-10))
        for x, target in steps[1:]:
            pipe.step(x, target=target, loss_fn=nn.functional.cross_entropy)
        expected = tied_grads(pipe, steps)
        for title, param in pipe.named_parameters():
            assert param.grad is not None
            if not torch.allclose(param.grad, expected[title], rtol=1e-10, atol=1e-10):
                wrong.append(f"{name}: {title} after two steps")
    pipe = DistributedPipe(tied_model(seed=rank), "1f1b", balance=[2, 3], chunks=4)
    copies: list[Any] = [None, None]
    dist.all_gather_object(copies, dict(pipe.named_parameters())["0.weight" if rank == 0 else "4.weight"].detach())
    wrong += ["copies do not begin equal"] * (not torch.equal(*copies))
    pipe.load_state_dict(tied_model().state_dict(), assign=True)  # Other tensors than those that were found to be tied.
    pipe.step(*(steps[0][:1]), target=steps[0][1], loss_fn=nn.functional.cross_entropy)
    wrong += [f"assigned: {w}" for w in differences(pipe, tied_grads(pipe, steps[:1]))]
    pipe.zero_grad()
    mine = "0.weight" if rank == 0 else "4.weight"
    weight = dict(pipe.named_parameters())[mine]
    for by in (0, 1):
        weight.requires_grad_(rank != by)
        try:
            pipe.step(*(steps[0][:1]), target=steps[0][1], loss_fn=nn.functional.cross_entropy)
            wrong.append(f"frozen in stage {by}: nothing was raised")
        except StageError as error:
            told = f"0.weight is one parameter in the stages [0, 1], but is frozen in [{by}] alone"
            wrong += [str(error)] * (told not in str(error))
        wrong += [f"{name} has a gradient" for name, param in pipe.named_parameters() if param.grad is not None]
    weight.requires_grad_(False)
    pipe.step(*(steps[0][:1]), target=steps[0][1], loss_fn=nn.functional.cross_entropy)
    left = {name for name, param in pipe.named_parameters() if param.grad is None}
    wrong += [f"frozen: without gradients are {left}"] * (left != {mine})
    for stage in pipe.stages.values():
        stage.no_sync = nullcontext  # As wrappers have it that reduce gradients themselves.
    try:
        pipe.step(*(steps[0][:1]), target=steps[0][1], loss_fn=nn.functional.cross_entropy)
        wrong.append("a wrapper around a tied parameter: nothing was raised")
    except StageError as error:
        wrong += [str(error)] * ("0.weight is one parameter with that of another stage" not in str(error))
    v = DistributedPipe(tied_model(), "zb_v", balance=[1, 1, 2, 1], chunks=4)
    x, target = words(8)
    v.step(x, target=target, loss_fn=nn.functional.cross_entropy)
    plain = tied_model()
    for part, to in micro_batches(x, target):
        (nn.functional.cross_entropy(plain(part), to) / 4).backward()
    for title, param in v.named_parameters():
        expected_grad = plain.get_parameter(title).grad
        assert param.grad is not None and expected_grad is not None
        wrong += [f"zb_v: {title}"] * (not torch.allclose(param.grad, expected_grad, rtol=1e-10, atol=1e-10))
    return wrong


def _as_parameters(grads: Mapping[str, Tensor]) -> list[nn.Parameter]:
    found = []
    for name, grad in grads.items():
        if name != "4.weight":
            found.append(nn.Parameter(torch.zeros_like(grad)))
            found[-1].grad = grad.clone()
    return found


def optimizers() -> list[str]:
    """Three steps of training, by the schedule's own steps and by the caller's; one optimizer for each stage."""
    rank = dist.get_rank()
    steps = [batch(8, seed=seed) for seed in range(3)]
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    pipe_of: dict[str, DistributedPipe] = {
        name: DistributedPipe(mlp(), "zb_v", balance=[3] * 4, chunks=4) for name in ("own", "callers", "each")
    }
    stepped: dict[str, Any] = {
        "own": torch.optim.AdamW(pipe_of["own"].parameters(), lr=0.1),
        "callers": torch.optim.AdamW(pipe_of["callers"].parameters(), lr=0.1),
        "each": {
            index: torch.optim.AdamW(stage.parameters(), lr=0.1) for index, stage in pipe_of["each"].stages.items()
        },
    }
    for x, target in steps:
        orders = Plain(model)
        parts = micro_batches(x, target)
        orders.step(parts, mse, lambda name: turns(pipe_of["own"].schedule)[int(name.split(".")[0]) // 3])
        for name, param in model.named_parameters():
            param.grad = orders.grads.get(name)
        optimizer.step()
        for name, pipe in pipe_of.items():
            pipe.zero_grad()
            own = None if name == "callers" else stepped[name]
            pipe.step(x, target=target, loss_fn=mse, optimizer=own)
            if name == "callers":
                stepped[name].step()
    return [
        f"{name}: {title} on rank {rank}"
        for name, pipe in pipe_of.items()
        for title, param in pipe.named_parameters()
        if not torch.equal(param, model.get_parameter(title))
    ]


def norms() -> list[str]:
    """Clipping over all stages, by any norm; what is not finite stays so."""
    wrong, (x, target) = [], [tensor.double() for tensor in batch(8)]
    for norm_type in (1.0, 2.0, 3.5, math.inf):
        pipe, model = DistributedPipe(mlp().double(), "1f1b", balance=[5, 7], chunks=4), mlp().double()
        pipe.step(x, target=target, loss_fn=mse)
        plain = Plain(model)
        plain.step(micro_batches(x, target), mse, lambda name: range(4))
        for name, param in model.named_parameters():
            param.grad = plain.grads[name]
        expected = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type)
        by_hand = [param.grad for param in pipe.parameters() if param.grad is not None]
        found = nn.utils.get_total_norm(by_hand, norm_type)
        wrong += [f"{norm_type}: torch has {found}, not {expected}"] * (not torch.allclose(found, expected, rtol=1e-10))
        way = nn.utils.clip_grad_norm_ if norm_type in (1.0, math.inf) else None
        found = way(pipe.parameters(), 0.01, norm_type) if way else pipe.clip_grad_norm_(0.01, norm_type)
        wrong += [f"{norm_type}: {found} and {expected}"] * (not torch.allclose(found, expected, rtol=1e-10))
        for name, param in pipe.named_parameters():
            theirs = model.get_parameter(name).grad
            assert param.grad is not None and theirs is not None
            wrong += [f"{norm_type}: {name}"] * (not torch.allclose(param.grad, theirs, rtol=1e-10))
        if dist.get_rank() == 1:
            next(pipe.parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]
        wrong += [f"{norm_type}: NaN was lost"] * (not pipe.clip_grad_norm_(1.0, norm_type).isnan())
        with pytest.raises(RuntimeError, match="can't be clipped"):
            nn.utils.clip_grad_norm_(pipe.parameters(), 1.0, error_if_nonfinite=True)
    # A stage without parameters has nothing to give but that it takes part, and is no replica of the other.
    del pipe
    pipe = DistributedPipe(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), "gpipe", balance=[1, 1], chunks=2)
    pipe.step(torch.ones(4, 4), loss_fn=torch.mean)
    norms = [pipe.clip_grad_norm_(math.inf), nn.utils.clip_grad_norm_(pipe.parameters(), math.inf)]
    nn.utils.clip_grad_value_(pipe.parameters(), 1e-4)
    if dist.get_rank() == 0:
        own = torch.cat([param.grad.reshape(-1) for param in pipe.parameters() if param.grad is not None])
        wrong += ["the values"] * (own.abs().max().item() > 1e-4)
        with pytest.raises(ValueError, match=r"'0.weight' is a parameter of a pipeline's stage.*\[0, 1\]"):
            DistributedDataParallel(pipe.stages[0])
    wrong += [f"a stage without parameters: {norms}"] * (not 0 < norms[0] == norms[1])
    return wrong


def states() -> list[str]:
    """States have the plain names, and load into any other pipeline and into the plain model."""
    wrong = []
    first = DistributedPipe(mlp(seed=1), "zb_v", balance=[3] * 4)
    for stage in first.stages:
        if stage % 2:
            first.stages[stage] = torch.compile(first.stages[stage], backend="eager")  # type: ignore[assignment]  # never run
    whole = first.state_dict(full=True)
    if dist.get_rank() == 0:
        expected = mlp(seed=1).state_dict()
        wrong += ["the full state"] * (list(whole) != list(expected) and sorted(whole) != sorted(expected))
        wrong += [name for name, value in expected.items() if not torch.equal(whole[name], value)]
    elif whole:
        wrong.append("there is a state on another rank")
    given = mlp(seed=1).state_dict()
    second = DistributedPipe(mlp(seed=2), "1f1b", balance=[7, 5])
    second.load_state_dict(given)
    second.load_state_dict(second.state_dict())
    wrong += [name for name, value in second.state_dict().items() if not torch.equal(value, given[name])]
    wrong += [name for name, value in second.named_parameters() if not torch.equal(value, given[name])]
    for state, told in (
        ({**given, "typo.weight": torch.ones(1)}, "in no stage: typo.weight"),
        ({name: value for name, value in given.items() if name not in ("1.weight", "10.weight")}, "missing: 1"),
    ):
        try:
            second.load_state_dict(state)
            wrong.append("a state that does not fit was loaded")
        except RuntimeError as error:
            wrong += [str(error)] * (told not in str(error))
    second.load_state_dict({}, strict=False)
    wrong += ["stages"] * (list(second.stages) != [dist.get_rank()] or 5 in second.stages)
    return wrong


def measured() -> list[str]:
    """Times of a step on all ranks; the solver takes them, and what it finds computes the same."""
    wrong = []
    pipe, plain = DistributedPipe(mlp(), "solve", balance=[3] * 4, chunks=3, memory_cap=3), Plain(mlp())
    first = pipe.schedule
    for seed in range(4):
        x, target = batch(6, seed=seed)
        wrong += [f"step {seed}: {words}" for words in step_beside(pipe, plain, x, target)]
    wrong += ["not solved"] * (pipe.schedule is first)
    validate(pipe.schedule, memory_cap=3)
    found = pipe.measured()
    wrong += ["spans"] * (len(found.spans) != sum(map(len, pipe.schedule.compute_actions())))
    wrong += ["clock"] * (found.spans[0].start != 0 or any(span.end < span.start for span in found.spans))
    for rank, actions in enumerate(pipe.schedule.compute_actions()):
        wrong += ["order"] * (tuple(span.action for span in found.spans if span.rank == rank) != actions)
    own = tuple(span.action for span in pipe.last_trace)
    wrong += ["own spans"] * (own != pipe.schedule.compute_actions()[dist.get_rank()])
    wrong += ["picture"] * ("<svg" not in draw([simulate(pipe.schedule, found.costs), found]))
    links = measure_link_times(pipe.schedule.placement, pipe._channels.p2p, pipe.group, 60)
    everyones: list[Any] = [None, None]
    dist.all_gather_object(everyones, links)
    wrong += [f"links {links}"] * (everyones[0] != everyones[1])
    # In a V, the two stages in the middle stand on one rank.
    wrong += [f"times {links}"] * ([seconds > 0 for seconds in links] != [True, False, True] or max(links) > 5)
    return wrong


def on_meta() -> list[str]:
    """Stages that get their values after the pipeline was made, each on its rank; those of a tied weight are equal."""
    rank, wrong = dist.get_rank(), []
    for first in (True, False):  # The first holder has its values from the beginning, or not.
        with torch.device("meta"):
            model = tied_model()
        if first and rank == 0:
            embed = tied_model()[0]
            assert isinstance(embed, nn.Embedding)
            model[0].weight = model[4].weight = embed.weight
        pipe = DistributedPipe(model, "1f1b", balance=[2, 3], chunks=4, device="cpu")
        for stage in pipe.stages.values():
            for path, module in stage.named_modules():
                for name, param in module._parameters.items():
                    if param is not None and param.is_meta:
                        value = tied_model().state_dict()[f"{path}.{name}"]
                        tied_elsewhere = rank == 1 and path == "4"
                        module._parameters[name] = nn.Parameter(torch.zeros_like(value) if tied_elsewhere else value)
        x, target = words(8)
        pipe.step(x, target=target, loss_fn=nn.functional.cross_entropy)
        wrong += [f"{first}: {w}" for w in differences(pipe, tied_grads(pipe, [(x, target)]))]
    return wrong


def scaled() -> list[str]:
    """A gradient scaler around a pipeline: one verdict for all of its ranks."""
    x, target = batch(8)
    pipe = DistributedPipe(mlp(), "1f1b", balance=[6, 6], chunks=4)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler = ShardedGradScaler(device="cpu", init_scale=1024.0, process_group=pipe.group)
    scaler.scale(torch.ones(()))  # All ranks know the scale, though only the last stage computes a loss.
    before = [param.detach().clone() for param in pipe.parameters()]
    for bad in (True, False):
        factor = math.inf if bad else 1.0
        pipe.zero_grad()
        pipe.step(x, target=target, loss_fn=lambda output, to, factor=factor: scaler.scale(mse(output, to)) * factor)
        scaler.step(optimizer)
        scaler.update()
        unchanged = all(map(torch.equal, before, pipe.parameters()))
        if unchanged != bad:
            return [f"stepped: {not unchanged}, with infinities: {bad}"]
    return []


def failing_late() -> list[str]:
    """An optimizer fails on one rank in a step whose gradients are measured, where it steps once all are through."""
    rank, wrong = dist.get_rank(), []
    pipe = DistributedPipe(mlp(), "1f1b", balance=[6, 6], chunks=4)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    fails = optimizer.register_step_pre_hook(_raise) if rank == 1 else None
    x, target = batch(8)
    handle = on_microbatch_steps(
        lambda step: StepObserver(lambda weights: None, lambda: None, lambda param, grad: None)
    )
    try:
        pipe.step(x, target=target, loss_fn=mse, optimizer=optimizer)
        wrong.append(f"nothing was raised on rank {rank}")
    except StageError as error:
        words = ("stage 1 on rank 1 raised ArithmeticError in the optimizer's step", "Stages 0 had been stepped")
        wrong += [f"rank {rank} lacks {each!r}: {error}" for each in words if each not in str(error)]
    wrong += [f"rank {rank} keeps gradients" for param in pipe.parameters() if param.grad is not None]
    if fails is not None:
        fails.remove()
    pipe.step(x, target=target, loss_fn=mse, optimizer=optimizer)
    handle.remove()
    return wrong


CASES: dict[str, Callable[[], list[str]]] = {
    case.__name__: case for case in (tied, optimizers, norms, states, measured, on_meta, scaled, failing_late)
}


def all_cases() -> dict[str, list[str]]:
    return {name: case() for name, case in CASES.items()}


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, list[str]]]:
    return run_ranks(all_cases, 2)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process(name: str, outcomes: list[dict[str, list[str]]]) -> None:
    assert [outcome[name] for outcome in outcomes] == [[], []]


def replicas() -> list[str]:
    """Two replicas of a pipeline of two ranks; torch's own data parallelism in each stage, reduced once per step."""
    rank, wrong = dist.get_rank(), []
    pipes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    batches = [batch(8, seed=seed) for seed in (1, 2)]
    for schedule, balance in (("1f1b", [6, 6]), ("zb_v", [3] * 4)):
        plains = [Plain(mlp()), Plain(mlp())]
        pipe = DistributedPipe(mlp(), schedule, balance=balance, chunks=4, process_group=pipes[rank // 2])
        for index, stage in pipe.stages.items():
            pipe.stages[index] = DistributedDataParallel(stage, process_group=across[rank % 2])
        order = order_in_wrapped(pipe)
        for plain, (x, target) in zip(plains, batches, strict=True):
            plain.step(micro_batches(x, target), mse, order)
        x, target = batches[rank // 2]
        pipe.step(x, target=target, loss_fn=mse)
        means = {name: (plains[0].grads[name] / 2 + plains[1].grads[name] / 2) for name in plains[0].grads}
        wrong += [f"{schedule}: {words}" for words in differences(pipe, means)]
        if rank == 3:  # A stage of the second replica fails: so do all stages, of both.
            for stage in pipe.stages.values():
                stage.register_forward_pre_hook(_raise)
        try:
            pipe.step(x, target=target, loss_fn=mse)
            wrong.append("nothing was raised")
        except RuntimeError as error:
            told = "on purpose" if rank > 1 else "replicas of this stage failed"
            wrong += [f"rank {rank}: {error}"] * (told not in str(error))
        wrong += [f"{schedule}, afterwards: {words}" for words in differences(pipe, means)]
    return wrong + with_unused_parameters(pipes[rank // 2], across[rank % 2])


class UsesSome(nn.Module):
    """A layer that never runs, and one that runs in the first replica alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.always, self.never, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.sometimes(x) if dist.get_rank() < 2 else self.always(x)


def with_unused_parameters(group: Any, across: Any) -> list[str]:
    """What no replica uses has no gradient, so that no optimizer decays it; what one uses is averaged in all."""
    model = nn.Sequential(UsesSome(), UsesSome()).double()
    pipe = DistributedPipe(model, "1f1b", balance=[1, 1], chunks=2, process_group=group)
    for index, stage in pipe.stages.items():
        pipe.stages[index] = DistributedDataParallel(stage, process_group=across, find_unused_parameters=True)
    plain = [UsesSome().double(), UsesSome().double()]
    x = torch.ones(4, 4, dtype=torch.float64)
    plain[1].sometimes(plain[0].sometimes(x)).mean().backward()
    pipe.step(x, loss_fn=torch.mean)
    grads = {".".join(name.split(".")[-2:]): param.grad for name, param in pipe.named_parameters()}
    wrong = [f"'{name}' has a gradient" for name, grad in grads.items() if "never" in name and grad is not None]
    for name in ("sometimes.weight", "sometimes.bias"):
        whole, found = plain[dist.get_rank() % 2].get_parameter(name).grad, grads[name]
        assert whole is not None and found is not None
        wrong += [name] * (not torch.allclose(found, whole / 2, rtol=1e-10))
    return wrong


def order_in_wrapped(pipe: DistributedPipe) -> Callable[[str], Any]:
    orders = turns(pipe.schedule)
    names = {
        name.removeprefix("module."): index
        for index, stage in pipe.stages.items()
        for name, _ in stage.named_parameters()
    }
    return lambda name: orders[names[name]] if name in names else ()


def _raise(*_: Any) -> None:
    raise ArithmeticError("on purpose")


def test_replicas_of_a_pipeline_average_their_gradients_once_per_step() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_ranks(replicas, 4) == [[]] * 4


def averaged_in_buckets() -> list[int]:
    """Gradients of 16, 4, 8 and 2 elements, in buckets of 10; returns how many were averaged at a time."""
    torch.manual_seed(0)
    plain, rank = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double(), dist.get_rank()
    model = DistributedDataParallel(copy.deepcopy(plain))
    batches, wrappers, sizes = torch.randn(2, 3, 4, dtype=torch.float64), DataParallelWrappers([model]), list[int]()
    with wrappers.no_sync(skip_reduce=False):
        model(batches[rank]).square().mean().backward()

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
    return sizes


def test_gradients_of_replicas_are_averaged_bucket_by_bucket() -> None:
    assert run_ranks(averaged_in_buckets, 2) == [[16, 4, 10]] * 2


def tied_copies_that_come_apart() -> str:
    """Each rank's optimizer has another learning rate, so its copy of the tied weight goes another way."""
    pipe = DistributedPipe(tied_model(), "1f1b", balance=[2, 3], chunks=2, check_replicas_every=1)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1 * (1 + dist.get_rank()))
    batch, target = words(4)
    pipe.step(batch, target=target, loss_fn=nn.functional.cross_entropy)
    check_replicas(pipe)
    optimizer.step()
    with pytest.raises(DivergenceError):
        check_replicas(pipe)
    with pytest.raises(DivergenceError) as caught:
        pipe.step(batch, target=target, loss_fn=nn.functional.cross_entropy)
    return str(caught.value)


def test_copies_of_a_tied_weight_that_come_apart_are_found() -> None:
    for text in run_ranks(tied_copies_that_come_apart, 2):
        assert "step 2: 1 of 1 tensors" in text
        assert f"'0.weight' [{WORDS}, 8]: each of the ranks 0, 1 has values of its own" in text


def hook_on_a_tied_shard() -> str:
    pipe = DistributedPipe(tied_model(), "1f1b", balance=[2, 3], chunks=2)
    weight = dict(pipe.named_parameters())["0.weight" if group_of().rank == 0 else "4.weight"]
    mark_without_autograd_hooks([weight])  # As shards are.
    weight.register_post_accumulate_grad_hook(lambda param: None)
    x, target = words(4)
    try:
        pipe.step(x, target=target, loss_fn=nn.functional.cross_entropy)
    except StageError as error:
        return str(error)
    return ""


def test_a_hook_on_a_shard_of_a_tied_weight_is_refused() -> None:
    for text in run_ranks(hook_on_a_tied_shard, 2):
        assert "weight is one parameter with that of another stage, and its shard has a hook" in text


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


def small_integers(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape).double()


def steps_in_hooks(schedule: str, own_optimizer: bool) -> list[str]:
    torch.manual_seed(3)
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    with torch.no_grad():
        for param in plain.parameters():
            param.copy_(small_integers(*param.shape))
    model = copy.deepcopy(plain)
    pipe = DistributedPipe(model, schedule, balance=[1] * 4 if schedule == "zb_v" else [2, 2], chunks=2)
    beside, hooks = StepInHook(plain), StepInHook(pipe)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=100.0) if own_optimizer else None  # Hooks leave it no gradient.
    for step in range(2):
        x, y = small_integers(4, 4), small_integers(4, 4)
        nn.functional.mse_loss(plain(x), y).backward()
        pipe.step(x, target=y, loss_fn=nn.functional.mse_loss, optimizer=optimizer)
        if sorted(hooks.calls) != sorted(name for name in beside.calls if name in dict(pipe.named_parameters())):
            return [f"step {step}: {hooks.calls}"]
    full = dict(plain.named_parameters())
    return [name for name, param in pipe.named_parameters() if not torch.allclose(param, full[name], rtol=1e-9)]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
@pytest.mark.parametrize("own_optimizer", [False, True])
def test_hooks_on_parameters_are_called_once_per_step(schedule: str, own_optimizer: bool) -> None:
    assert not any(run_ranks(steps_in_hooks, 2, schedule, own_optimizer))


def failing_step_with_hooks() -> list[str]:
    pipe = DistributedPipe(mlp(), "1f1b", balance=[6, 6], chunks=2)
    hooks = StepInHook(pipe)

    def fails(*_: object) -> Tensor:
        raise ValueError("no loss")

    x, y = batch(4)
    with pytest.raises(StageError):
        pipe.step(x, target=y, loss_fn=fails)
    assert hooks.calls == []
    pipe.step(x, target=y, loss_fn=mse)
    return hooks.calls if len(hooks.calls) != len(list(pipe.parameters())) else []


def test_hooks_on_parameters_are_not_called_in_a_step_that_fails() -> None:
    assert not any(run_ranks(failing_step_with_hooks, 2))
