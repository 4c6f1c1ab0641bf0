"""Skip connections between layers of different stages, by torchgpipe's names `skippable`, `stash` and `pop`.

Begin with `skippable`.
"""
