"""The requests of a simulation: their lengths, and when they arrive."""
