"""What is cut, and how: partitions, stages, balance, skips and names. Nothing here knows of ranks."""
