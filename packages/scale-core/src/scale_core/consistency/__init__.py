"""Whether all ranks do the same, what is said when they don't, and how they give a step up together.

Begin with `contract`, which compares the `execution_order` between ranks; `flight_recorder` and `desync_report` make
the error of it, `recovery` and `all_ranks` raise an error of one rank on all.
"""
