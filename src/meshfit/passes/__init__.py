"""Forward and backward passes of one rank, over its microbatches.

whole      each microbatch through the whole model, one after another
pipeline   one rank works through its actions of a pipeline schedule; backward: in two halves
clock      when each action ran
forward    forwards alone, for evaluation and prediction
"""
