"""The options of the command, the values derived from them, and their checks.

Begin with `options`.
"""
