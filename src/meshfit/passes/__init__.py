"""Forward and backward passes of one rank, over its microbatches.

whole      each microbatch through the whole model, one after another
loss_sum   what a rank adds to the loss of the batch, weighted as one device would weigh it
pipeline   one rank works through its actions of a pipeline schedule; backward: in two halves
forward    forwards alone, for evaluation and prediction
"""
