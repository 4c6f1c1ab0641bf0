"""What lines of other training programs do on a sharded model: each is right or an error, and the guide says so.

The table in the guide is the one that is written here, line by line.
"""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_parity import noise
from through_a_file import through_a_file
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from scale_check.exact import assert_equal
from scale_core import num_parameters
from scale_core.errors import ShardedTensorError
from scale_core.shard import full_numel, full_shape
from scale_fsdp import ShardOptions, describe, fully_shard

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "sharded-parameters.md"


@dataclass
class Pair:
    """A model sharded over the ranks, and the plain one, on the same batches: the mean gradient is the plain one."""

    flat: bool

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 5))
        self.model = copy.deepcopy(self.plain)
        for module in (self.model[0], self.model):
            fully_shard(module, options=ShardOptions(flatten_parameters=self.flat))
        self.both = (self.model, self.plain)
        self.optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in self.both]

    def train(self, steps: int = 1, loss_of: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        for step in range(steps):
            for each, optimizer in zip(self.both, self.optimizers, strict=True):
                batch = noise(3, 4, seed=step)
                loss = each(batch).square().mean() if loss_of is None else loss_of(each, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    def check(self) -> None:
        assert_equal(self.model, self.plain)

    def check_close(self, **tolerance: float) -> None:
        torch.testing.assert_close(dict(self.model.state_dict()), dict(self.plain.state_dict()), **tolerance)


ROWS: list[str] = []
BOTH_FORMS = pytest.mark.parametrize("flat", [False, True])


def line(written: str, outcome: str, full: str) -> Callable[[Any], Any]:
    """Says which row of the table a test shows: the line, what it does, and the line for full parameters."""
    ROWS.append(f"| {written} | {outcome} | {full} |\n")
    return lambda test: test


@line(
    "`sum(p.numel() for p in model.parameters())`, `model.num_parameters()` of transformers",
    "right; with `flatten_parameters=True` padding counts as well",
    "`scale_core.num_parameters(model)`",
)
@BOTH_FORMS
@pytest.mark.ranks(2, in_turn=True)
def test_elements_are_counted(flat: bool) -> None:
    pair = Pair(flat)
    whole = sum(param.numel() for param in pair.plain.parameters())
    counted = sum(param.numel() for param in pair.model.parameters())
    assert counted >= whole if pair.flat else counted == whole  # A flat parameter has padding.
    assert num_parameters(pair.model) == whole == num_parameters(pair.plain) == describe(pair.model).num_elements
    if not pair.flat:
        assert sum(map(full_numel, pair.model.parameters())) == whole
    pair.model[0].requires_grad_(False)
    assert num_parameters(pair.model, only_trainable=True) == whole - 30


@line("parameter groups by `p.ndim`, by `p.shape`", "right; `p.to_local().shape` is the shard's", "")
@BOTH_FORMS
@pytest.mark.ranks(2, in_turn=True)
def test_parameters_are_grouped_by_shape(flat: bool) -> None:
    pair = Pair(flat)
    for (name, param), whole in zip(pair.model.named_parameters(), pair.plain.parameters(), strict=not pair.flat):
        if not pair.flat:
            assert full_shape(param) == whole.shape == param.shape, name
            assert param.ndim == whole.ndim


@line(
    "`p.norm()`, `p.mean()`, `torch.equal(p, plain_p)`, `writer.add_histogram(name, p)`",
    "right, on all ranks together; what needs all elements on one rank, as a histogram, is a ShardedTensorError",
    "`p.full_tensor()` on all ranks",
)
@BOTH_FORMS
@pytest.mark.ranks(2, in_turn=True)
def test_values_are_read(flat: bool) -> None:
    pair = Pair(flat)
    if not pair.flat:
        for param, whole in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
            torch.testing.assert_close(param.detach().norm(), whole.detach().norm())
            torch.testing.assert_close(param.detach().mean(), whole.detach().mean())
            assert torch.equal(param, whole)
        with pytest.raises(ShardedTensorError, match=r"numpy of '0.weight' .*full_tensor\(\)"):
            next(pair.model.parameters()).detach().numpy()
    with pair.model.summon_full_params():
        norms = [p.norm() for p in pair.model.parameters()]
    assert torch.equal(torch.stack(norms), torch.stack([p.norm() for p in pair.plain.parameters()]))
    pair.check()


def penalised(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean() + 0.1 * sum(param.square().sum() for param in model.parameters())


@line("`loss + c * sum(p.square().sum() for p in model.parameters())`", "right", "")
@BOTH_FORMS
@pytest.mark.ranks(2, in_turn=True)
def test_a_loss_has_a_penalty_of_the_weights(flat: bool) -> None:
    pair = Pair(flat)
    pair.train(3, penalised)
    pair.check_close(rtol=1e-6, atol=1e-7)  # The two gradients are added in another order.


@line("`torch.autocast(...)` around the forward", "right", "")
@BOTH_FORMS
@pytest.mark.ranks(2, in_turn=True)
def test_a_forward_runs_under_autocast(flat: bool) -> None:
    pair = Pair(flat)

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch).float().square().mean()

    pair.train(3, loss_of)
    pair.check()


@line(
    "`torch.amp.GradScaler`",
    "right: all ranks that share a shard step, or none does",
    "`scale_core.ShardedGradScaler` where ranks have other parameters, as stages of a pipeline",
)
@BOTH_FORMS
@pytest.mark.ranks(2, in_turn=True)
def test_torch_s_scaler_scales(flat: bool) -> None:
    pair = Pair(flat)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(pair.model(noise(3, 4)).square().mean()).backward()
    scaler.step(pair.optimizers[0])
    pair.optimizers[0].zero_grad()
    pair.plain(noise(3, 4)).square().mean().backward()
    pair.optimizers[1].step()
    pair.optimizers[1].zero_grad()
    pair.check_close(rtol=1e-6, atol=1e-7)


@line(
    "`torch.optim.swa_utils.AveragedModel(model)`",
    "right: an average of the shards, whose state dict is full",
    "`ShardedEMA`, which needs no second model",
)
@BOTH_FORMS
@pytest.mark.ranks(2, in_turn=True)
def test_torch_s_averaged_model_averages(flat: bool) -> None:
    pair = Pair(flat)
    averaged = [AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True) for each in pair.both]
    for _ in range(3):
        pair.train()
        for average, each in zip(averaged, pair.both, strict=True):
            average.update_parameters(each)
    assert_equal(*averaged)
    with torch.no_grad():
        outputs = [average.eval()(noise(3, 4)) for average in averaged]
    assert torch.equal(*outputs)
    averaged[0].load_state_dict(AveragedModel(pair.plain).state_dict())
    assert_equal(averaged[0].module, pair.plain)
    pair.train()
    pair.check()


@line(
    "`parameters_to_vector(model.parameters())`, `vector_to_parameters`",
    "the first is a ShardedTensorError; the second takes a full vector",
    "the first `with model.summon_full_params():`",
)
@BOTH_FORMS
@pytest.mark.ranks(2, in_turn=True)
def test_parameters_become_a_vector_and_back(flat: bool) -> None:
    pair = Pair(flat)
    with pytest.raises(ShardedTensorError, match=r"cat of .*full_tensor\(\)"):
        parameters_to_vector(pair.model.parameters())
    if not pair.flat:
        vector_to_parameters(parameters_to_vector(pair.plain.parameters()), pair.model.parameters())
        pair.check()
    with pair.model.summon_full_params():
        vector = parameters_to_vector(pair.model.parameters())
        assert torch.equal(vector, parameters_to_vector(pair.plain.parameters()))
        vector_to_parameters(2 * vector, pair.model.parameters())
    vector_to_parameters(2 * vector, pair.plain.parameters())
    pair.check()


@line("`param.data = values`", "right: the values are copied into the memory of the unit", "")
@BOTH_FORMS
@pytest.mark.ranks(2, in_turn=True)
def test_values_are_assigned_to_data(flat: bool) -> None:
    pair = Pair(flat)
    for each in pair.both:
        for param in each.parameters():
            param.data = torch.ones_like(param)
    pair.check()
    pair.train()
    pair.check()


@line("`model.half()`, `.bfloat16()`, `.to(...)` between steps", "right", "")
@pytest.mark.fault(84)
@BOTH_FORMS
@pytest.mark.ranks(2, in_turn=True)
def test_a_model_is_converted_between_steps(flat: bool) -> None:
    pair = Pair(flat)
    for each in pair.both:
        each.bfloat16()
    assert {tensor.dtype for tensor in pair.model.state_dict().values()} == {torch.bfloat16, torch.int64}
    pair.train(2, lambda model, batch: model(batch.bfloat16()).square().mean())
    # Kernels round the ends of a tensor in bf16 otherwise, and a flat parameter has other ends.
    pair.check_close(rtol=2e-2 if pair.flat else 0.0, atol=1e-3 if pair.flat else 0.0)


@line(
    "`copy.deepcopy((model, optimizer))`, `torch.save((model, optimizer), file)`",
    "right; load a file on the same rank of the same number of ranks",
    "`torch.save(model.state_dict(), file)` after all ranks have called `state_dict()`",
)
@pytest.mark.fault(84)
@BOTH_FORMS
@pytest.mark.ranks(2, in_turn=True)
def test_a_model_and_its_optimizer_are_copied(flat: bool) -> None:
    pair = Pair(flat)
    pair.train()
    both = pair.model, pair.optimizers[0]
    for copied in (copy.deepcopy(both), through_a_file(both, weights_only=False)):
        again = Pair(pair.flat)
        again.both, again.optimizers = zip(copied, copy.deepcopy((pair.plain, pair.optimizers[1])), strict=True)
        again.model, again.plain = again.both
        again.train(2)
        again.check()
    pair.train()
    pair.check()


@line(
    "`merge_adapter()` of peft, and other code that computes weights from weights",
    "torch's error about shapes, or this rank's shard",
    "the same `with model.summon_full_params():`; `merge_and_unload()` on a plain model with `model.state_dict()`",
)
@BOTH_FORMS
@pytest.mark.ranks(2, in_turn=True)
def test_weights_are_computed_from_weights(flat: bool) -> None:
    """What `merge_adapter()` of peft does: a weight is computed from other ones."""
    pair = Pair(flat)
    for each, around in zip(pair.both, (pair.model.summon_full_params(), contextlib.nullcontext()), strict=True):
        with around, torch.no_grad():
            each[0].weight.copy_(each[0].weight + each[3].weight.sum(0)[:, None])
    pair.check()
    pair.train()
    pair.check()


@line("`torch.compile(model)`, `block.compile()`", "right", "")
# The compiler asks each tensor that it meets for its gradient, and hides the warning, which an error is not.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@BOTH_FORMS
@pytest.mark.ranks(2, in_turn=True)
def test_models_and_blocks_are_compiled(flat: bool) -> None:
    pair = Pair(flat)
    torch._dynamo.reset()
    around = torch.compile(pair.model, backend="eager")
    pair.both = (around, pair.plain)
    pair.train(2)
    pair.both = (pair.model, pair.plain)
    pair.model[0].compile(backend="eager")
    pair.train(2)
    pair.check()


def test_the_guide_has_these_lines_and_no_others():
    head = "| line | on a sharded model | for full parameters |\n|---|---|---|\n"
    assert head + "".join(ROWS) + "\n" in GUIDE.read_text(encoding="utf-8")


BETWEEN_FORWARD_AND_BACKWARD: dict[str, Callable[[nn.Module], Any]] = {
    "squares": lambda model: sum(param.square().sum() for param in model.parameters()),
    "norms": lambda model: sum(param.norm() for param in model.parameters()),
    "means": lambda model: sum(param.abs().mean() for param in model.parameters()),
    "one row": lambda model: model[0].weight[0].sum(),
    "data": lambda model: sum(param.data.sum() for param in model.parameters()),
    "sizes": lambda model: sum(param.numel() * param.shape[0] for param in model.parameters()),
}
NEED_FULL_PARAMETERS: dict[str, Callable[[nn.Module], Any]] = {
    "a joined vector": lambda model: torch.cat([param.flatten() for param in model.parameters()]).norm(),
    "a linear function": lambda model: nn.functional.linear(torch.ones(1, 4), model[0].weight).sum(),
    "a matrix product": lambda model: (model[0].weight @ model[0].weight.t()).norm(),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [False, True])
def test_parameters_after_a_forward_are_right_or_an_error(reshard_after_forward: bool) -> None:
    """With `reshard_after_forward=False` FSDP2 shows full parameters until the backward; here they are shards."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).double()
    batch = noise(2, 4, seed=1).double()

    def backward(model: nn.Module, line: Callable[[nn.Module], Any]) -> Tensor:
        loss = model(batch).square().mean()
        loss = loss + 0.1 * line(model)
        loss.backward()
        return loss.detach()

    for name, line in (BETWEEN_FORWARD_AND_BACKWARD | NEED_FULL_PARAMETERS).items():
        model, expected = copy.deepcopy(plain), copy.deepcopy(plain)
        for module in (*model, model):
            fully_shard(module, reshard_after_forward=reshard_after_forward)
        if name in NEED_FULL_PARAMETERS:
            with pytest.raises(ShardedTensorError, match="it needs elements that other ranks have"):
                backward(model, line)
            continue
        torch.testing.assert_close(backward(model, line), backward(expected, line), msg=name)
        grads = {key: param.grad.full_tensor() for key, param in model.named_parameters()}
        torch.testing.assert_close(grads, {key: param.grad for key, param in expected.named_parameters()}, msg=name)
