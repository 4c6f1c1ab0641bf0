"""`MOELayer` and `Top2Gate` of the alias: GShard's formulas, written out densely, on one rank and on two."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairscale.nn import MOELayer, Top2Gate
from fairscale.nn.moe.top2gate import top2gating

DIM = 4


@pytest.mark.parametrize("num_experts, sharpness", [(2, 1.0), (3, 1.0), (4, 8.0), (8, 1.0)])
def test_top2gating_is_the_papers_algorithm(num_experts: int, sharpness: float) -> None:
    def gating_by_the_paper(logits: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the weights [S, E, C] of algorithm 1, token by token; `second` [S] is what was drawn."""
        num_tokens, num_experts = logits.shape
        capacity = 2 * num_tokens // num_experts
        scores = logits.softmax(1)
        first = scores.argmax(1)
        fraction = torch.stack([(first == expert).float().mean() for expert in range(num_experts)])
        taken, slots = [0] * num_experts, []
        for choices in (first, second):
            slots.append([])
            for expert in choices.tolist():
                slots[-1].append(taken[expert])
                taken[expert] += 1
        weights = torch.zeros(num_tokens, num_experts, capacity)
        for token in range(num_tokens):
            kept = [(c[token], s[token]) for c, s in zip((first, second), slots, strict=True) if s[token] < capacity]
            total = sum(scores[token, expert] for expert, _ in kept)
            for expert, slot in kept:
                weights[token, expert, slot] = scores[token, expert] / total
        return (scores.mean(0) * fraction).mean(), weights

    def drawn_second(logits: Tensor) -> Tensor:
        """The second expert of each token, by the Gumbel-max trick, from the numbers that come next."""
        noisy = logits + torch.distributions.Gumbel(torch.tensor(0.0), torch.tensor(1.0)).rsample(logits.shape)
        return noisy.scatter(1, logits.argmax(1, keepdim=True), float("-inf")).argmax(1)

    torch.manual_seed(num_experts)
    logits = (torch.randn(24, num_experts) * sharpness).requires_grad_()
    torch.manual_seed(7)
    expected = gating_by_the_paper(logits, drawn_second(logits.detach()))
    torch.manual_seed(7)
    loss, weights, mask = top2gating(logits)
    torch.testing.assert_close((loss, weights), expected)
    assert torch.equal(mask, weights != 0)
    assert int(mask.sum((0, 2)).max()) <= 2 * 24 // num_experts
    other = torch.randn_like(weights)
    found = [torch.autograd.grad((w * other).sum() + aux, logits)[0] for aux, w in ((loss, weights), expected)]
    torch.testing.assert_close(found[0], found[1])


def test_tokens_that_experts_do_not_divide_are_an_error() -> None:
    with pytest.raises(AssertionError, match="expected a number of tokens that 3 experts divide") as caught:
        Top2Gate(DIM, 3)(torch.randn(4, DIM))
    assert isinstance(caught.value, ValueError)


def experts_of(rank: int, count: int) -> nn.ModuleList:
    torch.manual_seed(10 + rank)
    return nn.ModuleList(nn.Sequential(nn.Linear(DIM, 6), nn.Tanh(), nn.Linear(6, DIM)) for _ in range(count))


@pytest.mark.ranks(0, 2)
def test_the_layer_is_gshards_in_one_process_and_on_two_ranks() -> None:
    """The layer against einsums over all experts; the reference of the other rank's shard is computed here, too."""

    class Recorded(nn.Module):
        """A gate that keeps what it returned."""

        def __init__(self, gate: nn.Module) -> None:
            super().__init__()
            self.gate = gate

        def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            self.found: tuple[Tensor, Tensor, Tensor] = self.gate(tokens)
            return self.found

    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    per_rank = 2
    torch.manual_seed(1)
    gate = Recorded(Top2Gate(DIM, per_rank * world_size))
    layer = MOELayer(gate, experts_of(rank, per_rank))
    assert all(param.expert for param in layer.experts.parameters())
    inputs = [torch.randn(4, 6, DIM, generator=torch.Generator().manual_seed(each)) for each in range(world_size)]
    torch.manual_seed(20 + rank)
    mine = inputs[rank].clone().requires_grad_()
    output = layer(mine)
    assert layer.l_aux is gate.found[0]
    (output.square().sum() + layer.l_aux).backward()

    twin = [experts_of(each, per_rank) for each in range(world_size)]
    plain_gate = Top2Gate(DIM, per_rank * world_size)
    plain_gate.load_state_dict(gate.gate.state_dict())
    for each in range(world_size):
        torch.manual_seed(20 + each)
        tokens = inputs[each].clone().requires_grad_()
        loss, weights, mask = plain_gate(tokens.flatten(0, 1))
        sent = torch.einsum("sec,sm->ecm", mask.float(), tokens.flatten(0, 1))
        made = torch.stack([expert(rows) for expert, rows in zip([e for t in twin for e in t], sent, strict=True)])
        expected = torch.einsum("sec,ecm->sm", weights, made).view_as(tokens)
        plain_gate.zero_grad()
        (expected.square().sum() + loss).backward()
        if each == rank:
            torch.testing.assert_close(output, expected)
            torch.testing.assert_close(layer.l_aux, loss)
            torch.testing.assert_close(mine.grad, tokens.grad)
            torch.testing.assert_close(gate.gate.wg.weight.grad, plain_gate.wg.weight.grad)
    for found, plain in zip(layer.experts.parameters(), twin[rank].parameters(), strict=True):
        torch.testing.assert_close(found.grad, plain.grad)  # of the tokens of all ranks, added up


def test_a_gate_of_ones_own_sends_tokens_where_it_says() -> None:
    class RoundRobin(nn.Module):
        def forward(self, tokens: Tensor) -> tuple[float, Tensor, Tensor]:
            goes = torch.zeros(len(tokens), 2, len(tokens))
            for token in range(len(tokens)):
                goes[token, token % 2, token // 2] = 1.0
            return 0.0, goes, goes.bool()

    scales = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(2))
    for factor, expert in enumerate(scales, start=1):
        expert.weight.data.copy_(torch.eye(DIM) * factor)
    tokens = torch.randn(2, 4, DIM)
    output = MOELayer(RoundRobin(), scales)(tokens)
    torch.testing.assert_close(output[:, 0::2], tokens[:, 0::2])
    torch.testing.assert_close(output[:, 1::2], tokens[:, 1::2] * 2)


@pytest.mark.parametrize(
    "inputs, text",
    [
        ((torch.ones(2, 2, DIM), torch.ones(1)), "only single input Tensor supported, got 2"),
        ((torch.ones(2, DIM),), r"input Tensor must have dimensions: .*got \[2, 4\]"),
        ((torch.ones(2, 3, DIM),), "expected a gate of 1 experts, 1 on each of 1 ranks, got combine weights of 3"),
    ],
)
def test_inputs_and_gates_that_do_not_fit_are_errors(inputs: tuple[Tensor, ...], text: str) -> None:
    layer = MOELayer(Top2Gate(DIM, 3), nn.Linear(DIM, DIM))
    with pytest.raises(ValueError, match=text):
        layer(*inputs)
    assert not dist.is_initialized()
