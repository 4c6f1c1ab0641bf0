"""A pipeline in one process, over several devices.

Begin with `pipe`.
"""
