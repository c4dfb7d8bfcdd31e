"""The phases of a save and of a load, top down."""
