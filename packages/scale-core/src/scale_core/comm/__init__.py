"""Collectives over the ranks of a group, the handles of transfers under way, and what ranks tell each other.

Begin with `collectives`: on a CPU they are tagged messages from rank to rank; `work` has their handles, `control_plane`
the few integers and words that ranks exchange on the host.
"""
