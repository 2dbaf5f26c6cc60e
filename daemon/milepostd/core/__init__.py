"""The pure core: what a node decides, apart from how it is carried out.

Events in, commands out, time as an argument. No module here knows a socket, a file, a clock, a
thread, a log or torch, so that thousands of nodes run in one process under a seed. `plan` is the
global plan, a function of the ranks' offers.
"""
