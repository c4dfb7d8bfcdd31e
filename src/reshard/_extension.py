"""Extensions of the stored bytes, under the module name that DCP users import from.

The classes are torch's own. A `FileSystemWriter` refuses to be given one: chunks are stored as
they are, so that any part of them can be read.
"""

from torch.distributed.checkpoint._extension import (
    Extension,
    ExtensionRegistry,
    StreamTransformExtension,
    ZStandard,
)

__all__ = ["Extension", "ExtensionRegistry", "StreamTransformExtension", "ZStandard"]
