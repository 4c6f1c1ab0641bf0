"""The search for schedules under measured times and a memory cap, beyond those with a name. No step passes here.

Begin with `solver`.
"""
