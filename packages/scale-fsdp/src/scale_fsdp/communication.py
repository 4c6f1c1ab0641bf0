"""`CommunicationPolicy`: which messages of a unit have 8 or 4 bits, and between which ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

from torch import nn

from scale_fsdp.mesh_info import MeshInfo
from scale_fsdp.transports.blocks import BlockFormat, FormatName
from scale_fsdp.transports.quantized import WireFormats

Format: TypeAlias = FormatName | BlockFormat | None
Kind: TypeAlias = Literal["1d", "embedding"]


@dataclass(frozen=True)
class CommunicationPolicy:
    """How a unit's parameters and gradients are sent between ranks; None sends the values unquantized.

    A format is "int8", "float8_e4m3" or "int4", in blocks of 128 values with one fp32 scale per block; or a
    `scale_fsdp.transports.blocks.BlockFormat`. The module of `BlockFormat` states the error of each format. The shards,
    and so the optimizer, the state dicts and every snapshot, keep their dtype: only messages are rounded.

    Parameters of one dimension (norms, biases) and of embeddings are sent as they are, and so are those that are no
    floating-point numbers: `print(describe(model))` shows which. In a group of one rank nothing is sent, and nothing
    rounded.

    ZeRO++ (arXiv 2306.10209), in DeepSpeed's names: `gather="int8"` is `zero_quantized_weights` (qwZ), `reduce="int4"`
    is `zero_quantized_gradients` (qgZ), and `reshard_after_forward=<ranks of a node>` of `fully_shard` is
    `zero_hpz_partition_size` (hpZ).

    Attributes:
        gather: Of the parameters, wherever the unit is gathered from its shards: "int8" or "float8_e4m3". All ranks,
            the owner of a shard too, compute with the numbers that were sent. What `reshard_after_forward=<int>` keeps
            of them is gathered inside a node, unchanged.
        reduce: Of the gradients, between the ranks that share the parameters. They are added up in fp32.
        replicate: Of the reduced gradients, between the replicas of a mesh of two dimensions: full precision inside a
            node, and fewer bits between.
        node_size: Ranks per node, neighbors in the mesh of one dimension. `gather` and `reduce` then apply only between
            nodes: shards come from one rank of each other node and are passed on inside in the dtype of the
            computation; gradients are averaged inside a node first. Where there are no more ranks than that, they are
            one node, and nothing is quantized. None treats all ranks equally.
        error_feedback: Add the rounding error of one step's gradients to the gradients of the next step. This takes 4
            bytes per gradient that this rank quantizes. In a backward pass it takes 8, and with a `ShardedGradScaler`
            until the step. `ErrorFeedbackState(model)` puts it into a snapshot; a run that goes on from one without it
            begins with an error of zero.
        include: Parameters that are sent in these formats all the same: "1d", "embedding".

    Raises:
        ValueError: No such format; 4 bits for parameters; settings without which others have no effect.
        TypeError: A value of the wrong kind.

    Examples:
        >>> import torch
        >>> from scale_fsdp import CommunicationPolicy, ShardOptions, fully_shard
        >>> policy = CommunicationPolicy(gather="int8", reduce="int4")  # ZeRO++: only messages are rounded
        >>> model = fully_shard(torch.nn.Linear(64, 64), options=ShardOptions(communication=policy))
        >>> model(torch.randn(2, 64)).sum().backward()

    See also: [the guide to quantized communication](../guides/slow-networks.md#quantized-communication-zero).
    """

    gather: Format = None
    reduce: Format = None
    replicate: Format = None
    node_size: int | None = None
    error_feedback: bool = False
    include: Collection[Kind] = ()

    def __post_init__(self) -> None:
        for name in ("gather", "reduce", "replicate"):
            block_format = _block_format(name, getattr(self, name))
            if name == "gather" and block_format is not None and block_format.dtype == "int4":
                raise ValueError(
                    "gather='int4': parameters in 4 bits are off by up to a 14th of the largest of their block, in "
                    "every pass, and nothing evens it out: write gather='int8' or gather='float8_e4m3'"
                )
        if not isinstance(self.error_feedback, bool):
            raise TypeError(f"error_feedback: expected True or False, got {self.error_feedback!r}")
        size: object = self.node_size
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"node_size: expected the number of ranks of a node, at least 1, or None, got {size!r}")
        kinds = get_args(Kind)
        unknown = [kind for kind in _as_names(self.include) if kind not in kinds]
        if unknown:
            raise ValueError(
                f"include: expected some of {', '.join(map(repr, kinds))}, got {unknown[0]!r}: "
                "write include=('embedding',)"
            )
        # In one order, in which ranks compare it: the order of a set differs between processes.
        object.__setattr__(self, "include", tuple(sorted(set(self.include))))
        if self.error_feedback and self.reduce is None and self.replicate is None:
            raise ValueError(
                "error_feedback=True: no gradient is quantized, so there is no error: name a format, "
                "CommunicationPolicy(reduce='int4', error_feedback=True)"
            )
        if size is not None and self.gather is None and self.reduce is None:
            raise ValueError(
                f"node_size={size}: neither parameters nor gradients are quantized between nodes: name a format, "
                f"CommunicationPolicy(gather='int8', node_size={size})"
            )

    @property
    def wire(self) -> WireFormats:
        """The formats of quantized messages."""
        return WireFormats(
            _block_format("gather", self.gather),
            _block_format("reduce", self.reduce),
            _block_format("replicate", self.replicate),
            self.error_feedback,
        )

    def check(self, mesh_info: MeshInfo) -> None:
        """Raises ValueError where the policy says something of ranks that these are not."""
        shard, replicas = mesh_info.shard.size, mesh_info.replicas.size
        if self.replicate is not None and mesh_info.replicas.process_group is None:
            raise ValueError(
                f"replicate={self.replicate!r}: the mesh has one dimension, so that no two of its ranks are replicas: "
                "pass mesh=init_device_mesh('cuda', (nodes, ranks_per_node)), or reduce= for gradients of all ranks"
            )
        size = self.node_size
        if size is not None and replicas > 1:
            raise ValueError(
                f"node_size={size}: the mesh of {replicas} x {shard} ranks says itself which are neighbors: leave "
                "node_size out; replicate= is the format between its rows"
            )
        if size is not None and size < shard and shard % size:
            divisors = [number for number in range(1, shard + 1) if shard % number == 0]
            raise ValueError(
                f"node_size={size}: {shard} ranks do not divide into nodes of {size}: take one of "
                f"{', '.join(map(str, divisors))}, or leave it out"
            )


def check_communication(policy: object) -> None:
    """Refuses a value that is not a policy."""
    if policy is not None and not isinstance(policy, CommunicationPolicy):
        raise TypeError(
            f"communication: expected a scale_fsdp.CommunicationPolicy or None, got {policy!r}: write "
            "options=ShardOptions(communication=CommunicationPolicy(gather='int8', reduce='int4'))"
        )


def unquantized_params(
    places: Iterable[tuple[nn.Module, nn.Parameter]], policy: CommunicationPolicy | None
) -> set[nn.Parameter]:
    """Returns the parameters that the policy does not quantize; `places` are the modules that hold them."""
    none = policy is None or not any((policy.gather, policy.reduce, policy.replicate))
    include = () if policy is None else policy.include
    unquantized = set()
    for module, param in places:
        floating = param.is_floating_point() and param.dtype.itemsize > 1
        is_1d = sum(length > 1 for length in param.shape) <= 1 and "1d" not in include
        if none or not floating or is_1d or (looks_like_embedding(module) and "embedding" not in include):
            unquantized.add(param)
    return unquantized


def looks_like_embedding(module: nn.Module) -> bool:
    """Whether it is an embedding, by its type or by its name: embeddings of other libraries are not subclasses."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) or "embedding" in type(module).__name__.lower()


def _block_format(name: str, value: object) -> BlockFormat | None:
    if value is None or isinstance(value, BlockFormat):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a format's name, a BlockFormat or None, got {value!r}: write {name}='int8'")
    try:
        return BlockFormat(cast(FormatName, value))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _as_names(include: object) -> Collection[Any]:
    if isinstance(include, str) or not isinstance(include, Collection):
        raise TypeError(f"include: expected a collection of names, got {include!r}: write include=('embedding',)")
    return include
