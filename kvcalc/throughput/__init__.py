"""How fast: devices, and what a step costs on them."""
