"""Whole programs through the real compilers of hardware that is not here: what they need, move and copy."""
