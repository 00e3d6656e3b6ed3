"""Run configurations: `base.py` holds every field; a model file changes only what differs."""
