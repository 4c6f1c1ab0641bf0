"""The options of the command, what they mean together, and what is refused.

Begin with `options`.
"""
