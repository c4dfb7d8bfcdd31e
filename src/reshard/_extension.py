"""Extensions of the stored bytes, under the module name that DCP users import from.

The classes are torch's own. `save(compress="zstd")` compresses better and faster, and any part of
what it stores can be read by itself.
"""

from torch.distributed.checkpoint._extension import (
    Extension,
    ExtensionRegistry,
    StreamTransformExtension,
    ZStandard,
)

__all__ = ["Extension", "ExtensionRegistry", "StreamTransformExtension", "ZStandard"]
