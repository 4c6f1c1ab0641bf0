"""Right programs are found right, whatever wraps them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from check_models import (
    PackedModel,
    TiedModel,
    accumulating_step,
    adamw,
    averaging,
    batches,
    conv_net,
    ddp,
    fsdp2,
    fsdp2_in_one_unit,
    mlp,
    parity_in_turn,
    sgd,
    sparse_embedding,
    tokens,
    with_batch_norm,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

from scale_check import ParityError, ParityVerdict, Report, parity
from scale_check.harness import ParityProgram, mean_square_step, sgd_with_momentum, unwrapped
from scale_check.noise import CastRecorder, full_precision
from scale_core import compat


def step_with_a_loss_module(model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
    optimizer.zero_grad()
    output = model(batch)
    loss: torch.Tensor = nn.MSELoss()(output, torch.zeros_like(output))
    loss.backward()
    optimizer.step()
    return loss


def autocast_step(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(batch.float()).float()
    loss: torch.Tensor = output.square().mean()
    loss.backward()
    optimizer.step()
    return loss


def fsdp2_in_bfloat16(model: nn.Module) -> nn.Module:
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16, output_dtype=torch.float32)
    return fully_shard(model, mp_policy=policy)


class SumsInFloat32(nn.Module):
    """A layer that computes in float32 whatever the model is in, as many norms and rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() @ self.weight.float()).to(x)


def layer_in_float32() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), SumsInFloat32(), nn.Tanh(), nn.Linear(40, 4))


def mlp_in_bfloat16() -> nn.Module:
    return mlp().bfloat16()


def in_bfloat16(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.bfloat16() for tensor in tensors]


class SampleBySample(nn.Module):
    """A detector's kind of forward: it loops over the samples, and each rank has fewer of them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.head(self.encoder(sample).tanh()) for sample in batch])


class LossBySample(SampleBySample):
    """The same, and it returns its loss; of two calls for each sample only the second has a gradient."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        losses = []
        for sample in batch:
            with torch.no_grad():
                target = self.encoder(sample)
            losses.append(self.head(self.encoder(sample).tanh() + target.cos()).square().mean())
        return torch.stack(losses).mean()


class LossesOfTwo(nn.Module):
    """Two losses in one tensor, each a mean over the samples, as a quantizer with several codebooks returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x).square().mean() for layer in self.layers])


def step_of_summed_outputs(model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(batch).sum()
    loss.backward()
    optimizer.step()
    return loss


MICRO_BATCHES = list(zip(batches(6), batches(6)[::-1], strict=True))
PROGRAMS: dict[str, dict[str, Any]] = {
    "DDP": {"build": mlp, "wrap": ddp, "batches": batches(6)},
    "FSDP2": {"build": mlp, "wrap": fsdp2, "batches": batches(6), "optimizer": adamw},
    "by hand": {"build": mlp, "wrap": averaging, "batches": batches(6)},
    "float32": {"build": mlp, "wrap": ddp, "batches": batches(6), "dtype": None, "optimizer": adamw},
    "a layer in float32": {"build": layer_in_float32, "wrap": ddp, "batches": batches(6)},
    "sample by sample": {"build": SampleBySample, "wrap": ddp, "batches": batches(6)},
    "sample by sample, accumulated": {
        "build": SampleBySample,
        "step": accumulating_step,
        "wrap": ddp,
        "batches": MICRO_BATCHES,
    },
    "sample by sample, with its loss": {
        "build": LossBySample,
        "step": step_of_summed_outputs,
        "wrap": ddp,
        "batches": batches(6),
    },
    "two losses in one tensor": {
        "build": LossesOfTwo,
        "step": step_of_summed_outputs,
        "wrap": ddp,
        "batches": batches(6),
    },
    "bfloat16": {"build": mlp_in_bfloat16, "wrap": ddp, "batches": in_bfloat16(batches(6)), "dtype": None},
    "bfloat16, tied": {"build": TiedModel, "wrap": ddp, "batches": tokens(), "dtype": torch.bfloat16},
    "autocast": {"build": mlp, "step": autocast_step, "wrap": ddp, "batches": batches(6), "dtype": None},
    "FSDP2 in bfloat16": {
        "build": mlp,
        "wrap": fsdp2_in_bfloat16,
        "batches": batches(6),
        "dtype": None,
    },
    "accumulation and clipping": {
        "build": mlp,
        "step": accumulating_step,
        "wrap": ddp,
        "batches": MICRO_BATCHES,
    },
    "a loss that is a module": {
        "build": mlp,
        "step": step_with_a_loss_module,
        "wrap": ddp,
        "batches": batches(6),
    },
    "convolutions": {"build": conv_net, "wrap": ddp, "batches": batches(2, 5, 5)},
    "tied and checkpointed, DDP": {"build": TiedModel, "wrap": ddp, "batches": tokens()},
    "tied and checkpointed, FSDP2": {
        "build": TiedModel,
        "wrap": fsdp2_in_one_unit,
        "batches": tokens(),
        "optimizer": adamw,
    },
    "packed sequences": {"build": PackedModel, "wrap": ddp, "batches": tokens()},
    "sparse gradients": {"build": sparse_embedding, "wrap": ddp, "batches": tokens(), "optimizer": sgd},
    "all ranks have all samples": {"build": mlp, "batches": batches(6), "data": "all"},
}

if compat.torch_version() < (2, 11):  # FSDP2 of torch 2.8 sums over gloo, but for float64.
    del PROGRAMS["FSDP2 in bfloat16"]


def assert_right(report: Report, name: str) -> None:
    assert report.verdict in (ParityVerdict.EQUAL, ParityVerdict.ROUNDING) and report.first is None, name
    assert report.num_compared > 50, name
    # Far below what is called a bug; in 16 bits, what one processor rounds and another does not is a larger part of it.
    assert report.largest_ratio < (60 if "bfloat16" in name else 20), f"{name}: {report}"


def test_a_right_program_is_equal_but_for_rounding() -> None:
    for name, report in parity_in_turn(PROGRAMS).items():
        assert_right(report, name)


def test_a_right_program_on_four_ranks_is_equal_but_for_rounding() -> None:
    assert_right(parity(mlp, wrap=fsdp2, batches=batches(6), ranks=4), "four ranks")


def test_one_rank_is_equal_to_the_bit() -> None:
    report = parity(mlp, ranks=1, batches=batches(6), optimizer=adamw)
    assert report.verdict is ParityVerdict.EQUAL and report.largest_ratio == 0
    assert str(report) == f"{report.num_compared} tensors are equal to the bit"


def test_autocast_is_off_in_compiled_modules_too() -> None:
    """Where it stands in the program, and where it stands in what is compiled; torch traces the latter."""

    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.layer(x)

    def dtypes() -> set[torch.dtype]:
        torch.compiler.reset()
        inside, outside = Casting(), nn.Linear(4, 2)
        inside.compile(backend="aot_eager")
        outside.compile(backend="aot_eager")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = outside(torch.ones(3, 4))
        return {output.dtype, inside(torch.ones(3, 4)).dtype}

    with full_precision():
        assert dtypes() == {torch.float32}
    assert dtypes() == {torch.bfloat16}


def test_policies_have_no_dtypes_in_full_precision() -> None:
    names = [each.name for each in fields(MixedPrecisionPolicy) if "dtype" in each.name]
    values: dict[str, Any] = {name: torch.bfloat16 if name.endswith("dtype") else lambda param: None for name in names}
    with full_precision():
        policy = MixedPrecisionPolicy(**values)
    assert [getattr(policy, name) for name in names] == [None] * len(names)
    assert vars(MixedPrecisionPolicy(**values)).items() >= values.items()


def test_dropout_is_refused_with_its_name() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"'1' draws random numbers in its forward, .*such as with Dropout\(p=0\)"):
        parity(lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout()), ranks=1, batches=[torch.ones(2, 2)])
    assert torch.equal(before, torch.get_rng_state())


@dataclass
class Batch:
    x: torch.Tensor


def test_batches_that_can_not_be_divided_are_refused() -> None:
    with pytest.raises(ValueError, match="got a Batch, which can't be divided between the ranks"):
        parity(mlp, batches=[Batch(torch.ones(2, 6))])
    with pytest.raises(ValueError, match="expected tensors of samples in each batch, got none"):
        parity(mlp, batches=[3])


class Discriminated(nn.Module):
    """Two models, each of which is wrapped by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 2)


def each_wrapped(model: nn.Module) -> nn.Module:
    assert isinstance(model, Discriminated)
    model.first, model.second = ddp(model.first), ddp(model.second)
    return model


def step_of_two(model: Any, optimizer: Any, batch: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model.second(model.first(batch).tanh()).square().mean()
    loss.backward()
    optimizer.step()
    return loss


class CastLinear(nn.Linear):
    """Computes in bfloat16 whatever the model is in."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.bfloat16(), self.bias.bfloat16()
        return nn.functional.linear(x.bfloat16(), weight, bias).to(x)


def casting() -> nn.Module:
    return nn.Sequential(CastLinear(6, 64), nn.Tanh(), CastLinear(64, 64), nn.Tanh(), CastLinear(64, 3))


def with_a_gradient_times_ten(model: nn.Module) -> nn.Module:
    if dist.get_rank() == 1:
        model.get_parameter("4.weight").register_hook(lambda grad: 10 * grad)
    return ddp(model)


def test_weights_in_bfloat16_hide_no_missing_average() -> None:
    with pytest.raises(ParityError, match="gradient of"):
        parity(mlp_in_bfloat16, batches=in_bfloat16(batches(6)), dtype=None)


def test_casts_to_bfloat16_hide_no_bug() -> None:
    assert parity(casting, wrap=ddp, batches=batches(6)).first is None
    for wrap in (unwrapped, with_a_gradient_times_ten):
        with pytest.raises(ParityError, match="gradient of"):
            parity(casting, wrap=wrap, batches=batches(6))


def built_with_casts() -> nn.Module:
    model = nn.Linear(6, 4)
    with torch.no_grad():
        model.weight.copy_(model.weight.bfloat16())
    return model


def test_casts_while_the_model_is_built_are_no_rounding_of_its_steps() -> None:
    batch = torch.ones(4, 6, dtype=torch.float64)
    program = ParityProgram(
        built_with_casts, mean_square_step, unwrapped, sgd_with_momentum, (batch,), "all", torch.float64, 0
    )
    _, rounding = program.measure()
    assert 0.0 < max(rounding.values()) < 1e-12


class FullyCompiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.compile(self.layer.forward, backend="eager", fullgraph=True)(x)


def test_casts_are_looked_for_in_compiled_models_too() -> None:
    assert parity(FullyCompiled, ranks=1, batches=batches(6)).verdict is ParityVerdict.EQUAL
    with CastRecorder() as casts:
        torch.compile(torch.Tensor.bfloat16, backend="eager", fullgraph=True)(torch.ones(2))
        torch.cond(torch.tensor(True), torch.neg, torch.abs, (torch.ones(2),))
    assert casts.eps == torch.finfo(torch.bfloat16).eps


class InputParallelLinear(nn.Module):
    """Has some columns of the weight on each rank, and lacks the all-reduce."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        return nn.functional.linear(x.chunk(num_ranks, -1)[rank], self.weight.chunk(num_ranks, 1)[rank])


def without_bias() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6, bias=False), nn.Tanh())


def input_parallel(model: nn.Module) -> nn.Module:
    layers = cast(nn.Sequential, model)
    layers[2] = InputParallelLinear(cast(nn.Linear, layers[2]))
    return model


def test_a_layer_that_lacks_its_all_reduce_is_named() -> None:
    with pytest.raises(ParityError, match=r"^step 1: output of 2 differs on "):
        parity(without_bias, wrap=input_parallel, data="all", batches=batches(6))


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def test_flat_parameters_of_fsdp1_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^parity: the model is wrapped by torch's FullyShardedData"):
        parity(mlp, wrap=fsdp1, batches=batches(6))


def test_functions_that_ranks_cannot_find_are_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match=r"parity: new processes cannot find .*: it is a lambda"):
        parity(lambda: pytest.fail("it ran"), batches=batches(6))


def test_two_models_of_one_program_have_their_names() -> None:
    report = parity(Discriminated, step_of_two, each_wrapped, batches=batches(6))
    assert report.first is None and report.num_compared > 20


def test_samples_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected samples that 3 ranks divide evenly, got .*\(8, 6\)"):
        parity(mlp, ranks=3, batches=batches(6))
    with pytest.raises(ValueError, match="num_ranks of at least 1, got 0"):
        parity(mlp, ranks=0, batches=batches(6), data="all")


def test_an_unsynchronized_batch_norm_is_the_only_difference() -> None:
    with pytest.raises(AssertionError, match="output of 1 differs on ranks 0, 1"):
        parity(with_batch_norm, wrap=ddp, batches=batches(6))
