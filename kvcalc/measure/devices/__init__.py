"""The local device: its memory, its clocks, its faults, and the other ranks."""
