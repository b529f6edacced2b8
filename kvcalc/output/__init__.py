"""One document in, one of four formats out."""
