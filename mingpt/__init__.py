"""The library that main.py, trainer.py and the other scripts use."""
