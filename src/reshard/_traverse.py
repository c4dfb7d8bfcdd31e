"""Walking nested state dicts, under the module name that DCP users import from."""

from reshard.tensors.flatten import traverse_state_dict
from reshard.tensors.paths import StatePath as OBJ_PATH
from reshard.tensors.paths import get_element, set_element

__all__ = ["OBJ_PATH", "get_element", "set_element", "traverse_state_dict"]
