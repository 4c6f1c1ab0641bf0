"""`Pipe`, a pipeline in one process over several devices.

Begin with `pipe`; `pipeline` runs the clock cycles, `worker` the tasks of each device.
"""
