"""The protocol of objects that hand out their state and take it back."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, runtime_checkable

__all__ = ["Stateful", "StatefulT"]


@runtime_checkable
class Stateful(Protocol):
    """An object that can be put into a state dict as it is.

    A save stores what `state_dict` returns. A load asks for `state_dict` first, to
    know what to load and where to, fills it, and hands it to `load_state_dict`.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state to store. Also called at the start of a load."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state that was loaded."""
        ...


def is_stateful(value: Any) -> bool:
    """Whether `value` is `Stateful`; much faster than asking the protocol."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


StatefulT = TypeVar("StatefulT", bound=Stateful)
