"""The identity of a process, in a form that fits into a file name.

A process of this machine can be looked up. Of one elsewhere nothing is known.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from functools import cache
from pathlib import Path

OWNER = r"[0-9a-f]{8}-\d{1,10}-\d{1,20}"
"""What a tag looks like, as a regular expression without groups."""


def start_time(pid: int) -> str | None:
    """When a process began, in the kernel's clock; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


@cache
def machine() -> str:
    """The same for two processes only if one can look up the other by its id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return f"{socket.gethostname()}/{boot}/{namespace}"


@cache
def _machine_tag() -> str:
    return hashlib.blake2s(machine().encode(), digest_size=4).hexdigest()


def owner_tag() -> str:
    """This process: its machine, its id and when it began."""
    return _tag_of(os.getpid())


@cache
def _tag_of(own: int) -> str:
    return f"{_machine_tag()}-{own}-{start_time(own) or 0}"


def is_alive(tag: str) -> bool | None:
    """Whether the process of a tag still runs; None if it is not on this machine."""
    if not re.fullmatch(OWNER, tag) or not machine():
        return None
    where, pid, began = tag.split("-")
    if where != _machine_tag():
        return None
    found = start_time(int(pid))
    if found is None and _is_hidden(int(pid)):
        return None
    return found == began


def _is_hidden(pid: int) -> bool:
    """Whether a process is there but not to be looked at, as those of others may be."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return False
