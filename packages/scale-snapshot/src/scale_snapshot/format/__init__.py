"""The files of a snapshot: their writers, the checksums of all bytes, and how they are verified and read.

Begin with `metadata`, the manifest; `planner` says which elements each rank writes and reads.
"""
