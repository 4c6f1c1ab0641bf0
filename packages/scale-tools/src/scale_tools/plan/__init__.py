"""`scale-train plan`: which way of training fits into a machine's memory, and what each costs.

Begin with `command`. `model` is what is planned, `strategies` how it can be divided; `estimate` runs the training step
of one rank on tensors without memory, with the `rates` of the options. `rows` says what fits and what is best, and
`report` prints and draws it.
"""
