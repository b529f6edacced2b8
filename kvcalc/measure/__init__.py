"""Run a model's real attention layers on the device at hand: count the bytes, time the steps."""

import warnings

# torch warns where numpy is not installed, which kvcalc does not need. Before torch is first imported.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
