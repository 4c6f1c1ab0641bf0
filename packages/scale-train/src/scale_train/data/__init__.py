"""Text as bytes, and which part of it a rank sees at which step.

Begin with `text`.
"""
