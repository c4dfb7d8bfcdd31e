"""Which torch the tests run with."""

from __future__ import annotations

import torch

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
PINNED = (2, 13)
"""The version in constraints.txt, which `make test` runs with."""
