"""Run a model's real attention layers on the device at hand: count the bytes, time the steps."""
