"""Figures and reports of results: draws, and computes nothing that the command line could not. Knows ``hbmtwin.api``."""
