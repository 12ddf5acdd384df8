"""Attention modules for your own models: constructors take plain numbers, and torch is all they need."""
