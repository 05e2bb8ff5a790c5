"""A drill: real processes on a real mount, killed and frozen at chance moments and at named points, then an audit of
everything that they were told.

The rule: what the processes were told is kept outside of the pool, flushed before they go on, so that the audit never
takes the pool's word for what the pool has promised. `conductor.run_drill` is the entry.
"""
