"""The sans-IO core: books and wire formats as plain synchronous code.

Nothing in this package imports trio, zmq, torch, threading or time: messages and the current time come in as
arguments, and what is to be done comes out as values. The shell around it (`trio_mori._sender`,
`trio_mori._receiver`) carries the decisions out.
"""
