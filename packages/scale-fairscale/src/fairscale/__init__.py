"""FairScale's names for programs that import them: each is a thin translation onto a package of scale.

`nn/` and `optim/` are laid out as FairScale 0.4.13 is, so that a path is found where its users look for it. What a
name has become, and what to write in new code, stands in `docs/guides/migration-fairscale.md`.
"""

from importlib import metadata as _metadata

# FairScale's last version, whose surface this is: programs compare it, fairseq as a string.
__version__ = "0.4.13"
__version_tuple__ = (0, 4, 13)

__all__: list[str] = []

# The metadata that scale-fairscale installs under this name requires scale-fairscale; FairScale's own does not.
if any("scale-fairscale" not in (dist.requires or ()) for dist in _metadata.distributions(name="fairscale")):
    raise ImportError(
        "the distributions fairscale and scale-fairscale are both installed, and both install the module 'fairscale': "
        "keep one of them, python -m pip uninstall fairscale and then reinstall scale-fairscale, or "
        "python -m pip uninstall scale-fairscale"
    )

from fairscale import nn as nn  # After the check; programs write `fairscale.nn.Pipe` without importing it.
