"""Walking nested state dicts, under the module name that DCP users import from."""

from collections.abc import MutableMapping

from reshard.tensors.flatten import traverse_state_dict
from reshard.tensors.paths import StatePath as OBJ_PATH
from reshard.tensors.paths import get_element, set_element
from reshard.tensors.printing import keep_visiting_tensors as _keep_visiting_tensors
from reshard.tensors.printing import print_tensor

__all__ = ["OBJ_PATH", "get_element", "print_tensor", "set_element", "traverse_state_dict"]
__all__ += ["CONTAINER_TYPE", "PATH_ITEM", "STATE_DICT_ITEM", "_keep_visiting_tensors"]

PATH_ITEM = str | int
STATE_DICT_ITEM = object
CONTAINER_TYPE = MutableMapping[PATH_ITEM, STATE_DICT_ITEM]
