"""`split`: a model cut at names of modules into stages that run the model's own forward.

A stage is a copy of the model itself and of the other modules that have parts on several stages. In it, the modules of
other stages are replaced by placeholders without values; its own ones are the very modules of the model. So parameters
have the model's names, a model on the meta device is never complete in memory, and nothing is traced.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from scale_core.arguments import checked_arguments, did_you_mean
from scale_core.hooks.module_parts import is_for_each_part
from scale_pipe.module_split.collected_outputs import install_collectors
from scale_pipe.module_split.cut_plan import CutPlan, plan_cuts
from scale_pipe.module_split.placeholder_tensor import PlaceholderTensor, to_meta
from scale_pipe.module_split.stage_forward import RemoteForward, StageForward, StageModules
from scale_pipe.partition.partition import FORWARD_HOOKS, forward_hook_names, slice_layers

_STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def split(
    model: nn.Module,
    cuts: Sequence[str],
    *,
    hold: Mapping[str, int | Sequence[int]] | None = None,
    pass_on: Sequence[str] | None = None,
) -> list[nn.Module]:
    """Cuts a model into stages at the calls of modules.

    The first stage is called with the model's arguments, every other one with the result of the stage before; the
    last returns the model's output. A later stage may be given arguments of the model by keyword, for example labels
    that only its rank has. The modules stay the model's own objects.

        >>> import torch
        >>> from scale_pipe import split
        >>> model = torch.nn.Transformer(8, 2, num_encoder_layers=2, num_decoder_layers=2, batch_first=True).eval()
        >>> first, second = split(model, ["encoder.layers.1"])
        >>> source, target = torch.randn(2, 4, 8), torch.randn(2, 3, 8)
        >>> torch.equal(second(first(source, target)), model(source, target))
        True

    Args:
        model: Any module. Each stage also runs the code of its forward between the calls of modules.
        cuts: Names of modules, in the order in which the model registers them. Each begins a stage, at its first call.
            The stage of a module follows from the order of registration.
        hold: The stage of a module or parameter, by its name, if the order of registration is not the order of use.
            Give several stages to a module that all of them use, for example an embedding that shares its weight with
            the output layer.
        pass_on: The names of the arguments whose tensors later stages need, for example "labels". Of all other
            arguments they get only the shapes. None passes on all.

    Returns:
        One stage more than there are cuts. Where an `nn.Sequential` is cut at its own layers, they are sequences.

    Raises:
        TypeError: The model is not a module; cuts, `hold` or `pass_on` are not names; a cut is a module that is never
            called.
        ValueError: A module, an argument or a stage does not exist; cuts are out of order or named twice; the forward
            of a split module was replaced, so its copies could not use it.

    See also: [the guide to pipelines](../guides/pipe.md).
    """
    plan = plan_cuts(model, cuts, hold)
    if not cuts:
        return [model]
    if isinstance(pass_on, str) or not isinstance(pass_on, Iterable | None):
        raise TypeError(f'pass_on is a list of names, as ["labels"], but got {pass_on!r}')
    runs_itself = "forward" in vars(model) or forward_hook_names(model) or hold or any("." in cut for cut in cuts)
    if type(model) is nn.Sequential and not runs_itself:
        names = list(model._modules)
        starts = [0, *map(names.index, cuts), len(names)]
        return list(slice_layers(model, [end - start for start, end in pairwise(starts)]))
    _check_pass_on(model, pass_on or ())
    install_collectors(model)
    passed = None if pass_on is None else frozenset(pass_on)
    return [_stage(model, StageForward(plan, stage, passed)) for stage in range(plan.num_stages)]


def _check_pass_on(model: nn.Module, names: Sequence[str]) -> None:
    """Raises `ValueError` if the model's forward lacks an argument that is to be passed on."""
    parameters = inspect.signature(type(model).forward).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in names:
        if name not in parameters:
            kind, hint = type(model).__name__, did_you_mean(name, list(parameters)[1:])
            raise ValueError(f"pass_on names {name!r}, which the forward of {kind} does not take; {hint}")


def _stage(model: nn.Module, forward: StageForward) -> nn.Module:
    stage = _split_copy(model, "", forward.plan, forward.stage)
    for hooks in FORWARD_HOOKS:  # These get the model's inputs or outputs, which only one stage has.
        first = hooks == "_forward_pre_hooks"
        if forward.stage != (0 if first else forward.plan.num_stages - 1):
            hooks_of_parts = ((key, hook) for key, hook in vars(model)[hooks].items() if is_for_each_part(hook))
            vars(stage)[hooks] = OrderedDict(hooks_of_parts)
    forward.bind(stage)
    return stage


def _split_copy(module: nn.Module, name: str, plan: CutPlan, stage: int) -> nn.Module:
    """Returns a stage's copy of a module that has parts on several stages."""
    if "forward" in vars(module):
        raise ValueError(
            f"{name or type(module).__name__!r} is cut through, but its forward was replaced "
            f"({type(vars(module)['forward']).__name__}), and the copies of it could not follow; do that to smaller "
            "modules, or to the stages that split returns"
        )
    copy, prefix = _bare_copy(module), f"{name}." if name else ""
    for hooks in (*FORWARD_HOOKS, *_STATE_HOOKS):
        vars(copy)[hooks] = type(vars(module)[hooks])(vars(module)[hooks])
    for key, parameter in module._parameters.items():
        if parameter is None or plan.holds(stage, prefix + key):
            copy._parameters[key] = parameter
        else:
            _set_placeholder(
                copy, key, parameter, f"parameter {prefix + key!r} of {plan.describe_stages(prefix + key)}"
            )
    copy._buffers.update(module._buffers)
    parts = StageModules(prefix)
    for key, child in module._modules.items():
        path = prefix + key
        if child is None:
            parts[key] = None
        elif path in plan.split_modules:
            parts[key] = _split_copy(child, path, plan, stage)
        elif path in plan.stages_of and not plan.holds(stage, path):
            parts[key] = _placeholder_module(child, path, plan.describe_stages(path))
        else:
            parts[key] = child
    vars(copy)["_modules"] = parts
    return copy


def _placeholder_module(module: nn.Module, name: str, where: str) -> nn.Module:
    """Returns a copy of a module without values, which has the attributes that a forward may read."""
    copy = _bare_copy(module)
    for hooks in (*FORWARD_HOOKS, *_STATE_HOOKS):
        vars(copy)[hooks] = OrderedDict()
    for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is None:
            copy._parameters[key] = None
        else:
            _set_placeholder(copy, key, tensor, f"{name}.{key} of {where}")
    for key, child in module._modules.items():
        copy._modules[key] = None if child is None else _placeholder_module(child, f"{name}.{key}", where)
    # A class's own ways to save and load, as a batch norm has, would look for missing modules.
    vars(copy).update(
        forward=RemoteForward(name, where), _save_to_state_dict=_save_nothing, _load_from_state_dict=_load_nothing
    )
    return copy


def _save_nothing(destination: Any, prefix: str, keep_vars: bool) -> None:
    """Adds nothing to a state dict."""


def _load_nothing(state: Mapping[str, Any], prefix: str, _: Any, strict: bool, *lists: list[str]) -> None:
    """Takes nothing from a state dict; where that is strict, keys of this module are unexpected."""
    unexpected = lists[1]
    if strict:
        unexpected += [key for key in state if key.startswith(prefix) and "." not in key[len(prefix) :]]


def _bare_copy(module: nn.Module) -> nn.Module:
    """Returns a module of the same class with the same attributes, without parameters, buffers and modules."""
    copy = object.__new__(type(module))
    vars(copy).update(vars(module))
    vars(copy).update(_parameters={}, _buffers={}, _modules={})
    return copy


def _set_placeholder(module: nn.Module, key: str, tensor: Any, origin: str) -> None:
    vars(module)[key] = PlaceholderTensor(to_meta(tensor), origin, tensor.device, is_parameter=True)


@checked_arguments
def shared_parameters(stages: Sequence[nn.Module]) -> list[list[tuple[int, str]]]:
    """Returns the parameters that are one tensor and are on several stages, of `split` or any modules.

    Returns:
        Of each such tensor its stages and names there, in order: [(0, "wte.weight"), (3, "head.weight")].

    Examples:
        >>> from torch import nn
        >>> from scale_pipe import shared_parameters
        >>> embed, head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        >>> head.weight = embed.weight
        >>> shared_parameters([nn.Sequential(embed), nn.Sequential(head)])
        [[(0, '0.weight'), (1, '0.weight')]]

    See also: [the guide to pipelines](../guides/pipe.md).
    """
    places: dict[int, list[tuple[int, str]]] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            places.setdefault(id(parameter), []).append((number, name))
    return [calls for calls in places.values() if len({number for number, _ in calls}) > 1]
