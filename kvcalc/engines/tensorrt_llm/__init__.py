"""TensorRT-LLM. `engine` has its class."""
