"""What a run says: lines, files, a picture and the summary at its end.

Begin with `reporters`.
"""
