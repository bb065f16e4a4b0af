"""In what order the devices work.

passes     all devices at once, each through its own microbatches, one after another
actions    a schedule as data: what each rank of a pipeline does, in order; simulate: what that would take
pipeline   one rank works through its actions; transport: tensors from rank to rank; backward: in two halves
along      what the ranks of a pipeline tell each other after a step
clock      when each action ran; gantt draws it
"""
