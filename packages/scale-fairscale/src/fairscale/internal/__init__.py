"""Functions of FairScale's own that programs import all the same. Begin with `containers.py`."""
