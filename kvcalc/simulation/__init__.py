"""A discrete-event simulation of an engine: requests arrive, are scheduled by the engine's rules, and take blocks."""
