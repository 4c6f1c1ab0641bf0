"""Schedules as data: their builders, validator, simulator, solver and pictures. Nothing here needs a tensor.

Begin with `schedule`, then `classic`.
"""
