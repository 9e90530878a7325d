"""What writes files of this repository: run as `python -m tools.NAME`."""
