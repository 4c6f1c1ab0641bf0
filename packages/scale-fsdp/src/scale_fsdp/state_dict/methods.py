"""The methods of a sharded module by which its state is saved and loaded: whole, or as this rank holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from scale_fsdp.state_dict.full import state_dict_of
from scale_fsdp.state_dict.loading import load_whole
from scale_fsdp.state_dict.local import (
    consolidate_shard_weights,
    load_local_state_dict,
    local_metadata_dict,
    local_state_dict,
)
from scale_fsdp.state_dict.optimizer import HasState, full_optim_state_dict, shard_optim_state_dict


class WithState(nn.Module):
    """What a sharded module saves and loads."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the plain module's state dict: full tensors under plain names. All ranks call it together.

        Which ranks get it, and on which device, is what `fully_shard` was told by `state_dict_on_rank_0_only` and
        `state_dict_device`; `full_state_dict` takes both at the call. The arguments are those of `nn.Module`.

        Raises:
            RuntimeError: torch's checkpoint functions ask, and parameters are flat.
            ScaleDistributedError: A rank did something else.
        """
        return state_dict_of(self, super().state_dict, *args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Takes this rank's pieces out of full tensors, as the plain module's state dict has them; nothing is sent.

        Raises:
            RuntimeError: Names or shapes are not the module's; nothing has been loaded then. Or the parameters are in
                use.
            ValueError: `assign`, which would replace the shards; or the state is that of one rank alone.
        """
        return load_whole(self, super().load_state_dict, state_dict, strict, assign)

    def local_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what this rank holds: its shards, and the module's buffers. Nothing is sent.

        The tensors share the shards' memory. The arguments are those of `nn.Module.state_dict`.
        """
        return local_state_dict(self, super().state_dict, *args, **kwargs)

    def local_metadata_dict(self) -> dict[str, Any]:
        """Returns what this rank's shards are shards of, to be saved beside them: see `consolidate_shard_weights`.

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

    def gather_full_optim_state_dict(self, optim: HasState, recipient_rank: int | None = 0) -> dict[str, Any] | None:
        """Gathers the optimizer's whole state by name, on the CPU of one rank: see `full_optim_state_dict`.

        Raises:
            ValueError: As there.
            ScaleDistributedError: As there.
        """
        return full_optim_state_dict(self, optim, recipient_rank=recipient_rank)

    def get_shard_from_optim_state_dict(
        self, full_optim_state_dict: Mapping[str, Any], optim: HasState | None = None
    ) -> dict[str, Any]:
        """Makes this rank's state, for `optim.load_state_dict`, of the whole one: see `shard_optim_state_dict`.

        Raises:
            ValueError: As there.
            TypeError: As there.
        """
        return shard_optim_state_dict(full_optim_state_dict, self, optim)
