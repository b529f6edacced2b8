"""Whether the command that one already has starts, what it holds, and what load it sustains: `kvcalc check`."""
