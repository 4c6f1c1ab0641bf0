"""`FullyShardedDataParallel` of the alias: FairScale's arguments, names, attributes and errors."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairscale import _warnings
from fairscale._warnings import FairScaleWarning
from fairscale.nn import FlattenParamsWrapper, FullyShardedDataParallel, auto_wrap, enable_wrap, wrap
from fairscale.nn.data_parallel import TrainingState, auto_wrap_bn, get_fsdp_instances
from fairscale.nn.wrap import config_auto_wrap_policy
from fairscale.nn.wrap.auto_wrap import ConfigAutoWrap
from fairscale.utils.testing import DummyProcessGroup
from scale_core.errors import ContractError
from scale_core.shard import as_local
from scale_core.state import sharded_state_dict


@pytest.fixture(autouse=True)
def _nothing_said() -> None:
    _warnings.warn_once.cache_clear()


def plain_model(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))


def nested_model() -> FullyShardedDataParallel:
    module = plain_model()
    module[0] = FullyShardedDataParallel(module[0])
    return FullyShardedDataParallel(module)


def test_the_wrapper_inside_has_flat_parameters_and_the_module() -> None:
    module = plain_model()
    model = FullyShardedDataParallel(module)
    assert isinstance(model.module, FlattenParamsWrapper)
    assert model.module.module is module
    assert model.module.flat_param is model.params[0]
    assert model.module.num_params_managed == 6
    assert isinstance(model[3], nn.Linear) and isinstance(model.module[3], nn.Linear)
    assert [name for name, _ in model.named_parameters()] == ["_fsdp_wrapped_module.flat_param_0"]
    assert list(model.state_dict()) == list(model.module.state_dict()) == list(plain_model().state_dict())


def test_attributes_are_read_as_in_fairscale() -> None:
    model = nested_model()
    assert (model.rank, model.world_size, model.flatten_parameters, model.mixed_precision) == (0, 1, True, False)
    assert (model.compute_dtype, model.buffer_dtype, model.cpu_offload) == (torch.float32, torch.float32, False)
    assert model.compute_device == model.state_dict_device == torch.device("cpu")
    assert model.training_state is TrainingState.IDLE and model._is_root is None
    assert get_fsdp_instances(model) == [model, model[0]]
    assert not model.has_full_params and model.params_with_grad == []
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append((model.training_state, model[0]._is_root, model._is_root)))
    model(torch.ones(2, 4)).sum().backward()
    assert seen == [(TrainingState.FORWARD, False, True)]
    assert len(model.params_with_grad) == 2 and len(model.params) == 1
    with model.summon_full_params():
        assert model.has_full_params and model.training_state is TrainingState.SUMMON_FULL_PARAMS
        assert [name for name, _ in model.named_parameters()] == [n for n, _ in plain_model().named_parameters()]
    model.assert_state(TrainingState.IDLE)
    with pytest.raises(ValueError, match=r"expected to be in states .*FORWARD.* but current state is .*IDLE"):
        model.assert_state([TrainingState.FORWARD])
    assert "world_size=1, flatten_parameters=True, mixed_precision=False" in repr(model)


def test_names_of_flat_parameters_have_the_wrappers_in_them() -> None:
    model = nested_model()
    inner = "_fsdp_wrapped_module._fpw_module.0._fsdp_wrapped_module.flat_param_0"
    named = dict(model.named_parameters())
    assert set(named) == {"_fsdp_wrapped_module.flat_param_0", inner}
    assert all(model.get_parameter(name) is param for name, param in named.items())
    assert [name for name, _ in model.named_parameters("model")] == [f"model.{name}" for name in named]
    assert list(model.state_dict()) == [name for name, _ in plain_model().named_parameters()]
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    saved = sharded_state_dict(model, optimizer)
    assert {key for key in saved if key.startswith("model.")} == {
        f"model.{name}" for name in plain_model().state_dict()
    }
    unflattened = FullyShardedDataParallel(plain_model(), flatten_parameters=False)
    assert [name for name, _ in unflattened.named_parameters()] == list(plain_model().state_dict())


def test_full_parameters_are_released_when_asked() -> None:
    model = FullyShardedDataParallel(plain_model())
    model(torch.ones(2, 4)).sum().backward()
    model.unshard()
    assert model.has_full_params
    model._free_full_params()
    assert not model.has_full_params


class Shifted(nn.Module):
    """Adds a buffer to its input, as positions are added, and normalizes by running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("shift", torch.full((4,), 1 / 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x + self.shift))


def test_buffers_take_the_compute_dtype_and_are_saved_in_theirs() -> None:
    model = FullyShardedDataParallel(Shifted(), mixed_precision=True).eval()
    assert model(torch.ones(2, 4)).dtype == model.module.shift.dtype == torch.float16
    assert model.module.norm.num_batches_tracked.dtype == torch.int64
    saved = model.state_dict()
    assert saved["shift"].dtype == saved["norm.running_mean"].dtype == torch.float32
    assert (
        FullyShardedDataParallel(Shifted(), mixed_precision=True, compute_dtype=torch.float32).module.shift[0] == 1 / 3
    )
    kept = FullyShardedDataParallel(Shifted(), mixed_precision=True, buffer_dtype=torch.float32)
    assert kept.module.shift.dtype == torch.float32
    assert FullyShardedDataParallel(Shifted().half(), compute_dtype=torch.float16).module.shift.dtype == torch.float16


@pytest.mark.ranks(2)
def test_a_write_to_a_state_dict_does_not_change_the_model() -> None:
    """State dicts have plain tensors, also of buffers that were cast and of a module around the wrapper."""
    torch.manual_seed(0)
    model = FullyShardedDataParallel(Shifted(), mixed_precision=True)
    for state in (model.state_dict(), nn.Sequential(model).state_dict()):
        assert {type(value) for value in state.values()} == {Tensor}
        before = {name: value.clone() for name, value in state.items()}
        for value in state.values():
            value.zero_()
        for value, old in zip(model.state_dict().values(), before.values(), strict=True):
            assert torch.equal(value, old)


def test_torch_checkpoint_functions_are_seen_as_the_caller() -> None:
    """`get_model_state_dict` passes nothing to `state_dict()`, so it is known as the caller, by its module's name."""
    caller = {"__name__": "torch.distributed.checkpoint.state_dict", "model": FullyShardedDataParallel(plain_model())}
    with pytest.raises(RuntimeError, match="get_model_state_dict finds no plain names"):
        exec("model.state_dict()", caller)


def test_a_module_is_wrapped_anew_as_it_was() -> None:
    module = plain_model()
    first = FullyShardedDataParallel(module)
    first(torch.ones(2, 4)).sum().backward()
    again = FullyShardedDataParallel(module)
    assert torch.equal(again(torch.ones(2, 4)), first(torch.ones(2, 4)))
    assert again.params[0] is first.params[0]
    with pytest.raises(ValueError, match="is sharded already"):
        FullyShardedDataParallel(module, reshard_after_forward=False)


def test_a_weight_that_two_wrappers_share_gets_both_gradients() -> None:
    module, plain = plain_model(), plain_model()
    for each in (module, plain):
        each[0].weight = each[2].weight
    for place in (0, 2):
        module[place] = FullyShardedDataParallel(module[place], flatten_parameters=False)
    with pytest.warns(FairScaleWarning, match="append_shared_param.* has no effect"):
        module[2].append_shared_param(module[0].module.weight)
    with pytest.raises(ValueError, match="is not in it: share it before the modules are wrapped"):
        module[2].append_shared_param(nn.Parameter(torch.ones(4, 4)))
    model = FullyShardedDataParallel(module)
    for each in (model, plain):
        each(torch.ones(2, 4)).square().sum().backward()
    torch.testing.assert_close(model[0].module.weight.grad, plain[0].weight.grad)
    assert model[0].module.weight is model[2].module.weight


def test_parameters_are_reset_in_summon_full_params_and_outside() -> None:
    linear = FullyShardedDataParallel(nn.Linear(4, 4), allow_reset_parameters=True)
    assert linear.process_group_reduce_scatter is linear.process_group
    values = [linear.state_dict()["weight"].clone()]
    with linear.summon_full_params():
        linear.reset_parameters()
    values.append(linear.state_dict()["weight"].clone())
    linear.reset_parameters()
    values.append(linear.state_dict()["weight"].clone())
    assert len({value.sum().item() for value in values}) == 3


def test_errors_have_fairscales_types_and_texts() -> None:
    model = nested_model()
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(AssertionError, match="clip_grad_norm should only be called on the root"):
        model[0].clip_grad_norm_(1.0)
    with pytest.raises(AssertionError, match="no_sync on inner FSDP is not supported"), model[0].no_sync():
        pass
    with pytest.raises(ValueError, match="fp32_reduce_scatter requires mixed_precision=True"):
        FullyShardedDataParallel(plain_model(), fp32_reduce_scatter=True)
    once, again = model.summon_full_params(), model.summon_full_params()
    with once, pytest.raises(ValueError, match="expected to be in states"), again:
        pass
    with pytest.raises(RuntimeError, match="reset parameters after FSDP wrapping is not allowed"):
        model.reset_parameters()
    with pytest.raises(TypeError, match="unsupported type for reduce_scatter process group"):
        FullyShardedDataParallel(plain_model(), process_group_reduce_scatter="all")
    with pytest.raises(AssertionError, match="isn't wrapped"), enable_wrap(wrapper_cls=FullyShardedDataParallel):
        wrap(model)
    with pytest.raises(AssertionError, match="wrapper_cls"), enable_wrap(flatten_parameters=True):
        pass


def test_arguments_of_fairscales_machinery_warn_once_at_the_call() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            FullyShardedDataParallel(plain_model(), bucket_cap_mb=5, cpu_offload=True)
        FullyShardedDataParallel(plain_model(), bucket_cap_mb=25, verbose=False, fp32_reduce_scatter=None)
    assert [str(warning.message).split(":")[0] for warning in caught] == [
        "FullyShardedDataParallel(bucket_cap_mb=)",
        "FullyShardedDataParallel(cpu_offload=)",
    ]
    assert {(warning.filename, warning.category) for warning in caught} == {(__file__, FairScaleWarning)}


def test_force_input_to_fp32_and_groups_of_one_rank_are_taken() -> None:
    model = FullyShardedDataParallel(plain_model(), DummyProcessGroup(rank=0, size=1), force_input_to_fp32=True)
    assert model(torch.ones(2, 4, dtype=torch.float16)).dtype == torch.float32


def test_copies_and_pickles_run_by_themselves() -> None:
    inputs, model = torch.randn(3, 4), nested_model()
    expected = model(inputs)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(inputs), expected)
        assert copied.module.module is not model.module.module
        assert len(get_fsdp_instances(copied)) == 2


def test_subclasses_may_have_arguments_and_methods_of_their_own() -> None:
    class Mine(FullyShardedDataParallel):
        def __init__(self, *args: Any, use_sharded_state: bool = False, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.use_sharded_state = use_sharded_state

        def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
            state = super().local_state_dict if self.use_sharded_state else super().state_dict
            return state(destination=destination, prefix=prefix, keep_vars=keep_vars)

    with enable_wrap(wrapper_cls=Mine, use_sharded_state=True, bucket_cap_mb=25):
        assert ConfigAutoWrap.in_autowrap_context and ConfigAutoWrap.kwargs["use_sharded_state"]
        model = wrap(plain_model())
    assert not ConfigAutoWrap.in_autowrap_context
    assert type(model) is Mine and list(model.state_dict()) == ["flat_param_0"]


def test_batch_norms_are_wrapped_by_themselves() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    wrapped = auto_wrap_bn(module)
    assert isinstance(wrapped[1], FullyShardedDataParallel) and not wrapped[1].flatten_parameters
    marked = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.warns(FairScaleWarning, match="single_rank_pg"):
        auto_wrap_bn(marked, single_rank_pg=True, wrap_it=False)
    assert marked[1].wrapper_config["reshard_after_forward"] is False
    with pytest.raises(AssertionError, match="wrapper_config already"):
        auto_wrap_bn(marked)
    with enable_wrap(config_auto_wrap_policy, wrapper_cls=FullyShardedDataParallel):
        assert isinstance(auto_wrap(marked)[1], FullyShardedDataParallel)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        model(inputs).square().mean().backward()
        optimizer.step()


def shards_of_optimizer_state(
    model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer, full: dict[str, Any]
) -> list[dict[str, Any]]:
    """What ranks make of the full state, which says whose it is as their own; the argument becomes it."""
    given = copy.deepcopy(full)
    shard = model.get_shard_from_optim_state_dict(given)
    assert shard is given and model.get_shard_from_optim_state_dict(shard) is shard
    own = optimizer.state_dict()
    assert (shard.keys(), shard["shards"]) == (own.keys(), own["shards"])
    if own["state"]:
        with as_local():
            torch.testing.assert_close(shard["state"], own["state"], rtol=0, atol=0)
    by_rank: list[Any] = [None, None]
    dist.all_gather_object(by_rank, shard)
    return by_rank


@pytest.mark.ranks(2)
def test_two_ranks_train_save_consolidate_and_resume() -> None:
    # In another order on each rank, as Tango wraps what it keeps in a set.
    module = plain_model()
    for index in (0, 2) if dist.get_rank() else (2, 0):
        module[index] = FullyShardedDataParallel(module[index])
    model = FullyShardedDataParallel(module)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, 2)
    local = model.local_state_dict(), model.local_metadata_dict()
    full = model.gather_full_optim_state_dict(optimizer)
    held = [full]
    dist.broadcast_object_list(held)
    unflattened = FullyShardedDataParallel(plain_model(), flatten_parameters=False)
    resumed = torch.optim.Adam(unflattened.parameters(), lr=0.01)
    unflattened.load_state_dict(model.state_dict())
    shards = shards_of_optimizer_state(model, optimizer, held[0])
    other = shards_of_optimizer_state(unflattened, resumed, held[0])
    with pytest.raises(ValueError, match="this optimizer state is the shard of rank"):
        resumed.load_state_dict(other[1 - dist.get_rank()])
    resumed.load_state_dict(other[dist.get_rank()])
    optimizer.load_state_dict(shards[dist.get_rank()])
    for each in ((model, optimizer), (unflattened, resumed)):
        train(*each, 2)
    by_rank: list[Any] = [None, None]
    dist.all_gather_object(by_rank, local)
    assert (full is not None) == (dist.get_rank() == 0)
    torch.testing.assert_close(dict(unflattened.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    assert held[0]["param_id_map"] == {name: n for n, (name, _) in enumerate(plain_model().named_parameters())}
    weights, metadata = zip(*reversed(by_rank), strict=True)  # in any order
    differing = FullyShardedDataParallel(plain_model(seed=dist.get_rank()))
    with pytest.raises(ContractError, match=r"torch\.manual_seed"):
        differing(torch.ones(1, 4))
    loaded = FullyShardedDataParallel(plain_model(seed=dist.get_rank()))
    loaded.load_state_dict(model.state_dict())
    loaded(torch.ones(1, 4))
    whole = FullyShardedDataParallel.consolidate_shard_weights(weights, metadata)
    reference = plain_model()
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.01)
    for step in (0, 1, 0, 1):
        optimizer.zero_grad()
        for rank in range(2):
            inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(2 * step + rank))
            (reference(inputs).square().mean() / 2).backward()
        optimizer.step()
    torch.testing.assert_close(whole, dict(reference.state_dict()), rtol=1e-5, atol=1e-6)
    (outer, *inner) = metadata[-1]["param_metadata"]
    assert outer["fsdp_path"] == "" and outer["params"]["flat_param_0"]["names"] == ["3.weight", "3.bias"]
    assert [each["fsdp_path"] for each in inner] == ["0", "2"]


def as_fairscale_saves(
    path: str, wanted: dict[str, Tensor], rank: int, *, whole: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """One of two ranks' chunk of these parameters, in one flat parameter, and FairScale's metadata of it."""
    flat = torch.cat([tensor.reshape(-1) for tensor in wanted.values()])
    size = len(flat) if whole else -(-len(flat) // 2)
    padding = 0 if whole else size * (rank + 1) - len(flat) if rank else 0
    chunk = flat if whole else nn.functional.pad(flat[size * rank : size * (rank + 1)], [0, padding])
    described = {
        "names": list(wanted),
        "shapes": [tuple(tensor.shape) for tensor in wanted.values()],
        "numels": [tensor.numel() for tensor in wanted.values()],
        "padding": padding,
    }
    entry = {"fsdp_path": path, "params": {"flat_param_0": described}, "no_broadcast_optim_state": whole}
    return {f"{path}.flat_param_0".lstrip("."): chunk}, {**entry, "shared_param_info": []}


def test_shards_that_fairscale_has_saved_become_whole_weights() -> None:
    outer = {"weight": torch.randn(3, 3), "bias": torch.randn(2)}
    inner = {"fc.weight": torch.randn(2, 2)}
    buffers = {"mean": torch.ones(2)}
    weights, metadata = [], []
    for rank in range(2):
        units = [as_fairscale_saves("", outer, rank), as_fairscale_saves("experts.0", inner, rank, whole=True)]
        units[0][1]["shared_param_info"] = [("weight", "head.weight")]
        weights.append({**units[0][0], **units[1][0], **buffers})
        metadata.append({"param_metadata": [unit for _, unit in units], "buffer_names": list(buffers)})
    consolidate = FullyShardedDataParallel.consolidate_shard_weights
    expected = {**outer, "experts.0.fc.weight": inner["fc.weight"], "head.weight": outer["weight"]}
    torch.testing.assert_close(consolidate(weights, metadata), {**expected, **buffers}, rtol=0, atol=0)
    torch.testing.assert_close(consolidate(weights, metadata, with_module_buffers=False), expected, rtol=0, atol=0)
    expert = {"experts.0.flat_param_0": weights[0]["experts.0.flat_param_0"]}
    assert list(consolidate([expert], metadata[:1], strict=False)) == ["experts.0.fc.weight"]
    with pytest.raises(ValueError, match="'flat_param_0' is missing in the weights"):
        consolidate([expert], metadata[:1])
    with pytest.raises(ValueError, match="expected 11 elements on all ranks together, got 6"):
        consolidate(weights[:1], metadata[:1])
    with pytest.raises(ValueError, match="Require metadata for each shard"):
        consolidate(weights, metadata[:1])
    weights[1]["experts.0.flat_param_0"] = torch.zeros(4)
    with pytest.raises(ValueError, match=r"'experts\.0\.flat_param_0' is another parameter on each rank"):
        consolidate(weights, metadata)


def test_metadata_says_which_parameters_are_shared() -> None:
    module = plain_model()
    module[0] = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[0][1].weight = module[0][0].weight
    module[0] = FullyShardedDataParallel(module[0])
    (outer, inner) = FullyShardedDataParallel(module).local_metadata_dict()["param_metadata"]
    assert (outer["shared_param_info"], inner["shared_param_info"]) == ([], [("0.weight", "1.weight")])


def test_a_whole_optimizer_state_loads_into_a_plain_optimizer() -> None:
    model = FullyShardedDataParallel(plain_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    full = model.gather_full_optim_state_dict(optimizer)
    assert full is not None
    plain = torch.optim.Adam(plain_model().parameters())
    plain.load_state_dict(full)
    shapes = [tuple(param.shape) for param in plain_model().parameters()]
    assert [tuple(state["exp_avg"].shape) for state in plain.state.values()] == shapes
    foreign: dict[str, Tensor] = {key: value for key, value in full.items() if key != "param_id_map"}
    with pytest.raises(ValueError, match="does not say which parameter has number 0"):
        model.get_shard_from_optim_state_dict(foreign)
