"""`hgms mix compare`: every mixture of a grid taken to the end, and the tuned models compared by
their test losses.
"""
