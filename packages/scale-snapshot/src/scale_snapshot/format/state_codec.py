"""A state of Python objects as JSON and tensors, and back, without loss.

The `state_dict()` of a scheduler, a data loader or your own class holds more than JSON knows: tuples, keys
that are numbers, bytes, infinities, arrays. They are written as `{"__type__": ...}`, tensors as the key under which
they stand in the tensor files. A value that can't be restored raises an error with its path. Decoding runs no code
of what it reads, which may come from a stranger.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scale_snapshot.format.metadata import JSON
from scale_snapshot.format.safetensors_io import SAVED_DTYPES, SAVED_NAMES

TYPE = "__type__"
"""The key of a JSON object that stands for something else than a dict."""

_MAX_DEPTH = 100
_NUMBERS = "biufc"  # The kinds of numpy's dtypes that are numbers.
_FACTORIES = {factory.__name__: factory for factory in (bool, int, float, str, list, dict, set, tuple)}
_SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "Size": torch.Size,
}
_MAPPINGS: dict[str, Callable[[Iterable[tuple[Any, Any]]], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda items: Counter(dict(items)),
}


class Encoded(NamedTuple):
    """A state in two parts."""

    value: JSON
    tensors: dict[str, Tensor]  # By the keys that stand in `value`


def encode(state: Any, key: str, where: str = "") -> Encoded:
    """Returns a state as JSON, and its tensors, not copied, by keys that begin with `key`; errors say `where` it is.

    Raises:
        TypeError: Something in it can't be read back as it was; the message says where it stands.
        ValueError: It is nested too deeply, as where it contains itself.
    """
    encoder = _Encoder(key, where or key)
    return Encoded(encoder.encode(state, ()), encoder.tensors)


def decode(value: JSON, tensor_of: Callable[[str], Tensor]) -> Any:
    """Returns the state that was encoded; `tensor_of` gives the tensor of a key.

    Raises:
        ValueError: It is not an encoded state.
    """
    if isinstance(value, list):
        return [decode(part, tensor_of) for part in value]
    if not isinstance(value, dict):
        return value
    if TYPE not in value:
        return {key: decode(part, tensor_of) for key, part in value.items()}
    try:
        return _decode_typed(value, tensor_of)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(value)[:200]} is not an encoded value: {type(error).__name__}: {error}") from error


def encode_extra(extra: Any) -> JSON:
    """Returns a caller's addition to a snapshot, as JSON; `decode_extra` gives it back.

    Raises:
        TypeError: Something in it is a tensor, or can't be read back; the message says where it stands.
        ValueError: It is nested too deeply.
    """
    try:
        encoded = encode(extra, "extra")
    except TypeError:
        try:
            json.dumps(extra, allow_nan=False)
        except (TypeError, ValueError):
            pass
        else:
            return extra  # type: ignore[no-any-return]  # Classes that JSON writes as a dict, a list or a number.
        raise
    if encoded.tensors:
        raise TypeError(
            f"{next(iter(encoded.tensors))} is a tensor or an array. extra= has no tensor files, because rank 0 writes "
            "it alone. Save it as an object: scale_snapshot.save(directory, step, {..., 'name': value})"
        )
    return encoded.value


def decode_extra(value: JSON) -> Any:
    """Returns the input of `encode_extra`; a ValueError says that it is not an encoded value."""
    return decode(value, dict[str, Tensor]().__getitem__)


def tensor_keys(value: JSON) -> list[str]:
    """Returns the keys of the tensors in an encoded state, in order."""
    if isinstance(value, list):
        return [key for part in value for key in tensor_keys(part)]
    if not isinstance(value, dict):
        return []
    if value.get(TYPE) in ("tensor", "ndarray"):
        return [str(value["key"])]
    return [key for part in value.values() for key in tensor_keys(part)]


class _Encoder:
    def __init__(self, key: str, where: str) -> None:
        self.key, self.where = key, where
        self.tensors: dict[str, Tensor] = {}

    def encode(self, value: Any, path: tuple[Any, ...]) -> JSON:
        if len(path) > _MAX_DEPTH:
            raise ValueError(
                f"{self._where(path[:5])}...: nested more than {_MAX_DEPTH} levels deep: leave out what contains itself"
            )
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value  # type: ignore[no-any-return]  # One of these types.
        if kind is float:
            return value if math.isfinite(value) else {TYPE: "float", "value": repr(value)}
        if kind is list:
            return [self.encode(part, (*path, index)) for index, part in enumerate(value)]
        if isinstance(value, dict):
            return self._mapping(value, path)
        if kind.__name__ in _SEQUENCES and kind in (tuple, set, frozenset, torch.Size):
            parts = [self.encode(part, (*path, index)) for index, part in enumerate(value)]
            if kind in (set, frozenset):  # Their order is another in each process.
                parts.sort(key=lambda part: json.dumps(part, sort_keys=True))
            return {TYPE: kind.__name__, "items": parts}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if kind in (bytes, bytearray):
            return {TYPE: kind.__name__, "base64": base64.b64encode(value).decode()}
        if kind is complex:
            return {TYPE: "complex", "items": [self.encode(value.real, path), self.encode(value.imag, path)]}
        if kind in (torch.dtype, torch.device):
            return {TYPE: kind.__name__, "value": str(value).removeprefix("torch.")}
        return self._of_numpy(value, path)

    def _mapping(self, value: dict[Any, Any], path: tuple[Any, ...]) -> JSON:
        kind = type(value)
        if kind is dict and all(type(key) is str for key in value) and TYPE not in value:
            return {key: self.encode(part, (*path, key)) for key, part in value.items()}
        items: list[JSON] = [
            [self.encode(key, (*path, "a key")), self.encode(part, (*path, key))] for key, part in value.items()
        ]
        if kind in (dict, OrderedDict, Counter):
            return {TYPE: kind.__name__, "items": items}
        if isinstance(value, defaultdict) and kind is defaultdict:
            factory = None if value.default_factory is None else getattr(value.default_factory, "__name__", "")
            if factory is None or _FACTORIES.get(factory) is value.default_factory:
                return {TYPE: "defaultdict", "factory": factory, "items": items}
        raise self._refusal(value, path)

    def _tensor(self, value: Tensor, path: tuple[Any, ...]) -> JSON:
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided or value.is_meta:
            raise self._refusal(value, path)
        if value.dtype not in SAVED_NAMES:
            raise TypeError(
                f"{self._where(path)}: {value.dtype} can't be saved: convert it to one of {', '.join(SAVED_DTYPES)}, "
                "or save its bytes, .view(torch.uint8)"
            )
        entry: dict[str, JSON] = {TYPE: "tensor", "key": self._add(value.detach(), path)}
        if value.device.type != "cpu":
            entry["device"] = value.device.type
        if isinstance(value, nn.Parameter):
            entry["parameter"] = True
        if value.requires_grad:
            entry["requires_grad"] = True
        return entry

    def _of_numpy(self, value: Any, path: tuple[Any, ...]) -> JSON:
        numpy = sys.modules.get("numpy")
        if numpy is None or getattr(getattr(value, "dtype", None), "kind", "") not in _NUMBERS:
            raise self._refusal(value, path)
        if type(value) is numpy.ndarray:
            try:
                tensor = torch.from_numpy(value.copy(order="C"))
            except TypeError:
                raise self._refusal(value, path) from None
            if tensor.dtype in SAVED_NAMES:
                return {TYPE: "ndarray", "key": self._add(tensor, path)}
        elif isinstance(value, numpy.generic) and type(value.item()) in (bool, int, float, complex):
            return {TYPE: "numpy", "dtype": value.dtype.name, "value": self.encode(value.item(), path)}
        raise self._refusal(value, path)

    def _add(self, tensor: Tensor, path: tuple[Any, ...]) -> str:
        # The key itself is that of the JSON which describes the tensor, for example the dtype of an array.
        requested = key = ".".join([self.key, *map(str, path)]) if path else f"{self.key}#data"
        number = 1
        while key in self.tensors:  # As with {"a.b": ..., "a": {"b": ...}}.
            number += 1
            key = f"{requested}#{number}"
        self.tensors[key] = tensor
        return key

    def _where(self, path: tuple[Any, ...]) -> str:
        return self.where + "".join(f"[{part!r}]" for part in path)

    def _refusal(self, value: Any, path: tuple[Any, ...]) -> TypeError:
        return TypeError(
            f"{self._where(path)}: a {type(value).__module__}.{type(value).__qualname__} can't be saved, because it "
            "could not be read back as it was: give numbers, texts, bytes, tensors, arrays of numbers, and tuples, "
            "lists, dicts and sets of them"
        )


def _decode_typed(value: dict[str, JSON], tensor_of: Callable[[str], Tensor]) -> Any:
    kind = str(value[TYPE])
    part: Any = value.get("value")
    items: Any = value.get("items")
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(item, tensor_of) for item in items)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]((decode(key, tensor_of), decode(value, tensor_of)) for key, value in items)
    if kind == "defaultdict":
        factory = value["factory"]
        decoded: defaultdict[Any, Any] = defaultdict(None if factory is None else _FACTORIES[str(factory)])
        decoded.update((decode(key, tensor_of), decode(value, tensor_of)) for key, value in items)
        return decoded
    if kind == "tensor":
        return _decode_tensor(value, tensor_of)
    if kind == "ndarray":
        return tensor_of(str(value["key"])).numpy()
    if kind in ("bytes", "bytearray"):
        data = base64.b64decode(str(value["base64"]))
        return data if kind == "bytes" else bytearray(data)
    if kind == "float":
        return float(part)
    if kind == "complex":
        real, imaginary = (decode(item, tensor_of) for item in items)
        return complex(real, imaginary)
    if kind == "dtype" and isinstance(dtype := getattr(torch, part), torch.dtype):
        return dtype
    if kind == "device":
        return torch.device(part)
    if kind == "numpy":
        import numpy

        dtype = numpy.dtype(str(value["dtype"]))
        if dtype.kind in _NUMBERS:
            return dtype.type(decode(part, tensor_of))
    raise ValueError(f"{str(value)[:200]} is not an encoded value: the type {kind!r} is not known")


def _decode_tensor(value: dict[str, JSON], tensor_of: Callable[[str], Tensor]) -> Tensor:
    tensor, device = tensor_of(str(value["key"])), str(value.get("device", "cpu"))
    if device != "cpu" and torch.accelerator.is_available():
        tensor = tensor.to(torch.accelerator.current_accelerator())
    wants_grad = value.get("requires_grad") is True
    if value.get("parameter"):
        return nn.Parameter(tensor, requires_grad=wants_grad)
    return tensor.requires_grad_(wants_grad)
