"""A server: a question with every default resolved, what one of its devices holds, and whether it starts and fits."""
