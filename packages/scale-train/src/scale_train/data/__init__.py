"""Text as bytes, and the part of it that a rank sees at each step.

Begin with `text`.
"""
