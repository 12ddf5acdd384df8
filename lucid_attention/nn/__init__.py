"""Modules for people who build their own models. Plain numbers in constructors, torch only."""
