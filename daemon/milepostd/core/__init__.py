"""The pure core: it decides what a node does, and leaves to others how that is done.

Events go in, commands come out, and time is an argument. No module here uses a socket, a file, a
clock, a thread, a log or torch. So thousands of nodes can run in one process, and each run can be
repeated.
"""
