"""MLX. `engine` has its class."""
