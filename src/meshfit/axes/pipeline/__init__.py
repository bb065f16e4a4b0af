"""What ``pipeline=n`` cuts: a recorded step, in stages.

cut       the split all ranks agree on, and the part of the model that a rank keeps
program   what each stage runs, for every kind of microbatch
audit     whether a recording does what the model does
weights   to and from the ranks, one tensor at a time
"""
