"""The softmax read-out of prepared values: plain, in strips, over a window, as a difference, for one token."""
