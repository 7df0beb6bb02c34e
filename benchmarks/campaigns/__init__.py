"""The parts of ``benchmarks/campaign.py``: commands in forked children, kills, damaged files,
hostile input.
"""
