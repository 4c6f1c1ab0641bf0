"""Tools that show where memory goes. Begin with `layer_memory_tracker.py`."""
