"""What is saved and loaded: weights (`full`, `local`, `consolidate`) and optimizer state (`optimizer`)."""
