"""What the strategies of the Trainer and of Fabric are made with: one constructor for both of a kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scale_fsdp import ShardOptions
from scale_lightning.checkpoints import StateDictType, check_state_dict_type

if TYPE_CHECKING:

    class _Base:
        """Either of Lightning's two `DDPStrategy`."""

        def __init__(self, **options: Any) -> None: ...

else:
    _Base = object

# Of Lightning's two `DDPStrategy`, where all others go to what shards.
_DDP_OPTIONS = frozenset(
    {
        "accelerator",
        "checkpoint_io",
        "cluster_environment",
        "parallel_devices",
        "precision",
        "precision_plugin",
        "process_group_backend",
        "start_method",
        "timeout",
    }
)


def _split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the options of Lightning's `DDPStrategy`, and the others."""
    lightnings = {key: value for key, value in options.items() if key in _DDP_OPTIONS}
    return lightnings, {key: value for key, value in options.items() if key not in lightnings}


class CheckpointOptions(_Base):
    """Whole checkpoints of rank 0, or folders into which each rank writes its shard."""

    def __init__(self, *, state_dict_type: StateDictType = "full", **options: Any) -> None:
        """Says what is sharded, how, and what a checkpoint is.

        Args:
            state_dict_type: "full" saves one file of full tensors, which one process and Lightning's own strategies
                load; "sharded" a folder into which each rank writes its shard. Both can be loaded on a different number
                of ranks.
            **options: Of Lightning's `DDPStrategy`, and so of `DistributedDataParallel`.

        Raises:
            ValueError: An unknown `state_dict_type`.
        """
        check_state_dict_type(state_dict_type)
        super().__init__(**options)
        self._state_dict_type = state_dict_type


class FSDPOptions(CheckpointOptions):
    """Options of `fully_shard`.

        strategy = ScaleFSDPStrategy(class_policy(Block), reshard_after_forward=True)

    See also: [the guide to Lightning](../guides/trainers.md#lightning).
    """

    def __init__(
        self, auto_wrap_policy: Any = None, *, state_dict_type: StateDictType = "full", **options: Any
    ) -> None:
        """Says what is sharded, how, and what a checkpoint is.

        Args:
            auto_wrap_policy: As `fully_shard_modules` takes it: `class_policy(Block)`, `size_policy(...)`. None makes
                one unit of what is not sharded yet.
            state_dict_type: "full" saves one file of full tensors, which one process and Lightning's own strategies
                load; "sharded" a folder into which each rank writes its shard. Both can be loaded on a different number
                of ranks.
            **options: Arguments of Lightning's `DDPStrategy`, for example `timeout` and `process_group_backend`. All
                others are arguments of `fully_shard`, with `options=ShardOptions(...)`.

        Raises:
            ValueError: An unknown `state_dict_type`, or `flatten_parameters` in the options, whose optimizer has no
                names.
        """
        lightnings, self._shard_options = _split(options)
        if (self._shard_options.get("options") or ShardOptions()).flatten_parameters:
            raise ValueError(
                "flatten_parameters=True merges parameters, so that a checkpoint can't name the optimizer's state: "
                "leave it out"
            )
        super().__init__(state_dict_type=state_dict_type, **lightnings)
        self._policy = auto_wrap_policy


class OSSStrategyOptions(CheckpointOptions):
    """Options of `OSS`.

        >>> from scale_lightning import ScaleOSSStrategy
        >>> strategy = ScaleOSSStrategy(oss_options={"broadcast_fp16": True})  # Trainer(strategy=strategy)

    See also: [the guide to Lightning](../guides/trainers.md#lightning).
    """

    def __init__(self, *, oss_options: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Says what is sharded, how, and what a checkpoint is.

        Args:
            oss_options: Arguments of `OSS`, for example `broadcast_fp16` or `options`.
            **options: `state_dict_type`, as in `scale_fsdp`. All others are arguments of Lightning's `DDPStrategy`,
                which passes them to `DistributedDataParallel`.

        Raises:
            ValueError: An unknown `state_dict_type`.
        """
        super().__init__(**options)
        self._oss_options = dict(oss_options or {})


class ShardedDDPOptions(OSSStrategyOptions):
    """Options of `ShardedDataParallel` and of `OSS`.

        strategy = ScaleShardedDDPStrategy(oss_options={"broadcast_fp16": True})

    See also: [the guide to Lightning](../guides/trainers.md#lightning).
    """

    def __init__(
        self,
        *,
        state_dict_type: StateDictType = "full",
        oss_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Says what is sharded, how, and what a checkpoint is.

        Args:
            state_dict_type: "full" saves one file of full tensors, which one process and Lightning's own strategies
                load; "sharded" a folder into which each rank writes its shard. Both can be loaded on a different number
                of ranks.
            oss_options: Arguments of `OSS`, for example `broadcast_fp16` or `options`.
            **options: Arguments of Lightning's `DDPStrategy`, for example `timeout`. All others are arguments of
                `ShardedDataParallel`. Here `overlap_gather` is False unless it is given: callbacks read parameters past
                the wrapper.

        Raises:
            ValueError: An unknown `state_dict_type`.
        """
        lightnings, wrapper_options = _split(options)
        super().__init__(state_dict_type=state_dict_type, oss_options=oss_options, **lightnings)
        self._wrapper_options = {"overlap_gather": False, **wrapper_options}
