"""`torch.distributed.checkpoint` as another name of Reshard, for code that cannot be edited."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import threading
import types
from typing import Any

import reshard

__all__ = ["Patch", "patch"]

_DCP = "torch.distributed.checkpoint"
_OTHERS = ("torch", "reshard")


class Patch:
    """What `patch` changed, until `undo` or the end of a `with` block."""

    def __init__(self) -> None:
        self._modules: dict[str, types.ModuleType] = {}
        self._attributes: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Put everything back as it was. Harmless if that is done already."""
        with _lock:
            if self not in _active:
                return
            _active.remove(self)
            if _active:
                # Another patch is in force; the last one to go puts things back.
                _active[0]._modules |= self._modules
                _active[0]._attributes += self._attributes
                if self in sys.meta_path:
                    sys.meta_path[sys.meta_path.index(self)] = _active[0]
                return
            for name in [name for name in sys.modules if name.startswith(f"{_DCP}.")]:
                if name not in self._modules:
                    del sys.modules[name]
            sys.modules.update(self._modules)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            for owner, name, original in reversed(self._attributes):
                setattr(owner, name, original)

    def find_spec(self, name: str, *_: Any) -> None:
        """Keep the import system from looking for modules of DCP among those of Reshard."""
        if name.startswith(f"{_DCP}."):
            raise ModuleNotFoundError(f"Reshard has no counterpart of {name!r}", name=name)

    def _apply(self) -> None:
        pairs = _pairs()
        # The one module of torch's own that has names of DCP.
        importlib.import_module("torch.distributed.tensor._shards_wrapper")
        self._modules = {n: m for n, m in sys.modules.items() if n.startswith(_DCP)}
        for name in self._modules.keys() - pairs.keys():
            # None in sys.modules means: not found.
            sys.modules[name] = None  # type: ignore[assignment]
        sys.meta_path.insert(0, self)
        ours_for: dict[int, Any] = {}
        for name, (theirs, ours) in pairs.items():
            ours_for[id(theirs)] = ours
            ours_for |= _twins(theirs, ours)
            sys.modules[name] = ours
        parent = sys.modules["torch.distributed"]
        self._set(parent, "checkpoint", reshard)
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] not in _OTHERS and isinstance(module, types.ModuleType):
                for attribute, value in list(vars(module).items()):
                    if id(value) in ours_for:
                        self._set(module, attribute, ours_for[id(value)])

    def _set(self, owner: Any, name: str, value: Any) -> None:
        original = getattr(owner, name)
        setattr(owner, name, value)
        self._attributes.append((owner, name, original))


_lock = threading.RLock()
_active: list[Patch] = []


def patch() -> Patch:
    """Make `torch.distributed.checkpoint` mean Reshard, everywhere in this process.

    Imports that follow get Reshard's modules, and names that other packages imported
    earlier are exchanged in them. Use it as a function, or in a `with` block, at whose
    end everything is put back. What Reshard does not have is not found under the patch. A
    package that is first imported under the patch keeps Reshard's names afterwards.
    """
    made = Patch()
    with _lock:
        _active.append(made)
        if len(_active) == 1:
            try:
                made._apply()
            except BaseException:
                made.undo()
                raise
    return made


def _pairs() -> dict[str, tuple[types.ModuleType, types.ModuleType]]:
    """Modules of DCP that have a counterpart here, by their full name."""
    dcp = importlib.import_module(_DCP)
    pairs = {_DCP: (dcp, reshard)}
    for found in pkgutil.iter_modules(dcp.__path__):
        name = f"reshard.{found.name}"
        if importlib.util.find_spec(name) is not None:
            theirs = importlib.import_module(f"{_DCP}.{found.name}")
            pairs[f"{_DCP}.{found.name}"] = (theirs, importlib.import_module(name))
    return pairs


def _twins(theirs: types.ModuleType, ours: types.ModuleType) -> dict[int, Any]:
    """Functions and classes of a module that have a counterpart of the same name."""
    return {
        id(value): getattr(ours, name)
        for name, value in vars(theirs).items()
        if isinstance(value, types.FunctionType | type)
        and value.__module__.startswith(_DCP)
        and hasattr(ours, name)
        and getattr(ours, name) is not value
    }
