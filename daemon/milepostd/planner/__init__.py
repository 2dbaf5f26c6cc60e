"""Planning outside the daemon's loop.

In the daemon: `process` starts the child process and asks it. In the child: `child` is its main
loop, `composing` answers the requests, `layouts` remembers what each rank was assigned, `fragments`
reads what the nodes wrote. In both: `frames`, the messages between the two.
"""
