"""The modules of `torch.distributed.checkpoint` as torch made them, also under `reshard.patch`."""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
import sys
import threading
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

DCP = "torch.distributed.checkpoint"


def is_of_dcp(value: object) -> bool:
    """Whether a class or function was defined by torch's own checkpoint modules."""
    module = getattr(value, "__module__", None)
    return isinstance(module, str) and (module == DCP or module.startswith(f"{DCP}."))


class _Originals:
    """The modules of torch's that a patch has replaced; none without a patch."""

    def __init__(self) -> None:
        self.modules: dict[str, ModuleType] = {}
        self._stand_ins: dict[str, Any] = {}
        self._users = 0
        self._lock = threading.RLock()

    @property
    def are_in_place(self) -> bool:
        """Whether an import finds torch's own modules at the moment."""
        return not self.modules or self._users > 0

    def replace(self, modules: Mapping[str, ModuleType]) -> None:
        """Keep what a patch is about to replace."""
        with self._lock:
            self.modules.update(modules)

    def restore(self) -> dict[str, ModuleType]:
        """Hand back what was replaced, and what torch has imported meanwhile."""
        with self._lock:
            modules, self.modules = self.modules, {}
            return modules

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Have imports find torch's own modules, for code of torch that pickles its classes.

        That holds for all threads, so it must not last long.
        """
        with self._lock:
            if not self.modules:
                is_patched = False
            else:
                is_patched = True
                self._users += 1
                if self._users == 1:
                    self._stand_ins = _loaded()
                    _exchange(self._stand_ins, self.modules)
        try:
            yield
        finally:
            if is_patched:
                with self._lock:
                    self._users -= 1
                    if not self._users and self.modules:
                        self.modules |= _loaded()
                        _exchange(self.modules, self._stand_ins)


def _loaded() -> dict[str, Any]:
    return {name: m for name, m in sys.modules.items() if name == DCP or name.startswith(f"{DCP}.")}


def _exchange(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    for name in old.keys() - new.keys():
        sys.modules.pop(name, None)
    sys.modules.update(new)


originals = _Originals()
"""What patches have replaced in this process."""


def torch_module(name: str) -> Any:
    """A module of `torch.distributed.checkpoint`, as torch made it."""
    full = f"{DCP}.{name}"
    found = originals.modules.get(full)
    if found is not None:
        return found
    with originals.in_place():
        return importlib.import_module(full)


def torch_class(module: str, name: str) -> Any:
    """A class of torch's, for pickles that were made under a patch."""
    found: Any = torch_module(module.removeprefix(f"{DCP}."))
    for part in name.split("."):
        found = getattr(found, part)
    return found


def reduce_class(value: object) -> Any:
    """How a pickle refers to a class of torch's that its name does not lead to under a patch.

    NotImplemented for all else, as `Pickler.reducer_override` has it.
    """
    if originals.are_in_place or not isinstance(value, type) or not is_of_dcp(value):
        return NotImplemented
    return torch_class, (value.__module__, value.__qualname__)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        return reduce_class(obj)


def dumps(value: object) -> bytes:
    """A pickle for another process of this job; with classes of torch's also under a patch."""
    if originals.are_in_place:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()
