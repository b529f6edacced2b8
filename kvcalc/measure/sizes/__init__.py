"""The memory that a run needs, and how much fits."""
