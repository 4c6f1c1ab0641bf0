"""The older paths of what is in `fair_dev`. Begin with `testing.py`."""
