"""`scale-train pipe show`: the schedule of a pipeline, drawn as planned and as measured.

Begin with `command`. `text_drawing` is the picture for a terminal, `measurement` runs the schedule on ranks.
"""
