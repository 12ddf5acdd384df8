"""The folder that `lucid run` puts on PYTHONPATH: Python runs its sitecustomize.py whenever a process starts."""
