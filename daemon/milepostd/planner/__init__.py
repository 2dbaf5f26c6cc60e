"""Planning outside the daemon's loop: the child process, and what runs in it."""
