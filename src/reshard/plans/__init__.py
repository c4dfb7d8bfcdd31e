"""Items as columns: the only place that turns objects into columns and back."""
