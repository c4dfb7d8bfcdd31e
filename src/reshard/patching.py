"""`torch.distributed.checkpoint` as another name of Reshard, for code that cannot be edited."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import logging
import pkgutil
import sys
import threading
import types
import warnings
from collections.abc import Iterable, Iterator, Set
from enum import Enum
from typing import Any

import reshard
from reshard.tensors.dcp_modules import DCP as _DCP
from reshard.tensors.dcp_modules import is_of_dcp, originals

logger = logging.getLogger(__name__)

__all__ = ["Patch", "patch"]

_OTHERS = ("torch", "reshard")
_MOST_NAMED = 20
_MOST_ELEMENTS = 1000
"""How many elements of a container are looked at for names that a patch cannot exchange."""


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
            sys.modules.update(self._modules | originals.restore())
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            for owner, name, original in reversed(self._attributes):
                setattr(owner, name, original)

    def find_spec(self, name: str, *_: Any) -> None:
        """Keep the import system from looking for modules of DCP among those of Reshard."""
        if name.startswith(f"{_DCP}.") and not originals.are_in_place:
            raise ModuleNotFoundError(f"Reshard has no counterpart of {name!r}", name=name)

    def _apply(self) -> None:
        pairs = _pairs()
        # The one module of torch's own that has names of DCP.
        importlib.import_module("torch.distributed.tensor._shards_wrapper")
        self._modules = {n: m for n, m in sys.modules.items() if n.startswith(_DCP)}
        originals.replace(self._modules)
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
        derived: list[str] = []
        missed: list[str] = []
        for module in _modules_of_others():
            own = _own_classes(module)
            derived += [f"{module.__name__}.{each.__qualname__}" for each in own]
            kept = _kept_classes(module, own) if own else set()
            for attribute, value in list(vars(module).items()):
                if id(value) in ours_for and id(value) not in kept:
                    self._set(module, attribute, ours_for[id(value)])
                missed += [
                    f"{module.__name__}.{attribute}{where}"
                    for where in _references(value, module.__name__, ours_for.keys())
                ]
        _say_what_stays(derived, missed)

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

    Call it before frameworks are imported. What it cannot exchange in those that were imported
    earlier, such as base classes and default arguments, is logged once, by name.
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
            # Some of torch's modules need packages that need not be installed; of others it says
            # that their names will go.
            with contextlib.suppress(ImportError), warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
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


def _modules_of_others() -> Iterator[types.ModuleType]:
    """The modules that are neither torch's nor ours, nor of Python itself."""
    for name, module in list(sys.modules.items()):
        package = name.split(".")[0]
        if package in _OTHERS or package in sys.stdlib_module_names:
            continue
        if isinstance(module, types.ModuleType):
            yield module


def _own_classes(module: types.ModuleType) -> list[type]:
    """The classes that a module defines and that derive from those of DCP."""
    return [
        value
        for value in list(vars(module).values())
        # By type(): there are objects that mind being asked for their class.
        if issubclass(type(value), type)
        and value.__module__ == module.__name__
        and any(map(is_of_dcp, value.__mro__))
    ]


def _kept_classes(module: types.ModuleType, own: list[type]) -> set[int]:
    """Classes of torch's that a module goes on to need, since its own derive from them.

    Their code is handed torch's plans, and may name its bases.
    """
    bases = {id(base) for each in own for base in each.__mro__ if is_of_dcp(base)}
    return bases | {id(value) for value in vars(module).values() if _is_data_class(value)}


def _is_data_class(value: Any) -> bool:
    """Whether `value` is a class that plans, metadata and results are made of."""
    if not issubclass(type(value), type) or not is_of_dcp(value):
        return False
    module = value.__module__.removeprefix(f"{_DCP}.")
    return module in ("planner", "metadata", "storage", "filesystem") and (
        dataclasses.is_dataclass(value) or issubclass(value, Enum)
    )


# What a patch does not reach


def _say_what_stays(derived: list[str], missed: list[str]) -> None:
    if derived:
        logger.warning(
            "patch() came after the import of classes that derive from torch's: %s. Planners and "
            "storages among them are adapted, and keep to torch's format; import them after the "
            "patch to have them derive from Reshard's",
            _named(derived),
        )
    if missed:
        logger.warning(
            "patch() cannot reach names of torch.distributed.checkpoint that were kept when a "
            "module was imported: %s. They stay torch's; import these modules after the patch",
            _named(missed),
        )


def _named(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMED])
    return f"{shown} and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else shown


def _references(value: Any, module: str, ids: Set[int]) -> Iterator[str]:
    """Where `value`, of a module, holds an object of one of `ids`; in words, after its name."""
    kind = type(value)
    if kind is types.FunctionType:
        if value.__module__ == module:
            yield from _in_function(value, ids)
    elif issubclass(kind, type):
        if value.__module__ == module:
            yield from _in_class(value, ids)
    elif kind is functools.partial:
        if _any_of(ids, (value.func, *value.args, *value.keywords.values())):
            yield " (a partial)"
    elif kind in (list, tuple, set, frozenset, dict):
        elements = value.values() if kind is dict else value
        if _any_of(ids, itertools.islice(elements, _MOST_ELEMENTS)):
            yield f" (a {kind.__name__})"
    elif kind.__module__ != "builtins" and kind.__dictoffset__:
        yield from _in_object(value, ids)


def _any_of(ids: Set[int], values: Iterable[Any]) -> bool:
    return not ids.isdisjoint(map(id, values))


def _in_function(function: types.FunctionType, ids: Set[int]) -> Iterator[str]:
    by_name = function.__kwdefaults__
    if _any_of(ids, function.__defaults__ or ()) or (by_name and _any_of(ids, by_name.values())):
        yield " (a default argument)"
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # Not filled yet.
            if id(cell.cell_contents) in ids:
                yield " (a closure)"


def _in_class(value: type, ids: Set[int]) -> Iterator[str]:
    for attribute, inner in list(vars(value).items()):
        if id(inner) in ids:
            yield f".{attribute}"
        function = inner.__func__ if type(inner) in (staticmethod, classmethod) else inner
        if type(function) is types.FunctionType:
            yield from (f".{attribute}{where}" for where in _in_function(function, ids))


def _in_object(value: Any, ids: Set[int]) -> Iterator[str]:
    with contextlib.suppress(AttributeError):
        # Not by vars(): there are objects that mind being asked.
        attributes = object.__getattribute__(value, "__dict__")
        if type(attributes) is dict and _any_of(ids, attributes.values()):
            yield from (f".{name}" for name, each in list(attributes.items()) if id(each) in ids)
