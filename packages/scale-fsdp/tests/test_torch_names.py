"""torch's own names: what FSDP2's `fully_shard` takes and adds to a module, and a program written for it."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from fsdp_parity import noise
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh

from scale_check.exact import assert_equal
from scale_core import compat
from scale_core.comm.group import group_of
from scale_core.shard import shard_of
from scale_fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, ShardOptions, UnshardHandle, fully_shard
from scale_fsdp.runtime.unit import unit_of, units_in


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.ffn_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (w(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ffn_norm(x))))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int = 17, width: int = 8, heads: int = 2, layers: int = 3) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(6, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def program(api: Any, half: bool, clips: bool) -> tuple[list[float], dict[str, Tensor]]:
    """A training script written for FSDP2; `api` is where its names are imported from."""
    rank, world = group_of().rank, group_of().size
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = Transformer()
    start = copy.deepcopy(model.state_dict())
    kwargs: dict[str, Any] = {"mesh": mesh, "offload_policy": api.OffloadPolicy()}
    if half:
        kwargs["mp_policy"] = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        api.fully_shard(layer, reshard_after_forward=True, **kwargs)
    api.fully_shard([model.norm, model.output], **kwargs)
    api.fully_shard(model, **kwargs)
    assert isinstance(model, Transformer) and isinstance(model, api.FSDPModule)
    for here, following in zip(model.layers, model.layers[1:], strict=False):
        here.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([here])
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    set_model_state_dict(model, start, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        model.unshard()
        for micro_batch in range(2):
            last = micro_batch == 1
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
            tokens = torch.randint(17, (2, 7), generator=generator)
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten()) / 2
            loss.backward()
            losses.append(loss.item())
        if clips:
            losses.append(float(norm_of(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5))))
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:  # As a checkpoint, out and in.
            state, state_of_optimizer = (
                get_model_state_dict(model, options=options),
                get_optimizer_state_dict(model, optimizer, options=options),
            )
            if rank != 0:
                state, state_of_optimizer = {}, {}
            whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(model, state, options=whole)
            set_optimizer_state_dict(model, optimizer, state_of_optimizer, options=whole)
    return losses, get_model_state_dict(model, options=options)


def norm_of(norm: Tensor) -> Tensor:
    """What torch's DTensor has as `full_tensor()`."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


fsdp2_averages = pytest.mark.skipif(compat.torch_version() < (2, 11), reason="FSDP2 of torch 2.8 sums over gloo")
APIS = [importlib.import_module(name) for name in ("torch.distributed.fsdp", "scale_fsdp")]


@fsdp2_averages
@pytest.mark.ranks(2)
def test_a_program_for_fsdp2_computes_the_same() -> None:
    """In bf16, without clipping, to the bit."""
    (theirs, their_state), (ours, our_state) = (program(api, half=False, clips=True) for api in APIS)
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert list(our_state) == list(their_state)
    torch.testing.assert_close(dict(our_state), dict(their_state), rtol=1e-5, atol=1e-6)
    in_bf16 = [program(api, half=True, clips=False) for api in APIS]
    assert_equal(in_bf16[1], in_bf16[0])


@fsdp2_averages
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.ranks(2, in_turn=True)
def test_each_unit_casts_its_inputs_as_fsdp2_to_the_bit(grouped: bool) -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
            return self.linear(x * shift) + shift

    class HandsOnFp32(nn.Module):
        """Hands tensors in fp32 to modules in it, by position and by name."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.block = nn.Linear(4, 4), nn.Linear(4, 4), Shifted()

        def forward(self, x: Tensor) -> Tensor:
            angles = torch.arange(4.0) / 3
            return self.block(self.second(self.first(x.float()).float()), shift=angles.cos())

    def hand_on_fp32(api: Any, grouped: bool) -> list[tuple[Tensor, dict[nn.Parameter, Tensor]]]:
        """The outputs of two steps, and the gradients: of FSDP2 whole, of ours the local shards."""
        torch.manual_seed(0)
        model = HandsOnFp32()
        policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        pair = [model.first, model.second]
        for unit in ([pair] if grouped else pair) + [model.block, model]:
            api.fully_shard(unit, mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = []
        for step in range(2):
            out = model(torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + group_of().rank)))
            out.float().square().sum().backward()
            steps.append((out.detach(), {param: norm_of(param.grad) for param in model.parameters()}))
            optimizer.step()
            optimizer.zero_grad()
        return steps

    theirs, ours = (hand_on_fp32(api, grouped) for api in APIS)
    for step, ((their_out, their_grads), (out, grads)) in enumerate(zip(theirs, ours, strict=True)):
        assert out.dtype == torch.bfloat16 and torch.equal(out, their_out)
        for whole, (param, grad) in zip(their_grads.values(), grads.items(), strict=True):
            assert torch.equal(whole, grad), f"step {step}: gradient of {shard_of(param).name}"


@fsdp2_averages
@pytest.mark.filterwarnings("ignore::FutureWarning:torch.distributed.checkpoint")
@pytest.mark.ranks(2)
def test_recipes_of_dcp_load_what_either_import_has_saved(tmp_path: Path) -> None:
    def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
        losses = []
        for step in steps:
            generator = torch.Generator().manual_seed(10 * step + group_of().rank)
            tokens = torch.randint(17, (2, 7), generator=generator)
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def built(api: Any, seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = Transformer(layers=1)
        api.fully_shard(model.layers[0])
        api.fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    class AppState(Stateful):
        """What the recipes for torch.distributed.checkpoint give it: both states, under the names of the model."""

        def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            self.model, self.optimizer = model, optimizer

        def state_dict(self) -> dict[str, Any]:
            model, optimizer = get_state_dict(self.model, self.optimizer)
            return {"model": model, "optimizer": optimizer}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            states = {"model_state_dict": state_dict["model"], "optim_state_dict": state_dict["optimizer"]}
            set_state_dict(self.model, self.optimizer, **states)

    def load_and_train(api: Any, states_in: str, app_in: str) -> tuple[list[float], list[float]]:
        model, optimizer = built(api, seed=1)
        states = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(states, checkpoint_id=f"{states_in}/states")
        set_model_state_dict(model, states["model"])
        set_optimizer_state_dict(model, optimizer, states["optimizer"])
        after_states = steps_of(model, optimizer, range(2, 4))
        model, optimizer = built(api, seed=2)
        dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=f"{app_in}/app")
        return after_states, steps_of(model, optimizer, range(2, 4))

    def save_and_train_on(api: Any, folder: str) -> list[float]:
        """Saves both states after two steps, in each way of torch's recipes; returns the losses that follow."""
        model, optimizer = built(api)
        steps_of(model, optimizer, range(2))
        states = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(states, checkpoint_id=f"{folder}/states")
        app, group = AppState(model, optimizer), torch.distributed.new_group()  # The writing thread has its own.
        saving = dcp.async_save({"app": app}, checkpoint_id=f"{folder}/app", process_group=group)
        after = steps_of(model, optimizer, range(2, 4))  # Beside the writing, which has copied what it writes.
        saving.result()
        return after

    folder = str(tmp_path)
    theirs, ours = APIS
    saved = save_and_train_on(theirs, f"{folder}/theirs"), save_and_train_on(ours, f"{folder}/ours")
    # Each loads the states that the other has saved, and its own of the other form.
    loaded = load_and_train(theirs, f"{folder}/ours", f"{folder}/theirs")
    found = (*saved, *loaded, *load_and_train(ours, f"{folder}/theirs", f"{folder}/ours"))
    for losses in found:
        assert losses == pytest.approx(found[0], rel=1e-6)


@pytest.mark.parametrize(
    "argument, line",
    [
        ("process_group", "mesh="),
        ("mixed_precision", "mp_policy=MixedPrecisionPolicy"),
        ("compute_dtype", "mp_policy=MixedPrecisionPolicy"),
        ("fp32_reduce_scatter", "reduce_dtype=torch.float32"),
        ("move_params_to_cpu", r"offload_policy=CPUOffloadPolicy\(\)"),
        ("move_grads_to_cpu", "FullyShardedDataParallel"),
        ("state_dict_device", "full_state_dict"),
        ("state_dict_on_rank_0_only", "full_state_dict"),
    ],
)
def test_another_library_s_argument_says_what_to_write(argument: str, line: str) -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=f"fully_shard: there is no argument {argument}=; write .*{line}"):
        fully_shard(layer, **{argument: None})
    assert type(layer) is nn.Linear


def test_dp_mesh_dims_may_be_none_as_in_fsdp2_and_nothing_else() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"expected dp_mesh_dims to be None, got 'dp'; write mesh= .*mesh\["):
        fully_shard(layer, dp_mesh_dims="dp")
    assert type(layer) is nn.Linear
    assert isinstance(fully_shard(layer, dp_mesh_dims=None), FSDPModule)


def steps_in_backward(flatten: bool, in_hooks: bool) -> list[Any]:
    """Trains with one optimizer for each parameter, that steps in the backward pass if `in_hooks`."""
    torch.manual_seed(0)
    model = Transformer(layers=2)
    for module in (*model.layers, model):
        fully_shard(module, options=ShardOptions(flatten_parameters=flatten))
    calls: list[str] = []
    optimizers = {param: torch.optim.AdamW([param], lr=1e-2) for param in model.parameters()}

    def step(name: str, param: Tensor) -> None:
        assert not torch.is_grad_enabled()
        calls.append(name)
        optimizers[param].step()
        optimizers[param].zero_grad()

    for name, param in model.named_parameters() if in_hooks else ():
        param.register_post_accumulate_grad_hook(functools.partial(step, name))
    losses: list[Any] = []
    for number in range(4):
        generator = torch.Generator().manual_seed(10 * number + group_of().rank)
        tokens = torch.randint(17, (2, 7), generator=generator)
        model.set_requires_gradient_sync(number != 1)
        if number == 3 and not flatten:
            model.layers[0].wq.weight.requires_grad_(False)
        loss = model(tokens[:, :-1]).square().mean()
        loss.backward()
        if in_hooks:
            trained = [n for n, p in model.named_parameters() if p.requires_grad]
            assert sorted(calls) == ([] if number == 1 else sorted(trained)), (number, calls)
            calls.clear()
        elif number != 1:
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(param.detach().clone() for param in model.parameters())]


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.ranks(2, in_turn=True)
def test_optimizers_in_hooks_step_when_gradients_are_reduced(flatten: bool) -> None:
    inside, after = (steps_in_backward(flatten, in_hooks) for in_hooks in (True, False))
    assert_equal(inside, after)


@pytest.mark.ranks(2)
def test_hooks_of_what_no_rank_has_used_are_not_called() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor, right: bool) -> Tensor:
            return self.right(x) if right else self.left(x)

    model = fully_shard(TwoHeads())
    calls: list[str] = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    left, right = ["left.bias", "left.weight"], ["right.bias", "right.weight"]
    # No rank, one rank or all of them use the right head.
    for uses_right, expected in ((False, left), (group_of().rank == 1, left + right), (True, right)):
        model(noise(4, 3), uses_right).sum().backward()
        assert sorted(calls) == expected
        calls.clear()
        model.zero_grad()


def test_shard_placement_fn_has_no_effect() -> None:
    from torch.distributed.tensor import Shard

    with pytest.warns(UserWarning, match="shard_placement_fn has no effect here"):
        layer = fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda param: Shard(1) if param.ndim == 2 else None)
    assert [tuple(param.shape) for param in layer.parameters()] == [(2, 2), (2,)]
    seen: list[nn.Parameter] = []
    plain = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="has no effect"):
        fully_shard(plain, shard_placement_fn=seen.append, ignored_params={plain.bias})
    assert len(seen) == 1 and seen[0].ndim == 2
    fully_shard(nn.Linear(2, 2), shard_placement_fn=None)
    plain, result = nn.Linear(2, 2), object()  # A ShardPlacementResult has ranks of its own.
    with pytest.raises(ValueError, match=r"shard_placement_fn: .* 'bias'"):
        fully_shard(plain, shard_placement_fn=lambda param: result if param.ndim == 1 else None)
    assert type(plain) is nn.Linear


def test_arguments_of_the_wrong_kind_are_refused() -> None:
    for wrong, message in (
        ({"module": []}, "got an empty list"),
        ({"module": [nn.Linear(2, 2), "x"]}, "expected an nn.Module or a list of them, got str"),
        ({"module": nn.Linear(2, 2), "offload_policy": "cpu"}, "offload_policy: expected"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            fully_shard(**wrong)


def test_pinned_memory_can_be_declined() -> None:
    for policy, params_on_host, pins in (
        (OffloadPolicy(), False, True),
        (CPUOffloadPolicy(), True, True),
        (CPUOffloadPolicy(pin_memory=False), True, False),
    ):
        unit = unit_of(fully_shard(nn.Linear(2, 2), offload_policy=policy))
        assert unit is not None
        placement = unit.options.placement
        found = placement.params_on_host, placement.grads_on_host, placement.pin_memory
        assert found == (params_on_host, params_on_host, pins)
        assert unit.buffers[0].devices.pin_memory is pins


@pytest.mark.ranks(2)
def test_several_modules_are_one_unit() -> None:
    class Grouped(nn.Module):
        """Two modules that are one unit, the second of which runs after another unit."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first, self.middle, self.last = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor, to_the_end: bool = True) -> Tensor:
            x = self.middle(self.first(x).tanh())
            return self.last(x) if to_the_end else x

    plain, rank = Grouped(), group_of().rank
    model = copy.deepcopy(plain)
    fully_shard(model.middle)
    assert fully_shard([model.first, model.last]) == [model.first, model.last]
    fully_shard(model)
    unit = unit_of(model.first)
    assert unit is not None and unit is unit_of(model.last) and units_in(model).count(unit) == 1
    assert_equal(model, plain)
    between: list[bool] = []
    model.middle.register_forward_hook(lambda *_: between.append(unit.gathered))
    for to_the_end in (True, False, True):
        inputs = [noise(4, 3, seed=seed) for seed in range(group_of().size)]
        sum(plain(x, to_the_end).square().mean() / len(inputs) for x in inputs).backward()
        model(inputs[rank], to_the_end).square().mean().backward()
        assert not unit.gathered, "stays gathered"
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0, atol=1e-6)
    assert_equal(copy.deepcopy(model), model, "copied")
    model.load_state_dict(Grouped().state_dict())
    assert_equal(model, Grouped(), "loaded")
    assert between == [True] * 3, f"gathered in between: {between}"


@pytest.mark.ranks(2)
def test_ignored_parameters_and_their_gradients_stay_full() -> None:
    rank = group_of().rank
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    left = model[0].weight
    fully_shard(model, ignored_params={left})
    for _ in range(2):
        model(noise(2, 3, seed=rank)).sum().backward()
    assert model[0].weight is left and left.shape == (3, 3) and left.grad is not None, "it was sharded"
    everyone = [torch.empty_like(left.grad) for _ in range(2)]
    torch.distributed.all_gather(everyone, left.grad)
    assert not torch.equal(*everyone), "its gradient was averaged"
    assert torch.equal(model.state_dict()["0.weight"], left), "it is not in the state"


@pytest.mark.ranks(2)
def test_only_none_lets_the_first_unit_decide_for_itself() -> None:
    for reshard, stays in ((None, True), (True, False), (False, True)):
        model = fully_shard(nn.Sequential(fully_shard(nn.Linear(3, 3)), nn.Linear(3, 3)), reshard_after_forward=reshard)
        loss = model(noise(2, 3)).sum()
        assert unit_of(model).gathered == stays, reshard
        loss.backward()
    model.set_reshard_after_forward(True)
    model(noise(2, 3)).sum()
    assert not unit_of(model).gathered


@pytest.mark.ranks(2)
def test_gradients_are_divided_by_the_factor_that_was_set() -> None:
    def copy_of(model: nn.Module) -> nn.Linear:
        layer = nn.Linear(3, 2)
        layer.load_state_dict(model.state_dict())
        return layer

    for mesh in (None, init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))):
        plain = fully_shard(nn.Linear(3, 2), mesh)
        scaled = fully_shard(copy_of(plain), mesh)
        scaled.set_gradient_divide_factor(1.0)
        for model in (plain, scaled):
            model(noise(2, 3, seed=group_of().rank)).square().sum().backward()
        pairs = zip(plain.parameters(), scaled.parameters(), strict=True)
        assert all(torch.equal(a.grad * 2, b.grad) for a, b in pairs), f"{mesh}"


DIFFERENCES = Path(__file__).parents[3] / "docs/guides/migration-fsdp.md"


def test_whatever_fsdp2_has_is_here_and_in_the_table() -> None:
    (theirs, ours), table = APIS, DIFFERENCES.read_text(encoding="utf-8")
    pairs = {
        name: (value, getattr(ours, name))
        for name in ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx", "UnshardHandle")
        if (value := getattr(theirs, name, None)) is not None  # torch 2.8 has fewer
    }
    methods = {name: value for name, value in vars(theirs.FSDPModule).items() if not name.startswith("_")}
    pairs |= {name: (value, getattr(FSDPModule, name, None)) for name, value in methods.items()}
    wrong = [f"{name} is not in the table" for name in pairs if name not in table]
    for name, (their, our) in pairs.items():
        if our is None:
            wrong.append(f"{name} is not here")
        elif inspect.isfunction(their):
            taken = inspect.signature(our).parameters
            for argument, parameter in inspect.signature(their).parameters.items():
                if "kwargs" in taken:
                    continue
                if argument not in taken or taken[argument].kind < parameter.kind < taken[argument].KEYWORD_ONLY:
                    wrong.append(f"{name} does not take {argument}=")
                elif parameter.default in (None, True, False) and taken[argument].default is not parameter.default:
                    wrong.append(f"{name} takes another default for {argument}=")
    arguments = list(inspect.signature(theirs.fully_shard).parameters)[1:]
    wrong += [f"fully_shard's {name}= is not in the table" for name in arguments if f"{name}=" not in table]
    assert wrong == []


def test_fsdp2_s_methods_are_there_or_say_what_to_do() -> None:
    model = fully_shard(nn.Linear(2, 2))
    model.set_requires_all_reduce(False)  # Without replicas nothing is left to switch off.
    model.set_reduce_scatter_unused_params(True)
    model.set_force_sum_reduction_for_comms(True)
    model.set_post_optim_event(torch.cpu.current_stream().record_event())  # None, on a CPU
    handle = model.unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    handle.wait()
    model.reshard()
    refused = ["set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"]
    refused += ["set_keep_unsharded_storage", "set_manual_backward_finalization", "finalize_backward"]
    for name in refused:
        with pytest.raises(NotImplementedError, match=f"{name} is a method of FSDP2 that is not supported here: .* "):
            getattr(model, name)(None)
    with pytest.warns(UserWarning, match="set_unshard_in_backward has no effect here"):
        model.set_unshard_in_backward(False)
    with pytest.raises(ValueError, match="expected a factor above 0"):
        model.set_gradient_divide_factor(0.0)
    with pytest.raises(TypeError, match="expected True or False, got 2"):
        model.set_reshard_after_forward(2)


@pytest.mark.ranks(4)
def test_micro_batches_without_all_reduce_add_up_to_the_average() -> None:
    """The gradients after the last micro-batch are FSDP2's. They are integers, whose sums are exact in any order."""
    model = fully_shard(nn.Linear(2, 4), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    for number in range(3):
        warned = pytest.warns(UserWarning, match=r"write set_requires_gradient_sync\(False\)")
        with warned if number < 2 else nullcontext():
            model.set_requires_all_reduce(number == 2)
        model(torch.full((1, 2), 4.0 * (group_of().rank + number))).sum().backward()
    average = sum(4.0 * (rank + number) for rank in range(4) for number in range(3)) / 4
    assert_equal(model.weight.grad.full_tensor(), torch.full((4, 2), average))
    assert_equal(model.bias.grad.full_tensor(), torch.full((4,), 3.0))


def test_a_pass_that_was_cut_off_is_ended_by_hand() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(2, 2)))
    loss = model(noise(1, 2)).sum()
    model.reset_iter_state()
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("dim", [1, -2])
def test_a_placement_along_a_missing_dimension_is_named(dim: int) -> None:
    from torch.distributed.tensor import Shard

    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"shard_placement_fn: expected .* dimension of 'bias' \[2\]"):
        fully_shard(layer, shard_placement_fn=lambda param: Shard(dim))
    assert unit_of(layer) is None


@pytest.mark.ranks(2)
def test_schedules_of_torch_wrap_a_step_on_shards() -> None:
    def weights_with_a_schedule(sharded: bool) -> Tensor:
        torch.manual_seed(0)
        layer = nn.Linear(3, 3, dtype=torch.float64)
        if sharded:
            fully_shard(layer)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.ones(2, 3, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
            schedule.step()
        return layer.state_dict()["weight"]

    assert torch.allclose(weights_with_a_schedule(True), weights_with_a_schedule(False), rtol=1e-12)
