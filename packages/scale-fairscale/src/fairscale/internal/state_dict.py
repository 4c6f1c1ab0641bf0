"""`replace_by_prefix_`, for keys of a state dict."""

from typing import Any


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


__all__ = ["replace_by_prefix_"]
