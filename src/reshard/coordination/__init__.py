"""How ranks talk to each other: a channel of our own, and what is said on it."""
