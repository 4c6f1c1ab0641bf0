"""Keys of a state dict: those that begin with a prefix, and the prefixes of modules of a class."""

from typing import Any

from torch import nn


def find_module_instances(module: nn.Module, search_class: type[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Returns the modules of a class in a module, itself included, with the prefix that each has in a state dict.

    >>> [prefix for prefix, _ in find_module_instances(nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU())), nn.ReLU)]
    ['0.', '1.0.']
    """
    named = module.named_modules(remove_duplicate=False)
    return [(f"{name}." if name else "", module) for name, module in named if isinstance(module, search_class)]


def replace_by_prefix_(state_dict: dict[str, Any], old_prefix: str, new_prefix: str) -> None:
    """Renames in place all keys that begin with a prefix.

    >>> state = {"layer.a": 1, "b": 2}
    >>> replace_by_prefix_(state, "layer.", "module.layer.")
    >>> state
    {'b': 2, 'module.layer.a': 1}
    """
    if old_prefix == new_prefix:
        raise ValueError("old_prefix and new_prefix must be distinct")
    for key in [key for key in state_dict if key.startswith(old_prefix)]:
        state_dict[new_prefix + key[len(old_prefix) :]] = state_dict.pop(key)


__all__ = ["find_module_instances", "replace_by_prefix_"]
