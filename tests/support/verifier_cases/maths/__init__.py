"""Equality in maths, one module per kind of answer."""
