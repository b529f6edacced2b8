"""The replicas of a server: their clocks, blocks and running requests, step by step."""
