"""How one unit is to be sharded: what the user has asked for, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from scale_core import compat
from scale_core.comm.group import GroupLike
from scale_core.flat.buffer import Devices
from scale_core.flat.layout import Atom
from scale_core.tree import map_tensors
from scale_fsdp.mesh_info import Ranks, ranks_of


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of one unit; None leaves things as they are.

    The local shards, their gradients and so the optimizer keep the dtype that the parameters were built in.

    Attributes:
        param_dtype: Of the gathered parameters, of the floating-point inputs of the outermost unit, and so of the
            computation.
        reduce_dtype: Of the gradients on their way between ranks; None is `param_dtype`.
        output_dtype: Of the module's floating-point outputs.
        buffer_dtype: Of the module's floating-point buffers. None is right nearly always: rotary frequencies and
            running statistics don't survive half precision.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name, dtype in vars(self).items():
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"MixedPrecision({name}=...): expected a floating-point torch.dtype, got {dtype!r}")


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """Returns tensors in containers of any kind, those of floating-point numbers in this dtype."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)


def resolve_precision(
    mixed_precision: bool | MixedPrecision,
    *,
    compute_dtype: torch.dtype | None = None,
    buffer_dtype: torch.dtype | None = None,
    fp32_reduce_scatter: bool | None = None,
) -> MixedPrecision:
    """Returns the policy behind the arguments of `fully_shard`.

    Args:
        mixed_precision: A policy; True is fp16 parameters and reduction; False leaves all dtypes alone.
        compute_dtype: FairScale's name for `param_dtype`.
        buffer_dtype: As in the policy.
        fp32_reduce_scatter: FairScale's name for `reduce_dtype=torch.float32`; None is False.

    Raises:
        TypeError: `mixed_precision` is neither.
        ValueError: A policy and one of the other three, or `fp32_reduce_scatter` without `mixed_precision`.
    """
    if isinstance(mixed_precision, MixedPrecision):
        given = {
            "compute_dtype": compute_dtype,
            "buffer_dtype": buffer_dtype,
            "fp32_reduce_scatter": fp32_reduce_scatter,
        }
        extra = [name for name, value in given.items() if value is not None]
        if extra:
            raise ValueError(
                f"a MixedPrecision policy was given and {', '.join(extra)} beside it: say it in the policy, "
                "MixedPrecision(param_dtype=..., reduce_dtype=..., buffer_dtype=...)"
            )
        return mixed_precision
    if not isinstance(mixed_precision, bool):
        raise TypeError(f"mixed_precision: expected a bool or a MixedPrecision, got {type(mixed_precision).__name__}")
    if not mixed_precision:
        if fp32_reduce_scatter:
            raise ValueError("fp32_reduce_scatter requires mixed_precision=True: without it gradients keep their dtype")
        return MixedPrecision(param_dtype=compute_dtype, buffer_dtype=buffer_dtype)
    param_dtype = compute_dtype or torch.float16
    reduce_dtype = torch.float32 if fp32_reduce_scatter else param_dtype
    return MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype, buffer_dtype=buffer_dtype)


AtomChoice = Atom | Callable[[str, tuple[int, ...]], Atom]


@dataclass(frozen=True)
class Placement:
    """On which devices a unit lives.

    Attributes:
        compute: Where it computes; None is where its parameters are.
        params_on_host: The shards, and so the optimizer's state, are on the host.
        grads_on_host: Reduced gradients are brought to the host at once, or only when the backward pass is over.
    """

    compute: torch.device | None = None
    params_on_host: bool = False
    grads_on_host: bool = False

    def devices_for(self, params: torch.device) -> Devices:
        """Returns where the buffers of parameters live that are on this device now."""
        compute = self.compute or params
        host = torch.device("cpu")
        return Devices(
            shard=host if self.params_on_host else compute,
            compute=compute,
            reduced=host if self.grads_on_host else compute,
        )


@dataclass(frozen=True)
class StateDictForm:
    """What `state_dict()` of a sharded module gives, and to whom.

    Attributes:
        device: Where its tensors are; None is where the shards are.
        rank_0_only: Rank 0 of the module's ranks alone gets them, and the others an empty dict.
    """

    device: torch.device | None = None
    rank_0_only: bool = False


@dataclass(frozen=True)
class UnitOptions:
    """How one unit is sharded.

    Attributes:
        ranks: Over which ranks.
        precision: In which dtypes it computes and communicates.
        placement: On which devices it lives.
        reshard_after_forward: Release between forward and backward; an integer leaves it cut among that many ranks.
        flatten: One flat parameter per buffer in place of one local shard per parameter.
        atom: What must not be cut between two ranks.
        limit_seconds: As the outermost unit, the longest wait for another rank; None is the group's own limit.
        form: What its module's `state_dict()` gives.
        error_if_nonfinite: As the outermost unit, give a step up in which a rank computes what is not finite.
    """

    ranks: Ranks
    precision: MixedPrecision
    placement: Placement
    reshard_after_forward: bool | int = True
    flatten: bool = False
    atom: AtomChoice = "auto"
    limit_seconds: float | None = None
    form: StateDictForm = StateDictForm()
    error_if_nonfinite: bool = False

    @classmethod
    def from_arguments(
        cls,
        process_group: GroupLike = None,
        *,
        reshard_after_forward: bool | int = True,
        mixed_precision: bool | MixedPrecision = False,
        flatten_parameters: bool = False,
        atom: AtomChoice = "auto",
        move_params_to_cpu: bool = False,
        move_grads_to_cpu: bool | None = None,
        compute_device: torch.device | str | None = None,
        limit_seconds: float | None = None,
        state_dict_device: torch.device | str | None = None,
        state_dict_on_rank_0_only: bool = False,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        fp32_reduce_scatter: bool | None = None,
        error_if_nonfinite: bool = False,
    ) -> UnitOptions:
        """Returns the options behind the arguments of `fully_shard`, which explains them.

        Raises:
            TypeError: An argument of the wrong kind.
            ValueError: Arguments that contradict each other, or that the ranks can't follow.
        """
        ranks = ranks_of(process_group)
        if not isinstance(reshard_after_forward, int):
            raise TypeError(
                f"reshard_after_forward: expected a bool or a number of ranks, got {reshard_after_forward!r}"
            )
        ranks.check_part(reshard_after_forward)
        if not isinstance(error_if_nonfinite, bool):
            raise TypeError(f"error_if_nonfinite: expected True or False, got {error_if_nonfinite!r}")
        return cls(
            ranks,
            resolve_precision(
                mixed_precision,
                compute_dtype=compute_dtype,
                buffer_dtype=buffer_dtype,
                fp32_reduce_scatter=fp32_reduce_scatter,
            ),
            resolve_placement(move_params_to_cpu, move_grads_to_cpu, compute_device, ranks),
            reshard_after_forward,
            flatten_parameters,
            atom,
            limit_seconds,
            resolve_form(state_dict_device, state_dict_on_rank_0_only),
            error_if_nonfinite,
        )

    def device_for(self, params: torch.device) -> torch.device:
        """Returns where parameters are to be that are on this device now: those on meta get memory where they compute.

        That is this rank's accelerator, if there is one that the ranks communicate by.
        """
        if params.type != "meta":
            return params
        accelerator = compat.accelerator() if self.ranks.whole.backend != "gloo" else None
        return self.placement.compute or accelerator or torch.device("cpu")


def resolve_placement(
    move_params_to_cpu: bool, move_grads_to_cpu: bool | None, compute_device: torch.device | str | None, ranks: Ranks
) -> Placement:
    """Returns where a unit lives, from the arguments of `fully_shard`.

    Args:
        move_params_to_cpu: Keep the shards on the host.
        move_grads_to_cpu: Bring each reduced gradient to the host at once; None is as for the parameters.
        compute_device: Where to compute; None is the parameters' own device or, for shards on the host, this rank's
            accelerator where the ranks communicate by one.
        ranks: The unit's ranks.

    Raises:
        TypeError: A flag is not a bool.
    """
    for name, value in (("move_params_to_cpu", move_params_to_cpu), ("move_grads_to_cpu", move_grads_to_cpu)):
        if not isinstance(value, bool | None):
            raise TypeError(f"{name}: expected True or False, got {value!r}")
    compute = torch.device(compute_device) if compute_device is not None else None
    if compute is None and move_params_to_cpu and ranks.whole.backend != "gloo":
        compute = compat.accelerator()
    if compute is not None and str(compute) == "cuda":
        compute = compat.accelerator() or compute  # Tensors say which one they are on, and are compared with this.
    return Placement(
        compute, move_params_to_cpu, move_params_to_cpu if move_grads_to_cpu is None else move_grads_to_cpu
    )


def resolve_form(state_dict_device: torch.device | str | None, state_dict_on_rank_0_only: bool) -> StateDictForm:
    """Returns the form behind the arguments of `fully_shard`.

    Raises:
        TypeError: The flag is not a bool.
    """
    if not isinstance(state_dict_on_rank_0_only, bool):
        raise TypeError(f"state_dict_on_rank_0_only: expected True or False, got {state_dict_on_rank_0_only!r}")
    device = None if state_dict_device is None else torch.device(state_dict_device)
    return StateDictForm(device, state_dict_on_rank_0_only)
