"""Copies of a state that training can no longer change."""
