"""Sharded state dicts that load at any number of ranks: of models, of optimizers, and for torch's own functions.

Begin with `state_dict`; `optim_state_dict` names an optimizer's state by parameters, `chunks` says which elements a
rank has.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scale_core.state.state_dict import load_sharded_state_dict, sharded_state_dict, target_state_dict

__all__ = ["load_sharded_state_dict", "sharded_state_dict", "target_state_dict"]


def __getattr__(name: str) -> Any:
    """Imports torch's checkpoint package, which takes a second, only when it is used."""
    if name in __all__:
        from scale_core.state import state_dict

        return getattr(state_dict, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
