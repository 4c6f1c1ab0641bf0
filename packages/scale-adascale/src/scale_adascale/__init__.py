"""Large batches without retuning: AdaScale for PyTorch, exact under every sharding.

`adascale` is the optimizer; read it first. `options` has what it takes beyond FairScale's arguments. Below it:

- `gain`, `noise_scale`, `batch_size`: the formulas, numbers in and numbers out;
- `measurement/`: from each local gradient to the sums over all ranks, and the estimates of one step;
- `estimates`: the averages of all steps;
- `squared_norms`, `adam_preconditioner`: norms of one gradient, and gradients as Adam scales them;
- `validation`: checks of arguments;
- `gain_scheduler`: a training that is counted in steps of the small batch.
"""

import logging

from scale_adascale.adascale import AdaScale
from scale_adascale.batch_size import Suggestion, fit_speed, halves, legw, linear, square_root, suggest_batch_size
from scale_adascale.gain_scheduler import GainScheduler, until_steps
from scale_adascale.noise_scale import NoiseScale
from scale_adascale.options import AdaScaleOptions

logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "2026.11.0"
__all__ = [
    "AdaScale",
    "AdaScaleOptions",
    "GainScheduler",
    "NoiseScale",
    "Suggestion",
    "fit_speed",
    "halves",
    "legw",
    "linear",
    "square_root",
    "suggest_batch_size",
    "until_steps",
]

# Tracebacks and documentation show the path that people import from.
for _name in __all__:
    globals()[_name].__module__ = __name__
del _name
