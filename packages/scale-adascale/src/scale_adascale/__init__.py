"""Large batches without retuning: AdaScale for PyTorch, exact under every sharding.

The files in reading order; each stands only on those above it:

- `gain`: the formulas, numbers in and numbers out;
- `averages`: moving averages of what each step measures;
- `scale`: what is one;
- `noise`: the gradient noise scale, and how sure it is;
- `goodput`: the batch size at which a training goes forward fastest;
- `rules`: the fixed rules that AdaScale is to be judged beside;
- `squares`: the sum of the squares of a gradient;
- `tally`: those of all gradients of a backward pass;
- `sharing`: how often a number counts that a rank measures;
- `groups`: which ranks have other data, and which other parts of the model;
- `agreement`: whether ranks really average their gradients;
- `preconditioning`: what Adam divides gradients by;
- `second_moments`: the same, of which each rank has a part;
- `hooks`: whether others change a gradient after it was seen;
- `hearing`: how a rank hears of each gradient, before it is averaged away;
- `local_grads`: what a rank measures before gradients are averaged away;
- `plan`: which rank has what of the parameters;
- `measuring`: from squares of each rank to those of all ranks;
- `halving`: two gradients of one batch;
- `single`: or, for one worker that accumulates nothing, those of successive steps;
- `estimates`: what is known after all steps so far;
- `fairscale`: what FairScale's AdaScale has saved;
- `loss_scale`: what a scaler has multiplied the loss by;
- `checks`: what is refused;
- `marks`: whether gradients were changed between passes;
- `sampling`: the gradients of one step, from the first backward pass to what they add to estimates;
- `around`: what an optimizer around another one is to schedulers, scalers and checkpoints;
- `listening`: the same, whose gradients are measured;
- `adascale`: the optimizer;
- `wrapper`: the same, built from a class;
- `progress`: a training that is counted in steps of the small batch.
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
