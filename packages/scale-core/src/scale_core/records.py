"""Records: facts that scale stores as an attribute of an object, for example a parameter, an optimizer or a module.

A record ends with its object. Copies and pickles of the object start without one. The layout of a shard is in its
`Shard` (`scale_core.shard`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, ClassVar, Self
from weakref import ReferenceType, ref

if TYPE_CHECKING:
    from scale_core.comm.group import Group


class Record:
    """Facts of one kind about one object."""

    attribute: ClassVar[str]  # the name of the object's attribute
    object_ref: ReferenceType[Any]  # A shallow copy of the object takes the attribute over, and has no record.

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # `torch.load(weights_only=True)` accepts that, but no class of ours.

    def __deepcopy__(self, memo: object) -> None:
        return None

    @classmethod
    def get(cls, obj: Any) -> Self | None:
        """Returns the record of an object, or None if it has none."""
        record = vars(obj).get(cls.attribute)
        return record if isinstance(record, cls) and record.object_ref() is obj else None

    @classmethod
    def get_or_create(cls, obj: Any) -> Self:
        """Returns the record of an object, which is created if it has none."""
        record = cls.get(obj)
        if record is None:
            record = vars(obj)[cls.attribute] = cls()
            record.object_ref = ref(obj)
        return record


class ParamRecord(Record):
    """Facts about a parameter.

    Attributes:
        lacks_autograd_hooks: Autograd computes no gradient for it, so its autograd hooks are never called.
        averaged_over: The ranks over which an autograd hook averages its gradient; None if it has no such hook.
        flat_buffer: The buffer of a flat parameter; None for other parameters.
        replaced_by: The owner of the shard that replaced it in the model, and its index in `owner.names`.
        unsharded_copy_of: The owner of the parameter that it is an unsharded copy of, and its index in `owner.names`.
        param_owner: scale-fsdp's `ParamOwner` of it.
    """

    attribute = "_scale_param"

    lacks_autograd_hooks = False
    averaged_over: Group | None = None
    flat_buffer: ReferenceType[Any] | None = None
    replaced_by: tuple[Any, int] | None = None
    unsharded_copy_of: tuple[ReferenceType[Any], int] | None = None
    param_owner: Any = None
