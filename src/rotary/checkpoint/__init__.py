"""Checkpoints: weights moved from one pair layout to the other, and nothing lost."""

from .convert import convert_checkpoint as convert_checkpoint
