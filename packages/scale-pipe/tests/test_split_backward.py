"""The two halves of a backward pass give what one pass gives, to the bit, whatever the stage is made of."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import checkpoint

from scale_core.compat import gradient_edge
from scale_pipe import split_backward
from scale_pipe.distributed.stage import run_backward
from scale_pipe.split_backward import SplitBackward


class Attention(nn.Module):
    """Pre-norm attention with a learned position and a residual: [N, 5, 8] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.position = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x + self.position)
        output: Tensor = x + self.attention(hidden, hidden, hidden)[0]
        return output


class Tied(nn.Module):
    """One layer, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(torch.relu(self.layer(x)))
        return output


class Hooked(nn.Module):
    """A hook of the user's changes a gradient on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 2)
        output: Tensor = self.second(hidden)
        return output


class Beside(nn.Module):
    """Returns something that does not depend on its input, added to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.bias * 3


class Doubled(torch.autograd.Function):
    """A function of Python with a parameter, which would be called twice."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        Doubled.calls += 1
        x, weight = ctx.saved_tensors
        return gradients[0] * weight, (gradients[0] * x).sum(0)


class OfPython(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = Doubled.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return output


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), reentrant

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.layers, x, use_reentrant=self.reentrant)
        return output


STAGES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), (4, 8)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 4, 3, bias=False),
            nn.GroupNorm(2, 4),
        ),
        (2, 3, 9, 9),
    ),
    "attention": (Attention, (3, 5, 8)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 5, 8)),
    "tied weight": (Tied, (4, 8)),
    "no parameters": (nn.Tanh, (4, 8)),
    "hook": (Hooked, (4, 8)),
    "beside the path": (Beside, (4, 8)),
    "function of Python": (OfPython, (4, 8)),
    "recomputed": (lambda: Recomputed(False), (4, 8)),
    "recomputed, reentrant": (lambda: Recomputed(True), (4, 8)),
    "identity": (nn.Identity, (4, 8)),
}
WHOLE = {"tied weight", "function of Python", "recomputed, reentrant"}
"""What can't be cut, and has one backward."""


def outputs_of(module: nn.Module, x: Tensor) -> list[Tensor]:
    outputs = module(x * 1 if x.requires_grad else x)
    return [one for one in (outputs if isinstance(outputs, tuple) else (outputs,)) if one.requires_grad]


@pytest.mark.parametrize("input_trains", [True, False])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", STAGES)
def test_both_halves_together_are_one_backward_to_the_bit(name: str, frozen: bool, input_trains: bool) -> None:
    torch.manual_seed(0)
    build, shape = STAGES[name]
    plain = build()
    if frozen:
        for param in list(plain.parameters())[::2]:
            param.requires_grad_(False)
    if name == "recomputed, reentrant" and not input_trains:
        return  # Torch computes no gradients at all then.
    apart = copy.deepcopy(plain)
    for _ in range(3):  # Accumulated.
        x = torch.randn(shape)
        inputs = [x.clone().requires_grad_(input_trains) for _ in range(2)]
        expected, found = outputs_of(plain, inputs[0]), outputs_of(apart, inputs[1])
        if not expected:
            return
        gradients = [torch.randn_like(output) for output in expected]
        torch.autograd.backward(expected, gradients)
        before = [None if param.grad is None else param.grad.clone() for param in apart.parameters()]
        backward = SplitBackward([gradient_edge(one) for one in found], inputs[1:] if input_trains else [])
        of_inputs = backward.run_inputs(list(gradients))
        if of_inputs is None:
            of_inputs = run_backward(
                [gradient_edge(one) for one in found], inputs[1:] if input_trains else [], gradients
            )
        if name not in WHOLE or not input_trains:
            for param, grad in zip(apart.parameters(), before, strict=True):
                assert param.grad is None if grad is None else torch.equal(param.grad, grad), "W has not run yet"
        backward.run_weights()
        if input_trains:
            assert of_inputs[0] is not None and inputs[0].grad is not None
            assert torch.equal(of_inputs[0], inputs[0].grad)
    for (title, ours), theirs in zip(apart.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), title
        assert ours.grad is None or theirs.grad is None or torch.equal(ours.grad, theirs.grad), title


def test_a_function_of_python_with_parameters_runs_once() -> None:
    module, x = OfPython(), torch.randn(4, 8, requires_grad=True)
    Doubled.calls = 0
    roots = [gradient_edge(module(x * 1))]
    assert SplitBackward(roots, [x]).run_inputs([torch.ones(4, 8)]) is None
    run_backward(roots, [x], [torch.ones(4, 8)])
    assert Doubled.calls == 1


def test_the_full_backward_gives_input_gradients_and_frees_all() -> None:
    layer, x = nn.Linear(8, 8), torch.arange(32.0).view(4, 8).requires_grad_()
    with torch.no_grad():
        layer.weight.copy_(torch.arange(64.0).view(8, 8))  # Whole numbers: sums of any order are the same.
    output = layer(x)
    (found,) = run_backward([gradient_edge(output)], [x], [torch.ones_like(output)])
    assert found is not None and torch.equal(found, layer.weight.sum(0).expand(4, 8)) and x.grad is None
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, x.detach().sum(0).expand(8, 8))


def test_an_output_without_a_gradient_gives_none() -> None:
    for apart in (False, True):
        layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
        roots = [gradient_edge(layer(x))]
        assert (SplitBackward(roots, [x]).run_inputs([None]) if apart else run_backward(roots, [x], [None])) == [None]
        assert layer.weight.grad is None


def test_inputs_that_are_not_used_have_no_gradient() -> None:
    layer = nn.Linear(8, 8)
    used, unused = torch.randn(4, 8, requires_grad=True), torch.randn(2, requires_grad=True)
    output = layer(used)
    found = SplitBackward([gradient_edge(output)], [used, unused]).run_inputs([torch.ones_like(output)])
    assert found is not None and found[0] is not None and found[1] is None


class Random(nn.Module):
    """Layers in an order drawn by hypothesis; with `again` some layers are used a second time."""

    def __init__(self, kinds: list[str], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.kinds = kinds
        self.layers = nn.ModuleList(nn.LayerNorm(6) if kind == "norm" else nn.Linear(6, 6) for kind in kinds)
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(6, generator=generator)) for _ in kinds)

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for kind, layer, scale in zip(self.kinds, self.layers, self.scales, strict=True):
            match kind:
                case "residual":
                    x = x + torch.relu(layer(x) * scale)
                case "gate":
                    x = torch.sigmoid(layer(first)) * x
                case "again":
                    x = torch.tanh(self.layers[0](x)) + scale
                case "bias":
                    x = x + scale
                case _:
                    x = layer(x)
        return x


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(["linear", "norm", "residual", "gate", "again", "bias"]), min_size=1, max_size=6),
    st.integers(0, 100),
    st.booleans(),
)
def test_any_graph_is_cut_without_a_difference(kinds: list[str], seed: int, freeze: bool) -> None:
    torch.manual_seed(seed)
    plain = Random(kinds, seed)
    if freeze:
        plain.layers[-1].requires_grad_(False)
    apart = copy.deepcopy(plain)
    x = torch.randn(3, 6)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    expected, found = plain(inputs[0]), apart(inputs[1])
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    backward = SplitBackward([gradient_edge(found)], inputs[1:])
    of_inputs = backward.run_inputs([gradient])
    if of_inputs is None:
        of_inputs = run_backward([gradient_edge(found)], inputs[1:], [gradient])
    (of_input,) = of_inputs
    backward.run_weights()
    assert of_input is not None and inputs[0].grad is not None and torch.equal(of_input, inputs[0].grad)
    for ours, theirs in zip(apart.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or theirs.grad is None or torch.equal(ours.grad, theirs.grad)


def test_a_transformer_layer_is_cut_at_each_of_its_parameters() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 8, requires_grad=True)
    cut = split_backward._cut([gradient_edge(layer(x))], [x])
    assert cut is not None and cut.beside is None
    leaves = [id(leaf) for part in cut.boundary for leaf in part.leaves]
    assert sorted(leaves + [id(leaf) for leaf in cut.vectors]) == sorted(map(id, layer.parameters()))
    vectors = [*layer.norm1.parameters(), *layer.norm2.parameters(), layer.self_attn.in_proj_bias]  # Added by itself.
    assert sorted(map(id, cut.vectors)) == sorted(map(id, vectors))


class CountedNode:
    """A node of a graph, which counts how often `next_functions` was read."""

    def __init__(self, *next_nodes: "CountedNode") -> None:
        self.num_visits = 0
        self._next_nodes = next_nodes

    @property
    def next_functions(self) -> tuple[tuple["CountedNode", int], ...]:
        self.num_visits += 1
        return tuple((node, 0) for node in self._next_nodes)

    def name(self) -> str:
        return "CountedNode"


def test_a_node_on_many_paths_is_visited_once() -> None:
    """Residual connections double the number of paths with each layer."""
    nodes = [CountedNode()]
    for _ in range(3):
        nodes.append(CountedNode(nodes[-1], CountedNode(nodes[-1])))
    cut = split_backward._cut([GradientEdge(nodes[-1], 0)], [])  # type: ignore[arg-type]
    assert cut is not None and [node.num_visits for node in nodes] == [1] * 4


def test_hooks_of_parameters_are_called_once_in_the_second_half() -> None:
    module = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8))
    calls: list[str] = []
    expected = copy.deepcopy(module)
    for name, param in module.named_parameters():
        if name.startswith("2"):
            param.register_hook(lambda gradient, name=name: calls.append(f"before {name}") or gradient * 2)
        param.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(f"after {name}"))
    x = torch.randn(4, 8)
    given = x.clone().requires_grad_()
    backward = SplitBackward([gradient_edge(module(given))], [given])
    backward.run_inputs([torch.ones(4, 8)])
    assert calls == []
    backward.run_weights()
    names = [name for name, _ in module.named_parameters()]
    assert sorted(calls) == sorted([f"after {name}" for name in names] + ["before 2.weight", "before 2.bias"])
    expected(x.clone()).backward(torch.ones(4, 8))
    for (name, ours), theirs in zip(module.named_parameters(), expected.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad * 2 if name.startswith("2") else theirs.grad), name
