"""Calls of torch's functions, from torch's own tables, with arguments in the place of which others can be put.

The tables are `op_db` and its relatives for `torch._foreach_*`, and the list of functions that `torch.overrides` can
override. To these come functions that read a tensor without asking its class.
"""

from __future__ import annotations

import copy
import io
import itertools
import math
import random
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import get_overridable_functions
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

TABLES = ("op_db", *(f"foreach_{kind}_op_db" for kind in ("unary", "binary", "pointwise", "reduce", "other")))
LARGEST_SAMPLE = 20_000  # elements
DTYPES = (torch.float64, torch.int64, torch.complex128, torch.bool, torch.float32)


@dataclass(frozen=True)
class Call:
    """One call of a function.

    Attributes:
        name: The function's, and of which sample, for people.
        function: What is called.
        leaves: The arguments, taken apart.
        spec: How they are put together again.
        out: The position in `leaves` of a tensor that the function writes its result to, if that was asked for.
        has_values: Whether the result is more than a shape, as it is not of `torch.empty_like`.
    """

    name: str
    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: TreeSpec
    outs: tuple[int, ...] = ()
    has_values: bool = True

    def tensors(self) -> list[int]:
        """The positions of the tensors that can be sharded; one that stands there twice counts once."""
        seen: dict[int, int] = {}
        for number, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and type(leaf) in (Tensor, nn.Parameter):
                seen.setdefault(id(leaf), number)
        return [*seen.values()]

    def run(self, replace: Callable[[int, Tensor], Tensor]) -> tuple[Any, list[Any]]:
        """Calls with other tensors in the place of the arguments; returns the result and these arguments."""
        replacements: dict[int, Tensor] = {}
        leaves: list[Any] = []
        for number, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor):
                if id(leaf) not in replacements:
                    replacements[id(leaf)] = replace(number, leaf)
                leaves.append(replacements[id(leaf)])
            else:
                leaves.append(leaf)
        args, kwargs = tree_unflatten(leaves, self.spec)
        seed(0)
        return self.function(*args, **kwargs), leaves


def is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def call_of(name: str, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], **options: Any) -> Call:
    leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
    return Call(name, function, tuple(leaves), spec, **options)


def seed(number: int) -> None:
    torch.default_generator.manual_seed(number)  # `torch.manual_seed` also formats a stack for devices to come.
    random.seed(number)
    np.random.seed(number)


UNDEFINED = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
"""Functions whose results have no defined values."""


def samples_of(op: Any, limit: int) -> Iterator[Any]:
    """Yields samples from all over what the table has for an entry, smaller ones only."""
    dtype = next((dtype for dtype in DTYPES if dtype in op.supported_dtypes("cpu")), None)
    if dtype is None:
        return
    seed(zlib.crc32(op.name.encode()))
    options = {"num_input_tensors": [3]} if op.name.startswith("_foreach_") else {}
    # `op.sample_inputs` looks for the test in all frames above it, for half of the time of all calls.
    samples = itertools.islice(op.sample_inputs_func(op, "cpu", dtype, requires_grad=False, **options), 8 * limit)
    usable = []
    for sample in samples:
        leaves = [
            leaf for leaf in tree_flatten((sample.input, sample.args, sample.kwargs))[0] if isinstance(leaf, Tensor)
        ]
        if leaves and sum(leaf.numel() for leaf in leaves) <= LARGEST_SAMPLE:
            usable.append(sample)
    # The first has most often no options; those after it are spread over all.
    step = max(1, len(usable) // limit)
    yield from [*usable[::step]][:limit]


def variants_of(op: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields the forms in which an entry can be called: function, method, operator, each in place as well."""
    seen: set[Any] = set()
    names = ("op", "method_variant", "inplace_variant", "operator_variant", "inplace_operator_variant")
    for name in names:
        function = getattr(op, name, None)
        if function is not None and function not in seen:
            seen.add(function)
            yield "" if name == "op" else name.removesuffix("_variant"), function


def calls_of_table(name: str, limit: int) -> Iterator[tuple[str, Iterator[Call]]]:
    """Yields for each entry of one of torch's tables its calls."""
    from torch.testing._internal import common_methods_invocations as tables  # An import of seconds.

    for op in getattr(tables, name):
        title = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        yield title, calls_of_entry(op, title, limit)


def calls_of_entry(op: Any, title: str, limit: int) -> Iterator[Call]:
    has_values = op.name not in UNDEFINED
    for number, sample in enumerate(samples_of(op, limit)):
        arguments = (sample.input, *sample.args)
        for variant, function in variants_of(op):
            name = f"{title}[{number}]{' ' if variant else ''}{variant}"
            yield call_of(name, function, arguments, sample.kwargs, has_values=has_values)
        if getattr(op, "supports_out", False) and "out" not in sample.kwargs:
            yield from calls_with_out(op.op, f"{title}[{number}] out", arguments, sample.kwargs, has_values)


def calls_with_out(
    function: Callable[..., Any], name: str, arguments: tuple[Any, ...], kwargs: dict[str, Any], has_values: bool
) -> Iterator[Call]:
    try:
        result, _ = call_of(name, function, arguments, kwargs).run(lambda _, tensor: tensor.clone())
    except Exception:
        return
    parts = result if isinstance(result, list | tuple) else [result]
    if not all(isinstance(part, Tensor) for part in parts):
        return
    zeros = tuple(torch.zeros_like(part) for part in parts)
    out = zeros[0] if isinstance(result, Tensor) else zeros
    options = {**kwargs, "out": out}
    call = call_of(name, function, arguments, options, has_values=has_values)
    ids = {id(tensor) for tensor in zeros}
    yield Call(
        *(call.name, call.function, call.leaves, call.spec),
        outs=tuple(number for number, leaf in enumerate(call.leaves) if id(leaf) in ids),
        has_values=has_values,
    )


# What torch lets others override, with arguments that many of its functions take.

_SQUARE = torch.tensor([[2.0, -0.5, 0.25], [0.5, 3.0, -1.0], [0.0, 0.75, 1.5]], dtype=torch.float64)
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "x": (_SQUARE,),
    "x, x": (_SQUARE, _SQUARE),
    "x, y": (_SQUARE, _SQUARE + 1),
    "x, 0": (_SQUARE, 0),
    "x, 1": (_SQUARE, 1),
    "x, 0.5": (_SQUARE, 0.5),
    "x, 0, 1": (_SQUARE, 0, 1),
    "x, (3, 3)": (_SQUARE, (3, 3)),
    "x, float32": (_SQUARE, torch.float32),
    "x, [0]": (_SQUARE, [0]),
    "x, 0, index": (_SQUARE, 0, torch.tensor([0, 2])),
    "x, mask": (_SQUARE, _SQUARE > 0.4),
    "x, mask, 0.5": (_SQUARE, _SQUARE > 0.4, 0.5),
    "x, y, 2x": (_SQUARE, _SQUARE + 1, 2 * _SQUARE),
    "[x, y]": ([_SQUARE, _SQUARE + 1],),
    "vector": (_SQUARE[0],),
    "vector, vector": (_SQUARE[0], _SQUARE[1]),
    "one element": (torch.tensor([1.5], dtype=torch.float64),),
    "number": (torch.tensor(1.5, dtype=torch.float64),),
    "number, number": (torch.tensor(1.5, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)),
}
# What they return belongs to one process: an address, an object, or how often the tensor was written.
_OF_THE_PROCESS = frozenset(
    {
        "data_ptr",
        "_typed_storage",
        "untyped_storage",
        "storage",
        "storage_type",
        "_version",
        "_base",
        "grad_fn",
        "_grad_fn",
    }
    | {
        "__hash__",
        "__repr__",
        "__dlpack__",
        "__reduce_ex__",
        "__setstate__",
        "share_memory_",
        "_cdata",
        "__cuda_array_interface__",
    }
    | {"set_", "resize_", "_backward_hooks", "_post_accumulate_grad_hooks", "record_stream", "__array_interface__"}
    | {"backward", "register_hook", "register_post_accumulate_grad_hook", "is_shared", "_is_view", "is_set_to", "names"}
    | {
        "to_dlpack",
        "module_load",
        "_make_subclass",
        "_make_wrapper_subclass",
        "pin_memory",
        "is_leaf",
        "_nested_tensor_size",
    }
    | {
        "_nested_tensor_strides",
        "_nested_tensor_storage_offsets",
        "_has_symbolic_sizes_strides",
        "__weakref__",
        "__dict__",
    }
    | {"storage_offset", "_reinterpret_tensor", "cuda", "xpu", "ipu", "mtia", "hpu", "vulkan", "metal"}
)


def overridable_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields all that torch lets a tensor's class override and that is in no table, by namespace and name."""
    from torch.testing._internal import common_methods_invocations as tables

    in_tables = {function for name in TABLES for op in getattr(tables, name) for _, function in variants_of(op)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        overridable = get_overridable_functions()
    for namespace, functions in overridable.items():
        where = getattr(namespace, "__name__", str(namespace))
        for number, function in enumerate(functions):
            name = getattr(function, "__name__", str(function))
            if function in in_tables:
                continue
            if name in ("__get__", "__set__", "__delete__"):
                attribute = getattr(getattr(function, "__self__", None), "__name__", str(number))
                if name != "__get__" or attribute in _OF_THE_PROCESS:
                    continue
                name = f"{attribute} (attribute)"
            if name not in _OF_THE_PROCESS and not name.startswith(
                ("_foreach_", "_fused_", "_cudnn", "cudnn", "mkldnn", "miopen")
            ):
                yield f"{where}.{name}", function


def calls_of_overrides(limit: int) -> Iterator[tuple[str, Iterator[Call]]]:
    """Yields for each overridable function the calls with arguments that it takes."""
    for name, function in overridable_functions():
        yield name, calls_that_work(name, function, limit)


def calls_that_work(name: str, function: Callable[..., Any], limit: int) -> Iterator[Call]:
    num_calls = 0
    for title, arguments in _ARGUMENTS.items():
        call = call_of(f"{name}({title})", function, arguments, {}, has_values="empty" not in name)
        try:
            call.run(lambda _, tensor: tensor.clone())
        except Exception:
            continue
        yield call
        num_calls += 1
        if num_calls == limit:
            return


def calls_beside_dispatch() -> Iterator[tuple[str, Iterator[Call]]]:
    """Yields what reads a tensor without asking its class: Python, numpy and constructors of torch."""
    functions: dict[str, Callable[..., Any]] = {
        "torch.tensor": torch.tensor,
        "torch.as_tensor": torch.as_tensor,
        "torch.asarray": torch.asarray,
        "torch.tensor of a list": lambda x: torch.tensor([x[0, 0], x[1, 1]]),
        "torch.Tensor": torch.Tensor,
        "torch.stack": lambda x: torch.stack([x, x]),
        "numpy.asarray": np.asarray,
        "numpy.array": np.array,
        "numpy.sum": np.sum,
        "numpy.float64": lambda x: np.float64(x.sum()),
        "list": list,
        "tuple": tuple,
        "iter": lambda x: [*iter(x)],
        "for": lambda x: [row * 2 for row in x],
        "unpack": lambda x: (lambda a, b, c: (a, b, c))(*x),
        "reversed": lambda x: [*reversed(x)],
        "sum": sum,
        "max": max,
        "len": len,
        "in": lambda x: 3.0 in x,
        "in a list": lambda x: any(x is y for y in [x]),
        "float": lambda x: float(x[1, 1]),
        "int": lambda x: int(x[1, 1]),
        "bool": lambda x: bool(x[1, 1] > 0),
        "round": lambda x: round(float(x[1, 1])),
        "format": lambda x: f"{x.sum():.2f}",
        "abs": abs,
        "divmod": lambda x: divmod(x, 2),
        "pow": lambda x: pow(x, 2),
        "rpow": lambda x: 2**x,
        "is larger": lambda x: (x > 0.4).sum(),
        "size by shape": lambda x: math.prod(x.shape),
        "torch.Size": lambda x: torch.Size(x.shape),
        "zeros of its shape": lambda x: torch.zeros(x.shape, dtype=x.dtype).add_(x),
        "zeros of its rows": lambda x: torch.zeros(x.shape[0], dtype=x.dtype).add_(x.mean(1)),
        "zeros_like": lambda x: torch.zeros_like(x).add_(x),
        "parameters_to_vector": lambda x: nn.utils.parameters_to_vector([x, x]),
        "get_total_norm": lambda x: nn.utils.get_total_norm([x, x]),
        "deepcopy": lambda x: copy.deepcopy(x),
        "copy": lambda x: copy.copy(x),
        "view and write": lambda x: x.detach().view(-1).mul_(2.0),
        "row and write": lambda x: x.detach()[1].mul_(2.0),
        "data and write": lambda x: x.data.mul_(2.0),
        "numpy and write": lambda x: np.multiply(x.detach().numpy(), 2.0, out=x.detach().numpy()),
        "set an item": lambda x: x.__setitem__(1, 7.0),
        "set by a mask": lambda x: x.__setitem__(x > 0.4, 7.0),
        "set data": lambda x: setattr(x, "data", torch.ones_like(x.detach())),
        "set data of the full shape": lambda x: setattr(x, "data", torch.full(x.shape, 2.0, dtype=x.dtype)),
        "functional call": lambda x: torch.func.functional_call(
            nn.Linear(3, 3, bias=False, dtype=x.dtype), {"weight": x}, (_SQUARE,)
        ),
        "vmap": lambda x: torch.vmap(lambda row: row.sum())(x),
        "operator module": lambda x: torch.ops.aten.sum.default(x),
        "operator with dim": lambda x: torch.ops.aten.sum.dim_IntList(x, [0]),
        "operator matmul": lambda x: torch.ops.aten.mm.default(x, x),
        "dlpack": lambda x: torch.from_dlpack(x),
        "saved and loaded": _saved_and_loaded,
    }
    for name, function in functions.items():
        yield name, iter([call_of(name, function, (_SQUARE,), {})])


def _saved_and_loaded(tensor: Tensor) -> Any:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
