"""Comparison of run folders: the table of methods, the frames behind its plots, and one HTML page.

Nothing here trains or tracks: `runs/<method>-<seed>/` go in, Polars frames or a page come out.
"""
