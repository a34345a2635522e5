"""Measurements: each module opens with the claim that it checks."""
