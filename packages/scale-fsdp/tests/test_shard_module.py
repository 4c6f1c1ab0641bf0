"""What may be sharded: parameters of every kind, in every place, over every kind of group."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from fsdp_parity import adam, assert_trains_as_plain, mean_square, noise, sgd, sharded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from scale_check.exact import assert_equal
from scale_core.comm.group import group_of
from scale_core.hooks.gradients import register_local_grad_hook
from scale_core.shard import full_shape, shard_of
from scale_core.sharded_tensor.tensor import local_tensor
from scale_core.state import load_sharded_state_dict, sharded_state_dict
from scale_fsdp import ShardOptions, fully_shard, reshard_to
from scale_fsdp.runtime.unit import units_in


def perceptron() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Sequential(nn.Linear(7, 7), nn.ReLU()), nn.Linear(7, 3))


# Names, order, groups.


@pytest.mark.ranks(2, in_turn=True)
def test_parameters_are_shards_under_the_original_names():
    plain = perceptron()
    model = sharded(plain, ["2.0", "2", "0", ""])
    named, expected = dict(model.named_parameters()), dict(plain.named_parameters())
    assert list(named) == list(expected)
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    for name, param in named.items():
        shard = shard_of(param)
        assert shard.name == name
        assert full_shape(param) == expected[name].shape
        assert torch.equal(local_tensor(param).reshape(-1), expected[name].reshape(-1)[shard.start : shard.stop])
    held = [sum(local_tensor(param).numel() for param in model.parameters()) for model in (model, plain)]
    assert held[0] <= held[1] // 2 + 8 * len(named)  # Each starts at a multiple of 8.
    assert [unit.name for unit in units_in(model)] == ["", "0", "2", "2.0"]


def test_the_module_keeps_its_class_and_its_methods():
    class Model(nn.Linear):
        def answer(self):
            return 42

    model = fully_shard(Model(2, 2))
    assert isinstance(model, Model)
    assert type(model).__name__ == "Model"
    assert type(model).__module__ == Model.__module__
    assert model.answer() == 42


@pytest.mark.ranks(2, in_turn=True)
def test_parameter_groups_by_dimension_train_as_plain():
    def groups_by_dimension(params):
        params = list(params)
        matrices = [p for p in params if p.ndim >= 2]
        return torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.3}, {"params": [p for p in params if p.ndim < 2], "lr": 0.1}],
            lr=0.01,
        )

    by_rows = {"atom": "row"}  # small tensors are cut at elements otherwise, into pieces of one dimension
    assert_trains_as_plain(perceptron(), ["0", "2", ""], mean_square(4, 5), optimizers=[groups_by_dimension], **by_rows)


# Frozen parameters.


@pytest.mark.fault(83)
@pytest.mark.ranks(2, in_turn=True)
def test_parameters_may_be_frozen_before_or_after_wrapping():
    def freeze(*names):
        def before(model, step):
            for name, param in model.named_parameters():
                param.requires_grad_(name not in names)

        return before

    for names in (["0.weight"], ["0.weight", "0.bias"], ["2.0.bias", "3.weight"]):
        plain = perceptron()
        freeze(*names)(plain, 0)
        for units, one, other in ((["0", "2", "3", ""], adam, sgd), ([""], sgd, adam)):
            assert_trains_as_plain(plain, units, mean_square(4, 5), optimizers=[one])
            after = freeze(*names)
            assert_trains_as_plain(perceptron(), units, mean_square(4, 5), before_step=after, optimizers=[other])


@pytest.mark.ranks(3, in_turn=True)
def test_parameters_may_be_frozen_and_unfrozen_between_steps():
    def freeze_by_turns(model, step):
        for number, param in enumerate(model.parameters()):
            param.requires_grad_((number + step) % 3 != 0)

    for units, both in (([""], [sgd]), (["0", "2", ""], [adam]), (["0", "2.0", "2", "3", ""], [sgd])):
        step = mean_square(4, 5)
        assert_trains_as_plain(perceptron(), units, step, before_step=freeze_by_turns, steps=6, optimizers=both)


# Shared parameters.


class Tied(nn.Module):
    """An embedding that is the head too, and a weight that three layers share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(7, 5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.layers[2].weight = self.layers[1].weight = self.layers[0].weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def run_tied(model, rank, step):
    tokens = torch.randint(7, (3, 4), generator=torch.Generator().manual_seed(10 * step + rank))
    yield model(tokens).square().mean()


TIED = {
    "in one unit": [""],
    "in the root, from units": ["head", ""],
    "embedding, head": ["embed", "head", ""],
    "head, embedding": ["head", "embed", ""],
    "three-way": ["layers.0", "layers.1", "layers.2", ""],
    "three-way, from the back": ["layers.2", "layers.1", "layers.0", "head", ""],
    "all": ["embed", "layers.1", "layers.0", "head", "layers.2", ""],
}


@pytest.mark.ranks(2, in_turn=True)
def test_tied_parameters_stay_tied():
    for units in TIED.values():
        for reshard, both in ((True, [adam]), (False, [sgd])):
            kwargs = {"reshard_after_forward": reshard}
            assert_trains_as_plain(Tied(), units, run_tied, steps=3, optimizers=both, **kwargs)
        model = sharded(Tied(), units)
        assert list(dict(model.named_parameters())) == list(dict(Tied().named_parameters()))


@pytest.mark.ranks(1, 2, in_turn=True)
def test_tied_units_show_their_shards_after_an_evaluation():
    """Train, evaluate, save: the modules show the same shards after each, and what they save loads."""
    tokens = torch.arange(6).view(2, 3)
    for units in TIED.values():
        for reshard in (True, False):
            model = sharded(Tied(), units, reshard_after_forward=reshard)
            optimizer = adam(model.parameters())
            shown = [id(param) for _, param in model.named_parameters(remove_duplicate=False)]

            def at_rest(model: nn.Module = model, shown: list[int] = shown) -> bool:
                return [id(param) for _, param in model.named_parameters(remove_duplicate=False)] == shown

            model(tokens).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert at_rest(), (units, "trained")
            with torch.no_grad():
                model.eval()(tokens)
            assert at_rest(), (units, "evaluated")
            loss = model.train()(tokens).sum()
            assert at_rest(), (units, "between forward and backward")
            loss.backward()
            with torch.no_grad():
                model(tokens)
            read = pickle.loads(pickle.dumps(model))
            assert torch.equal(read(tokens), model(tokens))
            model.unshard()
            model.reshard()
            assert at_rest(), (units, "unsharded by hand")
            if dist.get_world_size() > 1 and reshard:
                assert not any(unit.gathered for unit in units_in(model)), (units, "unsharded by hand")
            saved = {key: value.clone() for key, value in model.state_dict().items()}
            pieces = copy.deepcopy(sharded_state_dict(model, optimizer))
            reshard_to(model, optimizer=optimizer, reshard_after_forward=not reshard)
            with torch.no_grad():
                model(tokens)
            load_sharded_state_dict(pieces, model, optimizer)
            assert_equal(model, saved, units)


# Dtypes, shapes, memory formats.


class Odd(nn.Module):
    """Parameters that a simple flattening forgets: scalars, empty, transposed, integers, several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.transposed = nn.Parameter(torch.randn(5, 4).t())
        self.strided = nn.Parameter(torch.randn(4, 10)[:, ::2])
        self.wide = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.steps = nn.Parameter(torch.tensor([1, 2, 3]), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True, True, False]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        # `contiguous`, because torch adds a mean up in the order of memory, and shards are contiguous.
        y = x * self.scalar + self.transposed.contiguous() + self.strided.contiguous() + self.empty.sum()
        return (y * self.mask + self.wide.float() + self.narrow.float() + self.steps.sum()).contiguous()


@pytest.mark.fault(82, 83)
@pytest.mark.ranks(1, 2, 4, in_turn=True)
def test_parameters_of_any_shape_and_dtype_in_one_unit():
    for atom, both in (("auto", [adam]), ("element", [sgd]), ("row", [adam]), ("parameter", [sgd])):
        assert_trains_as_plain(Odd(), [""], mean_square(4, 5), optimizers=both, atom=atom)
    model = sharded(Odd(), [""])
    assert model.state_dict()["mask"].dtype is torch.bool and model.state_dict()["steps"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("build", ["here", "meta"])
def test_attributes_of_parameters_outlive_sharding_and_moves(build):
    class Tagged(nn.Linear):
        """Looks at an attribute of its weight where it computes."""

        def forward(self, x):
            assert self.weight.kind == "matrix"
            return super().forward(x)

    with torch.device("meta" if build == "meta" else "cpu"):
        model = nn.Sequential(Tagged(3, 3), nn.Linear(3, 2))
    model[0].weight.kind = "matrix"
    model[1].bias._no_weight_decay = True
    fully_shard(model[0], options=ShardOptions(init=False if build == "meta" else None))
    fully_shard(model, options=ShardOptions(init=False if build == "meta" else None))
    if build == "meta":
        model.to_empty(device="cpu")
        model.load_state_dict(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).state_dict())
    for each in (model, model.double()):
        assert [name for name, p in each.named_parameters() if getattr(p, "_no_weight_decay", False)] == ["1.bias"]
        each(torch.ones(2, 3, dtype=next(each.parameters()).dtype)).sum().backward()


@pytest.mark.ranks(2, in_turn=True)
def test_channels_last_weights_have_the_same_gradients():
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 2)).to(memory_format=torch.channels_last)
    model = sharded(plain, ["0", ""])
    for each in (model, plain):
        each(noise(2, 2, 5, 5)).square().mean().backward()
    for (name, param), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        expected = whole.grad.reshape(-1)[shard_of(param).start : shard_of(param).stop]
        assert torch.allclose(local_tensor(param.grad).reshape(-1), expected, atol=1e-6), name


@pytest.mark.fault(87)
@pytest.mark.ranks(4, in_turn=True)
def test_units_with_fewer_elements_than_ranks():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 2, bias=False), nn.LayerNorm(2, bias=False))
    assert_trains_as_plain(plain, ["0", "1", "2", ""], mean_square(3, 1))


@pytest.mark.ranks(4, in_turn=True)
def test_fused_optimizers_step_over_empty_shards():
    model = sharded(nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1)), ["0", "1", ""])
    for make in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        optimizer = make(model.parameters(), lr=0.1, fused=True)
        before = model.state_dict()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after = model.state_dict()
        assert all((before[name] != after[name]).all() for name in before), f"{make.__name__} left something as it was"


@pytest.mark.fault(26)
@pytest.mark.ranks(3, in_turn=True)
def test_all_ranks_start_from_the_weights_and_buffers_of_rank_0():
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(dist.get_rank())
    fully_shard(model)
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    assert_equal(model, expected)


@pytest.mark.ranks(2, in_turn=True)
def test_buffers_of_any_dtype_start_from_those_of_rank_0():
    """Buffers of dtypes that few transports know, contiguous and not."""
    model, expected = nn.Linear(2, 2), {}
    for dtype in (torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float64, torch.uint8):
        for name, shape in (("whole", (3, 4)), ("scalar", ()), ("none", (0, 2))):
            ours = torch.full(shape, 2.0 * dist.get_rank()).to(dtype)
            expected[f"{name}_{dtype}".replace(".", "_")] = torch.zeros(shape).to(dtype)
            model.register_buffer(f"{name}_{dtype}".replace(".", "_"), ours.t() if name == "whole" else ours)
    fully_shard(model)
    for name, zeros in expected.items():
        buffer = model.get_buffer(name)
        assert buffer.dtype == zeros.dtype and not buffer.to(torch.complex128).any(), name


@pytest.mark.ranks(1, 2, in_turn=True)
def test_local_gradients_of_flat_units_are_reported():
    """What `register_local_grad_hook` shows of a flat unit: its own gradient, in the order of the buffer."""
    plain = perceptron()
    model = sharded(plain, ["0", ""], flatten_parameters=True)
    heard: dict[str, Tensor] = {}

    def listen(params, grads) -> None:
        for param, grad in zip(params, grads, strict=True):
            heard[shard_of(param).name] = grad.clone()
            assert grad.numel() == full_shape(param).numel()

    handle = register_local_grad_hook(listen)
    for each in (model, plain):
        each(noise(2, 5, seed=dist.get_rank())).sum().backward()
    handle.remove()
    for unit in units_in(model):
        for number, buffer in enumerate(unit.buffers):
            flat = heard[f"{unit.name}.flat_param_{number}".lstrip(".")]
            for name, entry in zip(buffer.names, buffer.layout.entries, strict=True):
                mine = flat[entry.offset : entry.offset + entry.numel].view(entry.shape)
                assert torch.equal(mine, plain.get_parameter(name).grad), f"{name} differs"


@pytest.mark.ranks(2, in_turn=True)
def test_each_flat_parameter_has_a_name_of_its_own():
    """Two flat buffers in one unit; each has a name of its own, and its local gradient is reported."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double(), nn.Linear(3, 3))
    model[2].requires_grad_(False)
    fully_shard(model[0], options=ShardOptions(flatten_parameters=True))
    fully_shard(model, options=ShardOptions(flatten_parameters=True))
    named = dict(model.named_parameters())
    marks = {name: shard_of(param).name for name, param in named.items()}
    assert sorted(name if marks[name] == name else f"{name} is marked {marks[name]}" for name in named) == [
        "0.flat_param_0",
        "flat_param_0",
        "flat_param_1",
    ]


# Groups.


@pytest.mark.ranks(4, in_turn=True)
def test_subgroups_train_by_themselves():
    for members in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[1, 3]], [[0, 1, 3]]):
        groups = [dist.new_group(ranks) for ranks in members]
        for ranks, group, make in zip(members, groups, (adam, sgd), strict=False):
            if dist.get_rank() in ranks:
                assert group_of(group).ranks == tuple(ranks)
                step = mean_square(4, 5)
                assert_trains_as_plain(perceptron(), ["0", "2", ""], step, process_group=group, optimizers=[make])


@pytest.mark.ranks(4, in_turn=True)
def test_a_device_mesh_takes_the_place_of_a_group():
    line = init_device_mesh("cpu", (4,))
    plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for mesh in (line, plane["inner"], plane["outer"]):
        assert_trains_as_plain(perceptron(), ["0", ""], mean_square(4, 5), process_group=mesh, optimizers=[adam])


def test_a_world_of_one_needs_no_process_group():
    assert not dist.is_initialized()
    assert_trains_as_plain(perceptron(), ["0", "2", ""], mean_square(4, 5))
    assert_trains_as_plain(Tied(), ["embed", "layers.1", "head", ""], run_tied)
    assert_trains_as_plain(Odd(), [""], mean_square(4, 5))


@pytest.mark.ranks(1, in_turn=True)
def test_a_world_of_one_works_in_a_process_group_too():
    assert_trains_as_plain(perceptron(), ["0", "2", ""], mean_square(4, 5))


# Nesting.


class Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.inner = Deep(depth - 1) if depth else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.linear(x)))


@pytest.mark.ranks(2, in_turn=True)
def test_units_nest_at_any_depth():
    torch.manual_seed(5)
    names = [".".join(["inner"] * depth) for depth in range(6, -1, -1)]
    for reshard in (True, False):
        kwargs = {"reshard_after_forward": reshard}
        assert_trains_as_plain(Deep(6), names, mean_square(2, 3), **kwargs, optimizers=[adam])


@pytest.mark.ranks(2, in_turn=True)
def test_units_without_a_unit_around_them_train_too():
    torch.manual_seed(6)
    assert_trains_as_plain(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), ["0", "1"], mean_square(4, 3))


def test_a_copy_of_the_model_is_left_alone():
    plain = perceptron()
    before = copy.deepcopy(plain.state_dict())
    model = sharded(plain, ["0", ""])
    model(noise(2, 5)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert_equal(plain, before)


# Memory and attributes.


class TiedByData(nn.Module):
    """A head with a Parameter of its own over the embedding's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
        self.head.weight.data = self.embed.weight.data


def test_parameters_over_one_memory_are_refused_unchanged():
    model = TiedByData()
    with pytest.raises(ValueError, match=r"'embed.weight' and 'head.weight'.*head.weight = embed.weight, before"):
        fully_shard(model)
    assert units_in(model) == [] and model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    model.head.weight = model.embed.weight
    fully_shard(model)
    model = TiedByData()
    with pytest.raises(ValueError, match=r"'0.weight' and '1.weight' share"):
        fully_shard([model.embed, model.head])


def test_memory_of_what_a_unit_inside_has_sharded_is_refused():
    model = TiedByData()
    fully_shard(model.embed)
    with pytest.raises(ValueError, match=r"'embed.weight' and 'head.weight' share"):
        fully_shard(model)
    del model.head
    fully_shard(model)


def test_buffers_and_ignored_parameters_over_one_memory():
    model = TiedByData()
    with pytest.raises(ValueError, match=r"'head.weight' and 'embed.weight' share"):
        fully_shard(model, ignored_params={model.embed.weight})
    fully_shard(model, ignored_params={model.embed.weight, model.head.weight})
    model = nn.Linear(2, 2)
    model.register_buffer("shadow", model.weight.detach()[1:])
    with pytest.raises(ValueError, match=r"'weight' and 'shadow' overlap"):
        fully_shard(model)


@pytest.mark.ranks(1, 2, in_turn=True)
def test_attributes_stay_on_shards_and_full_parameters():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model[0].bias._no_weight_decay = True
    seen = []
    fully_shard(
        model[0], options=ShardOptions(init=lambda m: (seen.append(m.bias._no_weight_decay), m.reset_parameters()))
    )
    fully_shard(model)
    assert seen == [True]
    with model.summon_full_params():
        assert model[0].bias._no_weight_decay
        model[1].weight._scale = 2
    assert model[0].bias._no_weight_decay and model[1].weight._scale == 2
    reshard_to(model, group_of())
    assert model[0].bias._no_weight_decay and model[1].weight._scale == 2


# Views of wider dtypes.


@pytest.mark.ranks(1, 2, 3, in_turn=True)
def test_parameters_may_be_seen_as_wider_dtypes():
    class WiderViews(nn.Module):
        """Parameters that the forward sees as complex numbers and as halves, behind ones of odd sizes."""

        def __init__(self) -> None:
            super().__init__()
            self.odd = nn.Parameter(torch.ones(3))
            self.pair = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.0, 4.0]]))
            self.ragged = nn.Parameter(torch.arange(5.0))
            self.zero = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
            self.packed = nn.Parameter(torch.arange(9.0).half().view(torch.uint8)[:17].clone(), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            weight = torch.view_as_complex(self.pair) * torch.view_as_complex(self.ragged[:4].view(2, 2)).sum()
            scale = self.packed[:16].view(torch.float16).float().sum() + self.zero.sum()
            return x * torch.view_as_real(weight).sum() * scale * self.odd.sum()

    plain = WiderViews()
    model = fully_shard(copy.deepcopy(plain))
    for net in (plain, model):
        net(torch.ones(2)).sum().backward()  # Sums of small integers.
    for name, param in model.named_parameters():
        assert local_tensor(param).numel() == 0 or local_tensor(param).data_ptr() % 16 == 0, name
    for (name, param), (_, full) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        shard = shard_of(param)
        assert not (
            full.grad is not None
            and not torch.equal(local_tensor(param.grad).reshape(-1), full.grad.reshape(-1)[shard.start : shard.stop])
        ), name
