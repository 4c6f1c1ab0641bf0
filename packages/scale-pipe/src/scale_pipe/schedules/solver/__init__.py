"""The search for a schedule that no rule gives: under measured times, and under a cap of memory.

Begin with `solver`.
"""
