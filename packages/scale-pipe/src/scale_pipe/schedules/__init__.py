"""Schedules as data: what builds, proves, simulates and draws them. Nothing here needs a tensor.

Begin with `schedule`, then `classic`.
"""
