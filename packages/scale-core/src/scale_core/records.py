"""What scale knows of an object that is not its own: a record, as an attribute of the object.

So it is gone when the object is, and whoever has a parameter sees all that decides about it. What a shard is a part of
stands beside it, in its `Shard` (`scale_core.shard`). Copies and files of the object have none of it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, ClassVar, Self
from weakref import ReferenceType

if TYPE_CHECKING:
    from scale_core.comm.group import Group


class Record:
    """Facts of one kind about one object; a copy or a file of the object begins without them."""

    attribute: ClassVar[str]  # of the object, that has them

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # Which `torch.load` takes with `weights_only=True`.

    def __deepcopy__(self, memo: object) -> None:
        return None

    @classmethod
    def of(cls, thing: Any) -> Self | None:
        """The record of an object; None where nothing is known of it."""
        found = vars(thing).get(cls.attribute)
        return found if isinstance(found, cls) else None

    @classmethod
    def made_for(cls, thing: Any) -> Self:
        """The record of an object, made where there is none."""
        found = cls.of(thing)
        if found is None:
            found = vars(thing)[cls.attribute] = cls()
        return found


class ParamRecord(Record):
    """What is known of a parameter.

    Attributes:
        lacks_autograd_hooks: Autograd gives it no gradients, so a hook of autograd would never be called.
        averaged_over: The ranks over which a hook of autograd averages its gradient; None if there is no such hook.
        flat_buffer: Of a flat parameter, the buffer with the parameters in it.
        replaced_by: A shard has taken its place in the model: the shard's owner, and its number there.
        copy_of: It is an unsharded copy: the owner of what it is a copy of, and the number there.
        unit: The unit of scale-fsdp that has it, the number of its buffer there, and its own number in that.
    """

    attribute = "_scale_param"

    lacks_autograd_hooks = False
    averaged_over: Group | None = None
    flat_buffer: ReferenceType[Any] | None = None
    replaced_by: tuple[Any, int] | None = None
    copy_of: tuple[ReferenceType[Any], int] | None = None
    unit: Any = None
