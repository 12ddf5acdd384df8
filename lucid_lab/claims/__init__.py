"""One file for each claim of the paper: the claim, its jobs, its verdict. The folders hold the machinery."""
