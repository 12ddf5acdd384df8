"""A real pretrained model: its keys, what LUCID does to it, training it further, and the cost."""

from .claim import CLAIM, PAPER_NUMBERS, conclude, judge_paper, lacks, paper, plan

__all__ = ["CLAIM", "PAPER_NUMBERS", "conclude", "judge_paper", "lacks", "paper", "plan"]
