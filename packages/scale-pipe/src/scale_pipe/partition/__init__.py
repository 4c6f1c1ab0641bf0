"""Where to cut a sequence of layers: by size, by time, or by the makespan of the schedule.

Begin with `partition`, then `balance`.
"""
