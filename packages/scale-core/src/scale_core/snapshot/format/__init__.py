"""The files of a snapshot: who writes what, the checksums of all bytes, and how they are verified and read.

Begin with `metadata`, the manifest; `planner` says which elements each rank writes and reads.
"""
