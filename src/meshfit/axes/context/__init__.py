"""The context axis from inside: tensors of which each rank has some positions, and what is done to them.

span     which positions each rank has
piece    a tensor that is cut: it shows the shape of the whole
local    functions that a rank computes on its own positions
shapes   functions that move dims, or take some positions
mix      functions in which positions meet: products, sums, losses
attend   attention, by gathered keys or by heads
causal   the first of causal attention, in parts
carry    recurrent layers, whose state goes from rank to rank
saved    what backward gathers again
plan     where in a model cutting begins, as a value
find     the best such plan
recurrence  what carries a state from position to position, to say why a model is not cut
check    the proof, before anything is trained
"""
