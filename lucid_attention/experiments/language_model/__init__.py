"""Language modelling (A.5): the claim, its jobs, its figures and tables."""

from .claim import CLAIM, conclude, paper, plan

__all__ = ["CLAIM", "conclude", "paper", "plan"]
