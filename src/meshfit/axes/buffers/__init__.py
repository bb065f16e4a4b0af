"""Buffers that a forward writes: codebooks of vector quantisers, running sums, moving averages, counters, the vectors
of spectral norm. BatchNorm's are elsewhere (axes/data/batchnorm.py).

On one device each step updates them once, from the whole batch. So here: in every microbatch, on every rank, a forward
starts from the values of the step's beginning, and the update is made once, from what all of them have.

    watch.py    which buffers a forward writes, and in the call of which module
    trace.py    the operations of that call; made again from other statistics
    find.py     which of them sum up the batch (sums, means, extremes over samples), tried in double precision
    step.py     in training: those statistics are collected, combined over microbatches and ranks, and the update made

    traffic     the statistics, once a step: one all_reduce a dtype. Nothing for what does not depend on samples
"""
