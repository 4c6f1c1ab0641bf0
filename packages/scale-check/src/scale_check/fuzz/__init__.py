"""Random programs of training, run by a library on several ranks and compared with one process.

Begin with `command`. `models` draws what is trained, `programs` what is done with it, and `engines` says how each
library does it. `pool` runs many programs on one set of ranks.
"""
