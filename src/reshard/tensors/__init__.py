"""The torch side: what a value is, which regions of it are here, and how dicts nest.

The only home of torch-private names. Everything above speaks of regions.
"""
