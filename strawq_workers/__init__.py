"""The workers of strawq: what leases prompts from a pool, drives the inference engines, and commits the results.

The rule: everything here is a client of the pool. Nothing in `strawq` imports this package.
"""
