"""Cutting a sequence of layers, and where: by size, by time, or by the makespan of the schedule.

Begin with `partition`, then `balance`; `partition_function` calls a part.
"""
