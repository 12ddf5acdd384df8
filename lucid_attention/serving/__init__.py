"""LUCID in the engines that serve models."""
