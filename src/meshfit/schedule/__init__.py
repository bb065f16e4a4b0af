"""Pipeline schedules as data: nothing here runs a model.

actions    what each rank of a pipeline does, in order; checked
orders     the orders of the six schedules
issue      when each transfer is issued, such that no two ranks wait for each other
simulate   how long a schedule takes, by how long its actions take
"""
