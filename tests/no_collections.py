"""Turns garbage collections off when it is imported. What is imported next takes two thirds of the time."""

import gc

gc.disable()
