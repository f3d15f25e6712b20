"""The fault lane: stages in processes of their own, faults between and in them, and a checker that counts.

`python -m tests.faults --minutes 30 --seed N` runs it for long; `test_fault_lane.py` is the short form. Everything
random comes from the seed, but the processes run as they like, so that a seed names what was done to them, not how they
took it.
"""
