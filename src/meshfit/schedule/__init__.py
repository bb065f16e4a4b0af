"""In what order the devices work.

passes   all devices at once, each through its own microbatches, one after another
"""
