"""Loading without a template, under the module name that DCP users import from."""

from reshard.default_planner import _EmptyStateDictLoadPlanner
from reshard.state_dict_loader import _load_state_dict

__all__ = ["_EmptyStateDictLoadPlanner", "_load_state_dict"]
