"""`kvcalc check`: whether the user's own command starts, its memory, and the load that it sustains."""
