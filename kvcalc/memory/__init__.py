"""How many bytes: the formulas, element types and what each engine holds."""
