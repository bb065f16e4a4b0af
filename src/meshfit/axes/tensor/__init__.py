"""What ``tensor=n`` splits: found by trial, checked forward and backward, written down as a value, carried out.

plan         the planner: what is tried, in which order                      find, claim, vocabulary_claim
watch, twin  one forward of the model, looked at; copies to look into
check        the proof of a split: a module whole, against its parts in threads
region       the value: regions, cuts, what crosses                          words: the same for people; cost
cut          a region carried out, in place                                  ops, raw: what crosses ranks
vocabulary   logits of which each rank has a slice, and the loss of them
"""
