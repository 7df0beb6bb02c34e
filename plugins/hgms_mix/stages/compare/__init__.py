"""`hgms mix compare`: run all stages of the mixes of a grid, and compare the tuned models.

The comparison is by test losses.
"""
