"""Evaluation: which drafter is better, on which text, at which budget."""
