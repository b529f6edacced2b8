"""Questions asked over model and memory: each returns one plain document."""
