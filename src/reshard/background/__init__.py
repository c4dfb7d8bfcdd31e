"""Saves that go on while training does: their queue, and the process that may do them."""
