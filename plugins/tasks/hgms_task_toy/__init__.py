"""A small problem from the literature on penalty methods."""
