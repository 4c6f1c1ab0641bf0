"""`FlattenParamsWrapper`: a module whose parameters are views of a few flat ones, on one process.

The parameters that a flat one holds are no parameters of their modules any more: they are plain tensors there, views of
the flat one that are made again before each forward, so that gradients reach it. State dicts have the plain names, from
inside the module, or the flat ones (`flat_state_dict`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from scale_core.state.param_ownership import flat_buffer_of


class ParamInfo(NamedTuple):
    """A parameter's place: the path of its module, the module, and its name in it."""

    module_path: str
    module: nn.Module
    name: str

    @property
    def qualified(self) -> str:
        """The parameter's qualified name."""
        return f"{self.module_path}.{self.name}" if self.module_path else self.name


class _FlatParameterType(type(nn.Parameter)):  # type: ignore[misc]  # the metaclass of torch's class
    def __instancecheck__(cls, instance: object) -> bool:
        """Whether it is of this class, or a flat parameter of a sharded module."""
        if super().__instancecheck__(instance):
            return True
        return cls is FlatParameter and isinstance(instance, nn.Parameter) and flat_buffer_of(instance) is not None


class FlatParameter(nn.Parameter, metaclass=_FlatParameterType):
    """A parameter [sum of sizes] that holds others, one after the other.

    Args:
        params: Those, of one dtype and device.
        requires_grad: As for `nn.Parameter`.

    Raises:
        ValueError: There are none; or one is not a parameter, or is flat itself.
    """

    _param_numels: list[int]
    _param_shapes: list[torch.Size]
    _param_infos: list[ParamInfo]
    _shared_param_infos: list[tuple[ParamInfo, ParamInfo]]

    def __new__(cls, params: Sequence[nn.Parameter], requires_grad: bool = True) -> Self:
        if not isinstance(params, list | tuple) or not params:
            raise ValueError(f"An non-empty list or tuple argument is needed, got {params!r}")
        if not all(isinstance(param, nn.Parameter) for param in params):
            got = sorted({type(param).__name__ for param in params})
            raise ValueError(f"List items need to be Parameter types, got {', '.join(got)}")
        if any(isinstance(param, FlatParameter) for param in params):
            raise ValueError("Nesting FlatParameter is not supported")
        data = torch.cat([param.detach().reshape(-1) for param in params])
        return super().__new__(cls, data, requires_grad=requires_grad)

    def __init__(self, params: Sequence[nn.Parameter], requires_grad: bool = True) -> None:
        self._param_numels = [param.numel() for param in params]
        self._param_shapes = [param.size() for param in params]
        self._param_infos, self._shared_param_infos = [], []

    def get_param_views(self, external_data: Tensor | None = None) -> Iterator[Tensor]:
        """Yields each parameter, a view in its own shape of this one or of other data of as many elements.

        Raises:
            ValueError: It has another number of elements.
        """
        data = self if external_data is None else external_data
        if data.numel() != sum(self._param_numels):
            raise ValueError(
                f"Incorrect numel of supplied data: got {data.numel()} but expected {sum(self._param_numels)}"
            )
        pieces = data.reshape(-1).split(self._param_numels)
        return (piece.view(shape) for piece, shape in zip(pieces, self._param_shapes, strict=True))

    def metadata(self) -> tuple[list[str], list[torch.Size], list[int]]:
        """Returns names, shapes and sizes of what it holds."""
        return [info.qualified for info in self._param_infos], self._param_shapes, self._param_numels

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParameter:
        if id(self) not in memo:
            memo[id(self)] = _rebuild(self.data.clone(), self.requires_grad, self._sizes)
        copied: FlatParameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (self.data, self.requires_grad, self._sizes)

    @property
    def _sizes(self) -> dict[str, Any]:
        """What a copy has; the wrapper of the copy says in which modules its parameters are."""
        return {
            "_param_numels": list(self._param_numels),
            "_param_shapes": list(self._param_shapes),
            "_param_infos": [],
            "_shared_param_infos": [],
        }


def _rebuild(data: Tensor, requires_grad: bool, sizes: dict[str, Any]) -> FlatParameter:
    flat: FlatParameter = torch.Tensor._make_subclass(FlatParameter, data, requires_grad)
    vars(flat).update(sizes)
    return flat


class FlattenParamsWrapper(nn.Module):
    """Flattens parameters of a module into one flat parameter, or into one for each list.

    In new code: `scale_fsdp.fully_shard(module, options=ShardOptions(flatten_parameters=True))`, which shards the flat
    parameters, too.

        >>> import torch
        >>> from fairscale.nn import FlattenParamsWrapper
        >>> flat = FlattenParamsWrapper(torch.nn.Linear(3, 2))
        >>> [(name, tuple(param.shape)) for name, param in flat.named_parameters()]
        [('_fpw_module.flat_param_0', (8,))]
        >>> list(flat.state_dict())
        ['weight', 'bias']

    Args:
        module: Changed in place.
        param_list: The parameters to flatten, or a list of them for each flat one; None is all.
        flat_param_names: What stands behind `flat_param_`; None is a number.

    Raises:
        ValueError: Names and lists are not as many, names repeat, or a parameter is in two lists.
        AssertionError: Parameters of one list differ in dtype, or some train and some do not.
    """

    def __init__(
        self,
        module: nn.Module,
        param_list: Sequence[Any] | None = None,
        flat_param_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self._fpw_module = module
        lists = [list(module.parameters())] if param_list is None else list(param_list)
        if lists and isinstance(lists[0], nn.Parameter):
            lists = [lists]
        lists = [list(dict.fromkeys(params)) for params in lists if params]
        names = [str(number) for number in range(len(lists))] if flat_param_names is None else list(flat_param_names)
        if len(names) != len(lists):
            raise ValueError(f"Names and number of param lists must be equal, got {len(names)} and {len(lists)}")
        if len(set(names)) != len(names):
            raise ValueError(f"Each flat param must be given a unique name, got {names}")
        all_params = list(itertools.chain.from_iterable(lists))
        if len(set(all_params)) != len(all_params):
            raise ValueError("expected each parameter in one list, but some are shared between lists")
        self.flat_param_names = [f"flat_param_{name}" for name in names]
        self.num_params_managed = len(all_params)
        self.flat_params: Sequence[FlatParameter] = []
        places = _places(module)
        self._order = [  # of all places, in which state dicts have them
            (path, name) for path, child in module.named_modules() for name in child._parameters
        ]
        for params in lists:
            _check_alike(params, places)
            flat = FlatParameter(params, params[0].requires_grad)
            for param in params:
                first, *others = places[param]
                flat._param_infos.append(first)
                flat._shared_param_infos += [(other, first) for other in others]
            self.flat_params.append(flat)
        self._flatten()
        untyped = cast(Any, self)  # torch leaves these untyped.
        untyped.register_state_dict_pre_hook(_whole_before_saving)
        untyped._register_state_dict_hook(_flat_after_saving)
        untyped.register_load_state_dict_pre_hook(_whole_before_loading)
        untyped.register_load_state_dict_post_hook(_flat_after_loading)

    # What it holds.

    @property
    def module(self) -> nn.Module:
        """The module that was given."""
        return self._fpw_module

    @property
    def is_flattened(self) -> bool:
        """Whether the flat parameters are registered now."""
        return bool(self.flat_params) and self.flat_param_names[0] in self._fpw_module._parameters

    @property
    def flat_param(self) -> nn.Parameter:
        """The flat parameter, where there is only one.

        Raises:
            AttributeError: There are several, or none.
        """
        if len(self.flat_params) != 1:
            raise AttributeError("flat_param")  # `__getattr__` says why.
        return self.flat_params[0]

    def metadata(self, flat_param_idx: int) -> tuple[list[str], list[torch.Size], list[int]]:
        """Returns names, shapes and sizes of what one flat parameter holds."""
        return self.flat_params[flat_param_idx].metadata()

    def get_param_views(self, external_data_list: Sequence[Tensor | None] | None = None) -> Iterator[Tensor]:
        """Yields each parameter that is held, a view of the flat one or of other data."""
        sources = [None] * len(self.flat_params) if external_data_list is None else list(external_data_list)
        if len(sources) != len(self.flat_params):
            raise ValueError(f"Incorrect external data list: {len(sources)} vs. {len(self.flat_params)}")
        views = [flat.get_param_views(data) for flat, data in zip(self.flat_params, sources, strict=True)]
        return itertools.chain.from_iterable(views)

    # Flat and whole.

    def _flatten(self) -> None:
        """Registers the flat parameters, and puts views in the places of the others."""
        for name, flat in zip(self.flat_param_names, self.flat_params, strict=True):
            for info in self._every_place(flat):
                info.module._parameters.pop(info.name, None)
            self._fpw_module.register_parameter(name, flat)
        self._show_views()

    def _show_views(self, *, detached: bool = False) -> None:
        """Puts views of the flat parameters, through which gradients flow, in the places of the others."""
        for flat in self.flat_params:
            views = flat.get_param_views(flat.detach() if detached else None)
            for info, view in zip(flat._param_infos, views, strict=True):
                setattr(info.module, info.name, view)
            for info, first in flat._shared_param_infos:
                setattr(info.module, info.name, getattr(first.module, first.name))

    def _unflatten(self, data: Sequence[Tensor | None]) -> None:
        """Takes the flat parameters away, and registers what they hold as parameters."""
        params_by_place: dict[tuple[str, str], nn.Parameter] = {}
        modules: dict[str, nn.Module] = {}
        for name, flat, content in zip(self.flat_param_names, self.flat_params, data, strict=True):
            self._fpw_module._parameters.pop(name, None)
            source = flat.data if content is None else content.detach()
            for info, view in zip(flat._param_infos, flat.get_param_views(source), strict=True):
                params_by_place[info.module_path, info.name] = nn.Parameter(view, requires_grad=flat.requires_grad)
            for info, first in flat._shared_param_infos:
                params_by_place[info.module_path, info.name] = params_by_place[first.module_path, first.name]
            modules.update({info.module_path: info.module for info in self._every_place(flat)})
        for path, name in (key for key in self._order if key in params_by_place):
            vars(modules[path]).pop(name, None)
            modules[path].register_parameter(name, params_by_place[path, name])

    @contextmanager
    def unflatten_params(self, flat_params: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Inside, the parameters are registered in their own modules; what is written to them is kept.

        Args:
            flat_params: Data to look at in the place of the flat parameters' own; the data stay what they are.
        """
        sources: Sequence[Tensor | None] = [None] * len(self.flat_params) if flat_params is None else list(flat_params)
        was_flat = self.is_flattened
        if was_flat:
            self._unflatten(sources)
        try:
            yield
        finally:
            if was_flat:
                self._keep_loaded(sources)
                self._flatten()

    @torch.no_grad()
    def _keep_loaded(self, given: Sequence[Tensor | None]) -> None:
        """Copies what replaced a registered parameter, as `load_state_dict(assign=True)` does, into the flat one."""
        for flat, data in zip(self.flat_params, given, strict=True):
            source = flat.data if data is None else data.detach()
            for info, view in zip(flat._param_infos, flat.get_param_views(source), strict=True):
                current = info.module._parameters.get(info.name)
                if current is not None and current.data_ptr() != view.data_ptr():
                    view.copy_(current.detach())

    def _every_place(self, flat: FlatParameter) -> list[ParamInfo]:
        return [*flat._param_infos, *(info for info, _ in flat._shared_param_infos)]

    # nn.Module's own.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module on views of the flat parameters."""
        if self.is_flattened:
            self._show_views()
        return self._fpw_module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "flat_param":
                raise AttributeError(f"flat_param: expected one flat parameter, got {len(self.flat_params)}") from None
            if name == "_fpw_module" or name.startswith("__"):
                raise
            return getattr(self._fpw_module, name)

    def __getitem__(self, key: Any) -> Any:
        return self._fpw_module[key]  # type: ignore[index]  # what the module answers

    def flat_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state with the flat parameters, under `flat_param_0` and so on."""
        self._keeps_flat = True
        try:
            return super().state_dict(*args, **kwargs)
        finally:
            self._keeps_flat = False

    _keeps_flat = _is_whole_for_state = False

    def _apply(self, fn: Any, recurse: bool = True) -> FlattenParamsWrapper:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if self.flat_params:  # torch may have made parameters anew.
            self.flat_params = [
                cast(FlatParameter, self._fpw_module._parameters.get(name, flat))
                for name, flat in zip(self.flat_param_names, self.flat_params, strict=True)
            ]
            if self.is_flattened:
                self._show_views()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        modules = dict(self._fpw_module.named_modules())
        self.flat_params = [self._fpw_module._parameters[name] for name in self.flat_param_names]  # type: ignore[misc]
        for flat, infos in zip(self.flat_params, state["_places"], strict=True):
            infos_of_params, shared = infos
            flat._param_infos = [ParamInfo(path, modules[path], name) for path, name in infos_of_params]
            flat._shared_param_infos = [
                (ParamInfo(*_with(modules, info)), ParamInfo(*_with(modules, first))) for info, first in shared
            ]
        self._show_views()

    def __getstate__(self) -> dict[str, Any]:
        if self.is_flattened:
            self._show_views(detached=True)  # What has a history can't be copied.
        places = [
            (
                [(info.module_path, info.name) for info in flat._param_infos],
                [
                    ((info.module_path, info.name), (first.module_path, first.name))
                    for info, first in flat._shared_param_infos
                ],
            )
            for flat in self.flat_params
        ]
        return {**super().__getstate__(), "_places": places}  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _with(modules: Mapping[str, nn.Module], place: tuple[str, str]) -> tuple[str, nn.Module, str]:
    path, name = place
    return path, modules[path], name


def _places(module: nn.Module) -> dict[nn.Parameter, list[ParamInfo]]:
    """Where each parameter is, under all of its names."""
    infos_by_param: dict[nn.Parameter, list[ParamInfo]] = {}
    for path, child in module.named_modules():
        for name, param in child._parameters.items():
            if param is not None:
                infos_by_param.setdefault(param, []).append(ParamInfo(path, child, name))
    return infos_by_param


def _check_alike(params: Sequence[nn.Parameter], places: Mapping[nn.Parameter, list[ParamInfo]]) -> None:
    for attribute, values in (
        ("dtype", {param.dtype for param in params}),
        ("requires_grad", {param.requires_grad for param in params}),
    ):
        if len(values) > 1:
            names = [places[param][0].qualified for param in params]
            raise AssertionError(f"expects all parameters to have same {attribute}, got {values} in {', '.join(names)}")


def _whole_before_saving(module: FlattenParamsWrapper, *_: Any) -> None:
    """The parameters stand in their own modules, unless the flat ones are asked for."""
    if module.is_flattened and not module._keeps_flat:
        module._unflatten([None] * len(module.flat_params))
        module._is_whole_for_state = True


def _flat_after_saving(module: FlattenParamsWrapper, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Names without the wrapper, and the flat parameters again."""
    inside = f"{prefix}_fpw_module."
    for name in [name for name in state_dict if name.startswith(inside)]:
        state_dict[prefix + name[len(inside) :]] = state_dict.pop(name)
    if module._is_whole_for_state:
        module._flatten()
        module._is_whole_for_state = False


def _whole_before_loading(module: FlattenParamsWrapper, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Names as they are below the wrapper; `flat_param` is `flat_param_0`. The parameters stand in their modules."""
    inside, flat = f"{prefix}_fpw_module.", f"{prefix}flat_param"
    for name in [name for name in state_dict if name.startswith(prefix) and not name.startswith(inside)]:
        renamed = f"{name}_0" if name == flat else name
        state_dict[inside + renamed[len(prefix) :]] = state_dict.pop(name)
    if module.is_flattened and not any(name.startswith(f"{inside}flat_param_") for name in state_dict):
        module._unflatten([None] * len(module.flat_params))
        module._is_whole_for_state = True


def _flat_after_loading(module: FlattenParamsWrapper, incompatible_keys: Any) -> None:
    if module._is_whole_for_state:
        module._keep_loaded([None] * len(module.flat_params))
        module._flatten()
        module._is_whole_for_state = False


ParamGroups = Sequence[Sequence[nn.Parameter]] | Sequence[nn.Parameter]
"""What `param_list` takes."""

__all__ = ["FlatParameter", "FlattenParamsWrapper", "ParamGroups", "ParamInfo"]
