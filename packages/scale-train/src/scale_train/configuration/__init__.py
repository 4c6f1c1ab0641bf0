"""Options from the command line and from TOML files, and back: one table of fields made from the dataclasses.

Begin with `command_line.py`. Nothing here loads torch, except `resolve.py`, which checks options against this machine.
"""
