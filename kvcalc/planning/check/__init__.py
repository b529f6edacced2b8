"""Whether the command that one already has starts, what it holds, and what load it bears: `kvcalc check`."""
