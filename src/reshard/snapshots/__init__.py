"""Copies of state dicts that training can no longer change."""
