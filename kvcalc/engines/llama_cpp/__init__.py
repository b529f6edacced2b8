"""llama.cpp. `engine` has its class."""
