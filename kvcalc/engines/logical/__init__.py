"""No engine. `engine` has its class."""
