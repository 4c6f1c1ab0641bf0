"""`scale-train doctor`: whether training on several ranks works on this machine, and how fast its memory and links are.

Begin with `command`. `environment` looks at versions, devices and variables; `self_test` runs on each rank.
"""
