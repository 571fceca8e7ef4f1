"""Small theorems about adversarial training: each a function whose conditions are checked, with its source named.

Arrays are NumPy arrays in float64. Where a printed statement is wrong, the function gives the corrected one; the
docstring names the difference.
"""
