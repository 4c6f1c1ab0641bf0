"""`scale-check run`: an unchanged training script, on several ranks and on one, compared module by module.

Begin with `command`, which starts the processes; `rank` is what runs in each of them, and `data` gives the one process
the samples that the ranks have had.
"""
