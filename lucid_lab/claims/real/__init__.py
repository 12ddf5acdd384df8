"""A real model: the jobs of the experiment `pretrained`, round by round, and its figures and tables."""
