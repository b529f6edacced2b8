"""What a model is: its layers, the caches they hold, and where its facts come from."""
