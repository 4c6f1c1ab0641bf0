"""Converts between the names in the files of a model and the names in its state.

A model of transformers says itself how files of other versions are read: some tensors have other names there, and
experts stand one by one whose weights are one tensor in the model. Each saved tensor is then a box of the model's
tensor, and files are read and written by boxes. So nothing is converted in memory, and no rank needs the full tensor.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from scale_core.sharded_tensor.chunks import Chunk
from scale_core.state.validation import SavedTensor


class SavedPiece(NamedTuple):
    """A tensor of the files, as a part of one of the model's."""

    name: str  # In the files
    shape: tuple[int, ...]  # In the files
    chunk: Chunk  # Which elements of the model's tensor it has, in the same order


class Assembled(NamedTuple):
    """A tensor of the model, and its parts in the files."""

    tensor: SavedTensor
    pieces: tuple[SavedPiece, ...]

    @classmethod
    def of(cls, name: str, tensor: SavedTensor) -> Assembled:
        """A tensor that is saved unchanged."""
        return cls(tensor, (SavedPiece(name, tensor.shape, Chunk((0,) * len(tensor.shape), tensor.shape)),))


def model_of_transformers(model: nn.Module) -> nn.Module | None:
    """The module that carries a configuration: the model inside of wrappers, or this rank's first stage of it."""
    return next((module for module in model.modules() if getattr(module, "config", None) is not None), None)


@dataclass(frozen=True)
class Conversions:
    """How tensors of the files become tensors of a model: names first, and then their assembly."""

    patterns: Sequence[tuple[str, str]] = ()  # Regular expressions and their replacements; the first that fits counts
    renamings: Sequence[Any] = ()  # Of transformers, in their order
    converters: Sequence[Any] = ()  # Of transformers; the first that fits counts
    prefix: str = ""  # Of the names of a base model in a model with a head
    ignored: Sequence[str] = ()  # Regular expressions for saved names that the model has no use for

    @classmethod
    def for_loading(cls, model: nn.Module, key_mapping: Mapping[str, str] | None) -> Conversions:
        """The conversions that read a folder of any version."""
        carrier = model_of_transformers(model)
        transforms = _listed(carrier, is_saving=False)
        mapping = getattr(carrier, "_checkpoint_conversion_mapping", None)
        patterns = [*(key_mapping or {}).items(), *(mapping.items() if isinstance(mapping, Mapping) else ())]
        ignored = [*(getattr(carrier, "_keys_to_ignore_on_load_unexpected", None) or ())]
        if carrier is not None:  # They were persistent buffers once, and are none any more.
            ignored += [r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
        return cls(
            [(pattern, _as_replacement(into)) for pattern, into in patterns],
            [transform for transform in transforms if not hasattr(transform, "operations")],
            [transform for transform in transforms if hasattr(transform, "operations")],
            str(getattr(carrier, "base_model_prefix", "") or ""),
            ignored,
        )

    @classmethod
    def for_saving(cls, model: nn.Module) -> Conversions:
        """The way back, to the format that the model is published in."""
        carrier = model_of_transformers(model)
        back = [transform.reverse_transform() for transform in reversed(_listed(carrier, is_saving=True))]
        mapping = getattr(carrier, "_checkpoint_conversion_mapping", None)
        patterns = [(_as_replacement(into), pattern) for pattern, into in mapping.items()] if mapping else []
        return cls(
            [(pattern, _as_replacement(into)) for pattern, into in patterns],
            [transform for transform in back if not hasattr(transform, "operations")],
            [transform for transform in back if hasattr(transform, "operations")],
        )

    # From files to the model.

    def assemble(self, saved: Mapping[str, SavedTensor], known: Container[str]) -> dict[str, Assembled]:
        """Returns the content of the files, by the names of a model that has the names `known`.

        Raises:
            ValueError: Two saved tensors have one name in the model, or they are put together in a way that no file
                can be read by.
        """
        assembled: dict[str, Assembled] = {}
        collected: dict[str, tuple[Any, dict[str, list[str]]]] = {}
        first: dict[str, str] = {}
        for name in sorted(saved, key=natural_key):
            target, converter, pattern = self._target(name, known)
            if target not in known and any(re.search(pattern, target) for pattern in self.ignored):
                continue
            if converter is not None:
                collected.setdefault(target, (converter, {}))[1].setdefault(pattern, []).append(name)
                continue
            if target in assembled:
                raise ValueError(f"{first[target]} and {name} are both {target} in the model: pass key_mapping=")
            assembled[target], first[target] = Assembled.of(name, saved[name]), name
        for target, (converter, by_pattern) in collected.items():
            lists = {
                pattern: [Assembled.of(name, saved[name]) for name in names] for pattern, names in by_pattern.items()
            }
            assembled[target] = _joined(target, converter, lists)
        return assembled

    def _target(self, name: str, known: Container[str]) -> tuple[str, Any, str]:
        """The name in the model, and the converter and the one of its patterns that takes it there."""
        renamed, converter, pattern = _substituted(name, self.patterns), None, None
        for renaming in self.renamings:
            renamed, _ = renaming.rename_source_key(renamed)
        for renaming in self.converters:
            renamed, pattern = renaming.rename_source_key(renamed)
            if pattern is not None:
                converter = renaming
                break
        target = self._with_prefix(renamed, known)
        if target not in known and (as_it_is := self._with_prefix(name, known)) in known:
            return as_it_is, None, ""
        return target, converter, pattern or ""

    def _with_prefix(self, name: str, known: Container[str]) -> str:
        """The name with or without the prefix of the base model, whichever the model has."""
        dotted = f"{self.prefix}."
        for other in (name.removeprefix(dotted), dotted + name) if self.prefix and name not in known else ():
            if other in known:
                return other
        return name

    # From the model to files.

    def split(self, tensors: Mapping[str, SavedTensor]) -> dict[str, Assembled]:
        """Returns the saved tensors of each of the model's tensors.

        Raises:
            ValueError: A conversion can't be undone by writing parts of the tensor.
        """
        return {name: self._split(name, tensor) for name, tensor in tensors.items()}

    def _split(self, name: str, tensor: SavedTensor) -> Assembled:
        for converter in self.converters:
            renamed, pattern = converter.rename_source_key(name)
            if pattern is not None:
                parts = _divided(name, tensor, converter, pattern)
                before, first, after = renamed.partition(converter.target_patterns[0])
                assert first, f"{renamed} is made by {converter}"
                pieces = [piece._replace(name=self._published(before + piece.name + after)) for piece in parts]
                return Assembled(tensor, tuple(pieces))
        return Assembled.of(self._published(name), tensor)

    def _published(self, name: str) -> str:
        for renaming in self.renamings:
            name, _ = renaming.rename_source_key(name)
        return _substituted(name, self.patterns)


def _listed(carrier: nn.Module | None, *, is_saving: bool) -> list[Any]:
    """The conversions that transformers has for the model; none for models of other libraries."""
    if not hasattr(carrier, "base_model_prefix"):
        return []
    used = getattr(carrier, "_weight_conversions", None)  # By `from_pretrained`
    if is_saving and used is not None:
        return list(used)
    # It is imported already where the model is one of transformers; older versions have no such file.
    make = getattr(sys.modules.get("transformers.conversion_mapping"), "get_model_conversion_mapping", None)
    if make is None:
        return []
    if not is_saving:
        return list(make(carrier))
    # Whether the files had a prefix that the model has not, or the other way round, is not known.
    return [transform for transform in make(carrier, add_legacy=False) if type(transform).__name__ != "PrefixChange"]


def _substituted(name: str, patterns: Sequence[tuple[str, str]]) -> str:
    for pattern, into in patterns:
        renamed, count = re.subn(pattern, into, name)
        if count:
            return renamed
    return name


def _as_replacement(pattern: str) -> str:
    """A regular expression as the text that it stands for, without its lookarounds."""
    return re.sub(r"\(\?.*?\)", "", pattern).removeprefix("^")


def natural_key(name: str) -> list[tuple[int, str]]:
    """A key by which `experts.10` comes after `experts.9`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


_WHAT_HELPS = (
    "load it by from_pretrained of transformers, and save it by model.save_pretrained(folder, "
    "save_original_format=False), which load_pretrained reads"
)


def _joined(target: str, converter: Any, lists: Mapping[str, list[Assembled]]) -> Assembled:
    """The results of a converter for lists of saved tensors, by its patterns."""
    current: dict[str, list[Assembled]] = dict(lists)
    for operation in converter.operations:
        kind = type(operation).__name__
        if kind == "MergeModulelist":
            current = {pattern: [_stack(target, parts, operation.dim)] for pattern, parts in current.items()}
        elif kind == "Concatenate":
            parts = [part for pattern in converter.source_patterns for part in current.get(pattern, ())]
            current = {converter.source_patterns[0]: [_concatenate(target, parts, operation.dim)]}
        else:
            raise ValueError(f"{target} is made of saved tensors by {kind}, which is not supported: {_WHAT_HELPS}")
    left = [part for parts in current.values() for part in parts]
    if len(left) != 1:
        raise ValueError(f"{target} is made of {len(left)} saved tensors, and no operation joins them: {_WHAT_HELPS}")
    return left[0]


def _stack(target: str, parts: Sequence[Assembled], dim: int) -> Assembled:
    return _concatenate(target, [_with_dim(part, dim) for part in parts], dim)


def _with_dim(part: Assembled, dim: int) -> Assembled:
    def inserted(sizes: tuple[int, ...], size: int) -> tuple[int, ...]:
        return (*sizes[:dim], size, *sizes[dim:])

    pieces = tuple(
        piece._replace(chunk=Chunk(inserted(piece.chunk.offsets, 0), inserted(piece.chunk.sizes, 1)))
        for piece in part.pieces
    )
    return Assembled(SavedTensor(inserted(part.tensor.shape, 1), part.tensor.dtype), pieces)


def _concatenate(target: str, parts: Sequence[Assembled], dim: int) -> Assembled:
    def rest(part: Assembled) -> tuple[object, ...]:
        shape = part.tensor.shape
        return (*shape[:dim], *shape[dim + 1 :], part.tensor.dtype)

    pieces: list[SavedPiece] = []
    length = 0
    for part in parts:
        if rest(part) != rest(parts[0]):
            one, other = parts[0].pieces[0], part.pieces[0]
            raise ValueError(
                f"{target} is made of tensors that don't fit each other: {one.name} {one.shape} "
                f"{parts[0].tensor.dtype}, {other.name} {other.shape} {part.tensor.dtype}"
            )
        for piece in part.pieces:
            offsets = piece.chunk.offsets
            moved = (*offsets[:dim], offsets[dim] + length, *offsets[dim + 1 :])
            pieces.append(piece._replace(chunk=Chunk(moved, piece.chunk.sizes)))
        length += part.tensor.shape[dim]
    shape = parts[0].tensor.shape
    return Assembled(SavedTensor((*shape[:dim], length, *shape[dim + 1 :]), parts[0].tensor.dtype), tuple(pieces))


def _divided(name: str, tensor: SavedTensor, converter: Any, pattern: str) -> list[SavedPiece]:
    """The results of the reverse of a converter for one tensor; the names are patterns without their stars."""
    full_piece = SavedPiece(pattern, tensor.shape, Chunk((0,) * len(tensor.shape), tensor.shape))
    parts = (
        [full_piece._replace(name=converter.target_patterns[0])]
        if len(converter.target_patterns) == 1
        else [full_piece]
    )
    for operation in converter.operations:
        kind = type(operation).__name__
        targets = converter.target_patterns
        if kind == "Chunk" and len(parts) == 1 and getattr(operation, "num_shards_attribute", None) is None:
            parts = [
                part._replace(name=target_index)
                for part, target_index in zip(_cut(parts[0], operation.dim, len(targets)), targets, strict=True)
            ]
        elif kind == "SplitModulelist":
            parts = [
                _without_dim(section, operation.dim)._replace(name=part.name.replace("*", str(number)))
                for part in parts
                for number, section in enumerate(_cut(part, operation.dim, part.shape[operation.dim]))
            ]
        else:
            raise ValueError(
                f"{name} is published as other tensors, made by {kind}, which is not known here: pass "
                "save_original_format=False, and transformers reads what is written"
            )
    return parts


def _cut(piece: SavedPiece, dim: int, count: int) -> list[SavedPiece]:
    """Equal parts of a box along a dimension."""
    size, left = divmod(piece.shape[dim], count)
    if left:
        raise ValueError(f"{piece.name}: {piece.shape[dim]} elements along dimension {dim} are not {count} equal parts")

    def replaced(sizes: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*sizes[:dim], value, *sizes[dim + 1 :])

    offset = piece.chunk.offsets[dim]
    return [
        piece._replace(
            shape=replaced(piece.shape, size),
            chunk=Chunk(replaced(piece.chunk.offsets, offset + number * size), replaced(piece.chunk.sizes, size)),
        )
        for number in range(count)
    ]


def _without_dim(piece: SavedPiece, dim: int) -> SavedPiece:
    return piece._replace(shape=(*piece.shape[:dim], *piece.shape[dim + 1 :]))
