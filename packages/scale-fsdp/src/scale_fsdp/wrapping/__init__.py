"""Which modules become units (`policy`), and how they are made so (`units`)."""
