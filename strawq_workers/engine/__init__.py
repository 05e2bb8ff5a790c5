"""The embedded engine: a stand-in for SGLang that really decodes, for development, demos and tests.

The rule: it speaks SGLang's HTTP protocol, fields and habits as recorded in `contracts/sglang`, and every number in
an answer (token, log-prob, expert route, policy version) is what its small model computed. It is not for production:
the model is untrained.
"""
