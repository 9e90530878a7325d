"""Doors to other libraries: each file serves one, and is loaded only when it is asked for."""
