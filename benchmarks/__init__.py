"""Claims about time, each measured by one program that prints a JSON object as its last line."""
