"""The parts of ``meshfit.verify``:

training.py   trains a few steps, on one device or under a plan, and keeps losses, gradients, weights and state
double.py     the same job in fp64
compare.py    two trainings compared, and one device with itself: equal, different, or undecided
modules.py    the first module whose output or gradient differs
"""
