"""What lines of other training programs do on a sharded model: each is right or an error, and the guide says so.

The table in the guide is the one that is written here, line by line.
"""

import contextlib
import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from fsdp_beside import noise
from fsdp_cases import differing_weights
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from scale_core import full_numel, full_shape, num_parameters
from scale_core.errors import ShardedTensorError
from scale_core.testing import run_ranks
from scale_fsdp import describe, fully_shard

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "fsdp-errors.md"


@dataclass
class Pair:
    """A model sharded over the ranks, and the plain one, on the same batches: the mean gradient is the plain one."""

    flat: bool

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 5))
        self.model = copy.deepcopy(self.plain)
        for module in (self.model[0], self.model):
            fully_shard(module, flatten_parameters=self.flat)
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
        assert not differing_weights(self.model, self.plain)


def counts(pair: Pair) -> None:
    whole = sum(param.numel() for param in pair.plain.parameters())
    counted = sum(param.numel() for param in pair.model.parameters())
    assert counted >= whole if pair.flat else counted == whole  # A flat parameter has padding.
    assert num_parameters(pair.model) == whole == num_parameters(pair.plain) == describe(pair.model).num_elements
    if not pair.flat:
        assert sum(map(full_numel, pair.model.parameters())) == whole
    pair.model[0].requires_grad_(False)
    assert num_parameters(pair.model, only_trainable=True) == whole - 30


def dimensions(pair: Pair) -> None:
    for (name, param), whole in zip(pair.model.named_parameters(), pair.plain.parameters(), strict=not pair.flat):
        if not pair.flat:
            assert full_shape(param) == whole.shape == param.shape, name
            assert param.ndim == whole.ndim


def reads(pair: Pair) -> None:
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


def penalties(pair: Pair) -> None:
    pair.train(3, penalised)
    for mine, plain in zip(pair.model.state_dict().values(), pair.plain.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-6, atol=1e-7)  # The two gradients are added in another order.


def autocast(pair: Pair) -> None:
    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch).float().square().mean()

    pair.train(3, loss_of)
    pair.check()


def scaler(pair: Pair) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(pair.model(noise(3, 4)).square().mean()).backward()
    scaler.step(pair.optimizers[0])
    pair.optimizers[0].zero_grad()
    pair.plain(noise(3, 4)).square().mean().backward()
    pair.optimizers[1].step()
    pair.optimizers[1].zero_grad()
    for mine, plain in zip(pair.model.state_dict().values(), pair.plain.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-6, atol=1e-7)


def averages(pair: Pair) -> None:
    averaged = [AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True) for each in pair.both]
    for _ in range(3):
        pair.train()
        for average, each in zip(averaged, pair.both, strict=True):
            average.update_parameters(each)
    assert not differing_weights(*averaged)
    with torch.no_grad():
        outputs = [average.eval()(noise(3, 4)) for average in averaged]
    assert torch.equal(*outputs)
    averaged[0].load_state_dict(AveragedModel(pair.plain).state_dict())
    assert not differing_weights(averaged[0].module, pair.plain)
    pair.train()
    pair.check()


def vectors(pair: Pair) -> None:
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


def data(pair: Pair) -> None:
    for each in pair.both:
        for param in each.parameters():
            param.data = torch.ones_like(param)
    pair.check()
    pair.train()
    pair.check()


def conversions(pair: Pair) -> None:
    for each in pair.both:
        each.bfloat16()
    assert {tensor.dtype for tensor in pair.model.state_dict().values()} == {torch.bfloat16, torch.int64}
    pair.train(2, lambda model, batch: model(batch.bfloat16()).square().mean())
    for mine, plain in zip(pair.model.state_dict().values(), pair.plain.state_dict().values(), strict=True):
        # Kernels round the ends of a tensor in bf16 otherwise, and a flat parameter has other ends.
        torch.testing.assert_close(mine, plain, rtol=2e-2 if pair.flat else 0.0, atol=1e-3 if pair.flat else 0.0)


def copies(pair: Pair) -> None:
    pair.train()
    file = io.BytesIO()
    torch.save((pair.model, pair.optimizers[0]), file)
    file.seek(0)
    for copied in (copy.deepcopy((pair.model, pair.optimizers[0])), torch.load(file, weights_only=False)):
        again = Pair(pair.flat)
        again.both, again.optimizers = zip(copied, copy.deepcopy((pair.plain, pair.optimizers[1])), strict=True)
        again.model, again.plain = again.both
        again.train(2)
        again.check()
    pair.train()
    pair.check()


def merged(pair: Pair) -> None:
    """What `merge_adapter()` of peft does: a weight is computed from other ones."""
    for each, around in zip(pair.both, (pair.model.summon_full_params(), contextlib.nullcontext()), strict=True):
        with around, torch.no_grad():
            each[0].weight.copy_(each[0].weight + each[3].weight.sum(0)[:, None])
    pair.check()
    pair.train()
    pair.check()


def compiled(pair: Pair) -> None:
    torch._dynamo.reset()
    around = torch.compile(pair.model, backend="eager")
    pair.both = (around, pair.plain)
    pair.train(2)
    pair.both = (pair.model, pair.plain)
    pair.model[0].compile(backend="eager")
    pair.train(2)
    pair.check()


class Line(NamedTuple):
    """A row of the table, and what shows that it is so."""

    written: str
    does: str
    whole: str
    check: Callable[[Pair], None]


LINES = [
    Line(
        "`sum(p.numel() for p in model.parameters())`, `model.num_parameters()` of transformers",
        "right; with `flatten_parameters=True` padding counts as well",
        "`scale_core.num_parameters(model)`",
        counts,
    ),
    Line(
        "parameter groups by `p.ndim`, by `p.shape`",
        "right; `p.to_local().shape` is the shard's",
        "",
        dimensions,
    ),
    Line(
        "`p.norm()`, `p.mean()`, `torch.equal(p, plain_p)`, `writer.add_histogram(name, p)`",
        "right, on all ranks together; what needs all elements on one rank, as a histogram, is a ShardedTensorError",
        "`p.full_tensor()` on all ranks",
        reads,
    ),
    Line(
        "`loss + c * sum(p.square().sum() for p in model.parameters())`",
        "right",
        "",
        penalties,
    ),
    Line("`torch.autocast(...)` around the forward", "right", "", autocast),
    Line(
        "`torch.amp.GradScaler`",
        "right: all ranks that share a shard step, or none does",
        "`scale_core.ShardedGradScaler` where ranks have other parameters, as stages of a pipeline",
        scaler,
    ),
    Line(
        "`torch.optim.swa_utils.AveragedModel(model)`",
        "right: an average of the shards, whose state dict is full",
        "`ShardedEMA`, which needs no second model",
        averages,
    ),
    Line(
        "`parameters_to_vector(model.parameters())`, `vector_to_parameters`",
        "the first is a ShardedTensorError; the second takes a full vector",
        "the first `with model.summon_full_params():`",
        vectors,
    ),
    Line(
        "`param.data = values`",
        "right: the values are copied, and the memory stays that of the unit",
        "",
        data,
    ),
    Line("`model.half()`, `.bfloat16()`, `.to(...)` between steps", "right", "", conversions),
    Line(
        "`copy.deepcopy((model, optimizer))`, `torch.save((model, optimizer), file)`",
        "right; a file holds one rank's shards, for that rank of as many",
        "`torch.save(model.state_dict(), file)` after all ranks have called `state_dict()`",
        copies,
    ),
    Line(
        "`merge_adapter()` of peft, and whatever else computes weights from weights",
        "torch's error about shapes, or this rank's shard",
        "the same `with model.summon_full_params():`; `merge_and_unload()` on a plain model with `model.state_dict()`",
        merged,
    ),
    Line("`torch.compile(model)`, `block.compile()`", "right", "", compiled),
]


def run_lines() -> None:
    for flat in (False, True):
        for line in LINES:
            try:
                line.check(Pair(flat))
            except BaseException as error:
                error.add_note(f"{line.written}, flatten_parameters={flat}, rank {dist.get_rank()}")
                raise


# The compiler asks each tensor that it meets for its gradient, and hides the warning, which an error is not.
@pytest.mark.fault(84)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_ordinary_lines_do_what_the_guide_says():
    run_ranks(run_lines, 2)


def test_the_guide_has_these_lines_and_no_others():
    head = "| line | on a sharded model | for full parameters |\n|---|---|---|\n"
    rows = "".join(f"| {line.written} | {line.does} | {line.whole} |\n" for line in LINES)
    assert f"{head}{rows}\n" in GUIDE.read_text(encoding="utf-8")
