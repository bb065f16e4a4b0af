"""The experts of mixtures over ranks: which there are (find.py), proven to compute what the whole does (check.py); how
rows travel to them and back (travel.py); modules that do so in place of their own forward (spread.py); auxiliary losses
over all ranks (balance.py).
"""
