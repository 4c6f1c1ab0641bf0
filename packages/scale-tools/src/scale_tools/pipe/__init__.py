"""`scale-train pipe show`: the schedule of a pipeline, drawn as it is planned and as it was measured.

Begin with `command`. `text_drawing` is the picture for a terminal, `measurement` runs the schedule on ranks.
"""
