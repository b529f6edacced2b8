"""What one device holds: weights, cache, reserve and host memory, and what fits beside them."""
