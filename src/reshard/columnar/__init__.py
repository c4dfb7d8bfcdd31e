"""The bridge between the contract, which speaks of items and chunks, and `planning`, which speaks
of columns: sequences that cost no objects until somebody asks for one.
"""
