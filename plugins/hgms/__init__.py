"""HGMS: bilevel optimization when the lower level has many minimisers."""
