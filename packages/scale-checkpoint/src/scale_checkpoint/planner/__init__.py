"""Which blocks to keep, recompute or offload, for a budget of bytes: measured, predicted and solved.

Begin with `plan`; `profile` measures a step, `timeline` predicts memory, `solver` chooses.
"""
