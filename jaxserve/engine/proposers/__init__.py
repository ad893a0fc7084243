"""What may come next: proposers of drafts, how many of them pay, and what came of them.

Plain Python and numpy: nothing here needs the device.
"""
