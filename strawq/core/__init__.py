"""The pure heart: what may happen to a pool. No file, clock, thread or random number is touched here.

`decide(state, command)` answers with an event (it may happen, and this is what happens) or a refusal (not now, and
why). `apply(state, event, …)` makes it so. Whoever applies the same events in the same order has the same state, bit
for bit.
"""
