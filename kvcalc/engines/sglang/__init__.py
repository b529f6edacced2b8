"""SGLang. `engine` has its class."""
