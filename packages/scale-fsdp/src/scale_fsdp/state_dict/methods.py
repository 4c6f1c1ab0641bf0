"""Methods of a sharded module that save and load its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from scale_fsdp.state_dict.full import state_dict_of
from scale_fsdp.state_dict.loading import load_full_state_dict
from scale_fsdp.state_dict.local import (
    consolidate_shard_weights,
    load_local_state_dict,
    local_metadata_dict,
    local_state_dict,
)
from scale_fsdp.state_dict.optimizer import OptimizerLike, full_optim_state_dict, shard_optim_state_dict


class StateDictMethods(nn.Module):
    """State dicts of a sharded module: full, or of this rank alone."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the plain module's state dict: full tensors under plain names. All ranks call it together.

        Which ranks get it, and on which device, is set by `state_dict_on_rank_0_only` and `state_dict_device` of
        `fully_shard`; `full_state_dict` takes both at the call. The arguments are those of `nn.Module`.

        Raises:
            RuntimeError: torch's checkpoint functions call it, and parameters are flat.
            ScaleDistributedError: A rank did something else.
        """
        return state_dict_of(self, super().state_dict, *args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads full tensors, as the plain module's state dict has them; each rank takes its elements, nothing is sent.

        Raises:
            RuntimeError: Names or shapes are not the module's, or the parameters are in use; nothing has been loaded
                then.
            ValueError: `assign`, which would replace the shards; or the state is that of one rank alone.
        """
        return load_full_state_dict(self, super().load_state_dict, state_dict, strict, assign)

    def local_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what this rank holds: its shards, and the module's buffers. Nothing is sent.

        The tensors share the shards' memory. The arguments are those of `nn.Module.state_dict`.
        """
        return local_state_dict(self, super().state_dict, *args, **kwargs)

    def local_metadata_dict(self) -> dict[str, Any]:
        """Returns which elements this rank's shards are, to be saved beside them: see `consolidate_shard_weights`.

        Raises:
            ValueError: A parameter of the module belongs to a unit outside of it.
        """
        return local_metadata_dict(self)

    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Loads what `local_state_dict()` gave on this rank, under the same wrapping. Nothing is sent.

        Returns:
            Missing and unexpected names, as `nn.Module.load_state_dict` does.

        Raises:
            ValueError: It is that of another rank, another number of ranks or another wrapping, or a tensor in it has
                another shape; nothing has been loaded then.
            RuntimeError: The parameters are in use.
        """
        return load_local_state_dict(self, super().state_dict, super().load_state_dict, state_dict, strict)

    consolidate_shard_weights = staticmethod(consolidate_shard_weights)

    def gather_full_optim_state_dict(
        self, optim: OptimizerLike, recipient_rank: int | None = 0
    ) -> dict[str, Any] | None:
        """Gathers the optimizer's full state by name, on the CPU of one rank: see `full_optim_state_dict`."""
        return full_optim_state_dict(self, optim, recipient_rank=recipient_rank)

    def get_shard_from_optim_state_dict(
        self, full_optim_state_dict: Mapping[str, Any], optim: OptimizerLike | None = None
    ) -> dict[str, Any]:
        """Returns this rank's state, for `optim.load_state_dict`, of the full one: see `shard_optim_state_dict`."""
        return shard_optim_state_dict(full_optim_state_dict, self, optim)
