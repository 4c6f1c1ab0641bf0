"""A pipeline over several processes: each rank holds some stages, and follows its list of the schedule.

Begin with `pipe`, what users hold; `runtime` carries a rank's instructions out, `stage` computes.
"""
