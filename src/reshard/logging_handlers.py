"""The name of the event logger, under the module name that DCP users import from."""

from reshard.tensors.event_logger import DCP_LOGGER_NAME

__all__ = ["DCP_LOGGER_NAME"]
