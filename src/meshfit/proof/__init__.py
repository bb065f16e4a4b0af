"""What ``meshfit.verify`` is made of: short trainings, what they are compared by, and where they part.

training.py   trains a few steps, on one device or under a plan, and puts aside all that they made
double.py     the same job in fp64
rows.py       two trainings beside each other, and one device beside itself: equal, different, or not to be told
modules.py    the first module whose output or gradient differs
"""
