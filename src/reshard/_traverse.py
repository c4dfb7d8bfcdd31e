"""Walking nested state dicts, under the module name that DCP users import from."""

from reshard.tensors.flatten import StatePath as OBJ_PATH
from reshard.tensors.flatten import get_element, set_element, traverse_state_dict

__all__ = ["OBJ_PATH", "get_element", "set_element", "traverse_state_dict"]
