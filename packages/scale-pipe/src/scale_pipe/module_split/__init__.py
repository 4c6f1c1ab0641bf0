"""Cutting any model into stages at the names of its modules, without tracing it.

Begin with `split`; a step of a stage runs from `stage_forward` into `replay`.
"""
