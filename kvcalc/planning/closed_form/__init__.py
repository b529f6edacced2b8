"""How fast requests run: steps, admission, and the closed form of a load."""
