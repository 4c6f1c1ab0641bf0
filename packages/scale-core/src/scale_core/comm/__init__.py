"""Groups of ranks, collectives over them, and the handles of transfers under way.

Begin with `collectives`; `work` has the handles, `group` the ranks, `mesh` their axes, `subgroups` parts of a group,
`all_to_all` and `rank_order_sum` what layers and states send, `context_parallel_group` the ranks that divide samples.
"""
