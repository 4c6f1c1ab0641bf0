"""The promise: outputs, gradients, buffers and random numbers of a checkpointed module are the plain one's."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from scale_checkpoint import (
    apply_checkpointing,
    checkpoint_wrapper,
    disable_checkpointing,
    is_recomputing,
    offload_activations,
)
from scale_checkpoint_cases import differing, train


class Block(nn.Module):
    """Everything that a recomputation could get wrong: random numbers, statistics, fused attention, views."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.batch = nn.BatchNorm1d(width)
        self.feed = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, width))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.drop(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True))
        x = self.batch(x.transpose(1, 2)).transpose(1, 2)
        y: Tensor = x + self.feed(x)
        return y


class Net(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


HOWS: dict[str, dict[str, Any]] = {
    "recompute": {"how": "recompute"},
    "inputs to the host": {"how": "recompute", "offload_inputs": True, "min_bytes": 0},
    "inputs to disk": {"how": "recompute", "offload_inputs": True, "min_bytes": 0, "offload_to": "folder"},
    "all to the host": {"how": "offload", "min_bytes": 0},
    "all to disk": {"how": "offload", "min_bytes": 0, "offload_to": "folder"},
    "selective": {"how": "selective"},
    "products kept on the host": {"how": ["addmm", "native_batch_norm"], "offload_inputs": True, "min_bytes": 0},
    "all kept": {"how": lambda context, operator, *args, **kwargs: True},
}


@pytest.mark.parametrize("how", HOWS)
def test_training_is_that_of_the_plain_model(how: str, tmp_path: Path) -> None:
    kwargs = dict(HOWS[how])
    if "offload_to" in kwargs:
        kwargs["offload_to"] = tmp_path
    plain, ours = Net(), Net()
    for block in ours.blocks:
        apply_checkpointing(block, **kwargs)
    assert differing(train(ours, steps=3), train(plain, steps=3)) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_restored_with_its_dtype(dtype: torch.dtype) -> None:
    plain, ours = Net(), Net()
    for block in ours.blocks:
        checkpoint_wrapper(block)
    around = torch.autocast("cpu", dtype=dtype)
    assert differing(train(ours, around=around), train(plain, around=around)) == []


def test_keys_class_and_object_stay() -> None:
    plain, block = Block(), Block()
    assert checkpoint_wrapper(block) is block and type(block) is Block
    assert list(block.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in block.named_modules()] == [name for name, _ in plain.named_modules()]
    block.load_state_dict(plain.state_dict())


def test_a_copy_runs_its_own_weights() -> None:
    block = checkpoint_wrapper(nn.Linear(4, 4))
    twin = copy.deepcopy(block)
    with torch.no_grad():
        twin.weight.zero_()
    x = torch.randn(2, 4, requires_grad=True)
    assert torch.equal(twin(x), twin.bias.expand(2, 4)) and not torch.equal(block(x), twin(x))
    twin(x).sum().backward()
    assert torch.equal(x.grad, torch.zeros(2, 4)) and block.weight.grad is None


def test_a_model_is_pickled_with_its_checkpointing(tmp_path: Path) -> None:
    plain, ours = Net(), Net()
    for block in ours.blocks:
        checkpoint_wrapper(block, keep=["addmm"])
    again = pickle.loads(pickle.dumps(ours))
    torch.save(ours, tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=False)
    expected = train(plain)
    assert differing(train(again), expected) == [] and differing(train(saved), expected) == []
    assert runs_in_a_step(again.blocks[0].norm, again) == 2


def runs_in_a_step(module: nn.Module, model: nn.Module) -> int:
    """How often a module runs in a forward and its backward."""
    runs: list[None] = []
    handle = module.register_forward_pre_hook(lambda *_: runs.append(None))
    train(model, steps=1)
    handle.remove()
    return len(runs)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class Box:
    tensor: Tensor
    name: str


class Shapes(nn.Module):
    """Takes what is nested, and returns what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, kind: str, pair: Pair, *rest: Any, box: Box, scale: float) -> Any:
        inner = rest[0]["list"][1][0]
        y = torch.tanh(self.layer(pair.first * pair.second) + inner) * box.tensor * scale
        made: dict[str, Callable[[], Any]] = {
            "dict": lambda: {"y": y, "n": 3},
            "pair": lambda: Pair(y, y * 2),
            "box": lambda: Box(y, box.name),
            "list": lambda: [y, None, ("text", y.detach())],
            "tensor": lambda: y,
        }
        return made[kind]()


@pytest.mark.parametrize("offload", [False, True])
def test_outputs_stay_what_they_are_and_inputs_may_be_nested(offload: bool) -> None:
    plain = Shapes()
    ours = checkpoint_wrapper(copy.deepcopy(plain), offload, min_bytes=0)
    for kind, cls in {"dict": dict, "pair": Pair, "box": Box, "list": list, "tensor": Tensor}.items():
        found = []
        for module in (plain, ours):
            torch.manual_seed(0)
            leaves = [torch.randn(3, 4, requires_grad=True) for _ in range(4)]
            middle = [leaf * 1 for leaf in leaves]
            tree = {"list": [0, (middle[2],)]}
            output = module(kind, Pair(middle[0], middle[1]), tree, box=Box(middle[3], "box"), scale=0.5)
            tree["list"] = []  # What the caller does to its containers afterwards is its own.
            assert type(output) is cls
            y = output["y"] if kind == "dict" else output[0] if kind in ("pair", "list") else output
            y = y.tensor if kind == "box" else y
            module.zero_grad()
            y.square().sum().backward()
            found.append([y, *(leaf.grad for leaf in leaves), module.layer.weight.grad])
        assert differing(found[1], found[0]) == [], kind


def test_an_input_that_is_changed_in_place_is_noticed() -> None:
    """In a container and by keyword, too: it would be recomputed from other values."""
    module = checkpoint_wrapper(Shapes())
    x = torch.randn(3, 4)
    tree = {"list": [0, (x,)]}
    output = module(
        "tensor", Pair(torch.randn(3, 4), torch.randn(3, 4)), tree, box=Box(torch.ones(3, 4), ""), scale=1.0
    )
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_forward_replaced_on_the_instance_is_respected() -> None:
    def patched() -> nn.Linear:
        torch.manual_seed(0)
        layer, low = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        plain = layer.forward
        layer.forward = lambda x: plain(x) + low(x)  # type: ignore[method-assign]
        layer.low = low
        return layer

    x = torch.randn(2, 4)
    plain, ours = patched(), checkpoint_wrapper(patched())
    assert differing([ours(x)], [plain(x)]) == []
    ours(x).sum().backward()
    plain(x).sum().backward()
    assert torch.equal(ours.low.weight.grad, plain.low.weight.grad)
    apply_checkpointing(ours, "keep")
    assert torch.equal(ours(x), plain(x))


def test_gradients_can_be_taken_twice_and_of_gradients() -> None:
    plain, ours = Block().eval(), checkpoint_wrapper(Block().eval())
    ours.load_state_dict(plain.state_dict())
    found = []
    for module in (plain, ours):
        x = torch.linspace(-1, 1, 64).reshape(2, 4, 8).requires_grad_()
        y = module(x)
        once = torch.autograd.grad(y.square().sum(), [x, *module.parameters()], retain_graph=True, allow_unused=True)
        again = torch.autograd.grad(y.square().sum(), [x, *module.parameters()], allow_unused=True)
        found.append([*once, *again])
    assert differing(found[1], found[0]) == []
    tanh = checkpoint_wrapper(nn.Tanh())
    x = torch.linspace(-1, 1, 5).requires_grad_()
    (first,) = torch.autograd.grad(tanh(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.allclose(second, -2 * x.tanh() * (1 - x.tanh() ** 2))


def test_kept_results_serve_a_second_backward() -> None:
    plain, ours = Net(), Net()
    for block in ours.blocks:
        checkpoint_wrapper(block, keep=["addmm", "gelu"])
    found = []
    for model in (plain, ours):
        torch.manual_seed(3)
        loss = model(torch.randn(4, 5, 8)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([param.grad for param in model.parameters()])
    assert differing(found[1], found[0]) == []


def test_without_gradients_or_disabled_it_is_the_plain_forward() -> None:
    model = Net()
    for block in model.blocks:
        checkpoint_wrapper(block)
    with disable_checkpointing():
        assert runs_in_a_step(model.blocks[0].norm, model) == 1
    assert runs_in_a_step(model.blocks[0].norm, model) == 2
    tracked = int(model.blocks[0].batch.num_batches_tracked)
    with torch.no_grad():
        assert not model(torch.randn(2, 5, 8)).requires_grad
    # A recalibration of statistics under no_grad goes on as it does in the plain model.
    assert int(model.blocks[0].batch.num_batches_tracked) == tracked + 1


def test_what_needs_no_gradient_is_not_recomputed() -> None:
    model = nn.Sequential(checkpoint_wrapper(Block()), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    runs: list[None] = []
    model[0].norm.register_forward_pre_hook(lambda *_: runs.append(None))
    model(torch.randn(1, 5, 8)).sum().backward()
    assert len(runs) == 1 and not model[0](torch.randn(1, 5, 8)).requires_grad


@pytest.mark.parametrize("how", HOWS)
def test_layers_may_work_in_place_on_saved_storages(how: str, tmp_path: Path) -> None:
    """The gates of recurrent layers are pieces of one storage, each with a version of its own; RReLU saves its noise,
    and then draws it."""
    kwargs = dict(HOWS[how])
    if "offload_to" in kwargs:
        kwargs["offload_to"] = tmp_path
    for build in (
        lambda: nn.GRU(8, 6, 2, dropout=0.3, batch_first=True),
        lambda: nn.LSTMCell(8, 6),
        lambda: nn.GRUCell(8, 6),
        lambda: nn.Sequential(nn.Linear(8, 6), nn.RReLU(), nn.AlphaDropout(0.4), nn.Linear(6, 6)),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True),
    ):
        found = []
        for setting in ({"how": "keep"}, kwargs):
            torch.manual_seed(0)
            module = apply_checkpointing(build(), **setting)
            x = torch.randn(3, 8) if isinstance(module, nn.RNNCellBase) else torch.randn(3, 5, 8)
            for _ in range(2):
                output = module(x)
                (output if isinstance(output, Tensor) else output[0]).square().sum().backward()
            found.append([*(param.grad for param in module.parameters()), torch.rand(2)])
        assert differing(found[1], found[0]) == [], type(module).__name__


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("inplace", [False, True])
def test_noise_drawn_after_saving_ends_a_recomputation(how: str, inplace: bool) -> None:
    """RReLU stands last here, so all that is saved is there before it draws; for values above 0 it draws nothing."""
    if "disk" in how:
        return
    found = []
    for setting in ({"how": "keep"}, HOWS[how]):
        torch.manual_seed(0)
        layer = nn.Linear(64, 64)
        module = apply_checkpointing(nn.Sequential(layer, nn.RReLU(inplace=inplace)), **setting)
        x, grads = torch.randn(4, 64), []
        for bias in (0.0, 9.0):
            nn.init.constant_(layer.bias, bias)
            for _ in range(2):
                module(x).square().sum().backward()
            grads.append(layer.weight.grad.clone())
        found.append([*grads, torch.rand(2)])
    assert differing(found[1], found[0]) == []
    alone = checkpoint_wrapper(nn.RReLU(), preserve_random_state=False)
    x = torch.linspace(-1, 1, 64).requires_grad_()
    alone(x).sum().backward()
    assert bool((x.grad >= alone.lower).all()) and bool((x.grad <= 1).all())


class Forces(nn.Module):
    """Goes backward inside of its forward, after numbers were drawn and a buffer was changed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.energy = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        y = self.first(x) * torch.rand(8) * self.calls.clone()
        (force,) = torch.autograd.grad(torch.tanh(self.energy(self.norm(y))).sum(), y, create_graph=True)
        self.calls.mul_(1.5)
        y = self.energy(y + force).tanh() * torch.rand(8) * self.calls.clone()
        (force,) = torch.autograd.grad(self.energy(y).sigmoid().sum(), y, retain_graph=True)
        return y * force


@pytest.mark.parametrize("outer", ["keep", "recompute", "selective"])
@pytest.mark.parametrize("how", [how for how in HOWS if "disk" not in how])
def test_a_backward_inside_a_forward_sees_the_same_values(how: str, outer: str) -> None:
    found = []
    for setting in ({"how": "keep"}, HOWS[how]):
        torch.manual_seed(0)
        forces = apply_checkpointing(Forces(), **setting)
        model = nn.Sequential(nn.Linear(8, 8), forces, nn.Linear(8, 8))
        if setting["how"] != "keep":
            apply_checkpointing(model, outer)
        for _ in range(3):
            output = model(torch.linspace(-1, 1, 24).reshape(3, 8))
            output.square().sum().backward()
        found.append([output, *(param.grad for param in model.parameters()), *model.buffers(), torch.rand(2)])
    assert differing(found[1], found[0]) == []


@pytest.mark.parametrize("how", ["recompute", "offload", "selective"])
def test_lazy_modules_are_checkpointed_from_the_second_forward(how: str) -> None:
    found = []
    for setting in ("keep", how):
        torch.manual_seed(0)
        block = nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.Tanh(), nn.Dropout(0.3), nn.LazyLinear(8))
        apply_checkpointing(block, setting, offload_inputs=True, min_bytes=0)
        model = nn.Sequential(nn.Linear(8, 8), apply_checkpointing(nn.LazyLinear(8), setting, min_bytes=0), block)
        with torch.no_grad():
            again = pickle.loads(pickle.dumps(model))
        torch.manual_seed(1)
        for _ in range(3):
            model(torch.randn(5, 8)).square().sum().backward()
        found.append([*(param.grad for param in model.parameters()), *model.buffers(), torch.rand(2)])
        torch.manual_seed(1)
        again(torch.randn(5, 8)).sum().backward()
    assert differing(found[1], found[0]) == []
    runs: list[None] = []
    block[2].register_forward_pre_hook(lambda *_: runs.append(None))
    model(torch.randn(5, 8)).sum().backward()
    assert len(runs) == (1 if how == "offload" else 2)
    layer = nn.LazyLinear(8)
    with offload_activations(layer, min_bytes=0):
        layer(torch.randn(2, 4)).sum().backward()
    assert layer.weight.grad is not None


class Power(nn.Module):
    """Changes buffers of its own in the forward, in place and by assignment, and computes with them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("u", torch.randn(4))
        self.register_buffer("calls", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.u.copy_(nn.functional.normalize(self.weight.mv(self.u), dim=0))
            self.calls = self.calls + 1
            u = self.u.clone()
        y: Tensor = torch.sigmoid(x @ (self.weight / u.dot(self.weight.mv(u)))) * self.calls
        return y


def test_buffers_changed_by_a_forward_are_recomputed_from_old() -> None:
    torch.manual_seed(0)
    plain = nn.ModuleList([Power(), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4, 0.3)])
    ours = copy.deepcopy(plain)
    for module in ours:
        checkpoint_wrapper(module)
    found = []
    for modules in (plain, ours):
        x = torch.linspace(-1, 2, 12).reshape(3, 4)
        grads = []
        for _ in range(3):
            for module in modules:
                y = module(module(x)).square().sum()  # Twice before its backward.
                y.backward()
        grads = [param.grad for param in modules.parameters()]
        found.append([*grads, *modules.buffers()])
    assert differing(found[1], found[0]) == []


def test_a_buffer_that_changes_only_later_is_an_error() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.changes = False
            self.register_buffer("scale", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            if self.changes:
                self.scale.mul_(2)
            return x.exp() * self.scale

    module = checkpoint_wrapper(Late())
    x = torch.ones(3, requires_grad=True)
    module(x).sum().backward()
    module.changes = True
    with pytest.raises(RuntimeError, match=r"of a Late has changed its buffer 'scale' \[3\]"):
        module(x)


@pytest.mark.parametrize("how", ["recompute", "offload", "selective"])
def test_a_module_is_freed_without_a_garbage_collection(how: str) -> None:
    import gc
    import weakref

    gc.disable()
    try:
        module = apply_checkpointing(Block(), how, offload_inputs=True, min_bytes=0)
        module(torch.randn(2, 5, 8)).sum().backward()
        unused = module(torch.randn(2, 5, 8))
        reference = weakref.ref(module)
        forward = module.forward
        del module, unused
        assert reference() is None
        with pytest.raises(ReferenceError, match="keep the module"):
            forward(torch.randn(2, 5, 8))
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_parts_inside_and_a_compiled_whole(backend: str) -> None:
    torch._dynamo.reset()

    def built() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid())

    x = torch.linspace(-1, 1, 24).reshape(3, 8)
    plain = built()
    inside = checkpoint_wrapper(
        nn.Sequential(*built()[:2], *(torch.compile(part, backend=backend) for part in built()[2:]))
    )
    whole = checkpoint_wrapper(built())
    whole.compile(backend=backend)
    found = []
    for module in (plain, inside, whole):
        for _ in range(2):
            leaf = x.clone().requires_grad_()
            y = module(leaf)
            y.square().sum().backward()
        found.append([y, leaf.grad, *(param.grad for param in module.parameters())])
    assert differing(found[1], found[0]) == [] and differing(found[2], found[0]) == []


class Seen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = [*getattr(self, "seen", []), is_recomputing()]
        return x.exp()


def test_nested_checkpoints_are_recomputed_in_turn() -> None:
    inner = checkpoint_wrapper(Seen())
    outer = checkpoint_wrapper(nn.Sequential(nn.Tanh(), inner, nn.Tanh()))
    x = torch.linspace(-1, 1, 5).requires_grad_()
    outer(x).sum().backward()
    expected = torch.autograd.grad(x.tanh().exp().tanh().sum(), x)[0]
    assert torch.equal(x.grad, expected)
    assert inner.seen[0] is False and all(inner.seen[1:]) and len(inner.seen) > 1


def test_batch_norms_synchronized_later_are_still_checkpointed() -> None:
    """On CPU such a norm runs in eval mode alone; what counts is that the new module is what is run and guarded."""
    block = checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()))
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(block)
    assert converted is block and isinstance(block[1], nn.SyncBatchNorm)
    block[1].forward = lambda x: nn.BatchNorm1d.forward(block[1], x)  # type: ignore[method-assign]  # its own wants a GPU
    plain = nn.BatchNorm1d(4)
    x = torch.randn(6, 4)
    for _ in range(2):
        block(x).sum().backward()
        plain(block[0](x))
    assert torch.equal(block[1].running_mean, plain.running_mean) and int(block[1].num_batches_tracked) == 2
    # A norm that is itself what was wrapped is replaced by a plain one: torch makes a new module of it.
    alone = nn.SyncBatchNorm.convert_sync_batchnorm(checkpoint_wrapper(nn.BatchNorm1d(4)))
    assert isinstance(alone, nn.SyncBatchNorm)


class Collecting(nn.Module):
    """Fills the caller's containers, as models do with hidden states and caches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, hidden: list[Tensor], cache: dict[str, Any]) -> Tensor:
        y = torch.tanh(self.layer(x))
        hidden.append(y)
        cache["last"] = y * 2
        return y.exp() + sum(hidden[:-1])


@pytest.mark.parametrize("how", ["recompute", "offload", ["addmm", "tanh"]])
def test_the_callers_containers_are_filled_once(how: Any) -> None:
    torch.manual_seed(0)
    plain = Collecting()
    ours = apply_checkpointing(copy.deepcopy(plain), how, min_bytes=0)
    found = []
    for module in (plain, ours):
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        hidden, cache = [x * 3], {"first": x}
        loss = module(x, hidden, cache).sum() + hidden[1].sum() + cache["last"].square().sum()
        loss.backward()
        assert len(hidden) == 2 and list(cache) == ["first", "last"]
        found.append([loss.detach(), x.grad, *hidden, *cache.values(), module.layer.weight.grad])
    assert differing(found[1], found[0]) == []


def test_a_forward_that_changes_its_input_is_an_error_at_once() -> None:
    module = checkpoint_wrapper(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)))
    x = torch.randn(2, 4)
    with pytest.raises(RuntimeError, match=r"of a Sequential changes a tensor \[2, 4\] .* in place, .*inplace=False"):
        module(x)
    with disable_checkpointing():
        module(x).sum().backward()
    module.requires_grad_(False)
    module(x)  # Nothing will be computed again.


def test_transforms_of_functions_are_refused_with_what_to_write() -> None:
    module = checkpoint_wrapper(nn.Linear(4, 4))
    x = torch.randn(3, 2, 4)
    with pytest.raises(RuntimeError, match=r"a Linear that is checkpointed or offloaded: .*disable_checkpointing\(\)"):
        torch.func.vmap(module)(x)
    with disable_checkpointing():
        assert torch.func.vmap(module)(x).shape == x.shape


def test_nested_modules_may_be_treated_in_any_ways() -> None:
    plain, expected = Net(1), train(Net(1), steps=1)
    for inner, outer in itertools.product(HOWS, HOWS):
        if "disk" in inner + outer:
            continue
        ours = copy.deepcopy(plain)
        apply_checkpointing(ours.blocks[0].feed, **HOWS[inner])
        apply_checkpointing(ours.blocks[0].batch, **HOWS[inner])
        apply_checkpointing(ours.blocks[0], **HOWS[outer])
        assert differing(train(ours, steps=1), expected) == [], f"{inner} in {outer}"
