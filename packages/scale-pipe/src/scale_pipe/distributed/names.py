"""The plain model's names of what stands in a stage, whatever wrappers are around it."""

from __future__ import annotations

from torch import nn

_WRAPPED = {
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
}


def plain_names(stage: nn.Module) -> dict[str, str]:
    """Returns by the name of each module that holds tensors its name in the plain model.

    Args:
        stage: A part of a model, whose modules have their own names; wrapped or not.
    """
    names: dict[str, str] = {}
    hidden: set[str] = set()
    for path, module in stage.named_modules(remove_duplicate=False):
        inner = "module" if callable(getattr(module, "no_sync", None)) else _WRAPPED.get(type(module).__name__)
        if inner is not None and inner in module._modules:
            hidden.add(f"{path}.{inner}".lstrip("."))
        parent, _, last = path.rpartition(".")
        known = names.get(parent, "")
        names[path] = known if path in hidden else f"{known}.{last}".lstrip(".") if path else ""
    return names


def plain_name(names: dict[str, str], listed: str) -> str:
    """Returns the plain name of a tensor.

    Args:
        names: Of `plain_names`.
        listed: Its name in the stage.
    """
    path, _, last = listed.rpartition(".")
    return f"{names.get(path, path)}.{last}".lstrip(".")
