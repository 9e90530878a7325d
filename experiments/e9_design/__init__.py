"""Frequencies by design, in trained models."""
