"""One typed question: its fields, each declared once, and the record that the command line, batch and Python fill."""
