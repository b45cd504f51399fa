"""The algorithms once more, as plainly as NumPy and torch allow, to compare the real ones with."""
