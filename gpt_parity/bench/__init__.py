"""How fast and how large the twins are, measured side by side."""
