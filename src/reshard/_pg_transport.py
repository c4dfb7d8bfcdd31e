"""State dicts between ranks, under the module name that DCP users import from."""

from reshard.snapshots.transport import PGTransport

__all__ = ["PGTransport"]
