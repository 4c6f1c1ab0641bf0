"""Models of transformers cut at names of modules: their own forward runs in stages, and nothing else changes."""

import copy
from collections.abc import Callable
from typing import Any

import client_models as models
import pytest
import torch
from rank_values import by_rank
from torch import Tensor, nn

from scale_core.testing import run_ranks
from scale_pipe import DistributedPipe, shared_parameters, split
from scale_pipe.module_split.placeholder_tensor import PlaceholderTensorError

IDS = torch.arange(4 * 9).view(4, 9) * 7 % models.VOCABULARY
MASK = torch.ones_like(IDS)
MASK[0, :3] = 0


def gpt2() -> nn.Module:
    model = models.gpt2()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    return model


def of_language_model(model: Callable[..., Any], **kwargs: Any) -> Any:
    return model(input_ids=IDS, attention_mask=MASK, labels=IDS, **kwargs)


def in_turn(stages: list[nn.Module]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        output = stages[0](*args, **kwargs)
        for stage in stages[1:]:
            output = stage(output)
        return output

    return run


@pytest.mark.parametrize(
    ("build", "cuts", "kwargs"),
    [
        (gpt2, ["transformer.h.0", "transformer.h.1", "lm_head"], {}),
        (gpt2, ["transformer.h.1"], {"use_cache": False, "output_hidden_states": False}),
        (models.llama, ["model.layers.1", "model.norm"], {}),
        (models.mixtral, ["model.layers.1"], {"use_cache": False}),
    ],
)
def test_stages_of_a_language_model_are_the_model(
    build: Callable[[], nn.Module], cuts: list[str], kwargs: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = build().train()
    plain = copy.deepcopy(model)
    stages = split(model, cuts)
    for seed in range(2):
        torch.manual_seed(seed)
        expected = of_language_model(plain, **kwargs)
        expected.loss.backward()
        torch.manual_seed(seed)
        output = of_language_model(in_turn(stages), **kwargs)
        output.loss.backward()
        assert type(output) is type(expected)
        assert torch.equal(output.loss, expected.loss) and torch.equal(output.logits, expected.logits)
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad), name
    assert {key for stage in stages for key in stage.state_dict()} == set(plain.state_dict())


@pytest.mark.parametrize("build", [models.mixtral, models.qwen3_moe])
def test_what_layers_collect_beside_their_results_goes_along(build: Callable[[], nn.Module]) -> None:
    """The balance loss of a mixture of experts counts the routers of all stages, and trains them."""
    for cuts in (["model.layers.1"], ["model.layers.0", "model.layers.1", "lm_head"]):
        torch.manual_seed(0)
        model: Any = build().train()
        model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
        plain = copy.deepcopy(model)
        hidden = "lm_head" not in cuts  # The last one of them is no module's that the last stage has.
        kwargs = {"use_cache": False, "output_hidden_states": hidden}
        expected = of_language_model(plain, **kwargs)
        expected.loss.backward()
        output = of_language_model(in_turn(split(model, cuts)), **kwargs)
        output.loss.backward()
        assert torch.equal(output.aux_loss, expected.aux_loss) and torch.equal(output.loss, expected.loss)
        for kind in ("router_logits", "hidden_states") if hidden else ("router_logits",):
            assert len(output[kind]) == len(expected[kind]) and all(map(torch.equal, output[kind], expected[kind]))
        for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-5, atol=1e-7, msg=name)
        for way in (in_turn(split(model, cuts)), model):  # Cut a second time, and whole.
            again = of_language_model(way, **kwargs)
            assert len(again.router_logits) == len(expected.router_logits)
            assert torch.equal(again.aux_loss, expected.aux_loss)


def balanced_over_ranks() -> list[float]:
    torch.manual_seed(0)
    model: Any = models.mixtral().train()
    model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
    pipe = DistributedPipe(split(model, ["model.layers.1"]), chunks=2)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        loss = pipe.step(input_ids=IDS, labels=IDS, use_cache=False, loss_fn=lambda output: output.loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_experts_train_over_ranks_with_their_balance_loss() -> None:
    torch.manual_seed(0)
    model: Any = models.mixtral().train()
    model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = []
    for _ in range(3):
        losses = [model(input_ids=ids, labels=ids, use_cache=False).loss / 2 for ids in IDS.chunk(2)]
        sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(sum(loss.item() for loss in losses))
    assert run_ranks(balanced_over_ranks, 2) == [pytest.approx(expected, rel=1e-5)] * 2


def test_tied_embeddings_are_found() -> None:
    stages = split(models.gpt2(), ["transformer.h.1"])
    assert shared_parameters(stages) == [[(0, "transformer.wte.weight"), (1, "lm_head.weight")]]


def test_a_cut_inside_of_a_layer_has_its_residual_go_around_it() -> None:
    norms = [f"model.layers.0.{name}" for name in ("input_layernorm", "post_attention_layernorm")]
    stages = split(models.llama(), ["model.layers.0.mlp"], hold=dict.fromkeys(norms, 0))
    with pytest.raises(PlaceholderTensorError, match=r"went around the cut at 'model.layers.0.mlp'"):
        of_language_model(in_turn(stages), use_cache=False)


def test_an_encoder_and_a_decoder_are_cut() -> None:
    torch.manual_seed(0)
    model = models.t5().train()

    def run(model: Callable[..., Any]) -> Tensor:
        logits: Tensor = model(input_ids=IDS, decoder_input_ids=IDS[:, :5], use_cache=False).logits
        return logits

    expected = run(copy.deepcopy(model))
    for cuts in (["encoder.block.1", "decoder.block.0", "decoder.block.1"], ["decoder"], ["encoder", "decoder"]):
        assert torch.equal(run(in_turn(split(model, cuts))), expected)


def loss_of(output: Any, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


@pytest.mark.ranks(2)
def test_stages_train_as_the_model_with_its_tied_embedding() -> None:
    torch.manual_seed(0)
    model = models.gpt2()
    stages = split(model, ["transformer.h.1"], pass_on=[])
    pipe = DistributedPipe(stages, "1f1b", chunks=2)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
    losses = []
    for _ in range(2):
        loss = pipe.step(input_ids=IDS, use_cache=False, target=IDS, loss_fn=loss_of)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    (losses, state), (other_losses, _) = by_rank((losses, pipe.state_dict(full=True)))
    torch.manual_seed(0)
    model = models.gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = []
    for _ in range(2):
        parts = [loss_of(model(input_ids=ids, use_cache=False), ids) / 2 for ids in IDS.chunk(2)]
        for part in parts:
            part.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(sum(part.item() for part in parts))
    assert losses == other_losses == pytest.approx(expected, rel=1e-6)
    plain = model.state_dict()
    assert list(state) and set(state) == set(plain)
    for name, tensor in plain.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-7, msg=name)
