"""Tools around a training: what fits, does it work here, why did it end, what is in a checkpoint.

They are commands of `scale-train`: `plan`, `doctor`, `why`, `pipe` and `snapshot`. `commands` names them; each folder
is one of them.
"""

import logging

logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "2026.11.0"
__all__: list[str] = []
