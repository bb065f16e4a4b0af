"""The model server: processes that hold weights and optimizer, and workers that send gradients and get weights.

A run (the process that is asked for one, and its workers)
    coordination          how a worker's run works together with the others, and what one of them does for all
    server_state          the servers' state, fetched for a checkpoint
    join, fingerprint     workers that join from other hosts; what their job must have in common with the run's
A worker
    worker, connection    its exchange, and its connection to each server
    worker_group          a worker that is several ranks, and their process groups; shared_model: the memory they share
    workers               the workers that share a batch, as a group to gather over
A server
    process, launch       what a server process does; processes started, and started again
    server, client        the server, and a connected worker as it sees it
    synchronous, asynchronous     the coordinator: who works on which batch, and how gradients become steps
    keeper                weights, gradient sum and optimizer; running_statistics: BatchNorm's
    settings              how it deals with its workers
    snapshot              what a server that died resumes from
Between them
    wire, messages        authenticated messages, and what they may hold
    shared_memory         the buffer that both map
Below: exchange/parcel.py and compress.py, tensors as one buffer and in fewer bits; exchange/server_cost.py, bytes and
memory of all that.
"""
