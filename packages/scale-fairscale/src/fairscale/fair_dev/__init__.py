"""What tests of programs on FairScale import. Begin with `testing/testing.py`."""
