"""Which results are kept: by operator, by policy; that kept operators do not run again, and that it learns."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError, CheckpointPolicy, create_selective_checkpoint_contexts

from scale_checkpoint import checkpoint_wrapper
from scale_checkpoint.live_memory import LiveMemory
from scale_checkpoint.recompute.policy import can_be_saved, draws_random_numbers, resolve_policy
from scale_checkpoint_cases import differing

aten = torch.ops.aten


class Counting(TorchDispatchMode):
    """Counts how often operators run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def forward_runs(model: nn.Module, x: Tensor, names: list[str]) -> list[int]:
    with Counting() as counting:
        model(x).sum().backward()
    return [counting.counts.get(name, 0) for name in names]


def feed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))


def test_kept_operators_do_not_run_again_and_the_others_do() -> None:
    x = torch.randn(4, 8)
    assert forward_runs(feed(), x, ["addmm", "gelu", "tanh"]) == [3, 1, 1]
    assert forward_runs(checkpoint_wrapper(feed()), x, ["addmm", "gelu", "tanh"]) == [5, 2, 2], (
        "the last one stops early"
    )
    for keep in (["addmm"], ["addmm.default"], [aten.addmm], [aten.addmm.default], ["add.*"]):
        assert forward_runs(checkpoint_wrapper(feed(), keep=keep), x, ["addmm", "gelu", "tanh"]) == [3, 2, 2]


class ByItsMean(nn.Module):
    """Computes with the statistics that its norm has just updated, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = (self.norm(x) * self.norm.running_mean.clone() + x).tanh()
        return x


def test_a_norm_whose_result_is_kept_has_updated_its_statistics() -> None:
    torch.manual_seed(0)
    plain = ByItsMean()
    model = checkpoint_wrapper(copy.deepcopy(plain), keep=["native_batch_norm"])
    for _ in range(2):
        x = torch.randn(5, 4)
        for module in (plain, model):
            module(x).sum().backward()
    found, expected = ([p.grad for p in module.parameters()] for module in (model, plain))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert torch.equal(model.norm.running_mean, plain.norm.running_mean)
    assert forward_runs(model, x, ["native_batch_norm"]) == [2]


def test_a_policy_function_decides_by_what_it_sees() -> None:
    seen = []

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((operator, context.is_recompute, context.op_output.shape))
        if operator is aten.gelu.default:
            return CheckpointPolicy.PREFER_SAVE
        return CheckpointPolicy.MUST_RECOMPUTE if operator is aten.tanh.default else context.op_output.shape[-1] == 32

    assert forward_runs(checkpoint_wrapper(feed(), keep=policy), torch.randn(4, 8), ["addmm", "gelu", "tanh"]) == [
        3,
        1,
        2,
    ]
    assert (aten.gelu.default, False, torch.Size([4, 32])) in seen


def test_what_no_recomputation_asks_for_is_not_kept_again() -> None:
    model = checkpoint_wrapper(feed(), keep=["addmm"])
    x = torch.randn(500, 8)
    kept = []
    for _ in range(3):
        with LiveMemory(torch.device("cpu")) as live:
            output = model(x)
            kept.append(live.current_bytes - output.nbytes)
        live.close()
        output.sum().backward()
    last = 500 * 8 * 4  # The last product's result: the output itself, which stands for nothing that is needed.
    assert kept == [2 * 500 * 32 * 4] * 3 and last == output.nbytes
    assert len(model.forward._stats.unused) == 1


class InPlace(nn.Module):
    """Changes in place what operators have returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        hidden.mul_(2)
        y: Tensor = hidden[:, :4].add_(1) * hidden[:, 4:].sigmoid()
        return y


@pytest.mark.parametrize("offload", [False, True])
def test_a_result_that_is_changed_in_place_is_computed_again(offload: bool) -> None:
    torch.manual_seed(0)
    plain = InPlace()
    ours = InPlace()
    ours.load_state_dict(plain.state_dict())
    checkpoint_wrapper(ours, offload, keep=lambda *_, **__: True, min_bytes=1)
    x = torch.randn(4, 8)
    for module in (plain, ours):
        module(x).square().sum().backward()
    assert differing([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()]) == []
    # Afterwards, by whoever got it.
    module = checkpoint_wrapper(nn.Sequential(nn.Linear(8, 8), nn.Identity()), keep=["addmm"])
    grads = []
    for changed in (False, True):
        module.zero_grad()
        output = module(x)
        loss = (output * 3).sum()
        if changed:
            with torch.no_grad():
                output.zero_()
        loss.backward()
        grads.append(module[0].weight.grad.clone())
    assert torch.equal(*grads)


def test_operators_that_draw_are_always_run_again() -> None:
    x = torch.ones(3, 4, 8)
    assert draws_random_numbers(aten.native_dropout.default, (x, 0.5, True), {})
    assert draws_random_numbers(aten.bernoulli.default, (x,), {})
    assert not draws_random_numbers(aten._scaled_dot_product_flash_attention_for_cpu.default, (x, x, x), {})
    assert not draws_random_numbers(aten._scaled_dot_product_flash_attention_for_cpu.default, (x, x, x, 0.0), {})
    assert draws_random_numbers(aten._scaled_dot_product_flash_attention_for_cpu.default, (x, x, x, 0.1), {})
    assert not draws_random_numbers(aten.addmm.default, (x, x, x), {})


class Drawing(nn.Module):
    """Draws twice; whoever keeps the first result and draws the second again gets the first one's numbers for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * torch.bernoulli(torch.full_like(x, 0.5))
        return nn.functional.dropout(self.second(torch.tanh(y)), 0.5).exp()


def test_a_policy_that_keeps_noise_shifts_no_other_numbers() -> None:
    torch.manual_seed(0)
    plain, x = Drawing(), torch.randn(4, 8)
    ours = checkpoint_wrapper(copy.deepcopy(plain), keep=["bernoulli", "addmm"])
    for module in (plain, ours):
        torch.manual_seed(5)
        module(x).square().sum().backward()
    assert differing([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()]) == []


def test_views_and_in_place_operators_are_never_kept() -> None:
    assert can_be_saved(aten.mm.default) and can_be_saved(aten.native_layer_norm.default)
    assert not any(map(can_be_saved, (aten.view.default, aten.add_.Tensor, aten.detach.default, aten.t.default)))
    # Another rank waits for what sends; a process group brings these operators.
    if torch.distributed.is_available():
        assert not can_be_saved(torch.ops.c10d.send.default) and not can_be_saved(torch.ops.c10d.barrier.default)


class WrittenOut(nn.Module):
    """Attention of plain operators: scores [B, T, T] of q, k [B, T, 4], then values [B, T, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        y: Tensor = self.out((query @ key.transpose(-2, -1)).softmax(-1) @ value)
        return y


def test_selective_keeps_costly_results_but_no_large_products() -> None:
    torch.manual_seed(0)
    plain = WrittenOut()
    ours = checkpoint_wrapper(copy.deepcopy(plain), keep="selective")
    x = torch.randn(2, 16, 4)
    found = []
    for module in (plain, ours):
        module(x).square().sum().backward()
        found.append([p.grad for p in module.parameters()])
    assert differing(found[1], found[0]) == []
    names = ["addmm", "bmm", "_softmax"]
    plain_runs = forward_runs(plain, x, names)
    assert [ours - plain for ours, plain in zip(forward_runs(ours, x, names), plain_runs, strict=True)] == [0, 1, 1]
    # Where the heads are wider than the sequence is long, the scores are the smaller ones.
    again = checkpoint_wrapper(copy.deepcopy(plain), keep="selective")
    assert forward_runs(again, x[:, :3], names)[1] == plain_runs[1] + 1, "the mixed values are larger there"
    assert forward_runs(checkpoint_wrapper(copy.deepcopy(plain)), x, names)[1] == plain_runs[1] + 2


def test_selective_is_compared_copied_and_pickled_by_value() -> None:
    policy = resolve_policy("selective")
    for twin in (resolve_policy("selective"), copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert twin == policy and hash(twin) == hash(policy) and repr(twin) == "'selective'"
        assert (
            twin.matches(aten.addmm.default) and twin.matches(aten.bmm.default) and not twin.matches(aten.gelu.default)
        )
    assert policy != resolve_policy(sorted(policy.patterns))


def test_compiled_parts_inside_compute_the_same() -> None:
    torch._dynamo.reset()
    plain, parts = feed(), feed()
    ours = checkpoint_wrapper(nn.Sequential(parts[:2], torch.compile(parts[2:], backend="eager")), keep=["addmm"])
    x = torch.randn(4, 8)
    for _ in range(2):
        for module in (plain, ours):
            module.zero_grad()
            module(x).square().sum().backward()
        assert differing([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()]) == []


def test_wrong_operators_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'admm' is the name of no operator.*; did you mean .*'addmm'"):
        checkpoint_wrapper(nn.Tanh(), keep=["admm"])
    with pytest.raises(ValueError, match=r"'\(' is not a regular expression"):
        resolve_policy(["("])
    with pytest.raises(TypeError, match=r"got one string, 'mm': write \['mm'\]"):
        resolve_policy("mm")
    with pytest.raises(TypeError):
        resolve_policy([3])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        checkpoint_wrapper(nn.Tanh(), keep=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("said", ["PREFER_RECOMPUTE", 3, None])
def test_a_policy_that_says_no_policy_is_refused(said: Any) -> None:
    def careless(*args: Any, **kwargs: Any) -> Any:
        return said

    module = checkpoint_wrapper(nn.Linear(2, 2), keep=careless)
    told = rf"careless returned a {type(said).__name__}, {said!r}, for the result of aten.addmm.default: .*PREFER_SAVE"
    with pytest.raises(TypeError, match=told):
        module(torch.ones(1, 2))


def test_every_policy_that_does_not_say_recompute_keeps() -> None:
    for policy in CheckpointPolicy:
        runs = forward_runs(
            checkpoint_wrapper(feed(), keep=lambda *_, policy=policy, **__: policy), torch.randn(4, 8), ["gelu"]
        )
        assert runs == [2 if "RECOMPUTE" in policy.name else 1], policy


class ByAnAlias(nn.Module):
    """Changes in place what a layer without bias has returned: an alias of the product, with versions of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)

    def forward(self, x: Tensor, inside: bool) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        if inside:
            y.sigmoid_()
        return y, self.second((y * 2).exp())


@pytest.mark.parametrize("keep", ["selective", ["mm"], lambda *args, **kwargs: True])
@pytest.mark.parametrize("inside", [True, False])
def test_a_result_changed_through_an_alias_is_recomputed(keep: Any, inside: bool) -> None:
    plain = ByAnAlias()
    ours = checkpoint_wrapper(copy.deepcopy(plain), keep=keep)
    found = []
    for module in (plain, ours):
        x = torch.linspace(-1, 1, 24).reshape(2, 3, 4).requires_grad_()
        y, z = module(x, inside)
        if not inside:
            y.mul_(3)  # By whom it was given to.
        (y.sum() + z.square().sum()).backward()
        found.append([z.detach(), x.grad, *(param.grad for param in module.parameters())])
    assert differing(found[1], found[0]) == []


class Casts(nn.Module):
    """Its weight is cast in the first call, and taken out of autocast's cache in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(torch.tanh(self.layer(x)) * self.scale)
        return y


@pytest.mark.parametrize("keep", [["_to_copy"], [".*"], lambda *args, **kwargs: True])
def test_casts_that_autocast_caches_are_not_confused(keep: Any) -> None:
    plain = Casts()
    ours = checkpoint_wrapper(copy.deepcopy(plain), keep=keep)
    found = []
    for module in (plain, ours):
        x = torch.linspace(-1, 1, 16).reshape(4, 4)
        with torch.autocast("cpu", torch.bfloat16):
            y = module(module(x))
        y.float().square().sum().backward()
        found.append([y.detach(), *(param.grad for param in module.parameters())])
    assert differing(found[1], found[0]) == []


class Overwriting(nn.Module):
    """Changes what it has computed in place: by way of an alias where `bias` is False."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        y += 1
        return y


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), inner, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.first(x))
        z: Tensor = self.last(y if isinstance(y, Tensor) else y[0])
        return z


@pytest.mark.parametrize("shape", [(4, 8), (3, 5, 8)])
@pytest.mark.parametrize("keep", ["selective", lambda *args, **kwargs: True])
def test_a_result_kept_by_two_modules_is_changed_by_one_only(shape: tuple[int, ...], keep: Any, tmp_path: Path) -> None:
    for build in (
        lambda: nn.GRU(8, 8, batch_first=True),
        lambda: nn.RNN(8, 8, batch_first=True),
        lambda: Overwriting(True),
        lambda: Overwriting(False),
    ):
        found = []
        for to in (None, "host", tmp_path):
            torch.manual_seed(0)
            model = Around(build())
            if to is not None:
                checkpoint_wrapper(model.inner, keep=keep, offload_to=to, min_bytes=0)
                checkpoint_wrapper(model, keep=keep, offload_to=to, min_bytes=0)
            for _ in range(2):
                model(torch.linspace(-1, 1, 8).expand(shape) + torch.randn(shape)).square().sum().backward()
            found.append([param.grad for param in model.parameters()])
        assert differing(found[1], found[0]) == [] and differing(found[2], found[0]) == [], type(model.inner).__name__


class ByHand(nn.Module):
    """A product, then a sine."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x.cos() @ y).sin()


def test_context_fn_keeps_results_by_the_contexts_of_torch() -> None:
    x, y = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    context_fn = partial(create_selective_checkpoint_contexts, [aten.mm.default])
    module = checkpoint_wrapper(ByHand(), context_fn=context_fn)
    with Counting() as forward:
        out = module(x, y)
    with Counting() as backward:
        out.sum().backward()
    assert [counting.counts["mm"] for counting in (forward, backward)] == [1, 2], (
        "two products of gradients, none again"
    )
    assert backward.counts["cos"] == 2, "one of the recomputation, one of the gradient of sin"
    got = [x.grad, y.grad]
    x.grad = y.grad = None
    ByHand()(x, y).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(got, (x.grad, y.grad), strict=True))  # type: ignore[arg-type]


def addmm_contexts() -> Any:
    return create_selective_checkpoint_contexts([aten.addmm.default])


@pytest.mark.parametrize(
    "context_fn", [addmm_contexts, partial(create_selective_checkpoint_contexts, [aten.tanh.default])]
)
def test_a_compiled_module_takes_context_fn(context_fn: Any) -> None:
    torch._dynamo.reset()
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    plain, x = copy.deepcopy(module), torch.ones(2, 4)
    wrapped = checkpoint_wrapper(module, context_fn=context_fn)
    wrapped.compile(backend="aot_eager")
    for each in (wrapped, plain):
        each(x).square().sum().backward()
    gradients = zip(wrapped.parameters(), plain.parameters(), strict=True)
    assert all(torch.allclose(one.grad, other.grad) for one, other in gradients)  # type: ignore[arg-type]


def test_context_fn_is_entered_around_forward_and_recomputation() -> None:
    entered: list[str] = []

    @contextmanager
    def context(name: str) -> Iterator[None]:
        entered.append(name)
        try:
            yield
        except ArithmeticError:
            entered.append(f"{name} raises")
            raise

    def context_fn() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return context("forward"), context("recomputation")

    module = checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), context_fn=context_fn)
    for _ in range(2):
        module(torch.randn(1, 2)).sum().backward()
    assert entered == ["forward", "recomputation"] * 2

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        checkpoint_wrapper(Fails(), context_fn=context_fn)(torch.ones(1, requires_grad=True))
    assert entered[4:] == ["forward", "forward raises"]


def test_determinism_check_none_leaves_out_the_comparison() -> None:
    class Alternates(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return (x.float() if self.calls == 1 else x.double()).exp().sum()

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(CheckpointError, match="different metadata"):
        checkpoint_wrapper(Alternates())(x).backward()
    checkpoint_wrapper(Alternates(), determinism_check="none")(x).backward()
    with pytest.raises(ValueError, match='expected "default" or "none", got \'never\''):
        checkpoint_wrapper(Alternates(), determinism_check="never")  # type: ignore[arg-type]
