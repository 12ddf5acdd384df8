"""Language modelling (A.5): the claim, its jobs, its figures and tables."""

from .claim import CLAIM, PAPER_NUMBERS, conclude, judge_paper, paper, plan

__all__ = ["CLAIM", "PAPER_NUMBERS", "conclude", "judge_paper", "paper", "plan"]
