"""A rank's instructions: the schedule's actions with sends and receives between them.

Begin with `plan`.
"""
