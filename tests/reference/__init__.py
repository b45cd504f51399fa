"""The algorithms once more, as plainly as NumPy allows, to compare the native ones with."""
