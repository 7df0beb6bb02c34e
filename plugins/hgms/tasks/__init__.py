"""Tasks: problems with known answers, cleaning, imbalance, regression."""
