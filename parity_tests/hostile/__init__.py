"""Files and command lines that nobody should have written, and what is made of them."""
