"""Arguments of `fully_shard` for tests that have them in one flat table."""

from typing import Any

from with_options import with_options

from scale_fsdp import ShardOptions


def shard_arguments(**arguments: Any) -> dict[str, Any]:
    """Returns them as `fully_shard` takes them: fields of `ShardOptions` are in `options=`."""
    return with_options(ShardOptions, **arguments)
