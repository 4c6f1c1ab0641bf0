"""`scale-train why`: one sentence on why a training on several ranks ended, from what the ranks left behind.

Begin with `verdict`, a pure function of texts; `evidence` is what the texts say, `reading` finds them on the disk.
"""
