"""Bytes between memory and a store: in parallel, outside the GIL, in bounded memory."""
