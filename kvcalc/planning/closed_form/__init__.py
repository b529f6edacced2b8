"""The closed form of a load, which searches and fits ask again and again."""
