"""context_parallel.py: a model as it is, over a sequence that ranks divide, is the model over the whole one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import scale_tp
from scale_core.comm.group import group_of
from scale_core.testing import preload, run_ranks
from scale_tp.comm import all_reduce_sum

transformers = pytest.importorskip("transformers")
preload("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2")

WORDS, LENGTH, LR = 19, 12, 0.5


def _tokens(*shape: int) -> Tensor:
    return torch.randint(WORDS, shape, generator=torch.Generator().manual_seed(5))


def _causal_model(name: str, **changes: Any) -> nn.Module:
    """A tiny model of transformers with random weights, which are the same on all ranks."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0, "num_hidden_layers": 2}
    if name == "gpt2":
        sizes |= {"n_embd": 16, "n_head": 4, "n_positions": 32}
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | changes))
    sizes |= {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    kind = {"llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral"}[name]
    config = getattr(transformers, f"{kind}Config")(**sizes | changes)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


class Encoder(nn.Module):
    """A plain model whose attention is torch's own module, and not causal."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding, self.positions = nn.Embedding(WORDS, 16), nn.Embedding(LENGTH, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.layer(self.embedding(tokens) + self.positions(positions))
        logits: Tensor = self.head(x)
        return logits


def _losses_of(model: nn.Module, loss_of: Callable[[nn.Module], Tensor], mean: Callable[[Tensor], Tensor]) -> list[Any]:
    """The losses of three steps, and the weights behind them."""
    optimizer = torch.optim.SGD(model.parameters(), LR)
    losses = []
    for _ in range(3):
        loss = loss_of(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss.detach()))
    return [*losses, *(param.detach() for param in model.parameters())]


def _trains_as_one_process(model: nn.Module, attention: Any, *, checkpoints: str = "none") -> None:
    """Three steps of a causal model on this rank's parts, replicated over the ranks, and on whole sequences."""
    world = group_of()
    model.train()
    if checkpoints != "none":
        model.activation_checkpointing_enable({"use_reentrant": checkpoints == "reentrant"})
        model.enable_input_require_grads()  # without it, reentry has no gradients
    whole = copy.deepcopy(model)
    batch = {"input_ids": _tokens(2, LENGTH), "labels": _tokens(2, LENGTH)}
    batch["labels"][0, :5] = -100  # ranks have different numbers of tokens that count

    def on_whole_sequences(model: nn.Module) -> Tensor:
        loss: Tensor = model(**batch).loss
        loss.backward()
        return loss

    def on_this_part(model: nn.Module) -> Tensor:
        part = scale_tp.get_batch_on_this_cp_rank(batch)
        with scale_tp.context_parallel(attention=attention):
            loss: Tensor = model(**part).loss
            loss.backward()
        return loss

    expected = _losses_of(whole, on_whole_sequences, lambda loss: loss)
    replicated = DistributedDataParallel(model)
    found = _losses_of(replicated, on_this_part, lambda loss: all_reduce_sum(loss, world) / world.size)
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=2e-6, atol=1e-6)


@contextmanager
def _context_axis() -> Iterator[None]:
    scale_tp.initialize_model_parallel(1, context_parallel_size=group_of().size)
    yield
    scale_tp.destroy_model_parallel()


def _models(cases: list[tuple[str, str, str]]) -> None:
    warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
    with _context_axis():
        for name, attention, checkpoints in cases:
            _trains_as_one_process(_causal_model(name), attention, checkpoints=checkpoints)


def _plain_models() -> None:
    world = group_of()
    tokens, targets = _tokens(2, LENGTH), _tokens(3, LENGTH)[1:]
    positions = torch.arange(LENGTH)
    whole = Encoder()
    expected = F.cross_entropy(whole(tokens, positions).flatten(0, 1), targets.flatten())
    expected.backward()
    for attention in ("ring", "ulysses"):
        model = Encoder()
        mine = scale_tp.split_sequence(targets)
        with scale_tp.context_parallel(attention=attention):
            logits = model(scale_tp.split_sequence(tokens), scale_tp.position_ids(LENGTH))
            loss = F.cross_entropy(logits.flatten(0, 1), mine.flatten(), reduction="sum")
            loss = loss / scale_tp.num_tokens_per_rank(mine)
        loss.backward()  # nothing is computed again, so it may stand behind the block
        torch.testing.assert_close(all_reduce_sum(loss.detach(), world) / world.size, expected.detach())
        for param, its in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(all_reduce_sum(param.grad, world) / world.size, its.grad, rtol=1e-5, atol=1e-7)
        # In evaluation torch has a kernel for the whole layer, which would see this part alone.
        with torch.inference_mode():
            with scale_tp.context_parallel(attention=attention):
                logits = model.eval()(scale_tp.split_sequence(tokens), scale_tp.position_ids(LENGTH))
            torch.testing.assert_close(logits, scale_tp.split_sequence(whole.eval()(tokens, positions)))
        whole.train()


def _labels_that_do_not_count() -> None:
    """A model of transformers gets the labels to ignore, where they are others than -100."""
    world = group_of()
    model = _causal_model("llama")
    tokens, targets = _tokens(2, LENGTH), _tokens(2, LENGTH)
    targets[0, :5] = 0
    with torch.no_grad():
        logits = model(tokens).logits[:, :-1]
        expected = F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=0)
        part = scale_tp.get_batch_on_this_cp_rank({"input_ids": tokens, "labels": targets}, ignore_index=0)
        with scale_tp.context_parallel():
            loss = model(**part).loss
    torch.testing.assert_close(all_reduce_sum(loss, world) / world.size, expected)


def _half_precision() -> None:
    """As far from the sequence in fp32 as the whole sequence in bf16 is."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(3, 1, 2, LENGTH, 8, generator=generator)
    exact = F.scaled_dot_product_attention(*whole, is_causal=True)
    rounded = F.scaled_dot_product_attention(*whole.bfloat16(), is_causal=True)
    bound = 2 * (rounded.float() - exact).abs().max()
    part = scale_tp.split_sequence(whole, dim=3)
    for attention in ("ring", "ulysses"):
        with scale_tp.context_parallel(attention=attention):
            cast = F.scaled_dot_product_attention(*part.bfloat16(), is_causal=True)
            with torch.autocast("cpu", torch.bfloat16):
                under_autocast = F.scaled_dot_product_attention(*part, is_causal=True)
        assert cast.dtype == under_autocast.dtype == torch.bfloat16
        assert torch.equal(cast, under_autocast)
        assert (cast.float() - scale_tp.split_sequence(exact, dim=2)).abs().max() <= bound


def _two_ranks() -> None:
    _models([(name, attention, "none") for name in ("llama", "gpt2", "qwen2") for attention in ("ring", "ulysses")])
    _models([("llama", "ring", "reentrant"), ("gpt2", "ring", "non-reentrant"), ("llama", "ulysses", "non-reentrant")])
    with _context_axis():
        _plain_models()
        _labels_that_do_not_count()
        _half_precision()


def test_three_steps_on_two_ranks_equal_those_of_one_process() -> None:
    run_ranks(_two_ranks, 2)


@pytest.mark.soak  # worlds of four stand in the compositions of scale-train as well
def test_three_steps_on_four_ranks_equal_those_of_one_process() -> None:
    # Four ranks share two key-value heads.
    run_ranks(_models, 4, [("llama", "ring", "none"), ("llama", "ulysses", "none")])


def test_on_one_rank_nothing_is_changed() -> None:
    model = _causal_model("llama")
    batch = {"input_ids": _tokens(2, LENGTH), "labels": _tokens(2, LENGTH)}
    batch["labels"][0, :5] = -100
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    with scale_tp.context_parallel():
        part = scale_tp.get_batch_on_this_cp_rank(batch)
        torch.testing.assert_close(model(**part).loss, model(**batch).loss)
        model(input_ids=batch["input_ids"], attention_mask=mask)
    _is_refused("expected attention to be 'ring' or 'ulysses', got 'Ring'", lambda: None, "Ring")


class Attention(nn.Module):
    """Nothing but the call, with options of one's choice."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, **self.options)


def _is_refused(message: str, call: Callable[[], object], attention: Any = "ring") -> None:
    with pytest.raises(ValueError, match=message), scale_tp.context_parallel(attention=attention):
        call()


def _refusals() -> None:
    rank = group_of().rank
    x = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(rank))
    attend = F.scaled_dot_product_attention
    same = torch.ones(1, 2, 4, 8).cumsum(2)
    _is_refused(
        "all 2 ranks have the same keys and values.*get_batch_on_this_cp_rank", lambda: attend(same, same, same)
    )
    _is_refused(r"expected no attn_mask, got \[4, 4\] torch.bool", lambda: attend(x, x, x, torch.ones(4, 4).bool()))
    _is_refused('dropout_p=0 with attention="ring", got 0.1.*ulysses', lambda: attend(x, x, x, dropout_p=0.1))
    _is_refused("as many keys as queries, got 4 queries and 2 keys", lambda: attend(x, x[:, :, :2], x[:, :, :2]))
    _is_refused("2 positions or more on each rank, got 1", lambda: attend(*[x[:, :, :1]] * 3))
    _is_refused("2 heads and 1 key-value heads: pass enable_gqa=True", lambda: attend(x, x[:, :1], x[:, :1]))
    _is_refused("expected plain tensors, got Kept", lambda: attend(*[x.as_subclass(Kept)] * 3))
    _is_refused(r'no scaled_dot_product_attention was called.*attn_implementation="sdpa"', lambda: x.softmax(-1) @ x.mT)
    with scale_tp.context_parallel(attention="ulysses"):  # With heads of its own each rank can drop.
        assert attend(x, x, x, dropout_p=0.5).shape == x.shape

    # A block that was left by an error, or by the end, leaves the function as it was.
    assert torch.equal(attend(x, x, x, torch.ones(4, 4).bool()), attend(x, x, x))
    _is_refused("invalid literal", lambda: [attend(x, x, x), int("a later line")])
    checkpoint(Attention(), x.clone().requires_grad_(), use_reentrant=True).sum().backward()

    tokens = _tokens(2, 8)
    part = scale_tp.get_batch_on_this_cp_rank({"input_ids": tokens, "labels": tokens})
    model = _causal_model("llama")
    eager = _causal_model("llama", attn_implementation="eager")
    _is_refused("no scaled_dot_product_attention was called", lambda: eager(**part))
    forgotten = {"position_ids": "without position_ids=", "num_items_in_batch": "but without num_items_in_batch"}
    forgotten |= {"shift_labels": "but without shift_labels"}
    for name, message in forgotten.items():
        given = {key: value for key, value in part.items() if key != name}
        _is_refused(message, lambda given=given: model(**given))
    # Without a mask transformers takes positions that do not count on by 1 for several sequences, and makes one.
    without_mask = {key: value for key, value in part.items() if key != "attention_mask"}
    without_mask["position_ids"] = part["position_ids"].flip(1)
    _is_refused("expected no attn_mask.*get_batch_on_this_cp_rank", lambda: model(**without_mask, use_cache=False))
    _is_refused(
        "layers of sliding_attention .sliding_window=6.", lambda: _causal_model("mistral", sliding_window=6)(**part)
    )
    with scale_tp.context_parallel():  # The window is as long as the sequence.
        _causal_model("mistral", sliding_window=8)(**part)
    _is_refused(
        "call generate.. outside", lambda: model.generate(part["input_ids"], position_ids=None, max_new_tokens=3)
    )
    bert = transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=8
        )
    ).eval()
    masked = scale_tp.get_batch_on_this_cp_rank({"input_ids": tokens, "labels": tokens}, is_causal=False)
    _is_refused("its loss takes no num_items_in_batch", lambda: bert(**masked))
    with scale_tp.context_parallel():
        logits = bert(masked["input_ids"], position_ids=masked["position_ids"]).logits
    torch.testing.assert_close(logits, scale_tp.split_sequence(bert(tokens).logits), rtol=1e-5, atol=1e-6)


class Kept(Tensor):
    """A subclass of tensors."""


def _behind_the_block() -> None:
    """A checkpoint's second forward belongs into the block; a compiled one runs in it without its graph."""
    x = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(group_of().rank), requires_grad=True)
    attend = Attention(is_causal=True)
    with scale_tp.context_parallel():
        inside = checkpoint(attend, x, use_reentrant=False)
        inside.sum().backward()
        expected = attend(x).detach()
    for use_reentrant in (False, True):
        with scale_tp.context_parallel():
            output = checkpoint(attend, x, use_reentrant=use_reentrant)
        with pytest.raises(ValueError, match=r"call loss.backward\(\) inside the block"):
            output.sum().backward()
    # A block without a backward pass, as for evaluation, says nothing of checkpoints outside, whenever they were made.
    for use_reentrant in (False, True):
        before = checkpoint(attend, x.detach().requires_grad_(), use_reentrant=use_reentrant)
        with scale_tp.context_parallel():
            output = checkpoint(attend, x, use_reentrant=use_reentrant)
        with scale_tp.context_parallel():
            attend(x)
        behind = checkpoint(attend, x.detach().requires_grad_(), use_reentrant=use_reentrant)
        (before.sum() + behind.sum()).backward()
        with pytest.raises(ValueError, match=r"call loss.backward\(\) inside the block"):
            output.sum().backward()
    compiled = torch.compile(attend, backend="eager")
    compiled(x)  # and torch warns of no hook that a block has left behind
    with scale_tp.context_parallel(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        assert torch.equal(compiled(x), expected)
        attend(x).sum().backward()
    # From here on a checkpoint without any block is as it always was.
    alone = x.detach().requires_grad_()
    checkpoint(attend, alone, use_reentrant=True).sum().backward()
    again = x.detach().requires_grad_()
    attend(again).sum().backward()
    assert torch.equal(alone.grad, again.grad)


def _errors() -> None:
    with _context_axis():
        _refusals()
        _behind_the_block()


def test_what_would_not_be_that_of_one_process_is_refused() -> None:
    run_ranks(_errors, 2)
