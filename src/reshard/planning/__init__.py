"""Planning on columns: numpy in, numpy out.

Everything here is a pure function over arrays that describe regions, one row per
item. No I/O, no collectives, no `torch.distributed`, and no Python object per row:
a thousand ranks with a thousand tensors are a million rows.
"""
