"""Language modelling (A.5): the claim, its runs, the jobs beside training, and what the records say."""

from .claim import CLAIM, conclude, paper, plan

__all__ = ["CLAIM", "conclude", "paper", "plan"]
