"""context_parallel.py: a model as it is, over a sequence that ranks divide, is the model over the whole one."""

from __future__ import annotations

import copy
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import scale_tp
from scale_core.comm.group import group_of
from scale_core.testing import preload
from scale_tp.attention.padding import padding_mask
from scale_tp.comm import all_reduce_sum

context_parallel_module: Any = sys.modules["scale_tp.attention.context_parallel"]

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


def _bert() -> nn.Module:
    torch.manual_seed(6)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 8}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=WORDS, **sizes)).eval().double()


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


def _trains_as_one_process(model: nn.Module, attention: Any, *, checkpoints: str = "none", num_padded: int = 0) -> None:
    """Three steps of a causal model on this rank's shards, replicated over the ranks, and on full sequences."""
    world = group_of()
    model.train()
    if checkpoints != "none":
        model.activation_checkpointing_enable({"use_reentrant": checkpoints == "reentrant"})
        model.enable_input_require_grads()  # without it, reentry has no gradients
    whole = copy.deepcopy(model)
    batch = {"input_ids": _tokens(2, LENGTH), "labels": _tokens(2, LENGTH)}
    batch["labels"][0, :5] = -100  # ranks have different numbers of tokens that count
    if num_padded:
        batch["attention_mask"] = (torch.arange(LENGTH) >= torch.tensor([[num_padded], [0]])).long()

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


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    "name, ways",
    [
        ("llama", [("ring", "none"), ("ulysses", "none"), ("ring", "reentrant"), ("ulysses", "non-reentrant")]),
        ("gpt2", [("ring", "none"), ("ulysses", "none"), ("ring", "non-reentrant")]),
        ("qwen2", [("ring", "none"), ("ulysses", "none")]),
    ],
)
@_context_axis()
def test_three_steps_on_two_ranks_equal_those_of_one_process(name: str, ways: list[tuple[str, str]]) -> None:
    for attention, checkpoints in ways:
        _trains_as_one_process(_causal_model(name), attention, checkpoints=checkpoints)


@pytest.mark.soak  # worlds of four stand in the compositions of scale-train as well
@pytest.mark.ranks(4)
@pytest.mark.parametrize("attention", ["ring", "ulysses"])
@_context_axis()
def test_four_ranks_share_two_key_value_heads(attention: str) -> None:
    _trains_as_one_process(_causal_model("llama"), attention)


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("attention", ["ring", "ulysses"])
@_context_axis()
def test_torchs_encoder_layer_is_that_of_one_process(attention: str) -> None:
    world = group_of()
    tokens, targets = _tokens(2, LENGTH), _tokens(3, LENGTH)[1:]
    positions = torch.arange(LENGTH)
    whole = Encoder().double()
    expected = F.cross_entropy(whole(tokens, positions).flatten(0, 1), targets.flatten())
    expected.backward()
    model = Encoder().double()
    mine = scale_tp.split_sequence(targets)
    with scale_tp.context_parallel(attention=attention):
        logits = model(scale_tp.split_sequence(tokens), scale_tp.position_ids(LENGTH))
        loss = F.cross_entropy(logits.flatten(0, 1), mine.flatten(), reduction="sum")
        loss = loss / scale_tp.num_tokens_per_rank(mine)
    loss.backward()  # nothing is computed again, so it may stand behind the block
    torch.testing.assert_close(all_reduce_sum(loss.detach(), world) / world.size, expected.detach())
    for param, its in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(all_reduce_sum(param.grad, world) / world.size, its.grad, rtol=1e-10, atol=1e-10)
    # In evaluation torch has a kernel for the whole layer, which would see this part alone.
    with torch.inference_mode():
        with scale_tp.context_parallel(attention=attention):
            logits = model.eval()(scale_tp.split_sequence(tokens), scale_tp.position_ids(LENGTH))
        torch.testing.assert_close(logits, scale_tp.split_sequence(whole.eval()(tokens, positions)))


@pytest.mark.ranks(2)
@_context_axis()
def test_attention_with_masks_of_padding_is_that_of_one_process() -> None:
    """Masks of padding: one row with padding on the left and behind, so that one rank has padding alone."""
    ranks = group_of()
    generator = torch.Generator().manual_seed(2)
    query, key, value, given = torch.randn(4, 2, 4, LENGTH, 8, generator=generator, dtype=torch.float64)
    hidden = torch.zeros(2, LENGTH, dtype=torch.bool)
    hidden[0, :3] = hidden[0, 9:] = True  # With two ranks, all that the first one has of this row.
    full, causal = padding_mask(hidden, is_causal=False), padding_mask(hidden, is_causal=True)
    part_of = partial(scale_tp.split_sequence, process_group=ranks)
    mine = part_of(hidden)
    own = [padding_mask(mine, is_causal=False), padding_mask(mine, is_causal=True)]
    additive = torch.zeros(own[0].shape, dtype=torch.float64).masked_fill_(~own[0], -torch.inf)
    expanded = own[0].expand(-1, 4, mine.shape[1], -1)
    for whole, masks in ((full, (own[0], expanded, additive)), (causal, (own[1],))):
        leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        output = F.scaled_dot_product_attention(*leaves, attn_mask=whole)
        expected = [output.detach(), *torch.autograd.grad(output, leaves, given)]
        for mask, attention in itertools.product(masks, ("ring", "ulysses")):
            leaves = [part_of(tensor, dim=2).requires_grad_() for tensor in (query, key, value)]
            with scale_tp.context_parallel(ranks, attention=attention):
                output = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
            found = [output.detach(), *torch.autograd.grad(output, leaves, part_of(given, dim=2))]
            for got, its in zip(found, expected, strict=True):
                torch.testing.assert_close(got, part_of(its, dim=2), rtol=1e-10, atol=1e-10)


@pytest.mark.ranks(2)
@_context_axis()
def test_a_mask_that_is_filled_again_is_read_again() -> None:
    """As a server keeps one tensor for the masks of all its batches."""
    generator = torch.Generator().manual_seed(2)
    query, key, value = torch.randn(3, 2, 4, LENGTH, 8, generator=generator, dtype=torch.float64)
    hidden = torch.zeros(2, LENGTH, dtype=torch.bool)
    hidden[0, :3] = hidden[0, 9:] = True
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), scale_tp.context_parallel(attention="ring"):
            mask = torch.empty(2, 1, 1, LENGTH // group_of().size, dtype=torch.bool)
            for each in (hidden, hidden.flip(0), torch.zeros_like(hidden)):
                mask.copy_(padding_mask(scale_tp.split_sequence(each), is_causal=False))
                parts = [scale_tp.split_sequence(tensor, dim=2) for tensor in (query, key, value)]
                for _ in range(2):
                    got = F.scaled_dot_product_attention(*parts, attn_mask=mask)
                whole = padding_mask(each, is_causal=False)
                scores = (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).masked_fill(~whole, -torch.inf)
                expected = scores.softmax(-1) @ value
                torch.testing.assert_close(got, scale_tp.split_sequence(expected, dim=2), rtol=1e-10, atol=1e-10)


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("name, attention", [("llama", "ring"), ("llama", "ulysses"), ("gpt2", "ring")])
@_context_axis()
def test_padded_batches_train_as_on_one_process(name: str, attention: str) -> None:
    _trains_as_one_process(_causal_model(name), attention, num_padded=4)


@pytest.mark.ranks(2)
@_context_axis()
def test_a_padded_encoder_gives_the_logits_of_one_process() -> None:
    tokens, mask = _tokens(2, LENGTH), (torch.arange(LENGTH) < torch.tensor([[7], [LENGTH]])).long()
    bert = _bert()
    part = scale_tp.get_batch_on_this_cp_rank({"input_ids": tokens, "attention_mask": mask}, is_causal=False)
    with torch.no_grad(), scale_tp.context_parallel():
        logits = bert(**part).logits
    expected = scale_tp.split_sequence(bert(tokens, attention_mask=mask).logits)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.ranks(2)
@_context_axis()
def test_labels_to_ignore_may_be_others_than_minus_100() -> None:
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


@pytest.mark.ranks(2)
@_context_axis()
def test_half_precision_is_as_near_as_on_one_process() -> None:
    """As far from the sequence in fp32 as the full sequence in bf16 is."""
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


class Kept(Tensor):
    """A subclass of tensors."""


@pytest.mark.ranks(2)
@_context_axis()
def test_attention_unlike_that_of_one_process_is_refused() -> None:
    rank = group_of().rank
    x = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(rank))
    attend = F.scaled_dot_product_attention
    same = torch.ones(1, 2, 4, 8).cumsum(2)
    _is_refused(
        "all 2 ranks have the same keys and values.*get_batch_on_this_cp_rank", lambda: attend(same, same, same)
    )
    window = torch.ones(4, 4).bool().tril().triu(-1)
    more = r"got \[4, 4\] torch.bool, and the mask of rank 1 says more.*is_causal=True and no mask"
    _is_refused(more, lambda: attend(x, x, x, window if rank else torch.ones(4, 4).bool()))
    first = (torch.arange(4) == 0).expand(4, 4)
    _is_refused("the mask of rank each can be either", lambda: attend(x, x, x, first))
    _is_refused(r"the mask of rank 0 and 1 says more", lambda: attend(x, x, x, 0.5 * torch.ones(4, 4)))
    _is_refused("got is_causal=True as well", lambda: attend(x, x, x, window, is_causal=True))
    learned = torch.zeros(4, 4, requires_grad=True)
    _is_refused("got one that requires a gradient", lambda: attend(x, x, x, learned))
    _is_refused('dropout_p=0 with attention="ring", got 0.1.*ulysses', lambda: attend(x, x, x, dropout_p=0.1))
    _is_refused("as many keys as queries, got 4 queries and 2 keys", lambda: attend(x, x[:, :, :2], x[:, :, :2]))
    _is_refused("2 positions or more on each rank, got 1", lambda: attend(*[x[:, :, :1]] * 3))
    _is_refused("2 heads and 1 key-value heads: pass enable_gqa=True", lambda: attend(x, x[:, :1], x[:, :1]))
    _is_refused("expected plain tensors, got Kept", lambda: attend(*[x.as_subclass(Kept)] * 3))
    _is_refused(r'no scaled_dot_product_attention was called.*attn_implementation="sdpa"', lambda: x.softmax(-1) @ x.mT)
    with scale_tp.context_parallel(attention="ulysses"):  # With heads of its own each rank can drop.
        assert attend(x, x, x, dropout_p=0.5).shape == x.shape


@pytest.mark.ranks(2)
@_context_axis()
def test_a_block_left_by_an_error_leaves_the_function_as_it_was() -> None:
    x = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(group_of().rank))
    attend = F.scaled_dot_product_attention
    assert torch.equal(attend(x, x, x, torch.ones(4, 4).bool()), attend(x, x, x))
    _is_refused("invalid literal", lambda: [attend(x, x, x), int("a later line")])
    checkpoint(Attention(), x.clone().requires_grad_(), use_reentrant=True).sum().backward()


@pytest.mark.ranks(2)
@_context_axis()
def test_models_unlike_those_of_one_process_are_refused() -> None:
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
    _is_refused(
        "that marks padding alone.*says more.*get_batch_on_this_cp_rank", lambda: model(**without_mask, use_cache=False)
    )
    _is_refused(
        "layers of sliding_attention .sliding_window=6.", lambda: _causal_model("mistral", sliding_window=6)(**part)
    )
    with scale_tp.context_parallel():  # The window is as long as the sequence.
        _causal_model("mistral", sliding_window=8)(**part)
    _is_refused(
        "call generate.. outside", lambda: model.generate(part["input_ids"], position_ids=None, max_new_tokens=3)
    )


@pytest.mark.ranks(2)
@_context_axis()
def test_a_loss_that_takes_no_number_of_tokens_is_refused() -> None:
    tokens = _tokens(2, 8)
    bert = _bert()
    masked = scale_tp.get_batch_on_this_cp_rank({"input_ids": tokens, "labels": tokens}, is_causal=False)
    _is_refused("its loss takes no num_items_in_batch", lambda: bert(**masked))
    with scale_tp.context_parallel():
        logits = bert(masked["input_ids"], position_ids=masked["position_ids"]).logits
    torch.testing.assert_close(logits, scale_tp.split_sequence(bert(tokens).logits), rtol=1e-10, atol=1e-10)


@pytest.mark.ranks(2)
@_context_axis()
def test_a_backward_with_checkpoints_belongs_into_the_block() -> None:
    x = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(group_of().rank), requires_grad=True)
    attend = Attention(is_causal=True)
    with scale_tp.context_parallel():
        inside = checkpoint(attend, x, use_reentrant=False)
        inside.sum().backward()
    for use_reentrant in (False, True):
        with scale_tp.context_parallel():
            output = checkpoint(attend, x, use_reentrant=use_reentrant)
        with pytest.raises(ValueError, match=r"call loss.backward\(\) inside the block"):
            output.sum().backward()


@pytest.mark.ranks(2)
@_context_axis()
def test_after_an_evaluation_the_operator_is_torchs_own() -> None:
    x = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(group_of().rank), requires_grad=True)
    attend = Attention(is_causal=True)
    for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with scale_tp.context_parallel():
            attend(x).sum().backward()
        with context, scale_tp.context_parallel():
            kept = attend(x)
        assert context_parallel_module._kernel._library is None
        if kept.requires_grad:
            kept.sum().backward()  # may still come, since nothing is computed again


@pytest.mark.ranks(2)
@_context_axis()
def test_a_block_without_backward_says_nothing_of_others() -> None:
    """As for evaluation: of checkpoints outside, whenever they were made."""
    x = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(group_of().rank), requires_grad=True)
    attend = Attention(is_causal=True)
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


@pytest.mark.ranks(2)
@_context_axis()
def test_a_compiled_module_runs_in_a_block_without_its_graph() -> None:
    x = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(group_of().rank), requires_grad=True)
    attend = Attention(is_causal=True)
    with scale_tp.context_parallel():
        expected = attend(x).detach()
        attend(x).sum().backward()
    compiled = torch.compile(attend, backend="eager")
    compiled(x)  # and torch warns of no hook that a block has left behind
    with scale_tp.context_parallel(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        assert torch.equal(compiled(x), expected)
        attend(x).sum().backward()
    # Without any block a checkpoint is as it always was.
    alone = x.detach().requires_grad_()
    checkpoint(attend, alone, use_reentrant=True).sum().backward()
    again = x.detach().requires_grad_()
    attend(again).sum().backward()
    assert torch.equal(alone.grad, again.grad)
