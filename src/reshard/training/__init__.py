"""The whole state of a training run as one object to save and load."""

from reshard.training.train_state import TrainReport, TrainState

__all__ = ["TrainReport", "TrainState"]
