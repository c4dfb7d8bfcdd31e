"""The logger that torch keeps for events of checkpoints, and how it describes a group."""

from __future__ import annotations

import logging
from typing import Any

from torch.distributed import c10d_logger
from torch.distributed.logging_handlers import _log_handlers

DCP_LOGGER_NAME = "dcp_logger"
"""What telemetry registers its handler by, in torch's table of handlers."""


def event_logger() -> logging.Logger:
    """The logger of that name; the same that torch.distributed.checkpoint uses."""
    # A handler that was registered before is kept.
    _log_handlers.setdefault(DCP_LOGGER_NAME, logging.NullHandler())
    logger: logging.Logger = c10d_logger._get_or_create_logger(DCP_LOGGER_NAME)
    return logger


def describe_call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The name of a function, and the group that it was called for, as torch reports both."""
    described: dict[str, Any] = c10d_logger._get_msg_dict(name, **arguments)
    return described
