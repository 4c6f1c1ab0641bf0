"""Large batches without retuning: AdaScale for PyTorch, exact under every sharding.

`adascale` is the optimizer; read it first. Below it:

- `gain`, `noise_scale`, `batch_size`: the formulas, numbers in and numbers out;
- `squared_norms`, `param_info`, `process_groups`: squares of gradients, and which rank holds what how often;
- `adam_preconditioner`: gradients as Adam scales them;
- `grad_hooks`, `local_grad_norms`, `norm_reduction`: from each local gradient to the sums over all ranks;
- `step_statistics`, `estimates`: what one step gives, and what is known after all steps;
- `optimizer_wrapper`, `grad_scaler`, `validation`, `gradient_checks`: the inner optimizer, and what is refused;
- `gain_scheduler`: a training that is counted in steps of the small batch.
"""

from scale_adascale.adascale import AdaScale, AdaScaleWrapper
from scale_adascale.batch_size import Suggestion, fit_speed, halves, legw, linear, square_root, suggest_batch_size
from scale_adascale.gain_scheduler import GainScheduler, until_steps
from scale_adascale.noise_scale import NoiseScale

__version__ = "2026.11.0"
__all__ = [
    "AdaScale",
    "AdaScaleWrapper",
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

# Their home is where people import them from: tracebacks and documentation show that path.
for _name in __all__:
    globals()[_name].__module__ = __name__
del _name
