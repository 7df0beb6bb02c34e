"""Data mixtures for language models."""
