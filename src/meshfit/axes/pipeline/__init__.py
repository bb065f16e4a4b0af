"""What ``pipeline=n`` cuts: a recorded step, in stages.

stages    where the model is cut, and what its stages cost
staged    those that one rank holds
cut       the split all ranks agree on, and the part of the model that a rank keeps
program   what each stage runs, for every kind of microbatch
audit     whether a recording does what the model does
"""
