"""What ``tensor=n`` splits: found by trial, checked forward and backward, written down as a value, carried out.

What runs in a step

    border            where tensors enter and leave a region
    functions         autograd functions: products that are cut by output channels, cross entropy of cut logits
    sliced            tensors of which each rank has a slice or some rows

What is cut

    region            the value: regions of a model, and what is cut in them      explain: the same in words
    cut               a region carried out, in place                              cost: what a rank then runs and keeps

How that is found, once, on one rank

    plan              the search: what is tried, in which order                      cache: plans found before
    watch             one forward of the model, observed                             kinds: which modules are alike
    program           the operations of a step, as digests
    find              pairs of weights, from anatomy.pairs
    claim             pairs and layers as regions to be checked                      vocabulary_claim: embeddings, heads
    between           modules between regions, by rows
    check             the proof: a module whole, against its parts in threads
"""
