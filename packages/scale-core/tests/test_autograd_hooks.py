"""autograd.py: when things happen in a backward pass."""

from __future__ import annotations

import _thread
import queue
import threading
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scale_core.compat import queue_callback
from scale_core.hooks.autograd import (
    after_backward,
    after_gradient,
    alias_outputs,
    are_newest_nodes,
    before_backward,
    in_autograds_thread,
    in_backward,
    is_nested,
    register_post_backward,
    weak_hook,
)
from scale_core.hooks.gradients import (
    call_grad_published_hooks,
    call_local_grad_hooks,
    call_reduced_grad_hooks,
    has_local_grad_hooks,
    has_reduced_grad_hooks,
    is_consumed_in_backward,
    register_grad_published_hook,
    register_local_grad_hook,
    register_reduced_grad_hook,
)


class Watched(nn.Module):
    """A function of a weight and inputs that writes down when its backward begins and ends."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.log: list[str] = []
        after_gradient(self.weight, lambda _: self.log.append("weight"))

    def forward(self, *inputs: Tensor) -> object:
        (args, _), _ = after_backward((inputs, {}), lambda: self.log.append("after"))
        output = self.function(self.weight, *args)
        before_backward(output, lambda: self.log.append("before"))
        return output


def source(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0), requires_grad=True)


def test_outputs_come_first_then_parameters_then_inputs() -> None:
    module, x = Watched(lambda w, x: (w * x).relu()), source()
    module(x * 1).sum().backward()
    assert module.log == ["before", "weight", "after"]
    assert x.grad is not None and x.grad.tolist() == [2, 3]


def test_all_inputs_are_waited_for_and_the_unused_are_not() -> None:
    module = Watched(lambda w, x, y, unused: (w * x).relu() + y)
    module(source() * 1, source() * 1, source() * 1).sum().backward()
    assert module.log == ["before", "weight", "after"]


def test_an_input_given_twice_arrives_as_one() -> None:
    module = Watched(lambda w, x, y: w * x if x is y else w)
    x = source()
    module(*[x * 1] * 2).sum().backward()
    assert module.log == ["before", "weight", "after"]
    assert module.weight.grad is not None and module.weight.grad.tolist() == [1, 2]


def test_nobody_else_who_uses_an_input_is_waited_for() -> None:
    module, x = Watched(lambda w, x: w * x), source()
    hidden = x * 1
    other = hidden * 5
    other.register_hook(lambda _: module.log.append("other"))
    loss_of_other = other.sum()  # Older than the module's graph, so autograd comes to it later.
    (module(hidden).sum() + loss_of_other).backward()
    assert module.log == ["before", "weight", "after", "other"]
    assert x.grad is not None and x.grad.tolist() == [7, 8]


def test_without_an_input_with_gradient_nobody_is_called_after() -> None:
    module = Watched(lambda w, x: w * x)
    module(torch.ones(2)).sum().backward()
    assert module.log == ["before", "weight"]
    (args, _), found = after_backward(((torch.ones(2), 3), {}), lambda: None)
    assert not found and args[1] == 3


def test_outputs_in_containers_are_watched() -> None:
    module = Watched(lambda w, x: {"a": [w * x, None], "b": (w + x,)})
    out = module(source() * 1)
    out["b"][0].sum().backward()
    assert module.log == ["before", "weight", "after"]
    assert not before_backward({"a": torch.ones(2)}, lambda: None)


def test_an_output_changed_in_place_is_still_watched() -> None:
    module = Watched(lambda w, x: w * x)
    out = module(source() * 1)
    out.mul_(2).relu_()
    out.sum().backward()
    assert module.log == ["before", "weight", "after"]


@pytest.mark.parametrize("change", ["relu_", "mul_ of a part", "a part set"])
def test_an_output_that_is_a_view_changed_in_place_is_watched(change: str) -> None:
    def run(output: Tensor) -> None:
        if change == "relu_":
            output.relu_()
        elif change == "mul_ of a part":
            output[0].mul_(3)
        else:
            output[0] = 0
        output.sum().backward()

    weight, log = nn.Parameter(torch.tensor([2.0, -3.0])), list[str]()
    output = alias_outputs({"out": (weight * 2).view(2, 1)})
    before_backward(output, lambda: log.append("before"))
    run(output["out"])
    plain = nn.Parameter(weight.detach().clone())
    run((plain * 2).view(2, 1))
    assert log == ["before"]
    assert weight.grad is not None and plain.grad is not None and torch.equal(weight.grad, plain.grad)


def test_outputs_are_copied_only_where_somebody_could_interfere() -> None:
    hooked = source() * 2
    hooked.register_hook(lambda grad: grad)
    fresh, plain = source() * 2, torch.ones(4).view(2, 2)
    kept = alias_outputs([fresh, plain, None, 3])
    assert kept[0] is fresh and kept[1] is plain and kept[2:] == [None, 3]
    own = alias_outputs(hooked)
    assert own is not hooked and not own._is_view() and torch.equal(own, hooked)
    own.sum().backward()


def test_what_follows_the_outputs_has_its_backward_after_them() -> None:
    weight, log = nn.Parameter(torch.tensor([2.0, -3.0])), list[str]()
    output = weight * 3
    penalty = weight.pow(2).sum()
    penalty.register_hook(lambda _: log.append("penalty"))
    output = alias_outputs((output,))[0]
    before_backward(output, lambda: log.append("before"))
    (output.sum() + penalty).backward()
    assert log == ["before", "penalty"]
    assert weight.grad is not None and weight.grad.tolist() == [7, -3]


def test_an_operation_in_place_keeps_gradients_right() -> None:
    module, x = Watched(lambda w, x: x.mul_(3) * w), source()
    hidden = x * 1
    module(hidden).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [6, 9]
    assert hidden.tolist() == [3, 6]  # seen by whoever holds the input, as in plain PyTorch
    assert module.log == ["before", "weight"]


def test_an_in_place_operation_does_not_hide_the_other_inputs() -> None:
    module = Watched(lambda w, x, y: x.mul_(3) * w + y)
    module(source() * 1, source() * 1).sum().backward()
    assert module.log == ["before", "weight", "after"]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_calls_each_time_it_happens(use_reentrant: bool) -> None:
    module, x = Watched(lambda w, x: (w * x).relu()), source()
    checkpoint(module, x * 1, use_reentrant=use_reentrant).sum().backward()
    assert module.log == ["before", "weight", "after"]
    assert x.grad is not None and x.grad.tolist() == [2, 3]


def test_every_backward_through_one_graph_is_told() -> None:
    module = Watched(lambda w, x, y: w * x + y)
    out = module(source() * 1, source() * 1).sum()
    out.backward(retain_graph=True)
    out.backward()
    assert module.log == ["before", "weight", "after"] * 2


def test_a_parameter_callback_sees_its_gradient_and_is_removed() -> None:
    weight, seen = nn.Parameter(torch.ones(2)), []

    def look(param: Tensor) -> None:
        assert param.grad is not None
        seen.append(param.grad.tolist())

    handle = after_gradient(weight, look)
    (weight * 3).sum().backward()
    handle.remove()
    (weight * 3).sum().backward()
    assert seen == [[3, 3]]


def test_the_end_of_a_backward_comes_once_after_everything() -> None:
    module = Watched(lambda w, x: w * x)

    def begin() -> None:
        assert in_backward()
        queue_callback(lambda: module.log.append("end"))

    out = module(source() * 1)
    before_backward(out, begin)
    out.sum().backward()
    assert module.log == ["before", "weight", "after", "end"]
    assert not in_backward()


@pytest.mark.parametrize("fails", [False, True])
def test_whoever_awaits_a_backward_hears_of_one_that_fails_first(fails: bool) -> None:
    log: list[str] = []

    def fall(_: Tensor) -> None:
        raise ValueError("on the way")

    def tell(how: str) -> None:
        log.append(how)
        if fails:
            raise RuntimeError("which nobody sees")

    x = source()
    y = x * 1
    y.register_hook(lambda _: register_post_backward(lambda: tell("finished"), lambda: tell("failed")))
    if fails:
        x.register_hook(fall)
    try:
        (y * 2).sum().backward()
    except ValueError:
        log.append("raised")
    assert log == (["failed", "raised"] if fails else ["finished"])


def test_threads_of_python_are_not_those_of_autograd() -> None:
    """Those that C++ has started are as the ones of `_thread`: Python's own list of threads has none of them."""
    told: queue.SimpleQueue[bool] = queue.SimpleQueue()
    _thread.start_new_thread(lambda: told.put(in_autograds_thread()), ())
    assert told.get(timeout=60)
    threading.Thread(target=lambda: told.put(in_autograds_thread())).start()
    assert not told.get(timeout=60)
    assert not in_autograds_thread()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_reentrant_checkpoint_is_nested_in_a_watched_backward(use_reentrant: bool) -> None:
    weight = torch.ones(3, requires_grad=True)
    found: list[bool] = []
    weight.register_hook(lambda _: found.append(is_nested()))
    for waits in (True, False):
        x = torch.ones(3, requires_grad=True)
        y = checkpoint(lambda x: x * weight, x, use_reentrant=use_reentrant)
        if waits:
            y.register_hook(lambda _: register_post_backward(lambda: None, lambda: None))
        y.sum().backward()
    assert not is_nested()
    assert found == [use_reentrant, False]


def test_local_gradients_reach_all_hooks_until_removed() -> None:
    heard: list[tuple[str, int]] = []

    def listener(name: str) -> Callable[[Sequence[Tensor], Sequence[Tensor]], None]:
        return lambda params, grads: heard.append((name, len(params) + len(grads)))

    param = nn.Parameter(torch.ones(2))
    assert not has_local_grad_hooks()
    first, second = register_local_grad_hook(listener("first")), register_local_grad_hook(listener("second"))
    assert has_local_grad_hooks()
    call_local_grad_hooks([param], [torch.ones(2)])
    first.remove()
    first.remove()
    call_local_grad_hooks([param], [torch.ones(2)])
    second.remove()
    assert not has_local_grad_hooks()
    call_local_grad_hooks([param], [torch.ones(2)])
    assert heard == [("first", 2), ("second", 2), ("second", 2)]


def test_who_listens_to_local_gradients_records_no_graph() -> None:
    param = nn.Parameter(torch.ones(2))
    products: list[Tensor] = []
    handle = register_local_grad_hook(lambda params, grads: products.append(params[0] * grads[0]))
    call_local_grad_hooks([param], [torch.ones(2)])
    handle.remove()
    assert not products[0].requires_grad


def test_reduced_gradients_reach_all_hooks_until_removed() -> None:
    heard: list[tuple[str, Sequence[Tensor]]] = []
    param = nn.Parameter(torch.ones(2))
    first = register_grad_published_hook(lambda params: heard.append(("first", params)))
    second = register_grad_published_hook(lambda params: heard.append(("second", params)))
    call_grad_published_hooks([param])
    first.remove()
    call_grad_published_hooks([param, param])
    second.remove()
    call_grad_published_hooks([param])
    assert [(name, len(params)) for name, params in heard] == [("first", 1), ("second", 1), ("second", 2)]
    assert heard[0][1][0] is param


def test_a_hook_of_a_reduced_gradient_may_step_and_take_it_away() -> None:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.full((2,), 0.5)

    def step(params: Sequence[Tensor]) -> None:
        for each in params:
            assert each.grad is not None
            each.sub_(each.grad)  # In no graph, though the parameter requires a gradient.
            each.grad = None

    handle = register_grad_published_hook(step)
    call_grad_published_hooks([param])
    handle.remove()
    assert param.tolist() == [0.5, 0.5] and param.grad is None and param.is_leaf


def test_arriving_gradients_reach_hooks_without_a_graph() -> None:
    param, grad = nn.Parameter(torch.ones(2)), torch.full((2,), 0.5)
    heard: list[tuple[Tensor, Tensor, Tensor]] = []
    handle = register_reduced_grad_hook(lambda params, grads: heard.append((params[0], grads[0], params[0] * grads[0])))
    assert has_reduced_grad_hooks()
    call_reduced_grad_hooks([param], [grad])
    handle.remove()
    call_reduced_grad_hooks([param], [grad])
    ((told, given, product),) = heard
    assert told is param and given is grad and not product.requires_grad and param.grad is None


def test_all_hooks_are_asked_whose_gradient_is_used_at_once() -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    growing = {params[0]}
    handles = [register_grad_published_hook(lambda _: None, each) for each in (growing, (), {params[1]})]
    assert [is_consumed_in_backward(param) for param in params] == [True, True, False]
    growing.add(params[2])
    assert [is_consumed_in_backward(param) for param in params] == [True, True, True] and has_reduced_grad_hooks()
    for handle in handles:
        handle.remove()
    assert not any(is_consumed_in_backward(param) for param in params)


def test_it_is_known_whether_something_was_computed_later() -> None:
    leaf = torch.ones(2, requires_grad=True)
    first = leaf * 2
    assert are_newest_nodes([first])
    second = first + 1
    assert are_newest_nodes([second]) and are_newest_nodes([first, second]) and not are_newest_nodes([first])
    leaf.detach().mul(2)
    assert are_newest_nodes([second]) and are_newest_nodes([]) and are_newest_nodes([leaf])


def test_a_weak_hook_calls_a_method_while_its_object_lives() -> None:
    class Listener:
        def __init__(self) -> None:
            self.heard: list[tuple[int, float]] = []

        def hear(self, number: int, grad: Tensor) -> None:
            self.heard.append((number, grad.item()))

    listener, param = Listener(), torch.ones((), requires_grad=True)
    heard, gone = listener.heard, weakref.ref(listener)
    param.register_hook(weak_hook(listener.hear, 7))
    (2 * param).backward()
    del listener
    assert gone() is None
    (3 * param).backward()
    assert heard == [(7, 2.0)]
