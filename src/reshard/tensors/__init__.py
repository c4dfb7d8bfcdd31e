"""Everything about torch's tensors: nested state dicts, local shards, parts, memory.

Names that are private to torch are used here only. Everything above works with regions.
"""
