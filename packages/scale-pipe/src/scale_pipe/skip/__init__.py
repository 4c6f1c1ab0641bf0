"""Skip connections between layers of different stages, with torchgpipe's `skippable`, `stash` and `pop`.

Begin with `skippable`.
"""
