"""vLLM. `engine` has its class."""
