"""Reports of a run: lines, metrics file, plot and the summary at its end.

Begin with `reporters`.
"""
