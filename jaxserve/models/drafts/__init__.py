"""Small models that guess what a target will say next, from the target's own hidden states.

base.py is the contract of those that go on token by token; eagle.py, eagle3.py and mtp.py keep it.
medusa.py guesses several tokens at once and needs no cache.
"""
