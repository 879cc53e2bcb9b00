"""Figures and reports of results: they draw, and compute nothing that the command line could not."""
