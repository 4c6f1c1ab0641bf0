"""`OSS`, `ShardedDataParallel`, `AdaScale` and the scalers: FairScale's order of arguments, errors and attributes."""

import copy
import pickle
import warnings
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import scale_oss
from fairscale import _warnings
from fairscale._warnings import FairScaleWarning
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim import OSS, Adam, AdaScale, AdaScaleWrapper, GradScaler, Precision
from fairscale.optim.grad_scaler import OptState, ShardedGradScaler
from fairscale.optim.layerwise_gradient_scaler import LayerwiseGradientScaler
from scale_core.errors import DivergenceError
from scale_core.sharded_tensor.replicated_parameter import unreduced_grad
from scale_core.sharded_tensor.tensor import local_tensor
from scale_oss import OSSOptions


@pytest.fixture(autouse=True)
def _nothing_said() -> None:
    _warnings.warn_once.cache_clear()


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


class FairseqOSS(OSS):
    """As fairseq subclasses it."""

    @property
    def disable_mem_eff_fp16_loading_hack(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("supports") and hasattr(self.optim, name):
            return getattr(self.optim, name)
        raise AttributeError(f"FairseqOSS has no attribute {name!r}")


@pytest.mark.ranks(2)
def test_oss_is_built_and_subclassed_as_trainers_do() -> None:
    """As Lightning and fairseq construct it, on two ranks."""
    module = model()
    plain = torch.optim.AdamW(module.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lightning = OSS(params=plain.param_groups, optim=type(plain), **plain.defaults)
        lightning.broadcast_fp16 = False
        lightning._clear_cache()
        lightning.refresh_trainable()
        wrapped = ShardedDataParallel(module, sharded_optimizer=[lightning], reduce_buffer_size=0)
        other = model()
        fairseq = FairseqOSS([{"params": list(other.parameters())}], torch.optim.SGD, group=dist.group.WORLD, lr=0.1)
    for parallel, optimizer in ((wrapped, lightning), (ShardedDataParallel(other, fairseq), fairseq)):
        with parallel.no_sync():
            parallel(torch.ones(2, 4)).sum().backward()
        parallel.reduce()
        with pytest.raises(AssertionError, match="No grads waiting to be reduced"):
            parallel.reduce()
        assert optimizer.clip_grad_norm(0.1) > 0.1
        optimizer.step()
        assert isinstance(optimizer.optim, torch.optim.Optimizer)
        optimizer.consolidate_state_dict(recipient_rank=-1)
        optimizer.load_state_dict(optimizer.state_dict())
    for rank in range(2):  # all ranks hold the same
        held = [param.detach().clone() for param in wrapped.parameters()]
        for tensor in held:
            dist.broadcast(tensor, rank)
        assert all(map(torch.equal, held, wrapped.parameters()))
    assert [str(warning.message) for warning in caught] == [
        "OSS(group=): is process_group in new code: scale_oss.OSS(params, SGD, process_group=group)",
    ]


@pytest.mark.ranks(2)
def test_adascale_keeps_its_gain_on_gradients_averaged_by_hand() -> None:
    """A step of AdaScale on gradients that the program averages has the last gain; on others there is an error."""
    module = model()
    before = [param.detach().clone() for param in module.parameters()]
    optimizer = AdaScale(torch.optim.SGD(module.parameters(), lr=0.5))
    module(torch.full((2, 4), 1.0 + dist.get_rank())).square().sum().backward()
    with pytest.raises(RuntimeError, match="to have the same averaged gradients"):
        optimizer.step()
    for param in module.parameters():
        assert param.grad is not None
        dist.all_reduce(param.grad)
        param.grad /= 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    for param, old in zip(module.parameters(), before, strict=True):
        assert torch.equal(param, old - 0.5 * param.grad)
    assert (optimizer.gain(), optimizer.progress, len(optimizer._hook_handles)) == (1.0, 1.0, 4)
    (warning,) = caught
    assert "the gain stays what it was" in str(warning.message)
    adascale = AdaScale(torch.optim.SGD([parameter := nn.Parameter(torch.zeros(3))], lr=0.1))
    parameter.grad = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, -3.0]][dist.get_rank()])
    assert adascale._compute_intra_grad_corr_mean() == pytest.approx(-4 / 28**0.5)


@pytest.mark.ranks(2)
def test_unreduced_gradients_are_stepped_on_with_a_warning() -> None:
    """Each part of the parameters takes the step of the rank that updates it; what a scaler divides must be reduced."""
    module = model()
    optimizer = OSS(module.parameters(), torch.optim.SGD, lr=0.5)
    wrapped = ShardedDataParallel(module, optimizer)
    said = []
    for step in range(2):  # the second after one whose gradients were kept
        before = [param.detach().clone() for param in wrapped.parameters()]
        with wrapped.no_sync():
            wrapped(torch.full((2, 4), 1.0 + step + dist.get_rank())).square().sum().backward()
        grads = [[torch.zeros_like(param) for _ in range(2)] for param in module.parameters()]
        for param, by_rank in zip(module.parameters(), grads, strict=True):
            assert param.grad is not None
            dist.all_gather(by_rank, param.grad)
        with pytest.raises(RuntimeError, match=r"Call model\.reduce\(\) before"):
            ShardedGradScaler().unscale_(optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        said += [str(warning.message) for warning in caught]
        optimizer.wait()  # A buffer is a plain tensor, which does not wait by itself.
        (bucket,) = optimizer.buckets
        by_rank = optimizer.buckets[torch.device("cpu")]
        assert torch.equal(torch.cat([part.buffer for part in by_rank.values()]), bucket.full)
        own = by_rank[dist.get_rank()].buffer
        pieces = [piece for piece in map(local_tensor, bucket.optimizer_params) if piece.numel()]
        assert all(own.data_ptr() <= piece.data_ptr() < own.data_ptr() + own.nbytes for piece in pieces)
        for index, (param, old) in enumerate(zip(wrapped.parameters(), before, strict=True)):
            expected = old.flatten()
            for rank, spans in enumerate(bucket.partition.spans_by_rank):
                own = slice(spans[index].start, spans[index].stop)
                expected[own] -= 0.5 * grads[index][rank].flatten()[own]
            assert torch.equal(param.flatten(), expected) and unreduced_grad(param) is None
        wrapped(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    (text,) = said
    assert "run the last backward() before the step outside of no_sync(), or call model.reduce()" in text


def test_the_state_inside_is_found_by_parameter() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = OSS([parameter], torch.optim.SGD, lr=0.5, momentum=0.9)
    parameter.sum().backward()
    optimizer.step()
    assert torch.equal(optimizer.optim.state[parameter]["momentum_buffer"], torch.ones(2))
    assert optimizer.optim.state[nn.Parameter(torch.ones(2))] == {}
    optimizer.consolidate_state_dict()
    resumed = OSS([parameter], torch.optim.SGD, lr=0.1)
    resumed.load_state_dict(optimizer.state_dict())
    assert torch.equal(resumed.optim.state[parameter]["momentum_buffer"], torch.ones(2))
    assert resumed._per_device_params == {torch.device("cpu"): [[parameter]]}


def test_buckets_are_found_by_device_and_rank() -> None:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3, dtype=torch.float64))]
    optimizer = OSS(parameters[:1], torch.optim.SGD, lr=0.5)
    optimizer.add_param_group({"params": parameters[1:]})
    ((device, parts),) = optimizer.buckets.items()
    assert device == torch.device("cpu") and list(parts) == [0, 1]
    for part, parameter in zip(parts.values(), parameters, strict=True):
        assert (part.params, part.buffer.dtype) == ([parameter], parameter.dtype)
        part.buffer[0] = 7.0
        assert parameter[0] == 7.0
    with pytest.raises(KeyError, match="meta"):
        optimizer.buckets[torch.device("meta")]


def test_a_wrapped_model_may_be_half_for_a_while() -> None:
    module, plain = model(), model()
    optimizer = OSS(module.parameters(), torch.optim.SGD, lr=0.1)
    wrapped = ShardedDataParallel(module, optimizer)
    assert wrapped.half()(torch.ones(1, 4).half()).dtype == torch.float16
    with pytest.raises(RuntimeError, match=r"was torch\.float32 on cpu when OSS was built, and is torch\.float16"):
        optimizer.step()
    wrapped.float()
    reference = torch.optim.SGD(plain.half().float().parameters(), lr=0.1)
    for each, stepped in ((wrapped, optimizer), (plain, reference)):
        each(torch.ones(1, 4)).sum().backward()
        stepped.step()
    torch.testing.assert_close(dict(module.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)


@pytest.mark.ranks(2)
def test_half_precision_evaluates_between_a_pass_and_its_step() -> None:
    module = model()
    optimizer = OSS(module.parameters(), torch.optim.SGD, lr=0.1)
    wrapped = ShardedDataParallel(module, optimizer)
    wrapped(torch.ones(1, 4)).sum().backward()
    before = [local_tensor(param.grad).clone() for param in module.parameters() if param.grad is not None]
    with torch.no_grad():
        assert wrapped.eval().half()(torch.ones(1, 4).half()).dtype == torch.float16
    wrapped.train().float()
    grads = [local_tensor(param.grad) for param in module.parameters() if param.grad is not None]
    assert all(torch.equal(old.half().float(), new) for old, new in zip(before, grads, strict=True)) and grads
    optimizer.step()


def test_gradients_requiring_gradients_are_refused_before_a_pass() -> None:
    module = model()
    wrapped = ShardedDataParallel(module, OSS(module.parameters(), lr=0.1))
    module[2].bias.grad = torch.zeros(2, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"gradients that don't require grad, got one of '2\.bias'"):
        wrapped(torch.ones(1, 4))
    wrapped.eval()(torch.ones(1, 4))


def test_buckets_and_flags_of_fairscale_warn() -> None:
    with pytest.warns(FairScaleWarning, match="broadcast_buffer_size"):
        optimizer = OSS(model().parameters(), broadcast_buffer_size=10, lr=0.1)
    module = nn.Linear(2, 2)
    optimizer = OSS(module.parameters(), lr=0.1)
    with pytest.warns(FairScaleWarning, match="reduce_buffer_size"):
        wrapped = ShardedDataParallel(module, optimizer, reduce_buffer_size=100)
    with pytest.raises(AssertionError, match="Changing devices is not supported"):
        wrapped.to("meta")


def test_adascale_refuses_one_gradient_on_one_rank_as_fairscale() -> None:
    parameters = list(model().parameters())
    with pytest.raises(RuntimeError, match="AdaScale does not support a single worker without grad accumulation"):
        AdaScale(torch.optim.SGD(parameters, lr=0.1))
    optimizer = AdaScale(torch.optim.SGD(parameters, lr=0.1), num_gradients_to_accumulate=2)
    assert (optimizer.scale, optimizer._smoothing) == (2.0, optimizer.smoothing)
    wrapper = AdaScaleWrapper(
        model().parameters(), num_gradients_to_accumulate=4, debias_ewma=False, optim_cls=torch.optim.SGD, lr=0.1
    )
    assert wrapper.scale == 4.0


def test_adascale_gives_fairscales_gains() -> None:
    """The figures are those of FairScale's own tests."""
    for inputs, gain in (([[1.0, 0.0], [0.0, 1.0]], 4 / 3), ([[-1.0, 1.0], [1.0, -1.0]], 2.0)):
        layer = nn.Linear(2, 2, bias=False)
        optimizer = AdaScale(torch.optim.SGD(layer.parameters(), lr=0.1), num_gradients_to_accumulate=2)
        for each in inputs:
            (layer(torch.tensor(each)).sum() / 2).backward()
        if gain == 2.0:
            assert optimizer.gain() == pytest.approx(gain, rel=1e-5)
        else:
            assert 1.0 <= optimizer.gain() <= 2.0


@pytest.mark.parametrize("smoothing, gains", [(0.9, (4 / 3, 1.2, 2.0)), (0.5, (1.25, 1.2, 4 / 3))])
def test_an_added_groups_averages_count_steps_without_debiasing(smoothing: float, gains: tuple[float, ...]) -> None:
    """Means begin with zeros for these steps, averages that fade with the gain 1; moments are (0.5, 1) and (1, 0)."""
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = AdaScale(
        torch.optim.SGD([first], lr=0.1), smoothing=smoothing, num_gradients_to_accumulate=2, debias_ewma=False
    )
    for added in (False, True):
        if added:
            optimizer.add_param_group({"params": [second]})
            assert optimizer.gain(1) == 1.0
        for of_first, of_second in (([1.0, 1.0], [1.0, 0.0]), ([0.0, 1.0], [0.0, 1.0])):
            loss = (first * torch.tensor(of_first)).sum() + added * (second * torch.tensor(of_second)).sum()
            (loss / 2).backward()
        if added:
            assert (optimizer.gain(), optimizer.gain(0), optimizer.gain(1)) == pytest.approx(gains)
        optimizer.step()
        optimizer.zero_grad()


def test_scalers_take_the_scale_first() -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for scaler in (ShardedGradScaler(128.0), GradScaler(128.0)):
        scaler.scale(module(torch.ones(2, 4)).sum()).backward()
        assert scaler.get_scale() == 128.0
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert OptState.READY


def test_adam_is_torchs_where_it_can_be() -> None:
    expected, found = model(), model()
    for module, optimizer in (
        (expected, torch.optim.Adam(expected.parameters(), lr=0.1)),
        (found, Adam(found.parameters(), lr=0.1, precision=Precision.FULL_PRECISION)),
    ):
        module(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    torch.testing.assert_close(dict(found.state_dict()), dict(expected.state_dict()))
    with pytest.raises(NotImplementedError, match="MEMORY_EFFICIENT"):
        Adam(model().parameters(), precision=Precision.MEMORY_EFFICIENT_MIXED_PRECISION)
    with pytest.raises(RuntimeError, match="AMSGrad"):
        Adam(model().parameters(), amsgrad=True)


def test_layers_may_have_scales_of_their_own() -> None:
    expected, scaled = model(), model()
    inputs = torch.randn(3, 4)
    expected(inputs).sum().backward()
    scaler = LayerwiseGradientScaler(scaled, {"0": 8.0, "2": 64.0}, growth_interval=1)
    optimizer = torch.optim.SGD(scaled.parameters(), lr=0.0)
    scaler.scale()
    scaled(inputs).sum().backward()
    torch.testing.assert_close(scaled[2].weight.grad, 64 * expected[2].weight.grad)
    scaler.unscale()
    for found, true in zip(scaled.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.grad, true.grad)
    scaler.step(optimizer)
    scaler.update()
    assert [info.scaling_factor for info in scaler.get_layer_info()] == [16.0, 1.0, 128.0]
    scaler.scale()
    scaled(torch.full((1, 4), torch.inf)).sum().backward()
    scaler.unscale()
    scaler.update()
    assert scaler.get_layer_info()[0].scaling_factor == 8.0
    with pytest.raises(AssertionError, match="growth factor"):
        LayerwiseGradientScaler(scaled, {}, growth_factor=1.0)
    with pytest.raises(ValueError, match="no layer 'other'"):
        LayerwiseGradientScaler(scaled, {"other": 2.0})


@pytest.mark.ranks(2)
def test_the_first_step_makes_different_parameters_equal() -> None:
    """As in FairScale, each part comes from the rank that updates it. Later and under the wrapper it is an error."""
    rank = dist.get_rank()
    module = model()
    with torch.no_grad():
        module[0].weight.fill_(1.0 + rank)  # the first rank's part
        module[2].weight.fill_(3.0 + rank)  # the second rank's part
    optimizer = OSS(module.parameters(), torch.optim.SGD, lr=0.5, options=OSSOptions(check_replicas_every=1))
    (bucket,) = optimizer.buckets
    numel_by_rank = [[span.stop - span.start for span in spans] for spans in bucket.partition.spans_by_rank]
    assert numel_by_rank == [[16, 0, 0, 0], [0, 4, 8, 2]]
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    with pytest.warns(FairScaleWarning, match="ranks begin with different parameters"):
        optimizer.step()
    assert (module[0].weight == 0.5).all()
    assert (module[2].weight == 3.5).all()
    with torch.no_grad():
        module[0].weight.fill_(1.0 + rank)
    with pytest.raises(DivergenceError, match="step 2"):
        optimizer.step()
    other = model()
    optimizer = OSS(other.parameters(), torch.optim.SGD, lr=0.5)
    wrapped = ShardedDataParallel(other, optimizer)
    with torch.no_grad():
        other[0].weight.fill_(1.0 + rank)
    wrapped(torch.ones(1, 4)).sum().backward()
    with pytest.raises(DivergenceError, match="step 1"):
        optimizer.step()


@pytest.mark.ranks(2)
def test_the_first_step_makes_frozen_parameters_equal_too() -> None:
    value = 1.0 + dist.get_rank()
    params = [nn.Parameter(torch.full((4,), value), requires_grad=trains) for trains in (True, False)]
    optimizer = OSS(params, torch.optim.SGD, lr=0.5, options=OSSOptions(check_replicas_every=1))
    params[0].grad = torch.ones(4)
    with pytest.warns(FairScaleWarning, match="ranks begin with different parameters"):
        optimizer.step()
    optimizer.step()  # It compares all parameters, and would raise.
    assert set(params[1].tolist()) <= {1.0, 2.0}


class Residual(nn.Module):
    """With a parameter of its own, attention whose `out_proj` never runs, and branches around its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.position = nn.Parameter(torch.randn(3, 8))
        self.first = nn.Linear(8, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.last = nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = inputs + self.position
        x = x + self.first(input=x)
        return self.last(self.block(x) + x)


def test_scales_of_layers_leave_no_trace_in_outside_gradients() -> None:
    expected, scaled, inputs = Residual(), Residual(), torch.randn(2, 3, 8)
    expected(inputs).square().sum().backward()
    names = ["first", "block.norm1", "block.linear1", "block.self_attn.out_proj", "block.linear2", "last"]
    scaler = LayerwiseGradientScaler(scaled, {name: 2.0 ** (3 + number) for number, name in enumerate(names)})
    scaler.scale()
    scaled(inputs).square().sum().backward()
    assert torch.equal(scaled.first.weight.grad, 8 * expected.first.weight.grad)
    scaler.unscale()
    for (name, found), true in zip(scaled.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(found.grad, true.grad), name


def test_a_scaled_layer_that_writes_to_its_input_is_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    LayerwiseGradientScaler(module, {"1": 2.0}).scale()
    with pytest.raises(RuntimeError, match="modified inplace"):
        module(torch.ones(1, 4))


def test_scaled_layers_that_share_a_parameter_are_refused() -> None:
    module = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    module[2].weight = module[0].weight
    for name in ("0", "2"):
        with pytest.raises(ValueError, match=r"'0' and '2', which share 2\.weight"):
            LayerwiseGradientScaler(module, {name: 2.0})
    LayerwiseGradientScaler(module, {"1": 2.0})


def test_a_step_calls_each_hook_once_beside_a_new_optimizer() -> None:
    module, calls = model(), []
    optimizer = OSS(module.parameters(), torch.optim.SGD, lr=0.5)
    scale_oss.OSS(model().parameters(), torch.optim.SGD, lr=0.5)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert calls == ["before", "after"]


def test_the_optimizer_inside_and_its_state_are_copied() -> None:
    module = model()
    optimizer = OSS(module.parameters(), torch.optim.SGD, lr=0.5, momentum=0.9)
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = optimizer.optim.state
    inside = copy.deepcopy(optimizer.optim).state
    for copied in (inside, copy.deepcopy(state), copy.copy(state), state.copy(), pickle.loads(pickle.dumps(state))):
        assert type(copied) is defaultdict
        for ours, theirs in zip(state.values(), copied.values(), strict=True):
            assert torch.equal(ours["momentum_buffer"], theirs["momentum_buffer"])
