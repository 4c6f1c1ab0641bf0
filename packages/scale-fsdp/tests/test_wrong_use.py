"""Wrong use gets an error that says what was expected, what came, and what to write instead."""

import pytest
import torch
import torch.distributed as dist
from fsdp_parity import assert_same_grads, noise, sharded
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from scale_fsdp import OffloadOptimizer, ShardOptions, class_policy, fully_shard, fully_shard_modules
from scale_fsdp.wrapping.auto_wrap import get_fsdp_instances


@pytest.mark.fault(80)
def test_a_module_is_sharded_once():
    layer = fully_shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="Linear is sharded already: call fully_shard once"):
        fully_shard(layer)


@pytest.mark.parametrize("container", [nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})])
def test_a_container_that_is_never_called_is_refused(container):
    with pytest.raises(ValueError, match=f"{type(container).__name__} is never called.*for member in container"):
        fully_shard(container)


def test_only_modules_are_sharded():
    with pytest.raises(TypeError, match=r"expected an nn.Module or a list of them, got dict"):
        fully_shard({"layer": nn.Linear(2, 2)})
    with pytest.raises(TypeError, match="expected a ProcessGroup"):
        fully_shard(nn.Linear(2, 2), "gloo")


class Tied(nn.Module):
    """Its head has no parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(torch.relu(self.embed(x)))


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.ranks(1, 2, in_turn=True)
def test_weights_may_not_change_before_the_backward(reshard):
    linears = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for plain, units in ((linears, ["0", "1", ""]), (Tied(), ["embed", "head", ""])):
        last = units[1]
        for between in ("nothing", "evaluation", "forward", "load"):
            model = sharded(plain, units, reshard_after_forward=reshard)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            model(noise(2, 3)).square().sum().backward()
            loss = model(noise(2, 3)).square().sum()
            if between == "load":
                model.load_state_dict(plain.state_dict())
            else:
                optimizer.step()
            if between == "evaluation":
                with torch.no_grad():
                    model(noise(2, 3))
            elif between == "forward":
                loss = loss + model(noise(2, 3)).square().sum()
            words = rf"(?s)(?=.*unit '{last}'|.*root).*between its forward and its backward.*loss.backward\(\) first"
            with pytest.raises(RuntimeError, match=words):
                loss.backward()
            optimizer.zero_grad()
            model(noise(2, 3)).sum().backward()
            assert all(param.grad is not None for param in model.parameters())


def test_an_optimizer_of_the_plain_parameters_is_refused_by_name():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model(noise(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"AdamW was built before.*its '0.weight'.*AdamW\(model.parameters\(\)"):
        optimizer.step()
    torch.optim.AdamW(model.parameters()).step()


@pytest.mark.fault(81)
def test_the_error_of_such_an_optimizer_has_the_line_to_write():
    model = nn.Linear(3, 3)
    optimizer = OffloadOptimizer(torch.optim.AdamW, model.parameters())
    fully_shard(model)(noise(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"afterwards: OffloadOptimizer\(AdamW, model.parameters\(\), \.\.\.\)"):
        optimizer.step()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("how", [fully_shard, lambda model: fully_shard_modules(model, class_policy(nn.Linear))])
def test_hooks_on_plain_parameters_are_refused(how, register):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    handle = getattr(model[1].bias, register)(lambda _: None)
    with pytest.raises(ValueError, match=r"a hook is registered on '1.bias'.*register_local_grad_hook"):
        how(model)
    assert type(model) is nn.Sequential and not get_fsdp_instances(model)
    handle.remove()
    how(model)


def test_a_lazy_module_has_to_have_run():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"'0.weight' has no shape yet.*run the model once"):
        fully_shard(model)
    model(noise(2, 5))
    assert fully_shard(model)(noise(2, 5)).shape == (2, 3)


def test_gradient_hooks_on_shards_fail_the_next_forward():
    for flatten in (False, True):
        model = sharded(nn.Sequential(nn.Linear(3, 3)), [""], flatten_parameters=flatten)
        model(noise(2, 3)).sum().backward()
        handle = next(model.parameters()).register_hook(lambda _: None)
        with pytest.raises(RuntimeError, match=r"a hook .* shard of '0.weight'.*register_post_accumulate_grad_hook"):
            model(noise(2, 3))
        handle.remove()
        model(noise(2, 3)).sum().backward()


@pytest.mark.ranks(1, 2, in_turn=True)
def test_gradients_taken_inside_a_forward_are_refused():
    class Differentiated(nn.Module):
        """Takes a gradient inside of its forward, as energies' forces are taken."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.energy, self.inside = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), True

        def forward(self, x):
            energy = self.energy(x).sum()
            return torch.autograd.grad(energy, x)[0] if self.inside else energy

    plain, messages = Differentiated(), ""
    inside = sharded(plain, [""])(noise(2, 3).requires_grad_())  # It passes no unit's outputs, and is right.
    assert torch.equal(inside, plain(noise(2, 3).requires_grad_()))
    for units in (["energy", ""], ["energy.0", "energy", ""]):
        model = sharded(plain, units)
        with pytest.raises(RuntimeError, match=r"inside the forward of .*after the outermost") as caught:
            model(noise(2, 3).requires_grad_())
        messages += str(caught.value)
        model.inside = plain.inside = False
        plain.zero_grad()
        for each in (model, plain):
            each(noise(2, 3)).backward()
        norm = torch.nn.utils.get_total_norm([param.grad for param in plain.parameters()])
        assert torch.allclose(model.clip_grad_norm_(1e9), norm)
        plain.inside = True
    assert "root" in messages


@pytest.mark.fault(78)
def test_units_that_share_a_parameter_need_a_unit_around_both():
    model = Tied()
    fully_shard(model.embed)
    fully_shard(model.head)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"Linear shares a parameter with a Linear.*call fully_shard on the"):
            model.head(noise(2, 3))
    fully_shard(model)
    model(noise(2, 3)).sum().backward()


def test_second_order_gradients_are_refused_and_training_goes_on():
    model = sharded(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), ["0", ""])
    with pytest.raises(RuntimeError, match=r"'0\.\w+' has a gradient of its own.*create_graph"):
        model(noise(2, 3)).square().sum().backward(create_graph=True)
    model.zero_grad()
    model(noise(2, 3)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.fault(77)
@pytest.mark.ranks(1, 2, in_turn=True)
def test_a_second_backward_adds_the_same_gradient():
    model = sharded(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), ["0", "1", ""])
    loss = model(noise(2, 3)).square().sum()
    loss.backward(retain_graph=True)
    once = [param.grad.clone() for param in model.parameters()]
    loss.backward()
    assert all(torch.equal(p.grad, 2 * grad) for p, grad in zip(model.parameters(), once, strict=True))


@pytest.mark.ranks(2, in_turn=True)
def test_a_rank_outside_of_the_group_is_told_so():
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match=r"not a member[\s\S]*new_group"):
            fully_shard(nn.Linear(2, 2), group)


@pytest.mark.ranks(2, in_turn=True)
def test_dtensors_over_the_same_ranks_are_refused():
    """The user's own parallelize_module has made DTensors of one layer's parameters."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(model[1], mesh, ColwiseParallel())
    with pytest.raises(
        ValueError, match=r"(?s)'1.weight' is a shard \[1, 2\] of a parameter \[2, 2\].*mesh\[\"data\"\]"
    ):
        fully_shard(model, mesh)
    assert [type(param.data).__name__ for param in model.parameters()] == ["Tensor", "Tensor", "DTensor", "DTensor"]
    fully_shard(model[0], mesh)  # The layer beside it.
    model(noise(2, 2)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.ranks(2, in_turn=True)
def test_a_gradient_penalty_through_a_unit_is_refused():
    model = sharded(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)), ["0", ""])
    inputs = noise(2, 2).requires_grad_()
    with pytest.raises(RuntimeError, match=r"create_graph=True has come to .*no second derivative"):
        torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    model(inputs).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("flatten", [False, True])
def test_parameters_lent_for_a_call_are_refused(flatten):
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = sharded(plain, ["1", ""], flatten_parameters=flatten)
    x = noise(2, 3)
    for name in ("0.weight", "1.bias"):
        lent = {name: torch.zeros_like(plain.get_parameter(name))}
        error, said = RuntimeError, f"'{name}' was replaced by a different tensor.*functional_call"
        if flatten:  # torch itself sees that there is no parameter.
            error, said = TypeError, rf"attribute `{name.split('.')[1]}`: FlattenedParameter\(.*not an instance"
        with pytest.raises(error, match=said):
            torch.func.functional_call(model, lent, (x,))
        assert torch.equal(model(x), plain(x))
    if not flatten:
        assert torch.equal(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), plain(x))
    for each in (model, plain):
        each(x).square().mean().backward()
    assert torch.equal(model.state_dict()["0.weight"], plain[0].weight)


@pytest.mark.ranks(2, in_turn=True)
def test_a_forward_that_writes_to_its_parameters_is_refused():
    """The change would be lost with the gathered copy: every rank would train other weights than the plain model."""

    class Writes(nn.Module):
        """Changes its own weight in a forward, if it is asked to."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.now = nn.Linear(3, 3), False

        def forward(self, x):
            if self.now:
                with torch.no_grad():
                    self.linear.weight.clamp_(-0.1, 0.1)
            return self.linear(x)

    torch.manual_seed(2)
    plain = nn.Sequential(nn.Embedding(7, 3), Writes(), nn.Linear(3, 2))
    model = sharded(plain, ["0", "1", ""])
    x = torch.tensor([[1, 2], [3, 4]])
    for step in range(6):
        if step > 1:
            where, grad = (("0.weight", "1.linear.weight")[step % 2], step < 4)
            model[0].max_norm, model[1].now = (0.1, False) if step % 2 == 0 else (None, True)
            with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=f"'{where}'.* written to in place"):
                model(x).sum().backward()
            model[0].max_norm, model[1].now = None, False
        for each in (model, plain):
            each.zero_grad()
            each(x).square().mean().backward()
        assert_same_grads(model, plain, f"step {step}")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("flatten", [False, True])
def test_a_step_whose_backward_reached_no_shard_warns(flatten):
    """As of `backward(inputs=parameters)`, by which programs for GANs train one of two models."""
    model = fully_shard(nn.Sequential(nn.Linear(4, 3)), options=ShardOptions(flatten_parameters=flatten))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer.step()  # Before the first forward, as some do before they build a scheduler.
    loss = model(torch.ones(2, 4)).sum()
    loss.backward(inputs=list(model.parameters()))
    with pytest.warns(UserWarning, match=r"Adam.step\(\) changes nothing: .*weight' and others were used in a"):
        optimizer.step()
    for _ in range(2):
        with torch.no_grad():
            model(torch.ones(2, 4))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.step()  # No forward has come since.
