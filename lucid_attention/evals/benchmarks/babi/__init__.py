"""The worlds of bAbI's tasks QA1 to QA5 (Weston et al. 2015, data of release 1.2), simulated from scratch."""

from .story import TASKS, Story, make_story

__all__ = ["TASKS", "Story", "make_story"]
