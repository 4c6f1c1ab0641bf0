"""What FairScale called experimental. Begin with `nn/offload.py`; `not_offered.py` names what replaces the rest."""

from fairscale.experimental import not_offered

wgit = not_offered.wgit
