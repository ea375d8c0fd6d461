"""What a model would need on chips that are not here: bytes, and floors of a step's time. Nothing runs."""
